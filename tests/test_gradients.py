# SPDX-License-Identifier: Apache-2.0
"""Autograd: what needs a gradient gets the right one, and nothing else is touched."""

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import fusedops

pytestmark = pytest.mark.usefixtures("tree_sums")

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

EPS = 1e-5


def upstream(op, shape, dtype, device):
    return [torch.randn(shape).to(device, dtype) for _ in range(1 + op.adds)]


# Which gradients ---------------------------------------------------------------------------------


def subsets(op):
    return itertools.product([False, True], repeat=len(op.argument_names))


@pytest.mark.parametrize("long_rows", [False, True])
def test_every_subset_of_arguments_may_need_a_gradient(op, long_rows, device, request):
    hidden_size = 24
    if long_rows:
        request.getfixturevalue("kernels_run")
        hidden_size = 2 * request.getfixturevalue("small_blocks") + 2
    inputs = op.inputs((3, hidden_size), FP32, device)
    dy, *dsummed = upstream(op, (3, hidden_size), FP32, device)
    full = op.run(inputs, dy, *dsummed)
    for needs in subsets(op):
        leaves = {
            n: t.clone().requires_grad_(need)
            for (n, t), need in zip(inputs.items(), needs, strict=True)
        }
        y, summed = op.call(leaves)
        assert torch.equal(y, full.y)
        assert y.requires_grad == any(needs)
        if op.adds:
            assert summed.requires_grad == (leaves["x"].requires_grad or needs[1])
        outputs = [(y, dy)] + ([(summed, *dsummed)] if op.adds else [])
        outputs = [(out, g) for out, g in outputs if out.requires_grad]
        if outputs:
            torch.autograd.backward(*zip(*outputs, strict=True))
        for name, tensor in leaves.items():
            if not tensor.requires_grad:
                assert tensor.grad is None, (needs, name)
            else:
                assert torch.equal(tensor.grad, full.grads[name]), (needs, name)


ADDS = pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"], indirect=True)


@ADDS
def test_only_y_is_used(op, device):
    inputs = op.inputs((4, 40), FP32, device)
    dy = torch.randn(4, 40, device=device)
    zero_dsummed = op.run(inputs, dy, torch.zeros_like(dy))
    ours = op.run(inputs, dy)
    for name, grad in ours.grads.items():
        assert torch.equal(grad, zero_dsummed.grads[name]), name


@ADDS
def test_only_the_sum_is_used(op, device):
    """Then the gradient passes through, and weight and bias get zeros or nothing."""
    inputs = op.inputs((4, 40), FP32, device)
    dsummed = torch.randn(4, 40, device=device)
    grads = op.run(inputs, None, dsummed).grads
    assert torch.equal(grads.pop("x"), dsummed)
    assert torch.equal(grads.pop("residual"), dsummed)
    assert all(g is None or not g.any() for g in grads.values())


@ADDS
def test_gradients_of_branch_and_residual_do_not_share_storage(op, device):
    """Otherwise clipping or accumulating one in place would change the other."""
    inputs = op.inputs((4, 40), FP32, device)
    grads = op.run(inputs, *upstream(op, (4, 40), FP32, device)).grads
    x_grad, residual_grad = grads["x"], grads["residual"]
    before = residual_grad.clone()
    x_grad.zero_()
    assert torch.equal(residual_grad, before)


@ADDS
@pytest.mark.parametrize("use", ["y", "summed", "both"])
def test_gradients_land_in_their_inputs_dtype(op, use, device):
    inputs = op.inputs((4, 40), BF16, device, residual_dtype=FP32, weight_dtype=FP16)
    dy = None if use == "summed" else torch.randn(4, 40, device=device)
    dsummed = None if use == "y" else torch.randn(4, 40, device=device)
    for name, grad in op.run(inputs, dy, dsummed).grads.items():
        assert grad is None or grad.dtype == inputs[name].dtype, name


