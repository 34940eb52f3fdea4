# SPDX-License-Identifier: Apache-2.0
"""Timing of whole models: who is compared, in which order, what is left out, and what stays."""

import gc
import io
import json
import os
import random
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import build_llama
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
)

import fusedops
from fusedops import dispatch
from fusedops.integrations import liger, load, patching, timing
from fusedops.integrations.timing import Plan, Work
from fusedops.integrations.timing_report import Case, KernelTime, TimingReport, TimingRow

FAST = Plan(decode_batches=[2], sequences=2, tokens=8, seconds=0.0)
POPEN = subprocess.Popen
BERT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched models run their own code: the interpreter takes a hundred times as long."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


def one_block() -> Any:
    """Three norms, two of them after an add."""
    model = build_llama()
    model.config.num_hidden_layers = 1
    model.model.layers = model.model.layers[:1]
    return model


def only(report: TimingReport, contestant: str) -> list[TimingRow]:
    return [row for row in report.rows if row.contestant == contestant]


# Contestants -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels_run")
def test_variants_share_weights_and_compute_the_same(device: str, path: str) -> None:
    model = build_llama().to(device)
    ids = torch.arange(16, device=device)[None]
    made = {name: build(model) for name, build in timing.VARIANTS.items()}
    logits, counts = {}, {}
    with torch.no_grad():
        expected = model(ids).logits
        for name, variant in made.items():
            for ours, theirs in zip(variant.parameters(), model.parameters(), strict=True):
                assert ours is theirs
            variant(ids)  # blocks learn
            with dispatch.count_calls() as counted:
                logits[name] = variant(ids).logits
            counts[name] = dict(counted)
    assert torch.equal(logits["unpatched"], expected)
    for name in ("norms", "fused"):
        torch.testing.assert_close(logits[name], expected, rtol=1e-4, atol=1e-4)
    assert counts["unpatched"] == {}
    assert counts["norms"] == {("rms_norm", path): 7}
    assert counts["fused"] == {("rms_norm", path): 1, ("add_rms_norm", path): 6}


def test_copies_have_buffers_of_their_own_and_come_unpatched() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4))
    patching.patch(model)
    copied = timing.shared_copy(model)
    copied.train()(torch.randn(3, 4))
    assert not any(map(patching.is_patched, copied.modules()))
    assert patching.is_patched(model[0])
    assert copied[1].weight is model[1].weight
    assert (copied[1].num_batches_tracked, model[1].num_batches_tracked) == (1, 0)


# Turns -----------------------------------------------------------------------------------------


