# SPDX-License-Identifier: Apache-2.0
"""`warmup`, and how many kernels calls compile at all.

Without a GPU nothing is compiled, but Triton's own code tells which variant a launch would ask for.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import fusedops
from fusedops import NormShape, direct, direct_backward, dispatch, warmup
from fusedops.integrations import patch, unpatch
from fusedops.integrations.norms import READY

triton = pytest.importorskip("triton")

SHAPES = [(1, 1), (1, 7), (2, 1), (3, 5), (2, 16), (1, 33)]  # batch, tokens


def llama(width: int = 48) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))


def qwen3() -> Qwen3ForCausalLM:
    """Its heads have norms of their own, inside a block in a block."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    return Qwen3ForCausalLM(config)


def bert() -> BertModel:
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_dropout_prob=0.0,
    )
    return BertModel(config)


class Owner(nn.Module):
    """A block of this library's modules; one norm runs over two dimensions, one has no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fusedops.RMSNorm(32, cast="input", weight_offset=1.0)
        self.second = fusedops.AddRMSNorm(32, elementwise_affine=False)
        self.third = fusedops.AddLayerNorm(32)
        self.fourth = fusedops.LayerNorm((4, 8), bias=False)
        self.table = nn.Embedding(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        y, x = self.second(self.first(x), x)
        y, x = self.third(y, x)
        return self.fourth((x + y).unflatten(-1, (4, 8))).flatten(-2)


# --- which variants launches ask for -----------------------------------------------------------

Key = tuple[str, str, str]


def variant(call: Any) -> Key:
    """What Triton's cache would look this launch up by, on an H200."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    kernel = call.kernel
    if not isinstance(kernel, JITFunction):
        kernel = JITFunction(kernel.fn, **kernel.kwargs)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialization, options = bind(*call.arguments, **call.meta)
    return kernel.fn.__name__, str(specialization), str(options)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch, kernels_run: None, fresh_plans: None) -> set[Key]:
    """The variants that are launched by way of `kernels.launch`, as they come."""
    from fusedops.kernels import launch

    seen: set[Key] = set()
    run = launch.run

    def note(call: Any, device: torch.device) -> None:
        seen.add(variant(call))
        run(call, device)

    monkeypatch.setattr(launch, "run", note)
    # Nothing is launched directly, which would ask for the variants of calls before.
    monkeypatch.setattr(direct, "remember", lambda *_: None)
    monkeypatch.setattr(direct_backward, "remember", lambda *_: None)
    return seen


def ids(shape: tuple[int, int], device: str) -> Tensor:
    return torch.arange(shape[0] * shape[1], device=device).reshape(shape) % 64


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def train(model: nn.Module, shape: tuple[int, int], device: str) -> None:
    first(model(ids(shape, device))).float().square().sum().backward()
    model.zero_grad()


