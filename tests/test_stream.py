# SPDX-License-Identifier: Apache-2.0
"""The residual stream: what fuses, what must not, and that nobody can tell the difference.

On the CPU the operators are forced, so that sums and norms go through them (their reference). A
patched model is compared with the same model whose norms alone are patched where bits matter, and
with the unpatched one where they need not.
"""

import collections
import copy
import dataclasses
import functools
import gc
import io
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import build_llama, randomised
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import ModelOutput

from fusedops import direct, dispatch
from fusedops.integrations import classes, norms, patch, stream, unpatch
from fusedops.integrations.classes import original_class
from fusedops.integrations.patching import force_operators, patched, suspended
from fusedops.integrations.screening import stream_obstacle, writes_in_place
from fusedops.integrations.stream import (
    BLOCK,
    BlockState,
    ResidualStream,
    _Call,
    _slot,
    as_tensor,
)

INTERPRETED = dispatch.INTERPRETED  # before a fixture says otherwise
IDS = torch.tensor([[5, 9, 33, 2, 17, 60, 8], [1, 44, 7, 12, 3, 3, 29]])
SIZE = 16


@pytest.fixture(scope="module")
def native() -> Iterator[Any]:
    """direct.c, if it can be compiled; without a GPU it takes CPU tensors for those of one."""
    module = direct.load_native()
    if module is not None and not torch.cuda.is_available():
        stand_ins = {"is_cuda": torch.is_tensor, "is_capturing": lambda: False}
        module.configure(**direct.asked | stand_ins)
    yield module
    if module is not None:
        module.configure(**direct.asked)


@pytest.fixture(autouse=True, params=["python", "c"])
def forced(
    request: pytest.FixtureRequest,
    native: Any,
    monkeypatch: pytest.MonkeyPatch,
    fresh_plans: None,
) -> Iterator[None]:
    """Operators run on the CPU through their reference; blocks are run by Python, then by C."""
    if request.param == "c" and native is None:
        pytest.skip("direct.c cannot be compiled here")
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    for name in direct.EXPORTED:
        function = getattr(native, name) if request.param == "c" else None
        monkeypatch.setattr(direct, name, function)
    if request.param == "python":
        monkeypatch.setattr(direct, "load_native", lambda: None)
        for name, method in stream.PYTHON_METHODS.items():
            monkeypatch.setattr(ResidualStream, name, method)
    if request.param == "c" and not torch.cuda.is_available():
        monkeypatch.setattr(norms, "_make_ready", make_ready)
    with force_operators():
        yield
    _slot.held = None


def make_ready(
    module: nn.Module, operands: norms.Operands, x: Tensor, residual: Tensor | None
) -> None:
    """As for calls on a GPU: the next call like this one is made without looking further."""
    grad, dtype = torch.is_grad_enabled(), x.dtype
    state = vars(module)

    def call(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        rows = [t for t in (x, residual) if t is not None]
        if (
            torch.is_grad_enabled() is not grad
            or torch.is_autocast_enabled("cpu")
            or weight is not operands.weight
            or bias is not operands.bias
            or any(type(t) is not Tensor or t.dtype is not dtype for t in rows)
            or any(t.shape != x.shape or not t.is_contiguous() for t in rows)
        ):
            return None
        again = norms.read_operands(module, x, dtype)
        if again is None or again != operands:
            return None
        served.append(module)
        if residual is None:
            return norms.run_norm(module, again, x), None
        return norms.run_add_norm(module, again, x, residual)

    ready = state.get(norms.READY)
    if ready is None or ready.eps is not operands.eps:
        ready = state[norms.READY] = norms.Ready(operands)
    if residual is None:
        ready.call = call
    else:
        ready.add_call = call


served: list[nn.Module] = []  # by calls that were ready


class Block(nn.Module):
    """A pre-norm block as everybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.mix, self.mlp = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.mix(self.norm1(x))
        x = residual + x
        residual = x
        x = self.mlp(self.norm2(x))
        return residual + x


class Net(nn.Module):
    """Blocks, and a norm after the last."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.LayerNorm(SIZE)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def rows(*, grad: bool = False) -> Tensor:
    return torch.randn(2, 5, SIZE, requires_grad=grad)


def counts(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, int, int]:
    """(result, norms called by themselves, norms fused with an add) of one forward."""
    with dispatch.count_calls() as calls:
        result = model(*args, **kwargs)
    fused = sum(count for (name, _), count in calls.items() if name.startswith("add_"))
    return result, sum(calls.values()) - fused, fused


def assert_same(model: nn.Module, *args: Any, warm: int = 2, fused: int | None = None) -> None:
    """Streams give the bits that patched norms alone give, and the unpatched model's numbers."""
    with torch.no_grad():
        expected = model(*args)
        patch(model, fuse_residual=False)
        bits = model(*args)
        unpatch(model)
        patch(model)
        for _ in range(warm):
            model(*args)
        found, _, count = counts(model, *args)
    assert torch.equal(found, bits)
    assert torch.allclose(found, expected, atol=1e-5)
    if fused is not None:
        assert count == fused


def build_gpt2() -> PreTrainedModel:
    torch.manual_seed(11)
    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        eos_token_id=63,
        bos_token_id=1,
    )
    return randomised(GPT2LMHeadModel(config))


def build_t5() -> PreTrainedModel:
    torch.manual_seed(11)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return randomised(T5ForConditionalGeneration(config))


BUILDERS = {"llama": build_llama, "gpt2": build_gpt2}


@pytest.fixture(params=BUILDERS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return BUILDERS[request.param]()


@pytest.fixture
def llama() -> PreTrainedModel:
    return build_llama()


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return model.model.layers if hasattr(model, "model") else model.transformer.h


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor = IDS, **options: Any) -> Tensor:
    return model(ids, **options).logits


def warmed(model: PreTrainedModel) -> PreTrainedModel:
    patch(model)
    logits(model)
    logits(model)
    return model


# --- what fuses --------------------------------------------------------------------------------


def test_every_add_of_a_pre_norm_model_fuses(model: PreTrainedModel) -> None:
    expected = logits(model)
    report = patch(model)
    _, alone, fused = counts(logits, model)
    assert (alone, fused) == (2, 5)  # the norm after the last block is seen in the first forward
    for _ in range(3):
        found, alone, fused = counts(logits, model)
        assert (alone, fused) == (1, 6)
        assert torch.allclose(found, expected, atol=1e-5)
    (row,) = report.fused
    assert (row.blocks, row.forwards) == (3, 12)
    assert (row.inside, row.across, row.plain, row.missed) == (12, 11, 1, 0)
    assert row.reasons == {"which norm reads the block's result was not known": 1}


def test_norms_alone_where_asked(model: PreTrainedModel) -> None:
    report = patch(model, fuse_residual=False)
    assert report.fused == ()
    _, alone, fused = counts(logits, model)
    assert (alone, fused) == (7, 0)


def test_encoder_decoder_fuses_in_and_across_sublayers() -> None:
    model = build_t5()
    options = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
    with torch.no_grad():
        expected = model(**options).logits
        patch(model, fuse_residual=False)
        _, norms, _ = counts(model, **options)
        unpatch(model)
        patch(model)
        for _ in range(3):
            result, alone, fused = counts(model, **options)
    # one norm in the encoder and one in the decoder reads what no block has added
    assert (alone, fused) == (2, norms - 2)
    assert torch.allclose(result.logits, expected, atol=1e-5)


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.mix(x))
        return self.norm2(self.mlp(x) + x)