def test_backward_twice_accumulates(op, device):
    inputs = op.inputs((4, 40), FP32, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    for _ in range(2):
        op.call(leaves)[0].sum().backward()
    once = op.run(inputs, torch.ones(4, 40, device=device))
    for name, tensor in leaves.items():
        assert torch.equal(tensor.grad, 2 * once.grads[name]), name


def test_backward_without_retained_graph_says_so_the_second_time(op, device):
    x = op.inputs((4, 40), FP32, device)
    x["x"].requires_grad_()
    y, _ = op.call(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


# What is read must be unchanged, what is returned must be new ------------------------------------


def test_nothing_given_is_written(op, device):
    inputs = op.inputs((5, 72), FP16, device)
    dy, *dsummed = upstream(op, (5, 72), FP16, device)
    given = [*inputs.values(), dy, *dsummed]
    before = [t.clone() for t in given]
    versions = [t._version for t in given]
    op.call(inputs)
    op.run(inputs, dy, *dsummed)
    for tensor, copy, version in zip(given, before, versions, strict=True):
        assert torch.equal(tensor, copy)
        assert tensor._version == version


@pytest.mark.parametrize("train", [False, True])
def test_results_share_no_storage(op, train, device):
    inputs = op.inputs((5, 72), FP32, device)
    if train:
        inputs["x"].requires_grad_()
    y, summed = op.call(inputs)
    tensors = [*inputs.values(), y] + ([summed] if op.adds else [])
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


@pytest.mark.usefixtures("kernels_run")
def test_saved_tensors_that_were_changed_are_noticed(op, device):
    """As with torch's own norm: never a gradient for values that are no longer there."""
    inputs = op.inputs((4, 40), FP32, device)
    inputs["weight"].requires_grad_()
    y, summed = op.call(inputs)
    (summed if op.adds else inputs["x"]).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# What the graph keeps ----------------------------------------------------------------------------


def saved_bytes(function) -> dict[int, int]:
    """Storages that autograd keeps for the backward of what ``function`` does, by address."""
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return kept


@pytest.mark.usefixtures("kernels_run")
def test_training_keeps_rows_and_two_statistics(op, device):
    """No centred or normalised copy: the rows themselves, the weight, mean and rstd."""
    inputs = op.inputs((6, 512), FP16, device)
    inputs["x"].requires_grad_()
    outputs = []
    kept = saved_bytes(lambda: outputs.extend(t for t in op.call(inputs) if t is not None))
    rows = outputs[1] if op.adds else inputs["x"]
    known = [rows, inputs["weight"], *([inputs["bias"]] if op.centers else [])]
    for tensor in known:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) <= (2 if op.centers else 1) * 6 * 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_keeps_nothing(op, mode, device):
    inputs = op.inputs((6, 512), FP16, device)
    inputs["x"].requires_grad_()
    with mode():
        assert saved_bytes(lambda: op.call(inputs)) == {}
        y, _ = op.call(inputs)
    assert not y.requires_grad
    del inputs["x"]
    frozen = op.inputs((6, 512), FP16, device)
    assert saved_bytes(lambda: op.call(frozen)) == {}


@pytest.mark.gpu
def test_inference_allocates_only_its_results(op):
    inputs = op.inputs((4096, 4096), FP16, "cuda")
    op.call(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = op.call(inputs)
    size = sum(t.numel() * t.element_size() for t in results if t is not None)
    assert torch.cuda.max_memory_allocated() - before == size


@pytest.mark.gpu
def test_frozen_weights_need_no_partial_sums(op):
    inputs = op.inputs((4096, 4096), FP16, "cuda")
    inputs["x"].requires_grad_()
    dy = torch.randn_like(inputs["x"])
    peaks = []
    for _ in range(2):
        y, _ = op.call(inputs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (dx,) = torch.autograd.grad(y, inputs["x"], dy)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] == dx.numel() * dx.element_size()


# Derivatives checked numerically, and of higher order --------------------------------------------


@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}, {"cast": "input"}])
def test_gradcheck(op, options, device):
    if options and op.centers:
        pytest.skip("LayerNorm has no such option")
    inputs = op.inputs((2, 3), FP64, device)
    tensors = [t.requires_grad_() for t in inputs.values()]

    def function(*arguments):
        y, summed = op.call(dict(zip(inputs, arguments, strict=True)), eps=0.1, **options)
        return y if summed is None else (y, summed)

    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}])