def test_every_round_goes_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    clock = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    works = {name: Work(lambda n=name: seen.append(n)) for name in "abc"}  # type: ignore[misc]
    times = timing.take_turns(works, seconds=36)
    rounds = ["".join(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert rounds == ["abc", "bca", "cab", "cba", "bac", "acb"]
    assert {name: len(values) for name, values in times.items()} == {"a": 6, "b": 6, "c": 6}


def test_at_least_three_rounds_and_no_collection_in_them() -> None:
    enabled: list[bool] = []
    work = Work(lambda: enabled.append(gc.isenabled()))
    assert gc.isenabled()
    assert len(timing.take_turns({"a": work}, seconds=0.0)["a"]) == 3
    assert enabled == [False] * 3
    assert gc.isenabled()

    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        timing.take_turns({"a": Work(fail)}, seconds=0.0)
    assert gc.isenabled()
    gc.disable()
    try:
        timing.take_turns({"a": work}, seconds=0.0)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_only_the_run_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def takes(seconds: float) -> Any:
        def pass_by() -> None:
            now[0] += seconds

        return pass_by

    assert timing.wall(Work(takes(0.25), before=takes(7.0), after=takes(9.0))) == 250.0


@pytest.mark.usefixtures("no_kernels")
def test_the_ratio_is_that_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that becomes slower and slower: two rounds say 2, one says 4, one says 1.
    times = {"unpatched": [10.0, 20.0, 40.0, 80.0], "fused": [5.0, 20.0, 10.0, 40.0]}
    assert timing.round_ratio(times, "unpatched", "fused") == 2.0
    monkeypatch.setattr(timing, "take_turns", lambda works, seconds: times)
    model = build_llama()
    plan = Plan(measures=["decode"], decode_batches=[4], seconds=0.0)
    report = timing.time_model(model, plan)
    (row,) = only(report, "fused")
    assert (row.median_ms, row.min_ms, row.unpatched_ms, row.rounds) == (15.0, 5.0, 30.0, 4)
    assert (row.ratio, row.best_ratio) == (2.0, 2.0)
    assert row.tokens_per_second == pytest.approx(4 / 15.0e-3)


# What is measured ------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels_run")
def test_a_whole_comparison(device: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_UP", 1)
    monkeypatch.setattr(timing, "MIN_ROUNDS", 1)
    model = one_block().to(device)
    steps: list[tuple[str, int, int]] = []
    report = timing.time_model(model, FAST, on_step=lambda *s: steps.append(s))
    titles = [
        "decode, 2 x 1 token", "prefill, 2 x 8 tokens", "train, 2 x 8 tokens",
        "train forward, 2 x 8 tokens", "train backward, 2 x 8 tokens",
    ]  # fmt: skip
    for name, calls in {"unpatched": 0, "norms": 3, "fused": 3}.items():
        rows = only(report, name)
        assert [row.title for row in rows] == titles, report
        assert [row.fused_calls for row in rows] == [calls] * 5
        assert {row.path for row in rows} == {path if calls else "none"}
        assert all(row.median_ms >= row.min_ms > 0 for row in rows)
        on_gpu = device == "cuda"
        assert all((row.kernels is not None) == on_gpu for row in rows)
        assert [row.peak_memory is not None for row in rows] == [False, *[on_gpu] * 4]
        for row in rows:
            own = [p for p in report.profile if (p.title, p.contestant) == (row.title, name)]
            counted = sum(part.kernels for part in own if part.kind != timing.COPIES)
            assert counted == (row.kernels or 0)
            # The backward of a norm written out in torch's operations is none by its name.
            wanted = {"matmul"} if (name, row.measure) == ("unpatched", "train backward") else {
                "norm", "matmul"}  # fmt: skip
            assert wanted <= {part.kind for part in own} or not on_gpu
    assert [done for _, done, _ in steps] == list(range(11))
    assert {total for _, _, total in steps} == {10}
    assert ("these times say nothing about a GPU" in str(report)) == (path == "interpreter")


@pytest.mark.usefixtures("no_kernels")
def test_decoding_keeps_the_length_of_the_cache() -> None:
    model = build_llama()
    lengths: list[int] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        lengths.append(cache.get_seq_length())

    with torch.no_grad():
        work = timing.work_of(Case("decode", 3, 1), model)
        model.register_forward_pre_hook(note, with_kwargs=True)
        for _ in range(3):
            timing.wall(work)
    assert lengths == [63] * 3  # of 64 positions, the last is for the step


@pytest.mark.usefixtures("no_kernels")
def test_a_cache_that_does_not_shrink_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import DynamicCache

    monkeypatch.setattr(DynamicCache, "crop", lambda self, count: None)
    report = timing.time_model(build_llama(), Plan(measures=["decode"], seconds=0.0))
    assert report.rows == []
    assert report.notes == [
        "decode left out: LlamaForCausalLM does not fill a cache that a step can be taken back from"
    ]


@pytest.mark.usefixtures("no_kernels")
def test_training_halves_make_a_whole_and_leave_no_gradient() -> None:
    model = build_llama()
    model(labels=(ids := torch.arange(8)[None]), input_ids=ids).loss.backward()
    weight = model.lm_head.weight
    weight.grad = None
    for part in ("train", "train backward"):
        work = timing.work_of(Case(part, 2, 8), model)
        work.before()
        assert weight.grad is None
        work.run()
        assert weight.grad is not None
        work.after()
        assert weight.grad is None
    work = timing.work_of(Case("train forward", 2, 8), model)
    work.run()
    assert weight.grad is None


@pytest.mark.usefixtures("no_kernels")
def test_an_encoder_has_no_decoding() -> None:
    report = timing.time_model(BertForMaskedLM(BertConfig(**BERT)), FAST)
    assert report.notes[0] == "decode left out: BertForMaskedLM does not generate text"
    assert {row.measure for row in report.rows} == {
        "prefill", "train", "train forward", "train backward",
    }  # fmt: skip


def test_a_model_without_a_loss_over_tokens_trains_on_its_outputs() -> None:
    model = BertModel(BertConfig(**BERT))
    assert not timing.token_loss(model)
    assert timing.token_loss(BertForMaskedLM(BertConfig(**BERT)))
    work = timing.work_of(Case("train backward", 1, 4), model, token_loss=False)
    work.before()
    work.run()
    assert model.embeddings.word_embeddings.weight.grad is not None


@pytest.mark.usefixtures("no_kernels")
def test_an_encoder_decoder_runs_both_halves() -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    report = timing.time_model(T5ForConditionalGeneration(config), FAST)
    assert report.notes[0].startswith("decode left out: T5ForConditionalGeneration is an encoder-")
    assert len(only(report, "fused")) == 4


@pytest.mark.usefixtures("no_kernels")
def test_no_training_of_a_frozen_model_and_no_more_tokens_than_positions() -> None:
    model = build_llama().requires_grad_(False)
    report = timing.time_model(model, Plan(measures=["prefill", "train"], seconds=0.0))
    assert {row.title for row in report.rows} == {"prefill, 4 x 64 tokens"}
    assert "train left out: no parameter of LlamaForCausalLM needs a gradient" in report.notes


KERNELS = {
    "norm_forward_kernel": "norm",
    "norm_backward_sliced_kernel": "norm",
    "_rms_norm_forward_kernel": "norm",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>": "norm",
    "void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::MeanOps<": "norm",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "norm",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<": "add",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<":
        "elementwise",
    "nvjet_tst_192x128_64x4_1x2_h_bz_coopA_NTT": "matmul",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_64x1_tn": "matmul",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass": "attention",
    "void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 7": "attention",
    "cunn_SoftMaxForward<4, float, float, float, at::native::LogSoftMaxForwardEpilogue>": "other",
    "Memcpy DtoD (Device -> Device)": "copy or fill",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>": "other",
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_kinds_of_kernels(name: str) -> None:
    assert timing.kind_of(name) == KERNELS[name]


def test_kernels_by_kind_and_overlaps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, start: float, end: float, gpu: int = 0, device: str = "CUDA") -> Any:
        return SimpleNamespace(
            name=name,
            time_range=SimpleNamespace(start=start, end=end),
            device_index=gpu,
            device_type=SimpleNamespace(name=device),
        )

    class Profile(nullcontext):  # type: ignore[type-arg]
        def events(self) -> list[Any]:
            return [
                event("norm_forward_kernel", 6000.0, 7000.0),
                event("norm_forward_kernel", 2000.0, 4000.0),
                event("nvjet_a", 1000.0, 2500.0),  # the norm waits for it until 2500
                event("Memcpy DtoD", 2600.0, 3900.0),  # on another stream, while the norm runs
                event("cunn_SoftMaxForward", 3000.0, 3250.0, gpu=1),
                event("cudaLaunchKernel", 0.0, 9000.0, device="CPU"),
            ]

        def __enter__(self) -> "Profile":
            return self

    monkeypatch.setattr(torch.profiler, "profile", lambda **options: Profile())
    monkeypatch.setattr(Work, "synchronize", lambda self: None)
    assert timing.kernel_times(Work(lambda: None)) is None
    work = Work(lambda: None, devices=frozenset([torch.device("cuda", 0)]))
    assert timing.kernel_times(work) == {
        "matmul": (1, 1.5), "norm": (2, 2.5), "copy or fill": (1, 0.0), "attention": (1, 0.25),
    }  # fmt: skip


# What stays as it was --------------------------------------------------------------------------


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("end", [None, RuntimeError("broken"), KeyboardInterrupt(), SystemExit()])
def test_the_model_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, end: BaseException | None
) -> None:
    model = build_llama(attention_dropout=0.5)
    model.train()
    model.lm_head.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [p.grad for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    classes = [type(module) for module in model.modules()]
    states = torch.get_rng_state(), random.getstate()
    if end is not None:

        def stop(works: Any, seconds: float) -> Any:
            for work in works.values():
                work.before()
                work.run()
            raise end

        monkeypatch.setattr(timing, "take_turns", stop)
    plan = Plan(measures=["train"], sequences=1, tokens=4, seconds=0.0)
    if isinstance(end, SystemExit):
        with pytest.raises(SystemExit):
            timing.time_model(model, plan)
    else:
        report = timing.time_model(model, plan)
        assert report.interrupted == isinstance(end, KeyboardInterrupt)
        assert bool(report.rows) == (end is None)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(bool((g == 1).all()) for g in gradients if g is not None)
    assert [module.training for module in model.modules()] == modes
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.is_grad_enabled()
    assert gc.isenabled()


# Others ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_kernels")
def test_compiled_models_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend="eager"))
    plan = Plan(measures=["decode"], decode_batches=[1], seconds=0.0)
    report = timing.time_model(one_block(), plan, against=["compile"])
    assert [row.measure for row in only(report, "compile")] == ["decode"]


@pytest.mark.usefixtures("no_kernels")
def test_who_fails_is_left_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

        def forward(self, **arguments: Any) -> None:
            raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", Broken)
    plan = Plan(measures=["prefill"], sequences=1, tokens=4, seconds=0.0)
    report = timing.time_model(build_llama(), plan, against=["compile"])
    assert {row.contestant for row in report.rows} == {"unpatched", "norms", "fused"}
    assert "prefill, 1 x 4 tokens: compile left out: RuntimeError: no compiler" in report.notes


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="measures: expected some of decode, prefill, train"):
        timing.time_model(nn.Linear(2, 2), Plan(measures=["sleep"]))
    with pytest.raises(ValueError, match="against: expected some of compile, got 'liger'"):
        timing.time_model(nn.Linear(2, 2), against=["liger"])