class NormFirst(Block):
    """The first add's base is the result of a norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x)
        return self.norm2(self.mlp(x) + x)


class Sandwich(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm2(self.mix(self.norm1(x)))
        return x


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm1(x)) + self.mlp(self.norm2(x)) + x


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x)) * 0.22
        return x + self.mlp(self.norm2(x)) * 0.22


class Flattens(Block):
    """As OPT does: the sum as a matrix, and back."""

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(self.norm1(x))
        shape = h.shape
        flat = h.reshape(-1, h.size(-1))
        residual = flat
        flat = self.mlp(self.norm2(flat))
        return (
            (residual + flat).view(shape) + 0.0 * h.mean()
            if self.look
            else self.out(residual + flat, shape)
        )

    look = False

    def out(self, h: Tensor, shape: torch.Size) -> Tensor:
        return h.view(shape)


class FlattensAndLooksBack(Flattens):
    look = True


class Converts(Block):
    """As Mamba does: conversions that change nothing."""

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.norm1(x.to(dtype=self.norm1.weight.dtype))
        residual = residual.to(torch.float32)
        x = (residual + self.mix(x)).float()
        return (x + self.mlp(self.norm2(x.to(torch.float32)))).contiguous()


class ReturnsTuple(Block):
    def forward(self, hidden: Tensor, *, extra: Any = None) -> tuple[Tensor, Any]:
        hidden = hidden + self.mix(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden)), extra


class TupleNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(hidden=x, extra=None)
        return self.norm(x)


@pytest.mark.parametrize(
    ("block", "fused"),
    [
        (Block, 6),
        (PostNorm, 6),
        (NormFirst, 3),
        (Sandwich, 3),
        (Parallel, 3),
        (Scaled, 6),
        (Flattens, 6),
        (FlattensAndLooksBack, 3),
        (Converts, 3),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_shapes_of_blocks(block: type[nn.Module], fused: int) -> None:
    assert_same(Net(block), rows(), fused=fused)


def test_hidden_states_by_keyword_and_tuple_results() -> None:
    assert_same(TupleNet(ReturnsTuple), rows(), fused=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hidden_states_are_bitwise_the_unpatched_models(dtype: torch.dtype) -> None:
    """Llama's norm is bit for bit the reference, so every sum can be compared."""
    model = build_llama().to(dtype)
    expected = model(IDS, output_hidden_states=True).hidden_states
    patch(model)
    for _ in range(3):
        found = model(IDS, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert type(one) is Tensor
        assert torch.equal(one, other)


def test_fp32_residual_with_half_branches_sums_in_fp32() -> None:
    class Mixed(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mix(self.norm1(x)).to(torch.bfloat16)
            return self.mlp(self.norm2(x)).to(torch.bfloat16) + x

    assert_same(Net(Mixed), rows(), fused=6)


# --- who may be handed a stream ----------------------------------------------------------------


class Recorder:
    """A hook that notes the types of all that it is handed."""

    def __init__(self) -> None:
        self.types: list[type] = []

    def note(self, value: Any) -> None:
        for item in value if isinstance(value, tuple | list) else [value]:
            self.types.append(type(item))

    def pre(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.note(args)
        self.note(list(kwargs.values()))

    def post(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.pre(module, args, kwargs)
        self.note(output)


@pytest.mark.parametrize("block", [Block, PostNorm, Sandwich, Parallel])
def test_no_hook_ever_sees_a_stream(block: type[nn.Module]) -> None:
    model = Net(block)
    recorder = Recorder()
    for module in model.modules():
        module.register_forward_pre_hook(recorder.pre, with_kwargs=True)
        module.register_forward_hook(recorder.post, with_kwargs=True)
    with torch.no_grad():
        expected = model(x := rows())
        patch(model)
        for _ in range(3):
            assert torch.allclose(model(x), expected, atol=1e-5)
    assert recorder.types
    assert ResidualStream not in recorder.types


def test_no_global_hook_sees_a_stream() -> None:
    model, recorder = Net(PostNorm), Recorder()
    patch(model)
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: recorder.note(args)
    )
    try:
        for _ in range(2):
            model(rows())
    finally:
        handle.remove()
    assert recorder.types
    assert ResidualStream not in recorder.types


def test_submodules_are_handed_tensors_also_without_hooks() -> None:
    seen: list[type] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
            seen.extend((type(x), type(y)))
            return x

    class Hands(Block):
        def __init__(self) -> None:
            super().__init__()
            self.look = Looks()

        def forward(self, x: Tensor) -> Tensor:
            h = x + self.mix(self.norm1(x))
            x = self.look(h, y=x) + self.mlp(self.norm2(h))
            return self.look(x, y=x)

    assert_same(Net(Hands), rows())
    assert set(seen) == {Tensor}


def test_only_submodules_that_are_handed_streams_keep_another_class() -> None:
    model = Net()
    patch(model)
    for _ in range(3):
        model(rows())
    assert type(model.layers[0].mix) is nn.Linear
    post = Net(PostNorm)
    patch(post)
    for _ in range(3):
        post(rows())
    assert original_class(post.layers[0].mix) is nn.Linear
    assert type(post.layers[0].mix) is not nn.Linear  # it reads the block's input
    types = [type(module) for module in Net(PostNorm).modules()]
    unpatch(post)
    assert [type(module) for module in post.modules()] == types


def test_hooks_on_blocks_and_norms_read_replace_and_edit(model: PreTrainedModel) -> None:
    blocks = layers_of(model)
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]

    def first(value: Any) -> Tensor:
        return value[0] if isinstance(value, tuple) else value

    def replace(module: nn.Module, args: Any, output: Any) -> Any:
        new = first(output) * 1.5
        return (new, *output[1:]) if isinstance(output, tuple) else new

    def edit(module: nn.Module, args: Any, output: Any) -> None:
        first(output).mul_(1.5)

    def edit_behind_its_back(module: nn.Module, args: Any, output: Any) -> None:
        first(output).data.mul_(1.5)

    def replace_input(module: nn.Module, args: Any) -> Any:
        return (args[0] * 1.5, *args[1:])

    def edit_input_behind_its_back(module: nn.Module, args: Any) -> None:
        args[0].data.mul_(1.5)

    plain = logits(model)
    for target in (blocks[1], norms[-1], norms[2]):
        for hook in (replace, edit, edit_behind_its_back):
            with suspended(model), hooked(target.register_forward_hook, hook):
                expected = logits(model)
            assert not torch.allclose(expected, plain, atol=1e-3)
            warmed(model)
            with hooked(target.register_forward_hook, hook):
                assert torch.allclose(logits(model), expected, atol=1e-4), hook
            assert torch.allclose(logits(model), plain, atol=1e-5), hook
        for pre_hook in (replace_input, edit_input_behind_its_back):
            with suspended(model), hooked(target.register_forward_pre_hook, pre_hook):
                expected = logits(model)
            with hooked(target.register_forward_pre_hook, pre_hook):
                for _ in range(2):
                    assert torch.allclose(logits(model), expected, atol=1e-4), pre_hook
            assert torch.allclose(logits(model), plain, atol=1e-5), pre_hook


class Wrapped(nn.Module):
    """A block in a block, as T5 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for sublayer in self.sublayers:
            x = sublayer(x)
        return x


@pytest.mark.parametrize("copied", ["", "deepcopy", "pickle"])
def test_hooks_on_modules_around_a_block_that_edit_behind_its_back(copied: str) -> None:
    model, x = Net(Wrapped), rows()

    def edit_output(module: nn.Module, args: Any, output: Tensor) -> None:
        output.data.mul_(2.0)

    def edit_input(module: nn.Module, args: Any) -> None:
        args[0].data.mul_(2.0)

    patch(model)
    if copied == "deepcopy":
        model = copy.deepcopy(model)
    elif copied == "pickle":
        model = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for _ in range(2):
            model(x.clone())
        for target in (model.layers[1], model.layers[2]):
            for register, hook in (
                (target.register_forward_hook, edit_output),
                (target.register_forward_pre_hook, edit_input),
            ):
                with hooked(register, hook):
                    with suspended(model):
                        expected = model(x.clone())
                    assert torch.allclose(model(x.clone()), expected, atol=1e-5)
        _, alone, fused = counts(model, x.clone())
    assert (alone, fused) == (1, 12)


class hooked:
    """A hook for the length of a ``with`` block."""

    def __init__(self, register: Callable[[Any], Any], hook: Any) -> None:
        self.handle = register(hook)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def test_hooks_that_only_capture_do_not_cost_the_hand_over() -> None:
    llama = build_llama(attn_implementation="eager")  # the others have no attentions to give
    patch(llama)
    for _ in range(2):
        llama(IDS, output_hidden_states=True)
    with torch.no_grad():
        result, alone, fused = counts(llama, IDS, output_hidden_states=True, output_attentions=True)
    assert (alone, fused) == (1, 6)
    with suspended(llama):
        expected = llama(IDS, output_hidden_states=True)
    for one, other in zip(result.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(one, other)


def test_backward_hooks_on_blocks_and_norms(llama: PreTrainedModel) -> None:
    def run() -> list[Tensor]:
        seen: list[Tensor] = []
        handles = [
            module.register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0]))
            for module in (llama.model.norm, *llama.model.layers)
        ]
        llama(IDS).logits.square().mean().backward()
        for handle in handles:
            handle.remove()
        return seen

    expected = run()
    warmed(llama)
    found = run()
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


# --- code that a stream must not reach ---------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2


class CallsFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(self.norm1(x))
        return h + self.mlp(self.norm2(Double.apply(h)))


def double(x: Tensor) -> Tensor:
    return Double.apply(x)


class CallsFunctionInHelper(Block):
    def helper(self, x: Tensor) -> Tensor:
        return (lambda y: double(y))(x)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(self.norm1(x))
        return h + self.mlp(self.norm2(self.helper(h)))


class CallsCheckpoint(Block):
    reentrant = False

    def branch(self, h: Tensor) -> Tensor:
        return self.mlp(self.norm2(h))

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(self.norm1(x))
        return h + checkpoint(self.branch, h, use_reentrant=self.reentrant)


class CallsReentrantCheckpoint(CallsCheckpoint):
    reentrant = True


@functools.cache
def compiled_double() -> Any:
    return torch.compile(lambda x: x * 2, backend="eager")


GRADIENT_HAZARDS = [CallsFunction, CallsFunctionInHelper, CallsCheckpoint, CallsReentrantCheckpoint]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    model(leaf).square().mean().backward()
    found = [leaf.grad, *(p.grad for p in model.parameters())]
    return [gradient.clone() for gradient in found if gradient is not None]


@pytest.mark.parametrize("block", GRADIENT_HAZARDS)
def test_blocks_that_would_lose_gradients_run_unstreamed(block: type[nn.Module]) -> None:
    model, x = Net(block), rows()
    expected = gradients(model, x)
    report = patch(model)
    for _ in range(3):
        found = gradients(model, x)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6, rtol=1e-4)
    (row,) = report.fused
    assert row.note and (row.inside, row.across) == (0, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_screening_names_the_obstacle() -> None:
    scripted = torch.jit.trace(lambda x: x * 2, (torch.ones(2),))

    class CallsScript(Block):
        def forward(self, x: Tensor) -> Tensor:
            return scripted(x)

    class CallsExtension(Block):
        def forward(self, x: Tensor) -> Tensor:
            return np.add(x, np.frombuffer)

    compiled = torch.compile(lambda x: x * 2, backend="eager")

    class CallsCompiled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return compiled(x)

    class AsksForTensor(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = x + self.mix(self.norm1(x))
            return h if isinstance(h, torch.Tensor) else h * 2

    class AsksTorch(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if torch.is_tensor(x) else x

    class WritesData(Block):
        def forward(self, x: Tensor) -> Tensor:
            branch = self.mix(self.norm1(x))
            h = x + branch
            branch.data.zero_()
            return h + self.mlp(self.norm2(h))

    class KeepsStream(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x + self.mix(self.norm1(x))
            return self.last

    class CallsVmap(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(self.mlp)(x + self.mix(self.norm1(x)))

    expected = {
        AsksForTensor: "asks whether something is a tensor",
        AsksTorch: "asks whether something is a tensor",
        WritesData: "names 'data' in its own code",
        KeepsStream: "keeps something as 'last'",
        CallsVmap: "names 'vmap' of torch.func",
        Block: None,
        PostNorm: None,
        Parallel: None,
        CallsFunction: "names the autograd Function Double",
        CallsFunctionInHelper: "names the autograd Function Double",
        CallsCheckpoint: "names torch.utils.checkpoint",
        CallsReentrantCheckpoint: "names torch.utils.checkpoint",
        CallsScript: "names a TorchScript function",
        CallsExtension: "names 'frombuffer' of the extension 'numpy'",
        CallsCompiled: "names a compiled function",
    }
    assert {cls: stream_obstacle(cls) for cls in expected} == expected
    assert stream_obstacle(type(build_llama().model.layers[0])) is None
    assert stream_obstacle(type(build_gpt2().transformer.h[0])) is None


@pytest.mark.parametrize("kind", ["asks", "data", "vmap"])
def test_code_that_a_stream_would_mislead_gives_what_it_gave(kind: str) -> None:
    class Misled(Block):
        def forward(self, x: Tensor) -> Tensor:
            branch = self.mix(self.norm1(x))
            h = x + branch
            if kind == "asks":
                h = h * 2 if torch.is_tensor(h) else h
            elif kind == "data":
                branch.data.zero_()
            else:
                h = torch.func.vmap(lambda row: row * 2)(h)
            return h + self.mlp(self.norm2(h))

    model = nn.ModuleList([Misled(), Misled()])
    x = torch.randn(2, 3, SIZE)

    def run() -> Tensor:
        with torch.no_grad():
            return model[1](model[0](x))

    expected = run()
    patch(model)
    with force_operators():
        for _ in range(3):
            torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-6)


def test_screening_does_not_stumble() -> None:
    """Names that are not there yet, cells that are empty, attributes that fail when looked at."""

    class Fails(type):
        @property
        def trap(cls) -> None:
            raise RuntimeError("looked at")

    class Trapped(metaclass=Fails):
        pass

    def make() -> type[nn.Module]:
        class Odd(Block):
            def forward(self, x: Tensor) -> Tensor:
                if x is later or Trapped.trap or not_there:  # type: ignore[name-defined]  # noqa: F821
                    return x
                return self.nowhere(x)

        found = stream_obstacle(Odd)
        later = None
        assert found is later
        return Odd

    assert stream_obstacle(make()) is None


@pytest.mark.parametrize("error", [TypeError, ValueError])  # the latter from a registry, say
def test_a_class_that_cannot_be_subclassed_is_left_alone(error: type[Exception]) -> None:
    class Final(Block):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            raise error("final")

    class FinalNorm(nn.LayerNorm):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            raise error("final")

    class FinalLinear(nn.Linear):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            raise error("final")

    model, x = Net(Final), rows()
    model.layers[0].norm1 = FinalNorm(SIZE)
    model.layers.append(PostNorm())
    model.layers[3].mix = FinalLinear(SIZE, SIZE)
    with torch.no_grad():
        expected = model(x)
        report = patch(model)
        for _ in range(3):
            assert torch.allclose(model(x), expected, atol=1e-5)
    assert [row.reason for row in report.norms if row.reason] == [
        "its class cannot be subclassed: final"
    ]
    assert [row.block_class.rpartition(".")[2] for row in report.fused] == ["PostNorm"]


def test_a_function_that_screening_cannot_see_is_refused_not_wronged() -> None:
    hidden = {"function": Double}

    class Hides(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm2(x + self.mix(self.norm1(hidden["function"].apply(x))))

    model = Net(Hides)
    patch(model)
    with pytest.raises(RuntimeError, match="hands its residual stream to an autograd Function"):
        model(rows(grad=True))
    with torch.no_grad():  # nothing to lose
        x = rows()
        found = model(x)
        with suspended(model):
            assert torch.allclose(found, model(x), atol=1e-5)


# --- aliases, versions, grad modes -------------------------------------------------------------


class InPlace(Block):
    """Every in-place form on the stream and beside it, with aliases read afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        alias = x
        x += 1.0
        x.mul_(0.5)
        x[..., 0] = 0.25
        x = alias + self.mlp(self.norm2(alias))
        branch = self.mix(x)
        branch += x
        return x + branch


def test_in_place_operations_keep_aliases() -> None:
    assert_same(Net(InPlace), rows())


class InPlaceOnInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(self.norm1(x))
        x *= 2.0
        return self.norm2(h) + x


def test_in_place_on_the_callers_tensor_reaches_the_caller() -> None:
    model = Net(InPlaceOnInput, layers=1)
    with torch.no_grad():
        first = rows()
        second = first.clone()
        expected = model(first)
        patch(model)
        assert torch.allclose(model(second), expected, atol=1e-5)
    assert torch.equal(first, second)


class ChangesBranch(Block):
    def forward(self, x: Tensor) -> Tensor:
        branch = self.mix(self.norm1(x))
        h = x + branch
        branch.zero_()
        return self.norm2(h)


def test_a_branch_changed_before_the_sum_is_read_is_an_error_not_a_wrong_sum() -> None:
    model = Net(ChangesBranch, layers=1)
    patch(model)
    with pytest.raises(RuntimeError, match="ChangesBranch changed a tensor in place"):
        model(rows())
    assert writes_in_place(ChangesBranch) and not writes_in_place(Block)
    with torch.inference_mode():  # no counters there: such a block runs unstreamed
        x = rows()
        found = model(x)
        with suspended(model):
            assert torch.allclose(found, model(x), atol=1e-5)


class NoGradPart(Block):
    """A sum made with gradients, first read without, as statistics are."""

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(self.norm1(x))
        with torch.no_grad():
            scale = h.abs().mean()
            normed = self.norm2(h)
        h = h * scale
        return h + self.mlp(normed)


class NoGradSum(Block):
    """A sum made without gradients, read with."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(h))


@pytest.mark.parametrize("block", [NoGradPart, NoGradSum])
def test_grad_mode_of_a_sum_is_that_of_the_line_that_wrote_it(block: type[nn.Module]) -> None:
    model, x = Net(block), rows()
    expected = gradients(model, x)
    patch(model)
    for _ in range(3):
        found = gradients(model, x)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6, rtol=1e-4)


def stream_of(base: Tensor, delta: Tensor | None = None) -> ResidualStream:
    stream = ResidualStream(base, _Call(BlockState(Block), False), 0, torch.is_grad_enabled())
    return stream if delta is None else stream + delta


def test_adding_does_nothing_until_somebody_looks() -> None:
    base, delta = rows(), rows()
    for sum_of in (
        lambda s, d: s + d,
        lambda s, d: d + s,
        lambda s, d: torch.add(s, d),
        lambda s, d: d.add(s),
    ):
        stream = sum_of(stream_of(base), delta)
        assert type(stream) is ResidualStream and stream._delta is delta
        assert (stream.shape, stream.dtype, stream.device) == (base.shape, base.dtype, base.device)
        assert (stream.dim(), stream.size(-1), stream.size(), stream.ndim) == (
            3,
            SIZE,
            base.shape,
            3,
        )
        assert stream._delta is delta
        assert torch.equal(as_tensor(stream), base + delta)
        assert stream._delta is None


@pytest.mark.parametrize(
    "touch",
    [
        lambda s: s * 2,
        lambda s: 2 * s,
        lambda s: s + 1,
        lambda s: 1 + s,
        lambda s: s - s,
        lambda s: -s,
        lambda s: s @ s.transpose(-1, -2),
        lambda s: s[0],
        lambda s: s[..., :3].sum(),
        lambda s: torch.cat([s, s]),
        lambda s: torch.stack((s, s)),
        lambda s: nn.functional.linear(s, torch.eye(SIZE)),
        lambda s: s.to(torch.bfloat16),
        lambda s: s.double().view(-1, SIZE),
        lambda s: s.view(-1, 2 * SIZE),
        lambda s: s.reshape(SIZE, -1),
        lambda s: s.view(torch.int32).view(torch.float32),
        lambda s: s.mean(-1, keepdim=True),
        lambda s: torch.stack(list(s)),
        lambda s: s == s,
        lambda s: s > 0,
        lambda s: s**2,
        lambda s: abs(s),
        lambda s: torch.where(s > 0, s, -s),
        lambda s: s.data,
        lambda s: s.T if s.dim() == 2 else s.mT,
        lambda s: torch.as_tensor(np.asarray(s)),
        lambda s: copy.deepcopy(s),
        lambda s: pickle.loads(pickle.dumps(s)),
        lambda s: torch.ops.aten.mul(s, 3),
        lambda s: torch.ones_like(s) + s[:1],
    ],
)
def test_anything_else_sees_the_sum(touch: Callable[[Any], Any]) -> None:
    base, delta = rows(), rows()
    found = touch(stream_of(base, delta))
    assert type(found) is Tensor
    assert torch.equal(found, touch(base + delta))


def test_scalars_lengths_and_truth() -> None:
    stream = stream_of(torch.tensor([[2.0]]), torch.tensor([[1.0]]))
    assert (float(stream), int(stream), bool(stream), len(stream)) == (3.0, 3, True, 1)
    assert repr(stream) == repr(torch.tensor([[3.0]]))
    assert f"{stream.item():.1f}" == "3.0"
    assert hash(stream) == hash(stream) and stream in {stream}
    stream.requires_grad = True
    assert as_tensor(stream).requires_grad
    assert not isinstance(stream, Tensor)  # C code would take it for one


def test_adds_of_another_kind_are_done_at_once() -> None:
    base = rows()
    for other in (torch.randn(SIZE), torch.randn(1, 5, SIZE), base[..., :1], base.long()):
        assert type(stream_of(base) + other) is Tensor
        assert torch.equal(stream_of(base) + other, base + other)
        assert torch.equal(other + stream_of(base), other + base)


def test_one_pending_add_at_most() -> None:
    base, one, two = rows(), rows(), rows()
    stream = stream_of(base)
    first = stream + one
    second = first + two
    assert first._delta is None
    assert torch.equal(as_tensor(second), (base + one) + two)
    assert torch.equal(as_tensor(first), base + one)
    assert torch.equal(as_tensor(stream), base)


def test_stream_that_outlives_its_block_is_its_tensor() -> None:
    kept: list[Any] = []

    class Keeps(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = x + self.mix(self.norm1(x))
            kept.append((h, x + 0))
            return self.norm2(h)

    model = Net(Keeps, layers=1)
    patch(model)
    x = rows()
    model(x)
    stream, _ = kept[-1]
    assert torch.equal(as_tensor(stream), x + model.layers[0].mix(model.layers[0].norm1(x)))
    assert type(stream + x) is Tensor


# --- the hand-over -----------------------------------------------------------------------------


class Between(Net):
    """Does something between the last block and the norm that its result was made for."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[Net, Tensor], Tensor] = lambda net, x: x

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(self.act(self, x))


def _in_place(net: Net, x: Tensor) -> Tensor:
    return x.mul_(2.0)


def _other_tensor(net: Net, x: Tensor) -> Tensor:
    return x * 2.0


def _view(net: Net, x: Tensor) -> Tensor:
    return x[:]


def _weight_in_place(net: Net, x: Tensor) -> Tensor:
    net.norm.weight.mul_(2.0)
    return x


def _other_weight(net: Net, x: Tensor) -> Tensor:
    net.norm.weight = nn.Parameter(net.norm.weight * 2.0)
    return x


def _bias_in_place(net: Net, x: Tensor) -> Tensor:
    net.norm.bias.add_(1.0)
    return x


def _other_eps(net: Net, x: Tensor) -> Tensor:
    net.norm.eps = 0.5
    return x


def _other_norm(net: Net, x: Tensor) -> Tensor:
    net.norm = copy.deepcopy(net.norm)
    net.norm.weight.data.mul_(2.0)
    return x


def _frozen(net: Net, x: Tensor) -> Tensor:
    net.norm.forward = lambda x: x
    return x


@pytest.mark.parametrize(
    "act",
    [
        _in_place,
        _other_tensor,
        _view,
        _weight_in_place,
        _other_weight,
        _bias_in_place,
        _other_eps,
        _other_norm,
        _frozen,
    ],
)
def test_whatever_changes_after_the_block_is_noticed(act: Callable[[Net, Tensor], Tensor]) -> None:
    model = Between()
    x = rows()
    with torch.no_grad():
        untouched = copy.deepcopy(model)
        untouched.act = act
        expected = untouched(x)
        patch(model)
        for _ in range(2):
            model(x)
        _, _, fused = counts(model, x)
        assert fused == 6
        model.act = act
        assert torch.allclose(model(x), expected, atol=1e-5)


def test_nothing_is_kept_after_the_norm_has_been_called(llama: PreTrainedModel) -> None:
    warmed(llama)
    assert _slot.held is None


def test_a_hand_over_that_nobody_fetches_is_dropped_and_given_up() -> None:
    model = Between()
    patch(model)
    with torch.no_grad():
        for _ in range(2):
            model(rows())
        model.act = _other_tensor
        for _ in range(3):
            model(rows())
        _, alone, fused = counts(model, rows())
        assert (alone, fused) == (2, 5)


def test_a_result_without_its_norm_is_not_kept_alive() -> None:
    model = Net()
    patch(model)
    with torch.no_grad():
        for _ in range(2):
            model(rows())
        x = rows()
        for layer in model.layers:
            x = layer(x)  # and no final norm
    held = weakref.ref(_slot.held.y)  # type: ignore[union-attr]
    assert held() is not None
    del x
    assert held() is None and _slot.held is None


def test_sum_made_without_gradients_read_with_them(llama: PreTrainedModel) -> None:
    """The last block under no_grad, its norm not: the weight's gradient must not be lost."""
    warmed(llama)
    with torch.no_grad():
        x = torch.randn(1, 4, 32)
        positions = llama.model.rotary_emb(x, torch.arange(4)[None])
        for layer in llama.model.layers:
            x = layer(x, position_embeddings=positions)
    y = llama.model.norm(x)
    y.sum().backward()
    assert llama.model.norm.weight.grad is not None


@pytest.mark.parametrize("made", [True, False])
def test_autocast_between_block_and_norm(made: bool) -> None:
    model = Net()
    patch(model)
    x = rows()
    with torch.no_grad():
        for enabled in (made, made, not made):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                h = x
                for layer in model.layers:
                    h = layer(h)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not enabled):
                found = model.norm(h)
                unpatch(model)
                expected = model.norm(h)
                patch(model)
            assert found.dtype == expected.dtype
            assert torch.allclose(found, expected, atol=1e-5)


def test_inference_mode(model: PreTrainedModel) -> None:
    expected = logits(model)
    warmed(model)
    with torch.inference_mode():
        found, alone, fused = counts(lambda: model(IDS).logits)
    # In the blocks; across them nothing tells of changes, nor in blocks that make some.
    writes = writes_in_place(original_class(layers_of(model)[0]))
    assert (alone, fused) == ((7, 0) if writes else (4, 3))
    assert found.is_inference()
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(logits(model), expected, atol=1e-5)


# --- training ----------------------------------------------------------------------------------


def model_gradients(model: PreTrainedModel, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS, **options).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-6, rtol=1e-3), name