def test_double_backward(op, options, device):
    if options and op.centers:
        pytest.skip("LayerNorm has no such option")
    inputs = op.inputs((2, 5), FP64, device)
    tensors = [t.requires_grad_() for t in inputs.values()]

    def function(*arguments):
        y, summed = op.call(dict(zip(inputs, arguments, strict=True)), eps=0.1, **options)
        return y if summed is None else (y, summed)

    assert torch.autograd.gradgradcheck(function, tensors)


def test_gradient_penalty(op, device):
    """The usual use of a second derivative: the norm of a gradient in the loss, in fp32."""
    inputs = op.inputs((3, 24), FP32, device)

    def penalty(function):
        leaves = {n: t.detach().clone().requires_grad_() for n, t in inputs.items()}
        y, _ = op.call(leaves, function, eps=EPS)
        (dx,) = torch.autograd.grad(y.square().sum(), leaves["x"], create_graph=True)
        dx.square().sum().backward()
        return {n: t.grad for n, t in leaves.items()}

    ours, theirs = penalty(op.function), penalty(op.torch_function())
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-4)


def test_batched_backward(op, device):
    """Many gradients at once (``is_grads_batched``, vectorised Jacobians)."""
    inputs = op.inputs((3, 8), FP32, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    y, _ = op.call(leaves)
    dy = torch.randn(4, 3, 8, device=device)
    batched = torch.autograd.grad(
        y, list(leaves.values()), dy, is_grads_batched=True, retain_graph=True
    )
    for i in range(4):
        single = torch.autograd.grad(y, list(leaves.values()), dy[i], retain_graph=True)
        for a, b in zip(batched, single, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-4, atol=1e-5)


def test_lazily_negated_tensors(op, device):
    """torch may note a negation instead of carrying it out; raw memory has the wrong sign."""
    inputs = op.inputs((3, 8), FP32, device)
    dy = torch.randn(3, 8, device=device)
    expected = op.run({n: -t for n, t in inputs.items()}, -dy)
    ours = op.run({n: torch._neg_view(t) for n, t in inputs.items()}, torch._neg_view(dy))
    torch.testing.assert_close(ours.y, expected.y)
    for name, grad in ours.grads.items():
        torch.testing.assert_close(grad, expected.grads[name], rtol=1e-5, atol=1e-5)


def test_zero_gradient_without_memory(op, device):
    """torch's symbolic zeros have no storage."""
    inputs = op.inputs((3, 8), FP32, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    y, _ = op.call(leaves)
    zero = torch._efficientzerotensor(3, 8, device=device)
    for grad in torch.autograd.grad(y, list(leaves.values()), zero):
        assert not grad.any()


# torch.func --------------------------------------------------------------------------------------


def as_function(op, names):
    def function(*arguments):
        out = op.call(dict(zip(names, arguments, strict=True)), eps=EPS)
        return out if op.adds else out[:1]

    def reference(*arguments):
        out = op.call(dict(zip(names, arguments, strict=True)), op.reference, eps=EPS)
        return out if op.adds else out[:1]

    return function, reference


def test_func_grad(op, device):
    inputs = op.inputs((3, 24), FP32, device)
    function, reference = as_function(op, list(inputs))
    argnums = tuple(range(len(inputs)))

    def loss(f):
        return lambda *arguments: sum(out.square().sum() for out in f(*arguments))

    ours = torch.func.grad(loss(function), argnums=argnums)(*inputs.values())
    theirs = torch.func.grad(loss(reference), argnums=argnums)(*inputs.values())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_dim", [0, 1])
def test_vmap(op, in_dim, device):
    inputs = op.inputs((4, 3, 24), FP32, device)
    function, _ = as_function(op, list(inputs))
    in_dims = tuple(in_dim if t.dim() > 1 else None for t in inputs.values())
    ours = torch.vmap(function, in_dims=in_dims, out_dims=in_dim)(*inputs.values())
    for a, b in zip(ours, function(*inputs.values()), strict=True):
        torch.testing.assert_close(a, b)


def test_vmap_over_weights(op, device):
    inputs = op.inputs((3, 24), FP32, device)
    inputs["weight"] = torch.randn(5, 24, device=device)
    function, _ = as_function(op, list(inputs))
    in_dims = tuple(0 if n == "weight" else None for n in inputs)
    ours = torch.vmap(function, in_dims=in_dims)(*inputs.values())
    for i in range(5):
        single = function(*{**inputs, "weight": inputs["weight"][i]}.values())
        torch.testing.assert_close(ours[0][i], single[0])


def test_per_sample_gradients(op, device):
    inputs = op.inputs((4, 3, 24), FP32, device)
    function, _ = as_function(op, list(inputs))
    in_dims = tuple(0 if t.dim() > 1 else None for t in inputs.values())
    position = list(inputs).index("weight")

    def loss(*arguments):
        return function(*arguments)[0].square().sum()

    per_sample = torch.vmap(torch.func.grad(loss, argnums=position), in_dims=in_dims)(
        *inputs.values()
    )
    total = torch.func.grad(loss, argnums=position)(*inputs.values())
    assert per_sample.shape == (4, 24)
    torch.testing.assert_close(per_sample.sum(0), total, rtol=1e-4, atol=1e-4)


# torch's own forward mode compiles its decompositions with TorchScript when first used.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@FORWARD_MODE
def test_jvp(op, device):
    inputs = op.inputs((3, 24), FP32, device)
    function, reference = as_function(op, list(inputs))
    primals = tuple(inputs.values())
    tangents = tuple(torch.randn_like(t) for t in primals)
    ours = torch.func.jvp(function, primals, tangents)
    theirs = torch.func.jvp(reference, primals, tangents)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@FORWARD_MODE
def test_dual_tensors(op, device):
    """Forward-mode tensors look like plain ones; their tangents must not be dropped."""
    inputs = op.inputs((3, 24), FP32, device)
    tangent = torch.randn(3, 24, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs["x"], tangent)
        arguments = {**inputs, "x": dual}
        ours = torch.autograd.forward_ad.unpack_dual(op.call(arguments, eps=EPS)[0]).tangent
        theirs = torch.autograd.forward_ad.unpack_dual(
            op.call(arguments, op.reference, eps=EPS)[0]
        ).tangent
    assert ours is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# Anything at all ---------------------------------------------------------------------------------


def values(shape, dtype, scale, generator):
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same values in other places."""
    if layout == "sliced":
        return torch.cat([t, t], -1)[..., : t.shape[-1]]
    if layout == "stepped":
        return torch.stack([t, t], -1).flatten(-2)[..., ::2]
    if layout == "transposed" and t.dim() > 1:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "offset":
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
    return t


@st.composite
def calls(draw):
    names = sorted(fusedops.functional.__all__)
    layouts = st.sampled_from(["plain", "plain", "sliced", "stepped", "transposed", "offset"])
    dtypes = st.sampled_from([FP16, BF16, FP32, FP64])
    leading = draw(st.lists(st.sampled_from([1, 2, 3, 4, 0]), max_size=3))
    arguments = ("x", "residual", "weight", "bias")
    return {
        "name": draw(st.sampled_from(names)),
        "shape": (*leading, draw(st.sampled_from([1, 2, 5, 16, 33, 100, 257]))),
        "dtypes": {n: draw(dtypes) for n in arguments},
        "layouts": {n: draw(layouts) for n in (*arguments, "dy", "dsummed")},
        "absent": {n for n in ("weight", "bias", "dsummed") if draw(st.integers(0, 3)) == 0},
        "needs": {n for n in arguments if draw(st.booleans())},
        "scale": draw(st.sampled_from([1e-3, 1.0, 30.0])),
        "cast": draw(st.sampled_from(["fp32", "input"])),
        "weight_offset": draw(st.sampled_from([0.0, 1.0])),
        "seed": draw(st.integers(0, 2**16)),
    }


# Each new dtype or length compiles kernels on a GPU, which takes about a second.
@hypothesis.settings(
    max_examples=30 if torch.cuda.is_available() else 100, deadline=None, derandomize=True
)
@hypothesis.given(call=calls())
def test_any_call_agrees_with_the_reference(call, device):
    generator = torch.Generator().manual_seed(call["seed"])
    adds, centers = call["name"].startswith("add"), call["name"].endswith("layer_norm")
    shape = call["shape"]
    arguments = {"x": shape, "residual": shape, "weight": shape[-1:], "bias": shape[-1:]}
    if not adds:
        del arguments["residual"]
    if not centers:
        del arguments["bias"]
    inputs = {}
    for name, size in arguments.items():
        scale = call["scale"] if name in ("x", "residual") else 1.0
        tensor = values(size, call["dtypes"][name], scale, generator).to(device)
        inputs[name] = None if name in call["absent"] else laid_out(tensor, call["layouts"][name])
    options = {"eps": 1e-3}
    if not centers:
        options |= {"cast": call["cast"], "weight_offset": call["weight_offset"]}

    def run(function):
        leaves = {
            n: t if t is None else t.detach().requires_grad_(n in call["needs"])
            for n, t in inputs.items()
        }
        outputs = function(**leaves, **options)
        outputs = outputs if adds else (outputs,)
        sent = []
        for name, out in zip(("dy", "dsummed"), outputs, strict=False):
            g = values(shape, out.dtype, 1.0, torch.Generator().manual_seed(len(name)))
            if out.requires_grad and name not in call["absent"]:
                sent.append((out, laid_out(g.to(device), call["layouts"][name])))
        if sent:
            torch.autograd.backward(*zip(*sent, strict=True))
        return outputs, {n: t.grad for n, t in leaves.items() if t is not None}

    ours, our_grads = run(getattr(fusedops, call["name"]))
    theirs, their_grads = run(getattr(fusedops.reference, call["name"]))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert a.requires_grad == b.requires_grad
        close(a, b, steps=1)
    for name, theirs_grad in their_grads.items():
        if theirs_grad is None:
            assert our_grads[name] is None or not our_grads[name].any()
        else:
            assert our_grads[name].dtype == theirs_grad.dtype
            close(our_grads[name], theirs_grad, steps=2)


def close(a: Tensor, b: Tensor, steps: int) -> None:
    """Equal up to some units of the tensor's dtype at its largest value.

    The reference rounds the gradients of y and of the sum before it adds them, the kernels after.
    """
    largest = b.detach().abs().max().item() if b.numel() else 0.0
    unit = torch.finfo(a.dtype).eps
    slack = 16 if a.dtype in (FP32, FP64) else 1  # the rounding of statistics and row sums
    torch.testing.assert_close(
        a.detach(), b.detach(), rtol=steps * unit, atol=max(steps * slack * unit * largest, 1e-30)
    )


# The plain torch path -----------------------------------------------------------------------------


@pytest.mark.parametrize("magnitude", [1e-20, 1e14, 1e15, 1e17])
def test_reference_gradient_of_large_and_small_rows(magnitude, device):
    x = (torch.randn(3, 8, device=device) * magnitude).requires_grad_()
    dy = torch.ones_like(x)
    dy[:, 0] = 2.0
    (ours,) = torch.autograd.grad(fusedops.reference.layer_norm(x, eps=1e-30), x, dy)
    exact = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(
        fusedops.reference.layer_norm(exact, eps=1e-30), exact, dy.double()
    )
    assert (ours - truth).abs().max() <= 1e-5 * truth.abs().max()