# The report ------------------------------------------------------------------------------------


def report_of_two() -> TimingReport:
    report = TimingReport("Some", "bfloat16", "cuda:0", 5.0, notes=["a [b] c"])
    shared = {"unpatched_ms": 3.0, "best_ratio": 1.1, "rounds": 9}
    for measure, peak in (("decode", None), ("train", 3 * 2**30)):
        for name, ratio in (("unpatched", 1.0), ("fused", 1.5)):
            report.rows.append(
                TimingRow(
                    measure, 4, 1, contestant=name, median_ms=3.0 / ratio, min_ms=1.9,
                    ratio=ratio, kernels=414, peak_memory=peak, **shared,
                )
            )  # fmt: skip
            report.profile.append(KernelTime(measure, 4, 1, name, "norm", 33, 0.5))
    return report


def test_report_as_json_and_back() -> None:
    report = report_of_two()
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["rows"][1]["tokens_per_second"] == pytest.approx(2000.0)
    assert TimingReport.from_dict(found) == report
    assert [report.profile_of(row) for row in report.rows] == [[part] for part in report.profile]


def test_table() -> None:
    report = report_of_two()
    lines = str(report).splitlines()
    assert lines[0] == "speed of Some in bfloat16 on cuda:0"
    assert lines[1].split() == [
        "ms", "min", "ms", "tokens/s", "speed", "by", "min", "fused", "kernels", "GiB",
    ]  # fmt: skip
    assert lines[2] == "decode, 4 x 1 token"
    assert lines[3].split() == [
        "unpatched", "3.000", "1.900", "1,333", "x1.000", "x1.100", "0", "414", "-",
    ]  # fmt: skip
    assert lines[7].split() == [
        "full", "fusion", "2.000", "1.900", "2,000", "x1.500", "x1.100", "0", "414", "3.00",
    ]  # fmt: skip
    assert len({len(lines[i]) for i in (1, 3, 4, 6, 7)}) == 1
    assert lines[-1] == "note: a [b] c"
    report.interrupted = True
    assert str(report).endswith("interrupted: this is what was done until then")
    assert "nothing was measured" in str(TimingReport("Some", "float32", "cpu", 1.0))