def test_gradients(model: PreTrainedModel) -> None:
    model.train()
    expected = model_gradients(model)
    patch(model)
    for _ in range(3):
        found, alone, fused = counts(model_gradients, model)
        assert_gradients(found, expected)
    assert (alone, fused) == (1, 6)


@pytest.fixture
def kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device on which the kernels run, on a CPU interpreted: the reference is no Function."""
    if not (torch.cuda.is_available() or INTERPRETED):
        pytest.skip("kernels do not run here")
    monkeypatch.setattr(dispatch, "INTERPRETED", device == "cpu")
    return device


def test_gradients_of_hidden_states(model: PreTrainedModel, kernels: str) -> None:
    """All of each gradient, also what comes through the norm that was fused with the sum."""
    model.to(kernels)

    def run() -> tuple[Tensor, ...]:
        output = model(IDS.to(kernels), output_hidden_states=True)
        return torch.autograd.grad(output.logits.square().sum(), output.hidden_states)

    expected = run()
    patch(model, fuse_residual="always")
    for _ in range(3):
        found, alone, fused = counts(run)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert (alone, fused) == (1, 6)


class ShowsItsSum(Block):
    """A submodule is given the sum of the first add, after its norm; the block returns it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + self.mix(self.norm1(x))
        normed = self.norm2(h)
        return h + self.mlp(normed) * self.gate(h).sigmoid(), h


