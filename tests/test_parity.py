# SPDX-License-Identifier: Apache-2.0
"""check_parity: what it measures, when it refuses to call that a proof, and what it leaves behind.

Without a GPU the operators are forced through the reference, except where a test says otherwise:
that is fast, and what is tested here is the comparison.
"""

import copy
import inspect
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedops import dispatch, functional
from fusedops.integrations import check_parity, parity, parity_report, patch, unpatch
from fusedops.integrations.classes import original_class
from fusedops.integrations.loading import load
from fusedops.integrations.parity_report import MIN_TOKENS, RATIO_LIMIT, ParityReport
from fusedops.integrations.patching import force_operators, is_patched

Model = Callable[..., nn.Module]
ChangeY = Callable[[str, Callable[[Tensor, Tensor], Tensor]], None]


@pytest.fixture
def reference_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators run, through plain torch."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    with force_operators():
        yield


@pytest.fixture(scope="module")
def llama() -> Callable[[torch.dtype], nn.Module]:
    made = load("tiny-llama").model
    return lambda dtype: copy.deepcopy(made).to(dtype)


@pytest.fixture(scope="module")
def gpt2() -> Callable[[torch.dtype], nn.Module]:
    made = load("tiny-gpt2").model
    return lambda dtype: copy.deepcopy(made).to(dtype)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))


def snapshot(model: nn.Module) -> list[Any]:
    """All that a comparison could leave behind in a model.

    A patched model's blocks learn in their forwards which submodules to guard; that is no change.
    """
    any_patched = any(map(is_patched, model.modules()))
    return [
        (
            name,
            original_class(module) if any_patched else type(module),
            module.training,
            {k: v for k, v in vars(module).items() if not k.startswith("_fusedops")},
            len(module._forward_hooks),
            is_patched(module),
        )
        for name, module in model.named_modules()
    ]