def generate(model: nn.Module, shape: tuple[int, int], device: str) -> None:
    with torch.no_grad():
        model(ids(shape, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_takes_at_most_six_kernels(
    dtype: torch.dtype, variants: set[Key], device: str
) -> None:
    model = llama().to(device, dtype)
    report = patch(model)
    train(model, (2, 5), device)
    train(model, (2, 5), device)  # with the blocks' last adds, too
    assert 0 < len(variants) <= 6, sorted(variants)
    known = set(variants)
    for shape in SHAPES:
        train(model, shape, device)
    assert variants == known
    assert sum(row.inside for row in report.fused) > 0
    assert sum(row.across for row in report.fused) > 0


def test_inference_adds_two_kernels_for_any_number_of_rows(variants: set[Key], device: str) -> None:
    model = llama().to(device)
    patch(model)
    for shape in SHAPES:
        generate(model, shape, device)
    assert {name for name, *_ in variants} == {"norm_forward_kernel"}
    assert len(variants) == 2


# --- what is ready after a warmup ---------------------------------------------------------------


@pytest.mark.parametrize("build", [llama, gpt2, qwen3, bert, Owner])
@pytest.mark.parametrize("frozen", ["nothing", "input", "norms"])
def test_a_model_asks_for_nothing_else_afterwards(
    build: Callable[[], nn.Module], frozen: str, variants: set[Key], device: str
) -> None:
    model = build().to(device)
    for name, parameter in model.named_parameters():
        embeds = any(part in name for part in ("embed", "wte", "wpe", "table"))
        norm = parameter.dim() == 1
        if frozen == "norms" and norm or frozen == "input" and embeds:
            parameter.requires_grad_(False)
    if build is not Owner:
        patch(model)
    # Heads' gradients are reached by two strides in batches of one.
    report = warmup(model, strided=build is qwen3)
    assert report.calls > 0
    assert report.skipped == ()
    ready = set(variants)
    for shape in SHAPES[:4]:
        generate(model, shape, device)
        train(model, shape, device)
    assert variants - ready == set()
    assert len(ready) < 2.5 * len(variants)


def test_inference_alone_compiles_inference_alone(variants: set[Key], device: str) -> None:
    model = llama().to(device)
    patch(model)
    with torch.no_grad():
        warmup(model)
    assert len(variants) == 2
    model.requires_grad_(False)
    warmup(model)
    assert len(variants) == 2
    warmup(model, training=True)
    assert len(variants) == 6  # frozen weights: one backward with the sum's gradient, one without
    generate(model, (2, 3), device)
    assert len(variants) == 6


def test_heads_are_no_part_of_the_stream(variants: set[Key], device: str) -> None:
    model = qwen3().to(device)
    patch(model)
    with torch.no_grad():
        warmup(model)
    assert len(variants) == 3  # the hidden states with and without an add, the heads without
    generate(model, (2, 3), device)
    assert len(variants) == 3


def test_under_autocast_branches_have_its_dtype(variants: set[Key], device: str) -> None:
    model = gpt2().to(device)
    patch(model)
    with torch.autocast(device, torch.bfloat16):
        warmup(model)
        ready = set(variants)
        for shape in SHAPES[:3]:
            generate(model, shape, device)
            train(model, shape, device)
    assert variants - ready == set()
    assert any("bf16" in specialization for _, specialization, _ in variants)


def test_dtype_of_a_model_is_that_of_most_parameters(variants: set[Key], device: str) -> None:
    model = llama().model.to(device, torch.bfloat16)
    model.norm.float()
    patch(model)
    with torch.no_grad():
        warmup(model)
        ready = set(variants)
        generate(model, (2, 3), device)
        assert variants - ready == set()
        warmup(model, dtype=torch.float16)
    assert {"*fp16" in specialization for _, specialization, _ in variants - ready} == {True}


@pytest.mark.parametrize("operator", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("width", [1, 24, 64, 128])
def test_shapes(
    operator: str,
    width: int,
    variants: set[Key],
    device: str,
    wide_columns: None,
    request: pytest.FixtureRequest,
) -> None:
    if width == 128:
        request.getfixturevalue("small_blocks")  # rows of two chunks
    shape = NormShape(operator, width, torch.float32, weight_dtype=torch.bfloat16)
    # The stride between groups of rows is a multiple of 16, or not, where the width is not.
    strided = width % 16 == 0
    assert warmup([shape, shape], device=device, training=True, strided=strided).calls == 1
    ready = set(variants)
    function = getattr(fusedops, operator)
    for rows in ((1, 1), (1, 3), (3, 3)):
        dense = torch.randn(*rows, width, device=device)
        for x in (dense, dense[:, :2]) if strided else (dense,):
            inputs = [x.detach().requires_grad_() for _ in range(2 if shape.adds else 1)]
            weights = [
                torch.randn(width, device=device, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(2 if shape.centered else 1)
            ]
            with torch.no_grad():
                function(*inputs, *weights)
            outputs = function(*inputs, *weights)
            y, *sums = outputs if shape.adds else [outputs]
            y.square().sum().backward(retain_graph=True)
            sum(output.square().sum() for output in (y, *sums)).backward()
    assert variants - ready == set()


COMPILES = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


driver.set_active(Driver())
from fusedops import autograd, direct, direct_backward, precompile
from fusedops.kernels import launch

launch.run = lambda call, device: call.kernel.warmup(*call.arguments, grid=call.grid, **call.meta)
direct._entry = lambda *_: (None, (), ())
names = []
spec = autograd.Spec(False, True, 0.0, torch.bfloat16, False)
weight = torch.zeros(64, dtype=torch.bfloat16)
with precompile._noting_compiles(names):
    for rows in (2, 1, 16):
        x, residual = torch.zeros(2, rows, 64, dtype=torch.bfloat16)
        for statistics in (None, torch.float32):
            autograd.kernel_forward(
                x, residual, weight, None, 1e-6, spec, save_statistics=statistics is not None
            )
            direct._kernel(
                ("",), x, residual, weight, None, 1e-6, spec, torch.bfloat16, statistics
            )
        rstd = torch.zeros(rows)
        saved = x, weight, None, rstd, 0.0
        wanted = True, torch.bfloat16, None
        autograd.kernel_backward(
            x, residual, *saved, False, needs_ds=True, dweight_dtype=wanted[1], dbias_dtype=None
        )
        assert direct_backward._plan(x, residual, saved, wanted)
print(*names)
"""


def test_direct_calls_ask_for_the_same_variants() -> None:
    """Triton's own compiler, for a GPU that is not here, in a process that interprets nothing."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILES],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "norm_forward_kernel", "norm_forward_kernel", "reduce_partials_kernel",
        "norm_backward_kernel",
    ]  # fmt: skip


# --- what it leaves alone, and what it says ------------------------------------------------------


def test_nothing_changes(device: str, kernels_run: None) -> None:
    model = llama().to(device)
    report = patch(model)
    norm = model.model.layers[0].input_layernorm
    fired: list[str] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: fired.append("module"))
    norm.weight.register_hook(lambda *_: fired.append("tensor"))
    states = [dict(vars(module)) for module in model.modules()]
    counts, generator = report.to_dict(), torch.get_rng_state()
    with dispatch.count_calls() as calls:
        done = warmup(model, training=True)
        assert calls == {}
        fusedops.rms_norm(torch.zeros(2, 8, device=device))
        assert calls.total() == 1
    assert done.calls == 2
    assert fired == []
    assert report.to_dict() == counts
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(
        vars(module).keys() == state.keys()
        for module, state in zip(model.modules(), states, strict=True)
    )
    assert READY not in vars(norm)
    unpatch(model)


def test_hooks_of_triton_are_put_back(device: str, kernels_run: None) -> None:
    assert triton.knobs.runtime.jit_post_compile_hook is None
    warmup([("rms_norm", 16, torch.float32)], device=device)
    assert triton.knobs.runtime.jit_post_compile_hook is None


def test_in_inference_mode(device: str, kernels_run: None) -> None:
    with torch.inference_mode():
        assert warmup([("rms_norm", 16, torch.float32)], device=device, training=True).calls == 1


@pytest.mark.parametrize("reason", ["no kernels", "disabled"])
def test_where_no_kernel_runs_it_says_so_once(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "DISABLED", reason == "disabled")
    monkeypatch.setattr(dispatch, "_logged", set())
    expected = "FUSEDOPS_DISABLE is set" if reason == "disabled" else "no kernels for device type"
    model = llama()
    patch(model)
    with caplog.at_level(logging.INFO, logger="fusedops"):
        for given in (model, [("rms_norm", 16, torch.float32)], Owner()):
            options = {"device": "cpu"} if isinstance(given, list) else {}
            done = warmup(given, **options)
            assert done.calls == 0
            assert done.kernels == ()
            (left_out,) = done.skipped
            assert expected in left_out
            assert f"left out: {left_out}" in str(done)
    assert caplog.text.count("warmup: left out") == 1


def test_norms_whose_rows_have_any_length_are_named(device: str, kernels_run: None) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eps = 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    class ScaleNorm(Scale):
        pass

    model = nn.Sequential(nn.Linear(8, 8), ScaleNorm(), nn.LayerNorm(8)).to(device)
    assert patch(model).patched == 2
    done = warmup(model)
    assert done.skipped == ("ScaleNorm has no weight and takes rows of any length",)
    assert done.calls == 1


def test_a_model_without_norms_of_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="found none in LlamaForCausalLM; patch it first"):
        warmup(llama())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, "model_or_shapes: expected .* got none"),
        ("rms_norm", TypeError, "model_or_shapes: expected .* got str"),
        (3, TypeError, "model_or_shapes: expected .* got int"),
        ([("rms_norm", 8)], TypeError, r"model_or_shapes\[0\]: expected"),
        ([("norm", 8, torch.float32)], ValueError, "operator: expected one of 'rms_norm'"),
        ([("rms_norm", 0, torch.float32)], ValueError, "size: expected a whole number > 0, got 0"),
        ([("rms_norm", 8, torch.int8)], TypeError, "dtype: expected torch.float16"),
        ([("rms_norm", 8, "float32")], TypeError, "dtype: expected .* got 'float32'"),
    ],
)
def test_bad_shapes(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        warmup(given)


@pytest.mark.parametrize(
    ("operator", "option", "error"),
    [
        ("rms_norm", {"residual_dtype": torch.float32}, ValueError),
        ("layer_norm", {"cast": "input"}, ValueError),
        ("rms_norm", {"cast": "fp16"}, ValueError),
        ("rms_norm", {"weight_dtype": torch.int32}, TypeError),
        ("rms_norm", {"out_dtype": 4}, TypeError),
    ],
)
def test_bad_options(operator: str, option: dict[str, Any], error: type[Exception]) -> None:
    (name,) = option
    with pytest.raises(error, match=name):
        NormShape(operator, 8, torch.float32, **option)


def test_options_of_the_other_kind() -> None:
    with pytest.raises(ValueError, match="device: a model's is where its parameters are"):
        warmup(Owner(), device="cpu")
    with pytest.raises(ValueError, match="dtype: each shape names its own"):
        warmup([("rms_norm", 8, torch.float32)], dtype=torch.float32)
    with pytest.raises(TypeError, match="dtype: expected torch.float16"):
        warmup(Owner(), dtype=torch.int32)  # type: ignore[arg-type]


# --- on a GPU: what Triton compiles --------------------------------------------------------------


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, as they come."""
    names: list[str] = []

    def note(**details: Any) -> None:
        names.append(details["fn"].name)

    knobs = triton.knobs.runtime
    knobs.jit_post_compile_hook = note
    yield names
    knobs.jit_post_compile_hook = None


# Widths that no other test has, so that no kernel for them is compiled already.


@pytest.mark.gpu
@pytest.mark.parametrize("width", [176, 1168])
def test_a_llama_compiles_at_most_six_kernels(width: int, compiled: list[str]) -> None:
    model = llama(width).to("cuda", torch.bfloat16)
    patch(model)
    train(model, (2, 5), "cuda")
    train(model, (2, 5), "cuda")
    assert 0 < len(compiled) <= 6
    known = list(compiled)
    for shape in SHAPES:
        train(model, shape, "cuda")
    assert compiled == known


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_after_a_warmup_nothing_compiles(dtype: torch.dtype, compiled: list[str]) -> None:
    model = llama(208).to("cuda", dtype)
    report = patch(model)
    done = warmup(model)
    assert len(done.kernels) > 0
    assert list(done.kernels) == compiled  # our hook is called, too
    compiled.clear()
    for shape in SHAPES:
        generate(model, shape, "cuda")
        train(model, shape, "cuda")
    assert compiled == []
    assert sum(row.inside for row in report.fused) > 0
    assert warmup(model).kernels == ()


@pytest.mark.gpu
def test_the_first_forward_may_be_captured(compiled: list[str]) -> None:
    """No forward of the model runs before; another, unpatched, makes torch's own kernels ready."""
    tokens = ids((2, 16), "cuda")
    # Made here, so that transformers need not look into one, which a capture does not allow.
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool, device="cuda").tril()

    def forward(model: nn.Module) -> Tensor:
        return model(tokens, attention_mask=mask, use_cache=False).logits

    torch.manual_seed(0)
    plain = llama(240).to("cuda", torch.bfloat16).eval()
    model = llama(240).to("cuda", torch.bfloat16).eval()
    model.load_state_dict(plain.state_dict())
    patch(model, fuse_residual="always")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            expected = forward(plain)
        torch.cuda.current_stream().wait_stream(side)
        assert len(warmup(model).kernels) > 0
        compiled.clear()
        with torch.cuda.graph(graph):
            logits = forward(model)
        assert compiled == []
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(logits, expected)


@pytest.mark.gpu
def test_not_during_a_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    held = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        held += 1
        with pytest.raises(RuntimeError, match="before, not during, the capture"):
            warmup([("rms_norm", 64, torch.float32)])


@pytest.mark.gpu(2)
def test_on_the_device_that_is_not_current(compiled: list[str]) -> None:
    shapes = [NormShape("add_rms_norm", 272, torch.bfloat16)]
    warmup(shapes, device="cuda:1", training=True)
    assert len(compiled) > 0
    assert torch.cuda.current_device() == 0
    compiled.clear()
    x, residual = torch.randn(2, 9, 272, device="cuda:1", dtype=torch.bfloat16)
    with torch.no_grad():
        fusedops.add_rms_norm(x, residual, torch.ones_like(x[0]))
    assert compiled == []