class ShowsItsGate(ShowsItsSum):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class KeepsSums(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.sums = []
        for layer in self.layers:
            x, h = layer(x)
            self.sums += [h, x]
        return self.norm(x)


@pytest.mark.parametrize("edited", [False, True])
def test_gradients_of_sums_that_a_block_shows(kernels: str, edited: bool) -> None:
    model, x = KeepsSums(ShowsItsSum).to(kernels), rows(grad=True).to(kernels)

    def hook(module: nn.Module, args: Any) -> None:
        args[0].retain_grad()
        seen.append(args[0])

    def run() -> list[Tensor]:
        y = model(x)
        if edited:
            y = y + sum(h.square() for h in model.sums)
        grads = torch.autograd.grad(
            y.square().sum(), [x, *model.sums, *model.parameters()], retain_graph=True
        )
        seen_grads = torch.autograd.grad(y.square().sum(), seen)
        seen.clear()
        return [*grads, *seen_grads]

    seen: list[Tensor] = []
    for layer in model.layers:
        layer.gate.register_forward_pre_hook(hook)
    expected = run()
    patch(model, fuse_residual="always")
    for _ in range(3):
        found, _, fused = counts(run)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert fused == 6


class WritesToItsSum(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(self.norm1(x))
        y = self.mlp(self.norm2(h))
        h *= 2
        return h + y


def test_sums_that_are_changed_after_their_norm(kernels: str) -> None:
    """Forward as ever; a backward would need what was overwritten, here as in the original."""
    model, x = Net(WritesToItsSum).to(kernels), rows().to(kernels)
    expected = model(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        expected.sum().backward()
    patch(model, fuse_residual="always")
    for _ in range(3):
        found = model(x)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            found.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*use_cache:UserWarning")
def test_gradient_checkpointing(model: PreTrainedModel, reentrant: bool) -> None:
    model.config.use_cache = False
    model.train()
    expected = model_gradients(model)
    # transformers 5 has another name for it
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
        {"use_reentrant": reentrant}
    )
    model.enable_input_require_grads()
    assert_gradients(model_gradients(model), expected)
    patch(model)
    for _ in range(3):
        found, _, fused = counts(model_gradients, model)
        assert_gradients(found, expected)
        assert fused >= 6  # in the blocks, forward and again in the backward
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    assert_gradients(model_gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2)])
def test_some_blocks_checkpointed(which: tuple[int, ...], reentrant: bool) -> None:
    class Partly(Net):
        checkpointed: tuple[int, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                if index in self.checkpointed:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                else:
                    x = layer(x)
            return self.norm(x)

    model, x = Partly(), rows()
    expected = gradients(model, x)
    patch(model)
    for _ in range(2):
        gradients(model, x)  # links are known from here on
    model.checkpointed = which
    for _ in range(2):
        for one, other in zip(gradients(model, x), expected, strict=True):
            assert torch.allclose(one, other, atol=1e-6, rtol=1e-4)


def test_frozen_weights_and_inputs() -> None:
    model, x = Net(), rows()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    expected = gradients(model, x)
    patch(model)
    for _ in range(3):
        found = gradients(model, x)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6, rtol=1e-4)