def test_table_of_rich() -> None:
    pytest.importorskip("rich")
    from rich.console import Console

    report = report_of_two()
    report.rows = [
        replace(row, measure="train backward", sequences=4, tokens=2048) for row in report.rows
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(report)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert "train backward," in text
    assert "full fusion" in text
    assert "note: a [b] c" in text
    console.print(TimingReport("Some", "float32", "cpu", 1.0, notes=["none [at] all"]))
    assert "nothing was measured\nnote: none [at] all" in console.file.getvalue()  # type: ignore[attr-defined]


# Liger, in a process of its own ------------------------------------------------------------------

FAKE_LIGER = """
from types import MethodType

def apply(rope=True, fused_linear_cross_entropy=True, rms_norm=True, model=None):
    assert rms_norm and not rope and not fused_linear_cross_entropy
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(type(module).forward, module)

MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}
"""


LIGERS_VERSION = "Liger's norms are those of liger-kernel 9"


@pytest.fixture
def fake_liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of Liger's name that is importable here and in processes that are started."""
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "monkey_patch.py").write_text(FAKE_LIGER)
    installed = tmp_path / "liger_kernel-9.dist-info" / "METADATA"
    installed.parent.mkdir()
    installed.write_text("Metadata-Version: 2.1\nName: liger-kernel\nVersion: 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    inherited = os.environ.get("PYTHONPATH")
    root = Path(fusedops.__file__).resolve().parent.parent
    paths = [str(tmp_path), str(root), *([inherited] if inherited else [])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.usefixtures("fake_liger")
def test_liger_runs_elsewhere_and_is_compared_there() -> None:
    model = load("tiny-llama").model
    plan = Plan(measures=["decode", "prefill"], decode_batches=[2], tokens=8, seconds=0.0)
    report = timing.start_report(model, plan)
    steps: list[str] = []
    liger.add_liger(report, model, "tiny-llama", plan, lambda what, *_: steps.append(what))
    assert report.notes == [LIGERS_VERSION]
    assert [row.title for row in report.rows] == ["decode, 2 x 1 token", "prefill, 4 x 8 tokens"]
    for row in report.rows:
        assert (row.contestant, row.own_process, row.rounds) == ("liger", True, 3)
        assert row.ratio == pytest.approx(row.unpatched_ms / row.median_ms, rel=0.5)
        assert f"{row.title}: Liger's norms ran in a process of its own" in str(report)
    assert steps[0] == "Liger's process: loading tiny-llama"
    assert steps[-1] == "Liger's process: done"
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.usefixtures("fake_liger")
@pytest.mark.parametrize(
    ("source", "model_type", "reason"),
    [
        ("tiny-gpt2", "gpt2", "Liger does not know models of the type 'gpt2'"),
        ("tiny-gpt2", "llama", "Liger replaces no norm of GPT2LMHeadModel"),
        ("no-such-model", "llama", "LoadingError: cannot load no-such-model"),
    ],
)
def test_why_liger_is_left_out(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    model_type: str,
    reason: str,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    plan = {"measures": ["prefill"], "sequences": 1, "tokens": 4, "seconds": 0.0}
    liger.main(
        {
            "source": source, "dtype": "float32", "device": "cpu", "model_type": model_type,
            "plan": plan,
        }
    )  # fmt: skip
    assert f"liger left out: {reason}" in capsys.readouterr().out


def test_liger_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    report = report_of_two()
    rows = list(report.rows)
    liger.add_liger(report, build_llama(), "some/model", FAST)
    assert report.notes[1:] == ["liger left out: liger-kernel is not installed"]
    assert report.rows == rows


def add_from(monkeypatch: pytest.MonkeyPatch, code: str, on_step: Any = None) -> TimingReport:
    """What `add_liger` makes of a process that runs ``code`` after it has sent a row."""
    sent = {"report": report_of_two().to_dict(), "step": ["first", 0, 1]}
    sent["report"]["rows"][1]["contestant"] = "liger"
    line = liger._MARK + json.dumps(sent)

    def start(command: Any, **options: Any) -> Any:
        program = f"import sys, time; print('chatter'); print({line!r}, flush=True); {code}"
        return POPEN([sys.executable, "-c", program], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    report = TimingReport("Some", "float32", "cpu", 0.0)
    liger.add_liger(report, build_llama(), "some/model", FAST, on_step)
    return report


@pytest.mark.usefixtures("fake_liger")
def test_a_process_that_dies_is_one_line_and_what_it_sent_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = add_from(monkeypatch, "sys.exit('first line\\nno memory')")
    assert [row.contestant for row in report.rows] == ["liger"]
    reason = "liger left out: its process ended with status 1: no memory"
    assert report.notes[1:] == [reason, LIGERS_VERSION]
    report = add_from(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert report.notes[1:] == ["liger left out: its process ended with SIGKILL", LIGERS_VERSION]


@pytest.mark.usefixtures("fake_liger")
def test_an_interrupt_ends_the_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    report = add_from(monkeypatch, "time.sleep(100)", interrupt)
    assert time.monotonic() - start < 50
    assert report.interrupted
    assert len(report.rows) == 1
