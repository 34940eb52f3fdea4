# SPDX-License-Identifier: Apache-2.0
"""The public functions under everything that traces, counts or re-runs what they do."""

import functools
import warnings

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fusedops

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

EPS = 1e-5


def function_of(op, inputs, **options):
    """The operator as a function of its tensors alone; its results as a tuple."""
    names = list(inputs)

    def function(*tensors):
        y, summed = op.call(dict(zip(names, tensors, strict=True)), eps=EPS, **options)
        return (y,) if summed is None else (y, summed)

    return function


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def leaves_of(inputs):
    return [t.detach().clone().requires_grad_() for t in inputs.values()]


def backward(outputs, leaves):
    torch.manual_seed(1)
    grads = [torch.randn_like(out) for out in outputs]
    return torch.autograd.grad(outputs, leaves, grads)


@pytest.fixture
def same(path):
    """Compiled code calls the same kernels, and so has the same bits; torch's own code need not."""
    limits = {"rtol": 1e-5, "atol": 1e-5} if path == "reference" else {"rtol": 0, "atol": 0}
    return functools.partial(torch.testing.assert_close, **limits)


# torch.compile ---------------------------------------------------------------------------------


def test_compiles_as_one_graph(op, same, device):
    inputs = op.inputs((4, 3, 40), FP32, device)
    function = function_of(op, inputs)
    same(compiled(function)(*inputs.values()), function(*inputs.values()))


def test_compiles_forward_and_backward(op, same, device):
    inputs = op.inputs((4, 3, 40), FP32, device)
    function = function_of(op, inputs)
    leaves = leaves_of(inputs)
    outputs = compiled(function)(*leaves)
    expected = function(*leaves)
    same(outputs, expected)
    same(backward(outputs, leaves), backward(expected, leaves))


