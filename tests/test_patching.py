# SPDX-License-Identifier: Apache-2.0
"""`patch` and `unpatch`: what they change, what they leave, and that logits stay the same."""

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import fusedops
from fusedops import dispatch
from fusedops.integrations import PatchReport, patch, patched, unpatch
from fusedops.integrations.patching import force_operators, is_patched
from fusedops.integrations.report import NormRow

LAYERS = 2
COMMON = {"vocab_size": 64, "num_hidden_layers": LAYERS, "pad_token_id": 0}
ROPE = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}

# family -> (model class, config, number of norms, what they become)
FAMILIES: dict[str, tuple[Any, Any, int, str]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**ROPE), 2 * LAYERS + 1, "rms_norm(cast=input)"),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=64, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64),
        2 * LAYERS + 1,
        "layer_norm",
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**ROPE), 2 * LAYERS + 1, "rms_norm(cast=input)"),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**ROPE), 2 * LAYERS + 1, "rms_norm(cast=input)"),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**ROPE, head_dim=8),
        4 * LAYERS + 1,
        "rms_norm(cast=input)",
    ),
    "gemma": (
        GemmaForCausalLM,
        GemmaConfig(**ROPE, head_dim=8),
        2 * LAYERS + 1,
        "rms_norm(cast=fp32, weight_offset=1)",
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(**ROPE, head_dim=8),
        4 * LAYERS + 1,
        "rms_norm(cast=fp32, weight_offset=1)",
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**ROPE), 2 * LAYERS + 1, "rms_norm(cast=input)"),
    "opt": (
        OPTForCausalLM,
        OPTConfig(
            **COMMON, hidden_size=32, ffn_dim=48, num_attention_heads=4, word_embed_proj_dim=32
        ),
        2 * LAYERS + 1,
        "layer_norm",
    ),
    "gpt_neox": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig(**COMMON, **ENCODER),
        2 * LAYERS + 1,
        "layer_norm",
    ),
    "bert": (BertForMaskedLM, BertConfig(**COMMON, **ENCODER), 2 * LAYERS + 2, "layer_norm"),
}

IDS = torch.tensor([[5, 9, 33, 2, 17, 60, 8], [1, 44, 7, 12, 3, 3, 29]])


def build(family: str) -> PreTrainedModel:
    """A tiny model with random norm weights and biases: ones and zeros would hide a mix-up."""
    model_class, config, _, _ = FAMILIES[family]
    torch.manual_seed(11)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels on the CPU, as without Triton's interpreter."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


@pytest.fixture
def forced(plain_cpu: None) -> Iterator[None]:
    """Patched norms call the operators on the CPU, which run their reference."""
    with force_operators():
        yield