def test_optimizer_steps_between_forwards(llama: PreTrainedModel) -> None:
    twin = copy.deepcopy(llama)
    patch(llama)
    for model in (llama, twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
    assert torch.allclose(logits(llama), logits(twin), atol=1e-4)


# --- generation --------------------------------------------------------------------------------

GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 5},
    "no_cache": {"use_cache": False},
}


@pytest.mark.parametrize("how", GENERATION)
def test_generate(llama: PreTrainedModel, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    padded = IDS.clone()
    padded[1, :3] = 0
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": (padded != 0).long(),
        "disable_compile": True,
        **GENERATION[how],
    }

    def run() -> Tensor:
        torch.manual_seed(3)
        return llama.generate(padded, **options)

    expected = run()
    patch(llama)
    for _ in range(2):
        found, _, fused = counts(run)
        assert torch.equal(found, expected)
    assert fused >= 6 * 4


def test_assisted_generation(llama: PreTrainedModel) -> None:
    assistant = build_llama(tie_word_embeddings=True)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = llama.generate(IDS[:1], assistant_model=assistant, **options)
    patch(llama)
    patch(assistant)
    for _ in range(2):
        found = llama.generate(IDS[:1], assistant_model=assistant, **options)
        assert torch.equal(found, expected)


# --- other tools -------------------------------------------------------------------------------


def test_accelerate_offload_in_either_order() -> None:
    from accelerate import cpu_offload

    expected = logits(build_llama())
    for patch_first in (True, False):
        model = build_llama()
        if patch_first:
            patch(model)
        cpu_offload(model, execution_device=torch.device("cpu"))
        if not patch_first:
            patch(model)
        for _ in range(3):
            found, alone, fused = counts(logits, model)
            assert torch.allclose(found, expected, atol=1e-5)
        assert alone + fused == 7
        unpatch(model)
        found, alone, fused = counts(logits, model)
        assert torch.equal(found, expected) and alone + fused == 0


def test_accelerate_hooks_on_blocks_keep_the_stream() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    expected = logits(build_llama())
    for patch_first in (True, False):
        model = build_llama()
        before = None
        for step in ("patch", "hook") if patch_first else ("hook", "patch"):
            if step == "patch":
                before = [dict(vars(m)) for m in model.modules()]
                patch(model)
            else:
                for layer in model.model.layers:
                    add_hook_to_module(layer, ModelHook())
        for _ in range(3):
            found, alone, fused = counts(logits, model)
            assert torch.allclose(found, expected, atol=1e-5)
        assert (alone, fused) == (1, 6)
        unpatch(model)
        if not patch_first:
            assert [dict(vars(m)) for m in model.modules()] == before
        for layer in model.model.layers:
            remove_hook_from_module(layer)
        found, alone, fused = counts(logits, model)
        assert torch.equal(found, expected) and alone + fused == 0


def test_fully_shard_in_either_order(tmp_path: Any) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        expected = model_gradients(build_llama())
        for patch_first in (True, False):
            model = build_llama()
            if patch_first:
                patch(model)
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
            if not patch_first:
                patch(model)
            for _ in range(3):
                found, _, fused = counts(model_gradients, model)
            assert fused >= 3
            assert_gradients({k: v.full_tensor() for k, v in found.items()}, expected)
            unpatch(model)
            found, alone, fused = counts(model_gradients, model)
            assert alone + fused == 0
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_in_either_order() -> None:
    from peft import LoraConfig, get_peft_model

    def wrap(model: PreTrainedModel) -> Any:
        torch.manual_seed(3)
        return get_peft_model(
            model, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        )

    expected = logits(wrap(build_llama()))
    for patch_first in (True, False):
        base = build_llama()
        if patch_first:
            patch(base)
        model = wrap(base)
        patch(model)
        for _ in range(3):
            found, alone, fused = counts(logits, model)
            assert torch.allclose(found, expected, atol=1e-4)
        assert (alone, fused) == (1, 6)


def test_compile_runs_the_original_code(model: PreTrainedModel) -> None:
    expected = logits(model)
    warmed(model)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with dispatch.count_calls() as calls:
        assert torch.allclose(logits(compiled), expected, atol=1e-5)
    assert not calls and len(graphs) == 1
    _, alone, fused = counts(logits, model)
    assert (alone, fused) == (1, 6)


def test_modes_and_transforms_run_unstreamed(llama: PreTrainedModel) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    expected = logits(llama)
    warmed(llama)
    with FlopCounterMode(display=False) as counter:
        assert torch.allclose(logits(llama), expected, atol=1e-5)
    assert counter.get_total_flops() > 0
    model, x = Net(), rows()
    patch(model)
    model(x)
    y = torch.func.vmap(model)(x[None].expand(3, -1, -1, -1))
    assert torch.allclose(y[1], model(x), atol=1e-5)
    with torch.device("meta"):
        assert model.to("meta")(torch.empty(1, 2, SIZE)).device.type == "meta"


def test_a_default_device_is_no_mode_to_step_aside_for(llama: PreTrainedModel) -> None:
    expected = logits(llama)
    try:
        torch.set_default_device("cpu")
        warmed(llama)
        found, alone, fused = counts(logits, llama)
    finally:
        torch.set_default_device(None)
    assert (alone, fused) == (1, 6)
    assert torch.allclose(found, expected, atol=1e-5)