@pytest.mark.usefixtures("kernels_run")
def test_compiled_graph_holds_the_kernels(op, device):
    """Not the reference, operation by operation: in CI's numbers that would go unnoticed."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    inputs = op.inputs((4, 40), FP16, device)
    torch._dynamo.reset()
    torch.compile(function_of(op, inputs), fullgraph=True, backend=keep)(*inputs.values())
    called = {str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"}
    assert any("fusedops" in target for target in called), called


def test_row_count_may_change_without_recompiling(op, same, device):
    inputs = op.inputs((64, 40), FP32, device)
    function = function_of(op, inputs)
    fast = compiled(function, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (64, 5, 33):
            part = [t[:rows].clone() if t.dim() > 1 else t for t in inputs.values()]
            same(fast(*part), function(*part))


def test_row_counts_recompile_once(op, same, device):
    """Without ``dynamic=True``: the second count compiles code for all others."""
    inputs = op.inputs((3, 64, 40), FP32, device)
    function = function_of(op, inputs)
    fast = compiled(function)

    def check(batch, rows):
        part = {n: t[:batch, :rows] if t.dim() > 1 else t for n, t in inputs.items()}
        leaves = leaves_of({n: t.contiguous() for n, t in part.items()})
        outputs, expected = fast(*leaves), function(*leaves)
        same(outputs, expected)
        same(backward(outputs, leaves), backward(expected, leaves))

    check(3, 64)
    check(3, 5)
    check(2, 7)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (33, 6, 50, 17):
            check(3, rows)


MIXES = [(BF16, FP32, FP32), (FP32, BF16, BF16), (FP16, FP16, FP32), (BF16, BF16, torch.float64)]


@pytest.mark.parametrize("cast", ["fp32", "input"])
@pytest.mark.parametrize(("dtype", "residual_dtype", "weight_dtype"), MIXES)
def test_compiles_mixed_dtypes(op, dtype, residual_dtype, weight_dtype, cast, same, device):
    if op.centers and cast == "input":
        pytest.skip("LayerNorm has no such option")
    inputs = op.inputs(
        (4, 40), dtype, device, residual_dtype=residual_dtype, weight_dtype=weight_dtype
    )
    function = function_of(op, inputs, **({} if op.centers else {"cast": cast}))
    leaves = leaves_of(inputs)
    outputs, expected = compiled(function)(*leaves), function(*leaves)
    assert [out.dtype for out in outputs] == [out.dtype for out in expected]
    same(outputs, expected)
    ours, theirs = backward(outputs, leaves), backward(expected, leaves)
    assert [g.dtype for g in ours] == [t.dtype for t in inputs.values()]
    same(ours, theirs)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_compiles_under_autocast(op, dtype, same, device):
    inputs = op.inputs((4, 40), dtype, device, weight_dtype=FP32)
    function = function_of(op, inputs)

    def under_autocast(*tensors):
        with torch.autocast(device, dtype=BF16):
            return function(*tensors)

    leaves = leaves_of(inputs)
    outputs, expected = compiled(under_autocast)(*leaves), under_autocast(*leaves)
    assert [out.dtype for out in outputs] == [out.dtype for out in expected]
    same(outputs, expected)
    same(backward(outputs, leaves), backward(expected, leaves))


def test_double_backward_of_compiled_code_is_refused(op, device):
    """By torch, in words of its own; what must not come is a wrong number."""
    inputs = op.inputs((4, 40), FP32, device)
    leaves = leaves_of(inputs)
    y = compiled(function_of(op, inputs))(*leaves)[0]

    def penalty():
        (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
        dx.square().sum().backward()

    with pytest.raises(RuntimeError, match="double backward"):
        penalty()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch 2.11 captures one on purpose
def test_compiles_with_reduced_overhead(op):
    """The compiler's own CUDA graphs: replayed with other inputs, and for other row counts."""
    inputs = op.inputs((64, 256), FP16, "cuda")
    function = function_of(op, inputs)
    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True, mode="reduce-overhead", dynamic=False)
    for rows in (64, 64, 64, 16, 16, 16):
        other = op.inputs((rows, 256), FP16, "cuda")
        leaves = leaves_of(other)
        torch.compiler.cudagraph_mark_step_begin()
        outputs = fast(*leaves)
        grads = [g.clone() for g in backward(outputs, leaves)]
        expected = function(*leaves)
        torch.testing.assert_close([out.clone() for out in outputs], list(expected))
        torch.testing.assert_close(grads, list(backward(expected, leaves)))


def test_compiles_with_some_gradients_only(op, same, device):
    inputs = op.inputs((4, 40), FP32, device)
    function = function_of(op, inputs)
    tensors = list(inputs.values())
    tensors[0] = tensors[0].requires_grad_()
    outputs = compiled(function)(*tensors)
    expected = function(*tensors)
    same(outputs, expected)
    same(backward(outputs, tensors[:1]), backward(expected, tensors[:1]))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "empty"])
def test_compiles_other_layouts(op, layout, same, device):
    inputs = op.inputs((4, 6, 40), FP32, device)
    change = {
        "transposed": lambda t: t.transpose(0, 1),
        "sliced": lambda t: t[:, ::2],
        "empty": lambda t: t[:0],
    }[layout]
    tensors = [change(t) if t.dim() > 1 else t for t in inputs.values()]
    function = function_of(op, inputs)
    ours, expected = compiled(function)(*tensors), function(*tensors)
    same(ours, expected)
    assert [t.stride() for t in ours] == [t.stride() for t in expected]


def test_compiles_inside_a_model(op, same, device):
    """What surrounds the call is traced with it, and the gradient flows through both."""
    inputs = op.inputs((4, 40), FP32, device)
    function = function_of(op, inputs)

    def block(x, *others):
        y, *rest = function(torch.tanh(x), *others)
        return (y @ y.T).relu(), *rest

    leaves = leaves_of(inputs)
    outputs, expected = compiled(block)(*leaves), block(*leaves)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(backward(outputs, leaves), backward(expected, leaves))