def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def norm_types(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


# --- families ----------------------------------------------------------------------------------


def test_families_plain_cpu_is_bitwise_the_unpatched_model(family: str, plain_cpu: None) -> None:
    model = build(family)
    expected, types = logits(model), norm_types(model)
    with dispatch.count_calls() as calls:
        report = patch(model)
        assert report.patched == FAMILIES[family][2]
        assert [row.describe() for row in report.norms] == [FAMILIES[family][3]]
        assert torch.equal(logits(model), expected)
    assert not calls  # nothing of ours ran: there is no kernel here
    assert unpatch(model) == report.patched
    assert norm_types(model) == types
    assert torch.equal(logits(model), expected)


def test_families_with_operators_forced(family: str, forced: None) -> None:
    model = build(family)
    expected = logits(model)
    patch(model)
    with dispatch.count_calls() as calls:
        found = logits(model)
    assert sum(calls.values()) == FAMILIES[family][2]
    assert {path for _, path in calls} == {"reference"}
    # Another order of the same fp32 operations: a few units in the last place of the largest.
    assert (found - expected).abs().max() <= 64 * torch.finfo(
        torch.float32
    ).eps * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3"])
def test_families_on_the_kernels(family: str, device: str, path: str, kernels_run: None) -> None:
    model = build(family).to(device)
    ids = IDS.to(device)
    expected = logits(model, ids)
    patch(model)
    with dispatch.count_calls() as calls:
        found = logits(model, ids)
    assert sum(calls.values()) == FAMILIES[family][2]
    assert {run for _, run in calls} == {path}
    assert (found - expected).abs().max() <= 64 * torch.finfo(
        torch.float32
    ).eps * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_models_with_operators_forced_round_where_the_original_does(
    family: str, dtype: torch.dtype, forced: None
) -> None:
    model = build(family).to(dtype)
    expected = logits(model)
    patch(model)
    found = logits(model)
    assert found.dtype == expected.dtype
    # Statistics in another order flip single roundings; a misplaced cast changes a quarter of them.
    assert (found != expected).double().mean() < 0.05


def test_gradients_with_operators_forced(family: str, forced: None) -> None:
    model = build(family)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(IDS).logits.square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    patch(model)
    found = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        limit = 1e-4 * gradient.abs().max() + 1e-9
        assert (found[name] - gradient).abs().max() <= limit, name


# --- the report --------------------------------------------------------------------------------


def test_report_lists_classes_and_prints_as_a_table(llama: PreTrainedModel) -> None:
    report = patch(llama)
    assert isinstance(report, PatchReport)
    (row,) = report.norms
    assert row.norm_class == "transformers.models.llama.modeling_llama.LlamaRMSNorm"
    assert (row.count, row.operator, row.cast, row.weight_offset) == (5, "rms_norm", "input", 0.0)
    assert "bfloat16/float32" in row.dtypes
    lines = str(report).splitlines()
    assert lines[0] == "LlamaForCausalLM: 5 norms patched, 0 left alone"
    assert lines[1].split() == ["norm", "class", "count", "now"]
    assert lines[2].split() == [row.norm_class, "5", "rms_norm(cast=input)"]
    assert json.loads(json.dumps(report.to_dict()))["patched"] == 5


def test_rows_that_differ_in_dtypes_alone_are_printed_as_one() -> None:
    row = NormRow("Norm", count=2, operator="layer_norm", dtypes=("float32/float32",))
    other = replace(row, count=3, dtypes=("float32/float32", "float64/float64"))
    lines = str(PatchReport("Model", (row, other))).splitlines()
    assert [line.split() for line in lines[2:]] == [["Norm", "5", "layer_norm"]]


class OnePlus(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(
            x, self.normalized_shape, self.weight + 1, self.bias, self.eps
        )


def test_report_gives_the_reason_for_what_is_left_alone() -> None:
    model = nn.Sequential(nn.LayerNorm(8), OnePlus(8), nn.BatchNorm1d(8), nn.Dropout(0.1))
    report = patch(model)
    assert (report.patched, report.left_alone) == (1, 2)
    assert type(model[1]) is OnePlus
    reasons = {row.norm_class.rpartition(".")[2]: row.reason for row in report.norms}
    assert reasons["OnePlus"] == "agrees with none of the norms on random inputs"
    assert "not a weight and a bias" in str(reasons["BatchNorm1d"])
    assert "left alone: agrees with none" in str(report)


def test_nothing_to_patch_raises_and_says_what_was_seen() -> None:
    with pytest.raises(ValueError, match="expected at least one norm"):
        patch(nn.Linear(4, 4))
    model = nn.Sequential(OnePlus(8))
    with pytest.raises(ValueError, match="OnePlus left alone: agrees with none"):
        patch(model)
    assert type(model[0]) is OnePlus
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got list"):
        patch([nn.LayerNorm(8)])  # type: ignore[arg-type]


# --- what changes and what does not ------------------------------------------------------------


def test_patch_keeps_identity_names_hooks_and_state_dict(llama: PreTrainedModel) -> None:
    norm = llama.model.norm
    cls, text, keys = type(norm), repr(llama), list(llama.state_dict())
    patch(llama)
    assert llama.model.norm is norm
    assert isinstance(norm, cls) and type(norm) is not cls
    assert (type(norm).__name__, type(norm).__module__) == (cls.__name__, cls.__module__)
    assert type(norm).__qualname__ == cls.__qualname__
    assert repr(llama) == text
    assert list(llama.state_dict()) == keys
    assert type(llama.model.layers[0].input_layernorm) is type(norm)


def test_unpatch_restores_types_attributes_and_logits(llama: PreTrainedModel) -> None:
    before = [(type(module), dict(vars(module))) for module in llama.modules()]
    expected = logits(llama)
    patch(llama)
    assert unpatch(llama) == 5
    assert [(type(module), dict(vars(module))) for module in llama.modules()] == before
    assert torch.equal(logits(llama), expected)
    assert unpatch(llama) == 0


def test_patching_one_model_leaves_others_and_classes_alone(forced: None) -> None:
    one, other = build("llama"), build("llama")
    cls = type(one.model.norm)
    members = dict(vars(cls))
    patch(one)
    assert type(other.model.norm) is cls
    assert type(build("llama").model.norm) is cls
    assert dict(vars(cls)) == members
    with dispatch.count_calls() as calls:
        logits(other)
    assert not calls


def test_second_patch_is_no_op_and_picks_up_new_norms(llama: PreTrainedModel) -> None:
    first = patch(llama)
    assert patch(llama) == first
    llama.model.extra = nn.LayerNorm(8)
    assert patch(llama).patched == 6
    assert unpatch(llama) == 6


def test_patched_context_restores_also_after_an_error(llama: PreTrainedModel) -> None:
    cls = type(llama.model.norm)
    seen: list[bool] = []

    def fail() -> None:
        with patched(llama) as report:
            seen.append(report.patched == 5 and is_patched(llama.model.norm))
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert seen == [True]
    assert type(llama.model.norm) is cls


def test_patched_context_leaves_patched_what_was(llama: PreTrainedModel) -> None:
    patch(llama.model.layers)
    with patched(llama) as report:
        assert report.patched == 5
    assert not is_patched(llama.model.norm)
    assert is_patched(llama.model.layers[0].input_layernorm)


def test_shared_norm_counts_once(forced: None) -> None:
    norm = nn.LayerNorm(8)
    model = nn.Sequential(nn.Sequential(norm, nn.Linear(8, 8)), nn.Sequential(norm))
    assert patch(model).patched == 1
    with dispatch.count_calls() as calls:
        model(torch.randn(2, 8))
    assert calls["layer_norm", "reference"] == 2
    assert unpatch(model) == 1


def test_changed_eps_and_weight_are_read_at_each_call(forced: None) -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    patch(model)
    x = torch.randn(3, 8) * 1e-3
    for change in (
        lambda norm: setattr(norm, "eps", 1e-2),
        lambda norm: setattr(norm, "weight", nn.Parameter(torch.randn(8))),
        lambda norm: norm.bias.data.fill_(3.0),
    ):
        change(model[0])
        with dispatch.count_calls() as calls:
            y = model(x)
        assert sum(calls.values()) == 1
        assert torch.allclose(y, nn.LayerNorm.forward(model[0], x), atol=1e-6)


# --- calls that the original must serve --------------------------------------------------------


def run_original(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether the call gives bitwise what the unpatched model gives, and runs no operator."""
    with dispatch.count_calls() as calls:
        found = model(*args, **kwargs)
    with torch.random.fork_rng():
        unpatch(model)
        expected = model(*args, **kwargs)
        patch(model)
    assert found.dtype == expected.dtype and found.stride() == expected.stride()
    return not calls and torch.equal(found, expected)


class Gated(nn.Module):
    """As in Mamba 2: a norm with an optional gate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.eps = 1e-6

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * nn.functional.silu(gate)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def test_further_arguments_run_the_original(forced: None) -> None:
    norm = Gated()
    patch(norm)
    x, gate = torch.randn(2, 8), torch.randn(2, 8)
    assert not run_original(norm, x)
    assert run_original(norm, x, gate)
    assert run_original(norm, x, gate=gate)
    assert run_original(norm, x=x)


def test_unproven_dtypes_run_the_original(forced: None) -> None:
    norm = build("llama").model.norm
    patch(norm)
    x = torch.randn(2, 3, 32)
    assert not run_original(norm, x.bfloat16())
    assert run_original(norm, x.double())  # Llama computes fp64 in fp32


def test_eps_that_no_operator_takes_runs_the_original(forced: None) -> None:
    norm = nn.Sequential(nn.LayerNorm(8))
    patch(norm)
    x = torch.randn(2, 8)
    norm[0].eps = 0.0
    with dispatch.count_calls() as calls:
        assert torch.equal(norm(x), nn.functional.layer_norm(x, (8,), eps=0.0))
    assert not calls


def test_another_width_runs_the_original(forced: None) -> None:
    norm = build("llama").model.norm
    patch(norm)
    assert run_original(norm, torch.randn(2, 1))  # broadcasts against the weight


def test_subclasses_of_tensor_run_the_original(forced: None) -> None:
    class Marked(Tensor):
        pass

    norm = build("llama").model.norm
    patch(norm)
    assert run_original(norm, torch.randn(2, 32).as_subclass(Marked))


def test_disable_runs_the_original(
    llama: PreTrainedModel, forced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(llama)
    monkeypatch.setattr(dispatch, "DISABLED", True)
    with dispatch.count_calls() as calls:
        logits(llama)
    assert not calls


def test_without_triton_the_original_runs(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "TRITON_OBSTACLE", "Triton cannot be imported")
    expected = logits(llama)
    patch(llama)
    with dispatch.count_calls() as calls:
        assert torch.equal(logits(llama), expected)
    assert not calls


def test_meta_weights_run_the_original(forced: None) -> None:
    norm = build("llama").model.norm
    patch(norm)
    norm.to("meta")
    with dispatch.count_calls() as calls:
        assert norm(torch.empty(2, 32, device="meta")).device.type == "meta"
    assert {path for _, path in calls} <= {"reference"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 2, 32).transpose(0, 1),
        lambda: torch.randn(2, 32, 3).transpose(1, 2),
        lambda: torch.randn(2, 3, 64)[..., ::2],
        lambda: torch.randn(2, 3, 64)[..., :32],
        lambda: torch.randn(1, 3, 32).expand(2, 3, 32),
        lambda: torch.randn(32),
        lambda: torch.randn(0, 3, 32),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2", "cohere"])
def test_results_have_the_originals_strides(
    kind: str, make: Callable[[], Tensor], forced: None
) -> None:
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm

    norm = {
        "llama": lambda: build("llama").model.norm,
        "gemma": lambda: build("gemma").model.norm,
        "gpt2": lambda: build("gpt2").transformer.ln_f,
        "cohere": lambda: CohereLayerNorm(32),
    }[kind]()
    x = make()
    expected = norm(x)
    patch(norm)
    with dispatch.count_calls() as calls:
        found = norm(x)
    assert sum(calls.values()) == (1 if x.numel() else 0)
    assert found.stride() == expected.stride()
    assert torch.allclose(found, expected, atol=1e-5)


# --- autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "qwen3"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_under_autocast_dtypes_are_the_originals(
    family: str, weights: torch.dtype, forced: None
) -> None:
    model = build(family).to(weights)
    seen: list[torch.dtype] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output.dtype)

    patch(model)
    norms = [module for module in model.modules() if is_patched(module)]
    unpatch(model)
    for norm in norms:
        norm.register_forward_hook(note)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = logits(model)
        dtypes, seen = seen, []
        patch(model)
        with dispatch.count_calls() as calls:
            found = logits(model)
    assert seen == dtypes
    assert sum(calls.values()) == len(norms)
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max()


# --- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_run_their_own_weights(llama: PreTrainedModel, how: str, forced: None) -> None:
    patch(llama)
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
    assert type(twin.model.norm) is type(llama.model.norm)
    with torch.no_grad():
        llama.model.norm.weight.zero_()
    with dispatch.count_calls() as calls:
        assert torch.equal(logits(twin), expected)
    assert sum(calls.values()) == 5
    assert not logits(llama).any()
    assert unpatch(twin) == 5
    assert is_patched(llama.model.norm)
    assert torch.allclose(logits(twin), expected, atol=1e-5)


def test_pickle_names_the_original_class_and_the_instruction_to_patch(
    llama: PreTrainedModel,
) -> None:
    patch(llama)
    stream = pickle.dumps(llama.model.norm)
    assert b"LlamaRMSNorm" in stream
    assert b"fusedops.integrations.classes" in stream
    unpatch(llama)
    assert b"fusedops" not in pickle.dumps(llama.model.norm)


def test_data_parallel_replica_runs_its_own_weights(forced: None) -> None:
    norm = build("llama").model.norm
    patch(norm)
    replica = norm._replicate_for_data_parallel()
    replica.weight = torch.full((32,), 2.0)  # replicas hold plain tensors in attributes
    x = torch.randn(2, 32)
    with dispatch.count_calls() as calls:
        found = replica(x)
    assert sum(calls.values()) == 1
    assert torch.allclose(found, 2.0 * nn.functional.rms_norm(x, (32,), eps=1e-6), atol=1e-5)


# --- hooks and other tools ---------------------------------------------------------------------


def test_hook_on_a_norm_fires_once_and_its_edits_take_effect(
    llama: PreTrainedModel, forced: None
) -> None:
    calls: list[Tensor] = []

    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(output)
        return 2 * output

    norm = llama.model.layers[1].post_attention_layernorm
    for step in ("before", "after"):
        if step == "after":
            patch(llama)
        handle = norm.register_forward_hook(double)
        found = logits(llama)
        handle.remove()
        if step == "before":
            expected = found
    assert len(calls) == 2
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, logits(llama), atol=1e-3)


def test_full_backward_hook_on_a_norm(llama: PreTrainedModel, forced: None) -> None:
    patch(llama)
    seen: list[Tensor] = []
    llama.model.norm.register_full_backward_hook(lambda module, gin, gout: seen.append(gin[0]))
    llama(IDS).logits.sum().backward()
    assert [gradient.shape for gradient in seen] == [(2, 7, 32)]


def test_accelerate_hooks_in_either_order(forced: None) -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    expected = logits(build("llama"))
    for patch_first in (True, False):
        model = build("llama")
        if patch_first:
            patch(model)
        cpu_offload(model, execution_device=torch.device("cpu"))
        if not patch_first:
            assert patch(model).patched == 5
        assert model.model.norm.weight.device.type == "meta"
        with dispatch.count_calls() as calls:
            assert torch.allclose(logits(model), expected, atol=1e-5)
        assert sum(calls.values()) == 5
        unpatch(model)
        with dispatch.count_calls() as calls:
            assert torch.equal(logits(model), expected)
        assert not calls
        remove_hook_from_module(model, recurse=True)
        assert torch.equal(logits(model), expected)


def test_accelerate_attributes_are_restored(llama: PreTrainedModel) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    norm = llama.model.norm
    add_hook_to_module(norm, ModelHook())
    before = dict(vars(norm))
    patch(llama)
    assert vars(norm)["_old_forward"] != before["_old_forward"]
    unpatch(llama)
    assert dict(vars(norm)) == before
    remove_hook_from_module(norm)
    left_over = dict(vars(norm))  # accelerate leaves the forward in the instance
    assert "forward" in left_over
    patch(llama)
    with force_operators(), dispatch.count_calls() as calls:
        norm(torch.randn(2, 32))
    assert sum(calls.values()) == 1
    unpatch(llama)
    assert dict(vars(norm)) == left_over


def test_hook_added_to_a_patched_norm_does_not_keep_it_patched(
    llama: PreTrainedModel, forced: None
) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    patch(llama)
    add_hook_to_module(llama.model.norm, ModelHook())
    unpatch(llama)
    with dispatch.count_calls() as calls:
        logits(llama)
    assert not calls
    patch(llama)
    remove_hook_from_module(llama.model.norm)
    unpatch(llama)
    with dispatch.count_calls() as calls:
        logits(llama)
    assert not calls


def test_instance_forward_of_another_tool_is_left_alone(llama: PreTrainedModel) -> None:
    norm = llama.model.norm
    norm.forward = lambda x: x  # type: ignore[method-assign]
    report = patch(llama)
    assert report.patched == 4
    assert [row.reason for row in report.norms if row.reason] == [
        "has a forward of its own in the instance"
    ]


def test_parametrization_on_a_patched_norm(llama: PreTrainedModel, forced: None) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    norm = llama.model.norm
    cls = type(norm)
    expected = logits(llama)
    patch(llama)
    nn.utils.parametrize.register_parametrization(norm, "weight", Double())
    with dispatch.count_calls() as calls:
        assert torch.allclose(logits(llama), 2 * expected, atol=1e-5)
    assert sum(calls.values()) == 5
    assert unpatch(llama) == 5
    with dispatch.count_calls() as calls:
        assert torch.equal(logits(llama), 2 * expected)
    assert not calls
    nn.utils.parametrize.remove_parametrizations(norm, "weight", leave_parametrized=False)
    with dispatch.count_calls() as calls:
        assert torch.equal(logits(llama), expected)
    assert not calls and isinstance(norm, cls)
    assert patch(llama).patched == 5  # the left-over class of ours serves again
    unpatch(llama)
    assert type(norm) is cls


def test_fully_shard_on_a_patched_norm(tmp_path: Any, forced: None) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        expected = logits(build("llama"))
        for patch_first in (True, False):
            model = build("llama")
            mesh = init_device_mesh("cpu", (1,))
            if patch_first:
                patch(model)
            for module in (model.model.norm, *model.model.layers, model):
                fully_shard(module, mesh=mesh)
            if not patch_first:
                patch(model)
            with dispatch.count_calls() as calls:
                assert torch.allclose(logits(model), expected, atol=1e-5)
            assert sum(calls.values()) == 5
            unpatch(model)
            assert isinstance(model.model.norm, FSDPModule)
            with dispatch.count_calls() as calls:
                assert torch.equal(logits(model), expected)
            assert not calls
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_modules_to_save_are_patched_in_both_copies(forced: None) -> None:
    from peft import LoraConfig, get_peft_model

    def wrap(model: PreTrainedModel) -> Any:
        torch.manual_seed(3)
        config = LoraConfig(
            target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False
        )
        return get_peft_model(model, config)

    plain = wrap(build("llama"))
    with torch.no_grad():
        plain.base_model.model.model.norm.modules_to_save["default"].weight.mul_(3.0)
    expected = logits(plain)
    with plain.disable_adapter():
        expected_off = logits(plain)
    assert not torch.allclose(expected, expected_off)
    for patch_first in (True, False):
        base = build("llama")
        if patch_first:
            patch(base)
        model = wrap(base)
        with torch.no_grad():
            model.base_model.model.model.norm.modules_to_save["default"].weight.mul_(3.0)
        assert patch(model).patched == 10  # peft matches by suffix: every norm, twice
        with dispatch.count_calls() as calls:
            assert torch.allclose(logits(model), expected, atol=1e-4)
            with model.disable_adapter():
                assert torch.allclose(logits(model), expected_off, atol=1e-4)
        assert calls["rms_norm", "reference"] == 10
        assert unpatch(model) == 10
        assert torch.equal(logits(model), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_vmap_and_grad_of_a_patched_norm(forced: None) -> None:
    norm = build("llama").model.norm
    x = torch.randn(4, 3, 32)
    expected = torch.func.vmap(norm)(x)
    patch(norm)
    assert torch.allclose(torch.func.vmap(norm)(x), expected, atol=1e-5)
    tangent = torch.func.jvp(norm, (x,), (torch.ones_like(x),))[1]
    unpatch(norm)
    assert torch.allclose(tangent, torch.func.jvp(norm, (x,), (torch.ones_like(x),))[1], atol=1e-5)


def test_compiled_models_run_the_original_forward(llama: PreTrainedModel, forced: None) -> None:
    expected = logits(llama)
    patch(llama)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(llama, backend=backend, fullgraph=True)
    with dispatch.count_calls() as calls:
        assert torch.allclose(logits(compiled), expected, atol=1e-5)
    assert not calls
    assert len(graphs) == 1
    assert "fusedops" not in str(graphs[0].graph)


def test_export_of_a_patched_model(llama: PreTrainedModel, forced: None) -> None:
    patch(llama)
    norm = llama.model.norm
    program = torch.export.export(norm, (torch.randn(2, 32),))
    x = torch.randn(2, 32)
    assert torch.allclose(program.module()(x), norm(x), atol=1e-6)


def test_generate(llama: PreTrainedModel, forced: None) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = llama.generate(IDS, **options)
    patch(llama)
    with dispatch.count_calls() as calls:
        assert torch.equal(llama.generate(IDS, **options), expected)
    assert sum(calls.values()) == 6 * 5


def test_public_names() -> None:
    from fusedops import integrations

    for name in ("PatchReport", "patch", "patched", "unpatch"):
        assert name in integrations.__all__
    assert fusedops.rms_norm is not None