# --- copies and threads ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_stream_by_themselves(llama: PreTrainedModel, how: str) -> None:
    warmed(llama)
    expected = logits(llama)
    if how == "deepcopy":
        twin = copy.deepcopy(llama)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(llama))
    else:
        file = io.BytesIO()
        torch.save(llama, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.zero_()
    for _ in range(3):
        found, alone, fused = counts(logits, twin)
        assert torch.equal(found, expected)
    assert (alone, fused) == (1, 6)
    assert unpatch(twin) == 7
    assert not any("fusedops" in name for module in twin.modules() for name in vars(module))


def test_guarded_submodules_survive_copies() -> None:
    model, x = Net(PostNorm), rows()
    patch(model)
    for _ in range(3):
        expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        unpatch(twin)
        assert [type(m) for m in twin.modules()] == [type(m) for m in Net(PostNorm).modules()]


def test_data_parallel_replicas_do_not_know_the_masters_norms() -> None:
    model = Net()
    patch(model)
    with torch.no_grad():
        for _ in range(2):
            model(rows())
    replica = model.layers[0]._replicate_for_data_parallel()
    state, original = (vars(m)["_fusedops_block"] for m in (replica, model.layers[0]))
    assert state is not original
    assert original.link is not None and state.link is None
    assert state.keys == original.keys


def replicated(module: nn.Module) -> nn.Module:
    """As `torch.nn.parallel.replicate` makes one, but for its own parameters."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replicated(child)
    replica._parameters = module._parameters
    return replica


@pytest.mark.parametrize("forwards", [0, 2])
def test_replicas_fuse_in_their_only_forward(forwards: int) -> None:
    """What is known of a model helps its replicas, but nothing need be: it may never have run."""
    model, x = Net(), rows()
    with torch.no_grad():
        expected = model(x)
        patch(model)
        for _ in range(forwards):
            model(x)
        for _ in range(2):
            replica = replicated(model)
            torch.testing.assert_close(replica(x), expected)
            states = [vars(block)["_fusedops_block"] for block in replica.layers]
            assert [state.inside for state in states] == [1] * len(states)


def test_two_threads_on_one_model(llama: PreTrainedModel) -> None:
    inputs = [
        torch.randint(64, (2, 6 + i), generator=torch.Generator().manual_seed(i)) for i in range(2)
    ]
    expected = [logits(llama, ids) for ids in inputs]
    patch(llama)
    wrong: list[int] = []
    start = threading.Barrier(2)

    def run(i: int) -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose(llama(inputs[i]).logits, expected[i], atol=1e-4):
                    wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_interleaved_models() -> None:
    one, other = Net(), Net()
    x = rows()
    with torch.no_grad():
        expected = [model(x) for model in (one, other)]
        patch(one)
        patch(other)
        for _ in range(3):
            a = b = x
            for first, second in zip(one.layers, other.layers, strict=True):
                a, b = first(a), second(b)
            assert torch.allclose(one.norm(a), expected[0], atol=1e-5)
            assert torch.allclose(other.norm(b), expected[1], atol=1e-5)


class Failing(Block):
    armed = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        if self.armed:
            raise RuntimeError("in the middle")
        return x + self.mlp(self.norm2(x))


class Spy(nn.Identity):
    """Notes what it is called with."""

    def forward(self, x: Any) -> Any:
        spied.append(type(x))
        return x


spied: list[type] = []


class ShowsMore(Block):
    """Hands its hidden states to a submodule that stands in a container or in another one."""

    where = "list"

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ModuleList([nn.ModuleDict({"gate": nn.Identity()})])
        self.inner = nn.Module()
        self.inner.gates = nn.Sequential(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        held = self.list[0]["gate"] if self.where == "list" else self.inner.gates[0]
        return x + self.mlp(self.norm2(x)) + 0 * held(x)


def put(block: nn.Module, path: str, how: str, module: nn.Module) -> None:
    holder, _, name = path.rpartition(".")
    parent = block.get_submodule(holder)
    if how == "setattr":
        setattr(parent, name, module)
    elif how == "_modules":
        parent._modules[name] = module
    elif how == "list":
        index = int(holder.rpartition(".")[2])
        block.list[index] = nn.ModuleDict({name: module})
    else:
        getattr(parent, how)(name, module)


@pytest.mark.parametrize(
    ("block", "path", "how"),
    [
        (ShowsItsGate, "gate", "setattr"),
        (ShowsItsGate, "gate", "add_module"),
        (ShowsItsGate, "gate", "register_module"),
        (ShowsItsGate, "gate", "_modules"),
        (ShowsMore, "list.0.gate", "add_module"),
        (ShowsMore, "list.0.gate", "_modules"),
        (ShowsMore, "list.0.gate", "list"),
        (ShowsMore, "inner.gates.0", "setattr"),
        (ShowsMore, "inner.gates.0", "_modules"),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_a_submodule_that_is_replaced_later_sees_no_stream(
    block: type[Block], path: str, how: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShowsMore, "where", path.partition(".")[0])
    model, x = Net(block).train(training), rows()
    with torch.no_grad():
        expected = model(x)
        patch(model, fuse_residual="always")
        for _ in range(3):
            model(x)
            model.train(not training)(x)  # both have been seen
            model.train(training)
        for layer in model.layers:
            put(layer, path, how, Spy())
        spied.clear()
        for _ in range(3):
            found, _, fused = counts(model, x)
            assert torch.allclose(found, expected, atol=1e-5)
        assert fused == 6
        model.train(not training)(x)
    assert spied == [Tensor] * 12
    assert unpatch(model) == 7
    assert all(type(layer.get_submodule(path)) is Spy for layer in model.layers)


def test_a_change_elsewhere_in_a_block_costs_no_second_look() -> None:
    """Only where the block's own code could call what was put in is the block watched anew."""
    model, x = Net(ShowsItsGate), rows()
    with torch.no_grad():
        patch(model, fuse_residual="always")
        for _ in range(3):
            model(x)
        layer = model.layers[0]
        state = vars(layer)[BLOCK]
        known = state.members
        assert len(known) == 1 and known[0][0] is None
        layer.mlp.extra = nn.Identity()
        model(x)
        assert state.members is known and state.learned == {True}


class Calls(nn.Module):
    """Has no forward; called all the same."""

    def __call__(self, x: Any) -> Any:
        spied.append(type(x))
        return x


class FinalSpy(Spy):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("final")


class FixedSpy(Spy):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise TypeError("fixed")
        super().__setattr__(name, value)


def forward_in_instance() -> nn.Module:
    module = nn.Module()
    module.forward = Spy().forward
    return module


def odd_modules() -> nn.Module:
    """Keeps its children in a dictionary of its own kind."""

    class Children(dict):  # type: ignore[type-arg]
        pass

    block = ShowsItsGate()
    block._modules = Children(block._modules)
    return block


@pytest.mark.parametrize(
    ("gate", "fused"), [(Calls, 6), (forward_in_instance, 6), (FixedSpy, 6), (FinalSpy, 0)]
)
def test_submodules_of_odd_classes_see_no_stream(gate: Callable[[], nn.Module], fused: int) -> None:
    model, x = Net(ShowsItsGate), rows()
    for layer in model.layers:
        layer.gate = gate()
    expected_class = type(model.layers[0].gate)
    spied.clear()
    assert_same(model, x, fused=fused)
    assert set(spied) == {Tensor}
    unpatch(model)
    assert type(model.layers[0].gate) is expected_class


def test_an_exchange_in_a_dictionary_of_another_kind_is_noticed() -> None:
    model, x = Net(odd_modules), rows()
    with torch.no_grad():
        patch(model, fuse_residual="always")
        for _ in range(3):
            model(x)
        for layer in model.layers:
            layer.gate = Spy()
        spied.clear()
        for _ in range(3):
            model(x)
    assert spied == [Tensor] * 9


def test_what_stands_beside_a_nested_module_that_was_handed_a_stream_is_guarded() -> None:
    """The block's own code picks among another module's experts."""
    chosen = 0

    class Picks(Block):
        def __init__(self) -> None:
            super().__init__()
            self.moe = nn.Sequential(nn.ModuleList(Spy() for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mix(self.norm1(x))
            return x + self.mlp(self.norm2(x)) + 0 * self.moe[0][chosen](x)

    model, x = Net(Picks), rows()
    spied.clear()
    with torch.no_grad():
        patch(model, fuse_residual="always")
        for expert in (0, 0, 1, 2):
            chosen = expert
            model(x)
    assert spied == [Tensor] * 12


def test_lazy_modules_are_left_alone_and_see_no_stream() -> None:
    """They take their class off in their first forward, and with it what was put on."""
    model, x, seen = Net(ShowsItsGate), rows(), []
    for layer in model.layers:
        layer.gate = nn.LazyLinear(SIZE)
        layer.gate.register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
    model.layers[0].extra = nn.LazyBatchNorm1d()
    with torch.no_grad():
        report = patch(model, fuse_residual="always")
        for _ in range(3):
            result, _, fused = counts(model, x)
        assert (seen, fused) == ([Tensor] * 9, 6)
        assert [row.reason for row in report.norms if row.reason] == [
            "its parameters have no shape before its first forward"
        ]
        unpatch(model)
        assert {type(layer.gate) for layer in model.layers} == {nn.Linear}
        assert torch.allclose(model(x), result, atol=1e-5)


@pytest.mark.parametrize("whole", ["gate", "block", "norm"])
@pytest.mark.parametrize("patched_first", [False, True])
def test_parametrizations_come_and_go(whole: str, patched_first: bool) -> None:
    """They add to and take away from the class that a module has, so that it must be their own."""

    class Gate(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert type(x) is Tensor
            return super().forward(x)

    class Gated(ShowsItsGate):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate(SIZE, SIZE)
            self.weight, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight + self.bias

    def targets() -> list[nn.Module]:
        return [layer if whole == "block" else getattr(layer, name) for layer in model.layers]

    name = {"gate": "gate", "norm": "norm1", "block": ""}[whole]
    model, x = Net(Gated), rows()
    with torch.no_grad():
        expected = model(x)

        def run() -> None:
            for _ in range(3):
                assert torch.allclose(model(x), expected, atol=1e-5)

        if patched_first:
            patch(model, fuse_residual="always")
            run()
        for module in targets():
            register_parametrization(module, "weight", nn.Identity())
        patch(model, fuse_residual="always")
        run()
        for module in targets():
            register_parametrization(module, "bias", nn.Identity())
        run()
        unpatch(model)
        run()
        patch(model, fuse_residual="always")
        run()
        for tensor in ("weight", "bias"):
            for module in targets():
                remove_parametrizations(module, tensor)
            run()
        unpatch(model)
        run()
    assert not any(classes.kind_of(module) for module in model.modules())


@pytest.mark.parametrize("how", ["unpatch", "patched", "suspended"])
def test_a_guard_that_was_taken_off_comes_back(how: str) -> None:
    """What is handed streams must not lose its guard while the block around it is patched."""
    model, x = Net(ShowsItsGate), rows()
    for layer in model.layers:
        layer.gate = Spy()
    with torch.no_grad():
        patch(model, fuse_residual="always")
        for _ in range(3):
            model(x)
        if how == "unpatch":
            for layer in model.layers:
                assert unpatch(layer.gate) == 0
        elif how == "patched":
            with patched(model, fuse_residual="always"):
                model(x)
        else:
            learned = [vars(layer)[BLOCK].calls for layer in model.layers]
            with suspended(model):
                assert all(type(layer.gate) is Spy for layer in model.layers)
            assert [vars(layer)[BLOCK].calls for layer in model.layers] == learned
            assert all(vars(layer)[BLOCK].learned for layer in model.layers)  # no second look
        spied.clear()
        for _ in range(3):
            _, _, fused = counts(model, x)
    assert spied == [Tensor] * 9
    assert fused == 6


class HandsItsMemory(Block):
    """To a submodule that another block has as well, which hands it hidden states."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, memory: Tensor, x: Tensor) -> Tensor:
        return super().forward(x + 0 * self.shared(memory))


class HandsItsStates(HandsItsMemory):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x)) + 0 * self.shared(x)


def test_a_guard_that_one_block_needs_no_more_stays_for_another() -> None:
    class Pairs(Net):
        def forward(self, x: Tensor) -> Tensor:
            memory = x
            for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = second(first(memory, x))
            return self.norm(x)

    shared = Spy()
    kinds = [HandsItsMemory, HandsItsStates] * 2
    model, x = Pairs(lambda: kinds.pop(0)(shared), layers=4), rows()
    with torch.no_grad():
        expected = model(x)
        patch(model, fuse_residual="always")
        spied.clear()
        for _ in range(4):
            assert torch.allclose(model(x), expected, atol=1e-5)
    assert spied == [Tensor] * 16


def test_exception_in_the_middle_of_a_block_leaves_nothing() -> None:
    model, x = Net(Failing), rows()
    with torch.no_grad():
        expected = model(x)
        patch(model)
        for warm in range(3):
            model.layers[1].armed = True
            with pytest.raises(RuntimeError, match="in the middle"):
                model(x)
            assert _slot.held is None
            model.layers[1].armed = False
            assert torch.allclose(model(x), expected, atol=1e-5), warm
    _, alone, fused = counts(model, x)
    assert (alone, fused) == (1, 6)


def test_one_block_called_many_times() -> None:
    class Recurrent(Net):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = self.layers[0](x)
            return self.norm(x)

    assert_same(Recurrent(layers=1), rows(), warm=4)


def test_skipped_and_reordered_blocks() -> None:
    class Any_order(Net):
        order: tuple[int, ...] = (0, 1, 2)

        def forward(self, x: Tensor) -> Tensor:
            for index in self.order:
                x = self.layers[index](x)
            return self.norm(x)

    model, x = Any_order(), rows()
    with torch.no_grad():
        for order in ((0, 1, 2), (0, 1, 2), (0, 2), (2, 1, 0), (1,), (0, 1, 2)):
            model.order = order
            found = None
            with suspended(model):
                expected = model(x)
            patch(model)
            found = model(x)
            assert torch.allclose(found, expected, atol=1e-5)


# --- coming and going --------------------------------------------------------------------------


def test_unpatch_restores_classes_and_attributes(model: PreTrainedModel) -> None:
    logits(model)
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    expected = logits(model)
    warmed(model)
    unpatch(model)
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before
    assert torch.equal(logits(model), expected)


def test_plain_cpu_runs_the_original_blocks(model: PreTrainedModel) -> None:
    from fusedops.integrations import norms

    expected = logits(model)
    report = patch(model)
    forced, norms._forced = norms._forced, 0
    try:
        assert torch.equal(logits(model), expected)
    finally:
        norms._forced = forced
    assert all(row.forwards == 0 for row in report.fused)


def test_report_counts_and_prints() -> None:
    model = Net(Sandwich)
    report = patch(model)
    assert [row.forwards for row in report.fused] == [0]
    for _ in range(2):
        model(rows())
    (row,) = report.fused
    assert (row.block_class.rpartition(".")[2], row.blocks, row.forwards) == ("Sandwich", 3, 6)
    assert (row.inside, row.across, row.plain) == (0, 5, 1)
    text = str(report)
    assert "residual adds so far" in text and "Sandwich" in text
    assert report.to_dict()["fused"][0]["across"] == 5


def test_blocks_whose_sums_no_norm_reads_say_so() -> None:
    class Unread(Block):
        def forward(self, x: Tensor) -> Tensor:
            return (self.norm2(self.mix(self.norm1(x))) + x).relu()

    model = Net(Unread)
    report = patch(model)
    for _ in range(3):
        model(rows())
    (row,) = report.fused
    assert (row.inside, row.across) == (0, 0)
    assert row.why.startswith("no norm reads a sum that it makes; something else than a norm")


@pytest.mark.parametrize("extra", [None, torch.zeros(2), [torch.zeros(2)]])
def test_blocks_that_return_tuples_hand_over(extra: Any) -> None:
    class Pair(Block):
        def forward(self, x: Tensor, mask: Any = None) -> Any:
            return super().forward(x), extra

    class Pairs(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x, others = layer(x, None)
                assert others is extra
            return self.norm(x)

    assert_same(Pairs(Pair), rows(), fused=6)


def test_a_global_hook_that_comes_in_the_middle_of_a_block() -> None:
    seen = []

    class Registers(nn.Module):
        on = False

        def forward(self, x: Tensor) -> Tensor:
            if self.on:
                handle = nn.modules.module.register_module_forward_pre_hook(
                    lambda module, args: seen.append((type(args[0]), module))
                )
                handles.append(handle)
            return x

    handles: list[Any] = []
    net, x, registers = Net(), rows(), Registers()
    net.layers[1].mix = nn.Sequential(net.layers[1].mix, registers)
    expected = net(x)
    patch(net)
    with torch.no_grad():
        for _ in range(3):
            net(x)
        registers.on = True
        try:
            found = net(x)
        finally:
            for handle in handles:
                handle.remove()
    assert torch.allclose(found, expected, atol=1e-5)
    assert {kind for kind, _ in seen} == {Tensor}
    assert {net.layers[1].norm2, net.layers[2].norm1, net.norm} <= {module for _, module in seen}


def test_a_model_unpatched_while_it_runs() -> None:
    """Nobody else holds what is known of the block then."""

    class Unpatches(nn.Module):
        models: tuple[Net, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            for model in self.models:
                unpatch(model)
            return x

    net, x = Net(), rows()
    last = Unpatches()
    net.layers[0].mlp = nn.Sequential(net.layers[0].mlp, last)
    expected = net(x)
    patch(net)
    with torch.no_grad():
        for _ in range(3):
            net(x)
        last.models = (net,)
        found = net(x)
    assert torch.allclose(found, expected, atol=1e-5)
    assert type(net.layers[0]) is Block


def test_a_next_norm_whose_weight_counts_no_versions() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(SIZE)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.norm1(x))

    with torch.inference_mode():
        last = nn.LayerNorm(SIZE)
    first, second, x = Net(Branch, 1), Net(Branch, 1), rows()
    first.norm = second.norm = last
    with torch.no_grad():
        expected = first(x), second(x)
        patch(first)
        patch(second)
        for _ in range(4):
            found = first(x), second(x)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_statistics_without_gradients_where_a_function_runs_the_model() -> None:
    """A checkpoint is such a Function; those inside a block are refused, not those around it."""

    class Statistics(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mix(self.norm1(x))
            with torch.no_grad():
                x.abs().mean()
            return x + self.mlp(self.norm2(x))

    class Around(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, net: Net) -> Tensor:
            with torch.enable_grad():
                return net(x.detach().requires_grad_()).detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient, None

    net, x = Net(Statistics), rows(grad=True)
    expected = net(x)
    patch(net)
    for _ in range(4):
        found = Around.apply(x, net)
    assert torch.allclose(found, expected, atol=1e-5)


def test_torch_functions_may_come_without_keywords() -> None:
    other = torch.ones(2, SIZE)
    for extra in ((), ({},), (None,)):
        for reverse in (False, True):
            held = stream_of(torch.zeros(2, SIZE))
            args = (held, other) if reverse else (other, held)
            result = ResidualStream.__torch_function__(torch.add, (), args, *extra)
            assert type(result) is ResidualStream
            assert torch.equal(as_tensor(result), other)


@pytest.fixture
def in_c(request: pytest.FixtureRequest) -> None:
    """Blocks are run by C alone."""
    if "[c]" not in request.node.name:
        pytest.skip("blocks are run by Python")


@pytest.mark.usefixtures("in_c")
def test_in_c_a_block_asks_python_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a block is known, its adds, norms and hand-overs are the C's alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net, x = Net().to(device), rows().to(device)
    report = patch(net)
    with torch.no_grad():
        for _ in range(3):
            expected = net(x)
        (before,) = report.fused
        for name in ("call_norm", "run_block", "call_unhooked"):
            monkeypatch.setattr(classes, name, None)
        for name in ("_HandOver", "_fuse", "_leave_block", "_finish", "_drop_held"):
            monkeypatch.setattr(stream, name, None)
        served.clear()
        assert torch.equal(net(x), expected)
    (after,) = report.fused
    assert (after.inside - before.inside, after.across - before.across) == (3, 3)
    assert after.forwards - before.forwards == 3
    if not torch.cuda.is_available():
        first, *_ = net.layers
        assert served == [first.norm1] + [
            norm for layer in net.layers for norm in (layer.norm2, following(net, layer))
        ]


def following(net: Net, layer: nn.Module) -> nn.Module:
    after = [*net.layers, net.norm][list(net.layers).index(layer) + 1]
    return getattr(after, "norm1", after)


@pytest.mark.usefixtures("in_c")
def test_in_c_nothing_leaks() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net, x = Net().to(device), rows().to(device)
    report = patch(net)

    def alive() -> int:
        gc.collect()
        return len(gc.get_objects())

    def fail(*_: Any) -> None:
        raise ArithmeticError

    with torch.no_grad():
        for _ in range(5):
            net(x)
        state = vars(net.layers[0])[BLOCK]
        held = [state, x, net.norm.weight, ResidualStream, _Call, stream._closed, None, 0, 1]
        before, objects = [sys.getrefcount(thing) for thing in held], alive()
        for _ in range(300):
            net(x)
        handle = net.layers[1].mlp.register_forward_pre_hook(fail)
        for _ in range(300):
            with pytest.raises(ArithmeticError):
                net(x)
        handle.remove()
        assert _slot.held is None
        net(x)
        served.clear()
    after = [sys.getrefcount(thing) for thing in held]
    # Other tests' garbage may go meanwhile; what leaks is there once a call.
    assert max(now - then for now, then in zip(after, before, strict=True)) < 100
    assert alive() - objects < 100
    assert report.fused[0].across > 900


# --- what leaves a block, and what its own code does -------------------------------------------


@dataclasses.dataclass
class Output(ModelOutput):
    h: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: Any


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda h: (h * 1, h),
    "list": lambda h: [h],
    "dict": lambda h: {"h": h},
    "output": lambda h: Output(h=h),
    "frozen": Frozen,
    "output in a tuple": lambda h: (Output(h=h),),
    "output in a dict": lambda h: {"output": Output(h=h)},
    "frozen beside the sum": lambda h: (h, Frozen(h)),
}
KEPT: dict[str, Callable[[Any], Any]] = {
    "object": lambda h: types.SimpleNamespace(h=h),
    "deque": lambda h: collections.deque([h]),
}


def innermost(value: Any) -> Any:
    """The last thing in a container or an object that is neither."""
    while not isinstance(value, Tensor | ResidualStream):
        if isinstance(value, dict):
            value = list(value.values())
        value = value[-1] if hasattr(value, "__getitem__") else value.h
    return value


@pytest.mark.parametrize("how", WRAPPED | KEPT)
def test_whatever_a_block_returns_holds_tensors(how: str) -> None:
    class Returns(Block):
        def forward(self, x: Tensor) -> Any:
            return (WRAPPED | KEPT)[how](super().forward(x))

    class Unwraps(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = innermost(layer(x))
                assert type(x) is Tensor
            return self.norm(x)

    assert_same(Unwraps(Returns), rows(), warm=3)


@pytest.mark.parametrize("how", WRAPPED)
def test_submodules_are_handed_tensors_in_containers(how: str) -> None:
    class Looks(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            found = innermost([*args, *kwargs.values()])
            assert type(found) is Tensor
            return 2 * found

    class Hands(Block):
        def __init__(self) -> None:
            super().__init__()
            self.look = Looks()

        def forward(self, x: Tensor) -> Tensor:
            h = x + self.mix(self.norm1(x))
            wrap = WRAPPED[how]
            return self.look(wrap(h)) + self.mlp(self.norm2(h)) + self.look(h=wrap(x))

    assert_same(Net(Hands), rows())


def test_a_submodule_that_only_a_later_forward_calls_is_handed_tensors() -> None:
    class Branches(Block):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

        def forward(self, x: Tensor, way: int) -> Tensor:
            h = x + self.mix(self.norm1(x))
            return h + self.mlp(self.norm2(h)) + self.ways[way](h if way < 2 else self.norm2(h))

    block, x, seen = Branches(), rows(), []
    for linear in block.ways:
        linear.register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
    model = nn.ModuleList([block])
    with torch.no_grad():
        expected = [block(x, way) for way in range(3)]
        patch(model)
        for way in (0, 0, 0, 1, 2, 2, 0, 1, 2):
            torch.testing.assert_close(block(x, way), expected[way], rtol=1e-5, atol=1e-5)
    assert set(seen) == {Tensor}
    assert type(block.ways[2]) is nn.Linear  # was never handed one
    unpatch(model)
    assert {type(linear) for linear in block.ways} == {nn.Linear}


@pytest.mark.parametrize("how", ["list", "dict", "deque", "object", "closure"])
def test_hidden_states_that_a_block_keeps_are_tensors(how: str) -> None:
    kept: dict[str, Any] = {"list": [], "dict": {}, "deque": collections.deque(), "closure": []}
    kept["object"] = types.SimpleNamespace()

    class Keeps(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = x + self.mix(self.norm1(x))
            if how in ("list", "deque"):
                kept[how].extend((x, h))
            elif how == "dict":
                kept[how].update(x=x, h=h)
            elif how == "object":
                setattr(kept[how], "h", h)  # noqa: B010
            else:
                kept[how].append(lambda: h)
            return h + self.mlp(self.norm2(h))

    model, x = Net(Keeps), rows()
    with torch.no_grad():
        expected = model(x)
        report = patch(model)
        for _ in range(3):
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
            values = kept[how]
            if how == "dict":
                values = values.values()
            elif how == "object":
                values = [values.h]
            elif how == "closure":
                values = [function() for function in values]
            assert {type(value) for value in values} == {Tensor}
    assert "keeps its hidden states" in report.fused[0].note


class Negates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return -dy


class CallsNegates:
    def __call__(self, x: Tensor) -> Tensor:
        return Negates.apply(x)


negates = Negates.apply
INSTANCE_FUNCTIONS = {
    "apply": (lambda: Negates.apply, "names the autograd Function Negates"),
    "lambda": (lambda: lambda x: Negates.apply(x), "names the autograd Function Negates"),
    "global": (lambda: lambda x: negates(x), "names the autograd Function Negates"),
    "partial": (lambda: functools.partial(negates), "names the autograd Function Negates"),
    "object": (CallsNegates, "names the autograd Function Negates"),
    "asks": (
        lambda: lambda x: 2 * x if isinstance(x, Tensor) else x,
        "asks whether something is a tensor",
    ),
    "as_tensor": (lambda: torch.as_tensor, "names torch.as_tensor"),
    "compiled": (
        lambda: torch.compile(lambda x: 2 * x, backend="eager"),
        "names a compiled function",
    ),
    "module": (lambda: {"hidden": nn.Linear(SIZE, SIZE)}, "none of its submodules"),
}


@pytest.mark.parametrize("container", [None, list, dict])
@pytest.mark.parametrize("how", INSTANCE_FUNCTIONS)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile's
def test_functions_that_a_block_holds_are_screened(how: str, container: type | None) -> None:
    make, note = INSTANCE_FUNCTIONS[how]

    class Holds(Block):
        def __init__(block) -> None:  # "self" is only a custom
            super().__init__()
            made = make()
            made = made["hidden"] if isinstance(made, dict) else made
            held = {None: made, list: [made], dict: {0: made}}[container]
            vars(block)["function"] = held

        def forward(block, x: Tensor) -> Tensor:
            held = block.function
            function = held if container is None else held[0]
            h = function(x + block.mix(block.norm1(x)))
            return h + block.mlp(block.norm2(h))

    model, x = Net(Holds), rows()
    expected = gradients(model, x)
    report = patch(model)
    for _ in range(3):
        for one, other in zip(gradients(model, x), expected, strict=True):
            assert torch.allclose(one, other, atol=1e-6, rtol=1e-4)
    assert note in report.fused[0].note


@pytest.mark.parametrize("how", ["submodule", "keyword"])
def test_a_branch_changed_under_inference_mode(how: str) -> None:
    """Inference tensors do not tell that they were changed."""

    class Changes(Block):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            branch = self.mix(self.norm1(x))
            h = x + branch
            if how == "submodule":
                z = self.act(branch)
            else:
                z = nn.functional.relu(branch, inplace=True)
            return z + self.mlp(self.norm2(h))

    model, x = Net(Changes), rows()
    with torch.inference_mode():
        expected = model(x)
        patch(model)
        for _ in range(3):
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_a_sum_first_read_in_inference_mode_keeps_its_gradient() -> None:
    class Measures(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = x + self.mix(self.norm1(x))
            with torch.inference_mode():
                self.norm2(h)
                h.view(-1, SIZE).mean().item()
            return h + self.mlp(self.norm2(h))

    model, x = Net(Measures), rows()
    expected = gradients(model, x)
    patch(model)
    for _ in range(3):
        for one, other in zip(gradients(model, x), expected, strict=True):
            assert torch.allclose(one, other, atol=1e-6, rtol=1e-4)


# --- when it pays ------------------------------------------------------------------------------


def test_fuse_residual_takes_three_values() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"fuse_residual: expected True, False or \"always\", got"):
        patch(net, fuse_residual="sometimes")
    assert all(type(module) is original_class(module) for module in net.modules())
    assert [vars(block)[BLOCK].min_elements for block in patched_blocks(net, "always")] == [0] * 3


def patched_blocks(net: nn.Module, fuse_residual: bool | str) -> list[nn.Module]:
    patch(net, fuse_residual=fuse_residual)
    return [module for module in net.modules() if BLOCK in vars(module)]


@pytest.fixture
def small_and_large(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Hidden states too small for a block's adds to be fused, and some that are not."""
    monkeypatch.setattr(stream, "MIN_ELEMENTS", 4 * 5 * SIZE)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return rows().to(device), torch.randn(4, 5, SIZE).to(device)


@pytest.mark.usefixtures("in_c")
def test_in_c_small_hidden_states_go_through_as_tensors(
    small_and_large: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = small_and_large
    net = Net().to(small.device)
    expected = net(small)
    report = patch(net)
    with torch.no_grad():
        for _ in range(3):
            net(large)
        (before,) = report.fused
        monkeypatch.setattr(classes, "run_block", None)
        assert torch.allclose(net(small), expected, atol=1e-5)
        (after,) = report.fused
        assert (after.small - before.small, after.inside, after.across) == (
            3,
            before.inside,
            before.across,
        )
        net(large)
    net(small)  # with gradients, too
    assert report.fused[0].small == after.small + 3
    net(large)
    assert report.fused[0].inside > after.inside


@pytest.mark.usefixtures("in_c")
def test_in_c_a_submodule_that_is_replaced_between_small_forwards_sees_no_stream(
    small_and_large: tuple[Tensor, Tensor],
) -> None:
    """A small forward does not ask whether the block is as it was; the next large one does."""
    small, large = small_and_large
    net = Net(ShowsItsGate).to(small.device)
    with torch.no_grad():
        expected = net(small), net(large)
        report = patch(net)
        for _ in range(3):
            net(large)
        for layer in net.layers:
            put(layer, "gate", "setattr", Spy())
        spied.clear()
        (before,) = report.fused
        assert torch.allclose(net(small), expected[0], atol=1e-5)
        assert report.fused[0].small == before.small + 3
        assert torch.allclose(net(large), expected[1], atol=1e-5)
        assert report.fused[0].inside > before.inside
    assert spied == [Tensor] * 6


@pytest.mark.gpu
def test_small_hidden_states_go_through_as_tensors(
    small_and_large: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An add that takes the GPU less time than a stream takes the CPU is left to the model."""
    small, large = small_and_large
    net = Net().cuda()
    with torch.no_grad():
        expected = net(small), net(large)
        report = patch(net)
        for _ in range(2):
            net(large)
        assert counts(net, small)[1:] == (7, 0)
        (row,) = report.fused
        assert row.small == 3
        assert "too small for it to pay (3 forwards)" in row.why
        found, alone, fused = counts(net, large)
        assert (alone, fused) == (1, 6)
        assert torch.allclose(net(small), expected[0], atol=1e-5)
        assert torch.allclose(found, expected[1], atol=1e-5)
        graph = torch.cuda.CUDAGraph()
        net(small)
        before = row.small
        with torch.cuda.graph(graph):
            net(small)
        assert report.fused[0].small == before + 2 * 3  # the replays hold fused adds
    assert counts(net, small)[2] == 0  # with gradients, too
    assert counts(net, large)[2] == 6
    unpatch(net)
    with torch.no_grad():
        patch(net, fuse_residual="always")
        for _ in range(2):
            net(small)
        assert counts(net, small)[1:] == (1, 6)