def test_exports(op, device):
    inputs = op.inputs((4, 40), FP32, device)

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return function_of(op, inputs)(*tensors)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's own deprecations
        program = torch.export.export(Model(), tuple(inputs.values()))
    torch.testing.assert_close(
        program.module()(*inputs.values()), function_of(op, inputs)(*inputs.values())
    )


# Fake tensors and other tracers ------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_fake_tensors_tell_shape_dtype_and_strides(op, layout, train, device):
    from torch._subclasses import FakeTensorMode

    inputs = op.inputs((4, 6, 40), BF16, device, weight_dtype=FP32)
    if layout == "transposed":
        inputs = {n: t.transpose(0, 1) if t.dim() > 1 else t for n, t in inputs.items()}
    real = function_of(op, inputs)(*inputs.values())
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t).requires_grad_(train) for t in inputs.values()]
        outputs = function_of(op, inputs)(*fakes)
        for fake, true in zip(outputs, real, strict=True):
            assert (fake.shape, fake.dtype, fake.device.type) == (true.shape, true.dtype, device)
            assert fake.stride() == true.stride()
        if train:
            for leaf, grad in zip(fakes, backward(outputs, fakes), strict=True):
                assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)


def test_fake_tensors_outside_their_mode(op, device):
    from torch._subclasses import FakeTensorMode

    inputs = op.inputs((4, 40), FP16, device)
    mode = FakeTensorMode()
    outputs = function_of(op, inputs)(*[mode.from_tensor(t) for t in inputs.values()])
    assert all(out.shape == (4, 40) for out in outputs)
    assert all(isinstance(out, torch._subclasses.FakeTensor) for out in outputs)


def test_meta_tensors(op):
    inputs = op.inputs((4, 40), FP16, "meta")
    outputs = function_of(op, inputs)(*inputs.values())
    assert all(out.is_meta and out.shape == (4, 40) and out.dtype == FP16 for out in outputs)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx(op, tracing_mode, same, device):
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = op.inputs((4, 40), FP32, device)
    function = function_of(op, inputs)
    traced = make_fx(function, tracing_mode=tracing_mode)(*inputs.values())
    other = op.inputs((4, 40), FP32, device)
    same(traced(*other.values()), function(*other.values()))