@pytest.fixture
def change_y(monkeypatch: pytest.MonkeyPatch) -> ChangeY:
    """Put ``change(y, weight)`` in the place of y in the norms and fused adds of a kind."""

    def install(kind: str, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        plain, add = getattr(functional, f"{kind}_norm"), functional.linked_add_norm

        def changed(x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
            return change(plain(x, weight, *args, **options), weight)

        def add_changed(
            x: Tensor, residual: Tensor, weight: Tensor, *args: Any, **options: Any
        ) -> tuple[Tensor, ...]:
            y, *sums = add(x, residual, weight, *args, **options)
            return change(y, weight) if options["centered"] is (kind == "layer") else y, *sums

        monkeypatch.setattr(functional, f"{kind}_norm", changed)
        monkeypatch.setattr(functional, "linked_add_norm", add_changed)

    return install


# --- what is measured --------------------------------------------------------------------------


@pytest.mark.usefixtures("reference_path")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_holds_for_both_families(
    family: str, dtype: torch.dtype, ids: Tensor, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(family)(dtype)
    report = check_parity(model, {"input_ids": ids}, backward=True)
    assert report.ok, str(report)
    assert report.path == "reference"
    assert report.fused_calls == 7
    assert report.tokens == ids.numel()
    assert len(report.blocks) == 3
    assert report.gradients is not None
    assert len(report.gradients) == len(list(model.parameters()))
    assert report.patch is not None
    assert report.patch.patched == 7
    if dtype == torch.float32:
        assert report.eps == torch.finfo(dtype).eps
        assert report.limit == parity_report.FP32_MULTIPLE * report.eps * report.largest
        assert report.ratio is None
    else:
        assert report.ratio is not None
        assert report.ratio <= RATIO_LIMIT
        assert report.unpatched_to_fp32 is not None
        assert report.unpatched_to_fp32.rms > 0
        assert report.gradient_ratio is not None


def test_kernels_are_what_is_proven(
    gpt2: Model, ids: Tensor, device: str, path: str, kernels_run: None
) -> None:
    report = check_parity(gpt2(torch.float32).to(device), ids, continuation=4)
    assert report.ok, str(report)
    assert report.path == path
    assert report.fused_calls == 7
    assert {p for paths in report.calls.values() for p in paths} == {path}
    assert path in str(report)


class NormLogits(nn.Module):
    """A norm whose result counts as logits; its reference is bit-equal to transformers' code."""

    def __init__(self) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        super().__init__()
        self.norm = LlamaRMSNorm(8)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.norm(x))


@pytest.mark.usefixtures("reference_path")
def test_numbers_are_those_of_the_definition(change_y: ChangeY) -> None:
    x = torch.randn(4, 20, 8)
    model = NormLogits()
    plain = model(x).logits.double()
    delta = torch.zeros(4, 20, 8)
    delta[0, 0, 0], delta[1] = 0.5, -0.25
    change_y("rms", lambda y, weight: y + delta)
    found = check_parity(model, x).patched
    patched = (model(x).logits + delta).double()
    assert found.max == pytest.approx(0.5, rel=1e-5)
    assert found.mean == pytest.approx((0.5 + 160 * 0.25) / 640, rel=1e-5)
    assert found.rms == pytest.approx(math.sqrt((0.25 + 160 * 0.0625) / 640), rel=1e-5)
    assert found.bit_equal == pytest.approx((640 - 161) / 640)
    p, q = plain.log_softmax(-1), patched.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-4, abs=1e-12)
    assert found.kl_max == pytest.approx(kl.max().item(), rel=1e-4)
    agreed = (plain.argmax(-1) == patched.argmax(-1)).double().mean().item()
    assert found.top1 == pytest.approx(agreed)


@pytest.mark.usefixtures("reference_path")
def test_histograms_hold_every_kept_output(change_y: ChangeY) -> None:
    x = torch.randn(4, 20, 8)
    model = NormLogits()
    plain = model(x).logits
    delta = torch.zeros(4, 20, 8)
    delta[1], delta[2, 0, 0] = -0.25, 2.0  # the latter beyond four times the rms
    change_y("rms", lambda y, weight: y + delta)
    report = check_parity(model, x)
    spread = report.spread
    assert spread is not None
    assert spread.patched is not None
    assert spread.patched.high == -spread.patched.low == pytest.approx(4 * report.patched.rms)
    assert sum(spread.patched.counts) == 640
    assert spread.patched.counts[30] == 640 - 161
    assert spread.patched.counts[-1] == 1
    bins, low, high = spread.scatter.bins, spread.scatter.low, spread.scatter.high
    assert sum(count for _, _, count in spread.scatter.cells) == 640
    assert low <= plain.min().item() < plain.max().item() <= high
    columns = [column for column, _, count in spread.scatter.cells for _ in range(count)]
    width = (high - low) / bins
    expected = ((plain.flatten().double() - low) / width).floor().clamp(0, bins - 1).long()
    assert sorted(columns) == sorted(expected.tolist())
    assert any(column != row for column, row, _ in spread.scatter.cells)


@pytest.mark.usefixtures("reference_path")
def test_no_histogram_of_what_is_not_finite(change_y: ChangeY) -> None:
    equal = check_parity(NormLogits(), torch.randn(4, 20, 8)).spread
    assert equal is not None
    assert equal.patched is None
    assert all(column == row for column, row, _ in equal.scatter.cells)
    change_y("rms", lambda y, weight: y.index_fill(-1, torch.tensor([0]), torch.nan))
    some = check_parity(NormLogits(), torch.randn(4, 20, 8)).spread
    assert some is not None
    assert some.patched is None
    assert sum(count for _, _, count in some.scatter.cells) == 640 - 80
    change_y("rms", lambda y, weight: y * torch.nan)
    assert check_parity(NormLogits(), torch.randn(4, 20, 8)).spread is None


@pytest.mark.usefixtures("reference_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_report_from_json(llama: Model, ids: Tensor, dtype: torch.dtype) -> None:
    report = check_parity(llama(dtype), ids, backward=True, continuation=2)
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    revived = ParityReport.from_dict(found)
    assert revived.to_dict() == report.to_dict()
    assert str(revived) == str(report)
    assert str(revived.patch) == str(report.patch)
    broken = replace(report, patched=replace(report.patched, max=math.nan), largest=math.inf)
    revived = ParityReport.from_dict(json.loads(json.dumps(broken.to_dict(), allow_nan=False)))
    assert math.isnan(revived.patched.max)
    assert revived.largest == math.inf


@pytest.mark.usefixtures("reference_path")
def test_chunks_do_not_change_the_numbers(
    llama: Model, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = check_parity(llama(torch.bfloat16), ids, continuation=0).to_dict()
    monkeypatch.setattr(parity, "_CHUNK", 7 * 256)
    parts = check_parity(llama(torch.bfloat16), ids, continuation=0).to_dict()
    for name in ("patched", "unpatched_to_fp32", "patched_to_fp32"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-9)
        assert parts["spread"][name]["counts"] == whole["spread"][name]["counts"]
    assert parts["spread"]["scatter"] == whole["spread"]["scatter"]


@pytest.mark.usefixtures("reference_path")
def test_masked_positions_are_left_out(gpt2: Model, ids: Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    model = gpt2(torch.float32)
    report = check_parity(model, {"input_ids": ids, "attention_mask": mask})
    assert report.tokens == ids.numel() - 25
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    assert report.largest == logits[mask.bool()].abs().max().item()


@pytest.mark.usefixtures("reference_path")
def test_continuation_is_the_unpatched_models_greedy_one(llama: Model, ids: Tensor) -> None:
    model = llama(torch.float32)
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    report = check_parity(
        model, {"input_ids": ids, "attention_mask": mask}, continuation=5
    ).continuation
    expected = model.generate(ids[:1, 10:], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert report is not None
    assert report.tokens == expected[0, 30:].tolist()
    assert (report.unpatched, report.patched, report.agreed) == (5, 5, 5)
    assert report.max_log_probability_difference < 1e-5


@pytest.mark.usefixtures("reference_path")
def test_first_block_to_differ_is_named(llama: Model, ids: Tensor, change_y: ChangeY) -> None:
    model = llama(torch.float32)
    target = model.get_submodule("model.layers.1.post_attention_layernorm").weight
    change_y("rms", lambda y, weight: y * 1.01 if weight is target else y)
    report = check_parity(model, ids)
    assert report.first_difference == "model.layers.1"
    assert report.blocks[0].bit_equal == 1
    assert [block.name for block in report.blocks] == [f"model.layers.{i}" for i in range(3)]
    assert report.outcome == "fails"


@pytest.mark.usefixtures("reference_path")
def test_own_loss_is_used_when_labels_are_given(llama: Model, ids: Tensor) -> None:
    model = llama(torch.float32)
    labels = ids.clone()
    labels[:, :20] = -100
    report = check_parity(model, {"input_ids": ids, "labels": labels}, backward=True)
    model(input_ids=ids, labels=labels).loss.backward()
    expected = model.get_parameter("lm_head.weight").grad
    assert expected is not None
    assert report.gradients is not None
    found = {g.name: g for g in report.gradients}["lm_head.weight"]
    assert found.largest == pytest.approx(expected.abs().max().item() * 64, rel=1e-5)


# --- what counts as a failure, and what as no proof ----------------------------------------------


@pytest.mark.usefixtures("reference_path")
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1 + 1e-3), (torch.bfloat16, 1.02)])
def test_a_wrong_norm_fails(
    llama: Model, ids: Tensor, dtype: torch.dtype, factor: float, change_y: ChangeY
) -> None:
    change_y("rms", lambda y, weight: y * factor)
    report = check_parity(llama(dtype), ids)
    assert not report.ok
    assert report.outcome == "fails"
    assert "parity fails" in str(report)


@pytest.mark.usefixtures("reference_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_gradient_fails(
    llama: Model, ids: Tensor, dtype: torch.dtype, change_y: ChangeY
) -> None:
    model = llama(dtype)
    target = model.get_submodule("model.layers.1.input_layernorm").weight
    # y stays, and the weight's gradient is half of what it was
    change_y(
        "rms",
        lambda y, weight: (
            (y - (y / weight / 2).detach() * (weight - weight.detach())) if weight is target else y
        ),
    )
    assert check_parity(model, ids).ok
    report = check_parity(model, ids, backward=True)
    assert report.outcome == "fails"
    assert "gradient of model.layers.1.input_layernorm.weight" in report.verdict


@pytest.mark.usefixtures("reference_path")
def test_another_dtype_fails(llama: Model, ids: Tensor, change_y: ChangeY) -> None:
    model = llama(torch.bfloat16)
    final = model.get_submodule("model.norm").weight
    model.lm_head = nn.Identity()
    change_y("rms", lambda y, weight: y.float() if weight is final else y)
    report = check_parity(model, ids, continuation=0)
    assert report.outcome == "fails"
    assert "torch.float32" in report.verdict
    assert "torch.bfloat16" in report.verdict


def test_no_fused_call_is_no_proof(
    llama: Model, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    report = check_parity(llama(torch.float32), ids)
    assert report.patched.max == 0
    assert report.fused_calls == 0
    assert report.path == "none"
    assert report.outcome == "not proven"
    assert not report.ok
    assert "no kernels for device type 'cpu'" in report.verdict
    assert "TRITON_INTERPRET=1" in report.verdict


def test_dtype_that_no_norm_was_proven_in_is_named(
    llama: Model, ids: Tensor, device: str, kernels_run: None
) -> None:
    report = check_parity(llama(torch.float64).to(device), ids, continuation=0)
    assert report.outcome == "not proven"
    assert "proven equal in bfloat16, float16, float32, not in float64" in report.verdict


@pytest.mark.usefixtures("reference_path")
def test_nan_is_no_proof(llama: Model, ids: Tensor) -> None:
    model = llama(torch.bfloat16)
    with torch.no_grad():
        model.get_submodule("model.norm").weight[0] = float("nan")
    report = check_parity(model, ids)
    assert report.outcome == "not proven"
    assert "NaN" in report.verdict
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.usefixtures("reference_path")
def test_nan_of_the_patched_model_alone_fails(llama: Model, ids: Tensor, change_y: ChangeY) -> None:
    change_y("rms", lambda y, weight: y * float("nan"))
    for dtype in (torch.float32, torch.bfloat16):
        assert check_parity(llama(dtype), ids).outcome == "fails"


@pytest.mark.usefixtures("reference_path")
def test_a_few_tokens_are_no_proof_below_fp32(gpt2: Model, ids: Tensor, change_y: ChangeY) -> None:
    few = ids[:1, : MIN_TOKENS // 2]
    assert check_parity(gpt2(torch.float32), few).ok
    change_y("layer", lambda y, weight: y * 1.01)
    report = check_parity(gpt2(torch.bfloat16), few)
    assert report.outcome == "not proven"
    assert "32 tokens" in report.verdict


@pytest.mark.usefixtures("reference_path")
def test_fp32_run_is_skipped_for_want_of_memory(
    gpt2: Model, ids: Tensor, monkeypatch: pytest.MonkeyPatch, change_y: ChangeY
) -> None:
    monkeypatch.setattr(parity, "available_memory", lambda device: 1000)
    change_y("layer", lambda y, weight: y * 1.01)
    report = check_parity(gpt2(torch.bfloat16), ids)
    assert report.ratio is None
    assert report.outcome == "not proven"
    assert any("no fp32 run" in note and "GiB" in note for note in report.notes)
    assert "no fp32 run" in str(report)


# --- what is left behind -------------------------------------------------------------------------


@pytest.mark.usefixtures("reference_path")
@pytest.mark.parametrize("came_patched", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_model_is_left_as_it_came(
    gpt2: Model, ids: Tensor, came_patched: bool, training: bool
) -> None:
    model = gpt2(torch.float32).train(training)
    model.get_submodule("transformer.h.1").eval()  # a flag of its own
    if came_patched:
        patch(model)
    model.get_parameter("transformer.wte.weight").grad = torch.ones(256, 64)
    before, weights = snapshot(model), copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    report = check_parity(model, {"input_ids": ids}, backward=True)
    assert report.ok
    assert (report.patch is None) == came_patched
    assert torch.equal(torch.get_rng_state(), random_state)
    assert snapshot(model) == before
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        if name == "transformer.wte.weight":
            assert torch.equal(parameter.grad, torch.ones(256, 64))
        else:
            assert parameter.grad is None


@pytest.mark.usefixtures("reference_path")
def test_logits_are_bitwise_those_from_before(llama: Model, ids: Tensor) -> None:
    model = llama(torch.float32)
    with torch.no_grad():
        before = model(ids).logits
        check_parity(model, ids, backward=True)
        assert torch.equal(model(ids).logits, before)


@pytest.mark.usefixtures("reference_path")
def test_part_of_a_model_that_was_patched_stays_the_part(llama: Model, ids: Tensor) -> None:
    model = llama(torch.float32)
    patch(model.get_submodule("model.layers.1"))
    before = snapshot(model)
    report = check_parity(model, ids)
    assert report.fused_calls == 2
    assert snapshot(model) == before


@pytest.mark.parametrize("came_patched", [False, True])
def test_model_is_left_as_it_came_when_its_forward_raises(
    gpt2: Model, ids: Tensor, came_patched: bool
) -> None:
    model = gpt2(torch.float32).train()
    if came_patched:
        patch(model)
    calls = 0

    def fail_later(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if is_patched(module) or calls == 1:
            raise RuntimeError("thrown in the middle")

    handle = model.get_submodule("transformer.h.1.ln_2").register_forward_pre_hook(fail_later)
    before = snapshot(model)
    for _ in range(2):  # in the unpatched run, then in the patched one
        with pytest.raises(RuntimeError, match="thrown in the middle"):
            check_parity(model, ids, continuation=0)
        assert snapshot(model) == before
    handle.remove()


@pytest.mark.usefixtures("reference_path")
def test_inputs_are_not_written(llama: Model, ids: Tensor) -> None:
    class Scribbler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor, seen: list[int]) -> Tensor:
            seen.append(1)
            return self.norm(x.mul_(2))

    x, seen = torch.randn(70, 8), [0]
    before = x.clone()
    assert check_parity(Scribbler(), {"x": x, "seen": seen}).ok
    assert torch.equal(x, before)
    assert seen == [0]


# --- any model -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("reference_path")
def test_models_of_other_kinds() -> None:
    from transformers import BertConfig, BertForMaskedLM, BertModel, T5Config
    from transformers import T5ForConditionalGeneration as T5

    ids = torch.randint(5, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    small = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}
    bert = BertConfig(**small, num_attention_heads=4, intermediate_size=64)
    for model_class, output in ((BertForMaskedLM, "logits"), (BertModel, "outputs")):
        report = check_parity(
            model_class(bert), {"input_ids": ids, "attention_mask": mask}, backward=True
        )
        assert report.ok, str(report)
        assert report.output == output
        assert report.tokens == 70
        assert report.continuation is None
        assert len(report.blocks) == 2
        assert (report.patched.top1 is None) == (output == "outputs")
    t5 = T5(T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
    report = check_parity(t5, {"input_ids": ids, "decoder_input_ids": ids, "attention_mask": mask})
    assert report.ok, str(report)
    assert report.tokens == ids.numel()
    assert [b.name for b in report.blocks] == [
        f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)
    ]


@pytest.mark.usefixtures("reference_path")
def test_a_block_that_is_shared_by_depths_is_listed_for_each() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
            self.layers = nn.ModuleList([block])

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + self.layers[0](x)
            return x

    report = check_parity(Shared(), torch.randn(70, 8))
    assert [b.name for b in report.blocks] == ["layers.0", "layers.0, call 2", "layers.0, call 3"]


@pytest.mark.usefixtures("reference_path")
def test_autocast_is_judged_as_below_fp32(llama: Model, ids: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = check_parity(llama(torch.float32), ids)
    assert report.ok, str(report)
    assert report.eps is None
    assert report.unpatched_to_fp32 is not None
    assert report.unpatched_to_fp32.rms > 1e-4


@pytest.mark.usefixtures("reference_path")
def test_offloaded_weights(llama: Model, ids: Tensor) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = llama(torch.float32)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    report = check_parity(model, ids)
    assert report.ok, str(report)
    assert report.fused_calls == 7
    half = llama(torch.bfloat16)
    accelerate.cpu_offload(half, execution_device=torch.device("cpu"))
    report = check_parity(half, ids, continuation=0)
    assert "no fp32 run: weights are offloaded" in report.notes


@pytest.mark.usefixtures("reference_path")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters(llama: Model, ids: Tensor) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    model = peft.get_peft_model(llama(torch.bfloat16), config)
    report = check_parity(model, {"input_ids": ids}, backward=True)
    assert report.ok, str(report)
    assert report.gradients is not None
    assert {g.name.split(".")[-3] for g in report.gradients} == {"lora_A", "lora_B"}
    assert report.continuation is not None
    assert len(report.blocks) == 3


@pytest.mark.usefixtures("reference_path")
def test_frozen_parameters_have_no_gradient_row(llama: Model, ids: Tensor) -> None:
    model = llama(torch.float32).requires_grad_(False)
    model.get_parameter("model.norm.weight").requires_grad_(True)
    report = check_parity(model, ids, backward=True)
    assert report.gradients is not None
    assert [g.name for g in report.gradients] == ["model.norm.weight"]


def test_bad_arguments_are_named(llama: Model, ids: Tensor) -> None:
    model = llama(torch.float32)
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        check_parity("tiny-llama", ids)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inputs: expected a tensor or a mapping.*got str"):
        check_parity(model, "hello")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="continuation: expected at least 0.*got -1"):
        check_parity(model, ids, continuation=-1)
    with pytest.raises(ValueError, match="backward: expected .* that require a gradient"):
        check_parity(model.requires_grad_(False), ids, backward=True)
    with pytest.raises(ValueError, match="found none in Linear"):
        check_parity(nn.Linear(4, 4), torch.randn(4, 4))


# --- how it is shown -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> ParityReport:
    loaded = load("tiny-llama", torch.bfloat16)
    with pytest.MonkeyPatch.context() as patcher, force_operators():
        patcher.setattr(dispatch, "INTERPRETED", False)
        return check_parity(loaded.model, loaded.inputs("a" * 70), backward=True)


def test_table_says_what_matters(report: ParityReport) -> None:
    text = str(report)
    for part in (
        "bfloat16 on cpu, 70 tokens",
        "path: reference, fused calls in a forward: 7 (",
        "max |Δ logits|",
        "bit-equal",
        "KL, mean",
        "top-1 agreement",
        "rms distance to fp32, patched / unpatched: ",
        "greedy continuation",
        "first block to differ",
        "model.layers.2",
        "gradients of 30 parameters",
        "parity holds: 7 fused calls through reference",
    ):
        assert part in text
    assert text.splitlines()[-1] == report.verdict


def test_gradients_over_few_tokens_are_allowed_for_chance(report: ParityReport) -> None:
    """Tiny fp16 models reached 1.10 in one of twenty seeds, with bit-equal logits."""

    def judged(tokens: int, factor: float) -> str:
        drift = [replace(g, patched_to_fp32=factor, unpatched_to_fp32=1.0) for g in gradients]
        return replace(report, tokens=tokens, gradients=drift).outcome

    gradients = report.gradients
    assert gradients is not None
    assert judged(64, 1.10) == "holds"
    assert judged(64, 1.24) == "fails"
    assert judged(4096, 1.06) == "holds"
    assert judged(4096, 1.10) == "fails"


@pytest.mark.usefixtures("reference_path")
@pytest.mark.parametrize("sabotage", [{"eps": 1e-2}, {"weight_offset": 0.05}])
def test_gradients_of_a_wrong_norm_fail(
    llama: Model, ids: Tensor, sabotage: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged by the gradients alone, at as few tokens as are judged at all."""
    for name in ("rms_norm", "add_rms_norm"):
        original = getattr(functional, name)

        def wrong(*args: Any, original: Any = original, **options: Any) -> Any:
            signature = inspect.signature(original)
            bound = signature.bind(*args, **options)
            bound.arguments.update(sabotage)
            return original(*bound.args, **bound.kwargs)

        monkeypatch.setattr(functional, name, wrong)
    report = check_parity(llama(torch.bfloat16), ids[:, :32], backward=True)
    assert report.tokens == MIN_TOKENS
    assert any("gradients are" in failure for failure in report._gradient_failures()), str(report)


def test_json_holds_the_report(report: ParityReport, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    report.to_json(target)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    found = json.loads(target.read_text())
    assert found == report.to_dict()
    assert found["ok"] is True
    assert found["outcome"] == "holds"
    assert found["path"] == "reference"
    assert sum(paths["reference"] for paths in found["calls"].values()) == 7
    assert found["fused_calls"] == 7
    assert found["ratio"] == report.ratio
    assert found["patch"]["patched"] == 7
    assert len(found["blocks"]) == 3
    assert found["gradients"][0].keys() >= {"name", "ratio", "max", "bit_equal"}
    assert len(found["continuation"]["tokens"]) == 16


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_is_an_image(report: ParityReport, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"drift.{suffix}"
    report.plot(target)
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert target.read_bytes().startswith(start)
    with pytest.raises(ValueError, match=r"path: expected a name that ends in .*png"):
        report.plot(tmp_path / "drift.nothing")


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")

    def fail(path: str) -> None:
        Path(path).write_text("half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        parity_report.write_atomically(target, fail)
    assert target.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_unpatched_model_gives_no_report_twice(llama: Model, ids: Tensor) -> None:
    """A comparison inside a `patch` of the user's own: unpatch still restores everything."""
    model = llama(torch.float32)
    before = snapshot(model)
    patch(model)
    with force_operators():
        check_parity(model, ids, continuation=0)
    assert unpatch(model) == 7
    assert snapshot(model) == before