def test_make_fx_of_the_backward(op, same, device):
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = op.inputs((4, 40), FP32, device)
    function = function_of(op, inputs)

    def gradients(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(sum(out.sum() for out in function(*leaves)), leaves)

    traced = make_fx(gradients)(*inputs.values())
    other = op.inputs((4, 40), FP32, device)
    torch.testing.assert_close(traced(*other.values()), gradients(*other.values()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace(op, same, device):
    """A trace must hold the operator, and not the result of the call it was made from."""
    inputs = op.inputs((4, 40), FP32, device)
    function = function_of(op, inputs)
    traced = torch.jit.trace(function, tuple(inputs.values()))
    other = op.inputs((7, 40), FP32, device)
    same(traced(*other.values()), function(*other.values()))


def test_flop_counter_sees_a_call(op, same, device):
    """A dispatch mode is entered through the dispatcher, and results do not change."""
    from torch.utils.flop_counter import FlopCounterMode

    inputs = op.inputs((4, 40), FP32, device)
    function = function_of(op, inputs)
    expected = function(*inputs.values())
    counter = FlopCounterMode(display=False)
    with counter:
        ours = function(*inputs.values())
        (inputs["x"] @ inputs["x"].T)
    same(ours, expected)
    assert counter.get_total_flops() == 2 * 4 * 40 * 4


def test_double_backward_under_a_mode(op, device):
    """There the registered operators run, whose backward must be differentiable too."""
    from torch.utils.flop_counter import FlopCounterMode

    inputs = op.inputs((2, 5), torch.float64, device)
    tensors = [t.requires_grad_() for t in inputs.values()]

    def function(*arguments):
        return op.call(dict(zip(inputs, arguments, strict=True)), eps=0.1)[: 1 + op.adds]

    with FlopCounterMode(display=False):
        assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_hessian(op, device):
    """Forward over reverse over vmap: transforms inside each other."""
    inputs = op.inputs((6,), torch.float64, device)
    names = list(inputs)

    def loss(function):
        def of(*arguments):
            out = op.call(dict(zip(names, arguments, strict=True)), function, eps=0.1)
            return sum(o.pow(3).sum() for o in out[: 1 + op.adds])

        return of

    ours = torch.func.hessian(loss(op.function))(*inputs.values())
    theirs = torch.func.hessian(loss(op.reference))(*inputs.values())
    torch.testing.assert_close(ours, theirs)


def test_dispatch_modes_see_an_operator(op, path, device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs = op.inputs((4, 40), FP32, device)
    with Record() as mode:
        function_of(op, inputs)(*inputs.values())
    assert mode.seen
    if path != "reference":
        assert any("fusedops" in name for name in mode.seen), mode.seen


def test_tensor_subclass_keeps_its_type(op, device):
    """A subclass is no plain memory: torch's operations decide what comes of it."""

    class Tagged(torch.Tensor):
        pass

    inputs = op.inputs((4, 40), FP32, device)
    expected = function_of(op, inputs)(*inputs.values())
    tagged = {**inputs, "x": inputs["x"].as_subclass(Tagged)}
    outputs = function_of(op, tagged)(*tagged.values())
    assert all(isinstance(out, Tagged) for out in outputs)
    for out, plain in zip(outputs, expected, strict=True):
        torch.testing.assert_close(out.as_subclass(torch.Tensor), plain, rtol=1e-5, atol=1e-5)


def test_dispatch_modes_and_subclasses_that_know_no_operator(op, device):
    """As DTensors, which know torch's operators only, under a mode that counts communication."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, held):
            return torch.Tensor._make_wrapper_subclass(
                cls, held.shape, held.stride(), dtype=held.dtype, device=held.device
            )

        def __init__(self, held):
            self.held = held

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func.namespace == "fusedops":
                raise NotImplementedError(func)
            args, kwargs = tree_map_only(Wrapped, lambda t: t.held, (args, kwargs or {}))
            return tree_map_only(torch.Tensor, Wrapped, func(*args, **kwargs))

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    inputs = op.inputs((4, 40), FP32, device)
    expected = op.run(inputs, inputs["x"])
    leaves = {name: Wrapped(t).requires_grad_() for name, t in inputs.items()}
    with Watch():
        y = op.call(leaves)[0]
        found = torch.autograd.grad(y, list(leaves.values()), Wrapped(inputs["x"]))
    torch.testing.assert_close(y.held, expected.y, rtol=1e-5, atol=1e-5)
    for name, gradient in zip(leaves, found, strict=True):
        torch.testing.assert_close(gradient.held, expected.grads[name], rtol=1e-4, atol=1e-5)


# Autocast ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("residual_dtype", [BF16, FP32])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients_under_autocast_are_torchs(op, dtype, residual_dtype, device):
    inputs = op.inputs((3, 64), dtype, device, residual_dtype=residual_dtype, weight_dtype=FP32)

    def step(function):
        leaves = dict(zip(inputs, leaves_of(inputs), strict=True))
        with torch.autocast(device, dtype=BF16):
            outputs = op.call(leaves, function, eps=EPS)[: 1 + op.adds]
        return outputs, backward(outputs, list(leaves.values()))

    (outputs, grads), (their_outputs, their_grads) = step(op.function), step(op.torch_function())
    for ours, theirs in zip((*outputs, *grads), (*their_outputs, *their_grads), strict=True):
        assert ours.dtype == theirs.dtype
        unit = max(torch.finfo(ours.dtype).eps, torch.finfo(outputs[0].dtype).eps)
        limit = 4 * unit * theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=limit)


# Patched models ----------------------------------------------------------------------------------


@pytest.fixture
def llama(device):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(device).eval()


def ids_of(batch, length, device):
    return torch.arange(batch * length, device=device).view(batch, length) % 50


def test_patched_model_compiles_forward_and_backward(llama, device):
    """As near to eager as the compiled unpatched model, and no more often compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    from fusedops.integrations import patch

    lengths = (12, 7, 9)

    def steps(model):
        results = []
        for length in lengths:
            llama.zero_grad()
            logits = model(ids_of(2, length, device)).logits
            logits.square().mean().backward()
            results.append((logits.detach(), [p.grad.clone() for p in llama.parameters()]))
        return results

    def graphs_and_steps():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        results = steps(torch.compile(llama, fullgraph=True, backend=counter))
        return counter.frame_count, results

    eager = steps(llama)
    plain_count, plain = graphs_and_steps()
    patch(llama)
    count, ours = graphs_and_steps()
    assert count <= plain_count
    for (logits, grads), (theirs, their_grads), truth in zip(ours, plain, eager, strict=True):
        limit = 2 * (theirs - truth[0]).abs().max().item() + 1e-6
        torch.testing.assert_close(logits, truth[0], rtol=0, atol=limit)
        torch.testing.assert_close(grads, their_grads, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler: an empty graph, streams of gradients
def test_a_patched_models_training_steps_with_reduced_overhead(llama):
    """In the compiler's CUDA graphs: recorded, replayed with other weights, and eager again."""
    from fusedops.integrations import patch

    def steps():
        llama.load_state_dict(weights)
        losses = []
        for step in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            ids = ids_of(2, 12, "cuda").roll(step, 1)
            loss = run(ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach().clone())
            with torch.no_grad():
                for parameter in llama.parameters():
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
        return torch.stack(losses)

    weights = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    run = llama
    expected = steps()
    assert expected[-1] < expected[0]
    patch(llama)
    torch._dynamo.reset()
    run = torch.compile(llama, mode="reduce-overhead")
    torch.testing.assert_close(steps(), expected, rtol=1e-3, atol=1e-4)
    run = llama
    torch.testing.assert_close(steps(), expected, rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


def test_patched_model_exports_whole(llama, device):
    from fusedops.integrations import patch, unpatch

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = llama

        def forward(self, ids):
            return self.model(ids).logits

    llama.set_attn_implementation("eager")  # sdpa on CUDA has guards on the length of its own
    patch(llama)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's own deprecations
        length = torch.export.Dim("length", min=2, max=64)
        program = torch.export.export(
            Logits(), (ids_of(2, 12, device),), dynamic_shapes=({1: length},)
        )
    unpatch(llama)
    for size in (12, 5):
        ids = ids_of(2, size, device)
        with torch.no_grad():
            torch.testing.assert_close(program.module()(ids), llama(ids).logits)


# Checkpointing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(op, use_reentrant, device):
    inputs = op.inputs((4, 40), FP32, device)
    function = function_of(op, inputs)
    leaves, others = leaves_of(inputs), leaves_of(inputs)
    torch.manual_seed(1)
    grads = [torch.randn(4, 40, device=device) for _ in range(1 + op.adds)]
    torch.autograd.backward(checkpoint(function, *leaves, use_reentrant=use_reentrant), grads)
    torch.autograd.backward(function(*others), grads)
    for a, b in zip(leaves, others, strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing(op, policy, device):
    inputs = op.inputs((4, 40), FP32, device)
    function = function_of(op, inputs)
    leaves, others = leaves_of(inputs), leaves_of(inputs)
    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda ctx, func, *args, **kwargs: policy
    )
    torch.manual_seed(1)
    grads = [torch.randn(4, 40, device=device) for _ in range(1 + op.adds)]
    outputs = checkpoint(function, *leaves, use_reentrant=False, context_fn=contexts)
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(function(*others), grads)
    for a, b in zip(leaves, others, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)


def test_saved_tensors_may_be_packed(op, device):
    """Offloading through saved-tensor hooks: what comes back is used, whatever object it is."""
    inputs = op.inputs((4, 40), FP32, device)
    function = function_of(op, inputs)
    leaves, others = leaves_of(inputs), leaves_of(inputs)
    with torch.autograd.graph.save_on_cpu():
        outputs = function(*leaves)
    sum(out.square().sum() for out in outputs).backward()
    sum(out.square().sum() for out in function(*others)).backward()
    for a, b in zip(leaves, others, strict=True):
        assert torch.equal(a.grad, b.grad)


# The registered operators ------------------------------------------------------------------------


def forward_samples(device):
    """Arguments for the forward operators: both norms, with and without a residual."""
    rows = torch.randn(3, 4, 24, device=device)
    weight = torch.randn(24, device=device)
    for x, adds, centered in [
        (rows, False, True),
        (rows.transpose(0, 1), True, True),
        (rows.transpose(0, 1), False, False),
        (rows[:0], True, False),
    ]:
        residual = torch.randn(x.shape, device=device) if adds else None
        bias = weight + 1 if centered else None
        yield (x, residual, weight, bias, EPS, centered, False, 0.0, FP32, centered)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["norm_forward", "norm_forward_training"])
@pytest.mark.parametrize("train", [False, True])
def test_opcheck_of_the_forwards(name, train, device):
    operator = getattr(torch.ops.fusedops, name).default
    for sample in forward_samples(device):
        arguments = tuple(
            a.detach().clone().requires_grad_() if train and isinstance(a, torch.Tensor) else a
            for a in sample
        )
        torch.library.opcheck(operator, arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["norm_forward", "norm_forward_training"])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("dtype", "residual_dtype", "weight_dtype"), MIXES)
def test_opcheck_of_mixed_dtypes(name, centered, dtype, residual_dtype, weight_dtype, device):
    operator = getattr(torch.ops.fusedops, name).default
    x = torch.randn(3, 4, 24, device=device, dtype=dtype)
    residual = torch.randn(4, 3, 24, device=device, dtype=residual_dtype).transpose(0, 1)
    weight = torch.randn(24, device=device, dtype=weight_dtype)
    bias = torch.randn(24, device=device, dtype=dtype) if centered else None
    s_dtype = torch.promote_types(dtype, residual_dtype)
    y_dtype = s_dtype if centered else torch.promote_types(s_dtype, weight_dtype)
    offset = 0.0 if centered else 1.0
    for rows, added in ((x, residual), (x[:, :0], residual[:, :0])):
        spec = (EPS, centered, not centered, offset, y_dtype, centered)
        torch.library.opcheck(operator, (rows, added, weight, bias, *spec))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("needs", [(True, FP32, FP32), (True, None, None), (False, FP32, None)])
def test_opcheck_of_the_backward(needs, device):
    needs_ds, dweight_dtype, dbias_dtype = needs
    for sample in forward_samples(device):
        x, residual, weight, bias, *spec = sample
        y, summed, mean, rstd = torch.ops.fusedops.norm_forward_training(*sample)
        dy = torch.randn_like(y)
        dsum = None if residual is None else torch.randn_like(y)
        s = x if residual is None else summed
        centered, row_major = spec[1], spec[-1] and residual is None
        torch.library.opcheck(
            torch.ops.fusedops.norm_backward.default,
            (dy, dsum, s, weight, mean, rstd, EPS, centered, 0.0, row_major)
            + (needs_ds, dweight_dtype, dbias_dtype),
        )


def test_importing_registers_once():
    """Both import orders lead to the same library; a second definition would raise."""
    import importlib

    module = importlib.import_module("fusedops.ops")
    assert module is importlib.import_module("fusedops.ops")
    assert fusedops.rms_norm is fusedops.functional.rms_norm
