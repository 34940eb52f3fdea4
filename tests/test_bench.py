# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, but for the timing: what is compared, checked, recorded, summed up and shown."""

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import build_llama

from fusedops import dispatch
from fusedops.integrations import load, timing
from fusedops.integrations.loading import ByteTokenizer
from fusedops.integrations.stream import BLOCK
from fusedops.integrations.timing_report import KernelTime, TimingRow

ROOT = Path(__file__).resolve().parent.parent


class ClockStub:
    """Stands for the GPU's clock: a time for each contestant, or the exception it is to meet."""

    def __init__(self, **times: Any) -> None:
        self.by_name, self.seen = times, []

    def copy_bandwidth(self, elements: int = 2**27) -> float:
        return 4.0

    def inputs(self, case: Any) -> int:
        return 2

    def times(self, contestants: dict[str, list[Any]]) -> dict[str, Any]:
        self.seen.append({name: len(calls) for name, calls in contestants.items()})
        found = {name: self.by_name.get(name, 10.0) for name in contestants}
        fatal = {n: t for n, t in found.items() if isinstance(t, Exception) and "CUDA" in str(t)}
        return fatal or {n: t if isinstance(t, Exception) else (t, 2 * t) for n, t in found.items()}


@pytest.fixture(scope="module")
def bench() -> Any:
    """The scripts as modules: they import each other by name, as scripts of one folder do."""
    sys.path.insert(0, str(ROOT / "bench"))
    names = ("run", "record", "providers", "launch", "plot", "traffic", "e2e", "fidelity",
             "bounds", "ncu")  # fmt: skip
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(ROOT / "bench"))
    for name in names:
        del sys.modules[name]


@pytest.fixture
def options(bench: Any, tmp_path: Path) -> Any:
    def make(*arguments: str) -> Any:
        out = ["--out", str(tmp_path / "run.json")]
        return bench.run.parse([*out, "--shape", "5x96", "--dtype", "fp32", *arguments])

    return make


def measure(bench: Any, functions: Any, timer: Any, operator: str = "rms_norm") -> dict[str, Any]:
    case = bench.providers.Case(operator, "forward", 5, 96, "fp32")
    lines = bench.run.measure(case, functions, timer, 4.0, "cpu")
    return {line["provider"]: line for line in lines}


# What is compared ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "direction", "streams", "vectors"),
    [
        ("rms_norm", "forward", 2, 1),  # x, y; weight
        ("layer_norm", "forward", 2, 2),
        ("add_rms_norm", "forward", 4, 1),  # x, residual, y, sum
        ("add_layer_norm", "forward", 4, 2),
        ("rms_norm", "backward", 3, 2),  # x, dy, dx; weight, its gradient
        ("layer_norm", "backward", 3, 3),
        ("add_rms_norm", "backward", 4, 2),  # sum, dy, dsum, dx
        ("add_layer_norm", "backward", 4, 3),
    ],
)
def test_bytes(bench: Any, operator: str, direction: str, streams: int, vectors: int) -> None:
    case = bench.providers.Case(operator, direction, 1000, 64, "bf16")
    assert case.bytes == 2 * 64 * (1000 * streams + vectors)
    inputs = bench.providers.tensors(case, "cpu")
    read = inputs[:4] if direction == "forward" else (inputs.x, inputs.weight, *inputs[4:])
    written = bench.providers.truth(case, inputs)
    written.pop("dresidual", None)  # the same tensor as dx
    moved = sum(t.numel() for t in (*read, *written.values()) if t is not None)
    assert case.bytes == 2 * moved


def test_the_whole_set(bench: Any) -> None:
    cases = list(bench.run.select(bench.run.parse([])))
    assert len(cases) == len(set(cases)) == 8 * (22 + 1 + 12 + 2 * 12)
    full = [c for c in cases if c.dtype == "bf16" and c.rows > 256]
    assert {c.width for c in full if c.width >= 8192} >= {8192, 12288, 262144}
    for case in full:
        elements = case.rows * case.width
        expected = 364800 * 128 if case.rows == 364800 else 2**26 << (case.width >= 8192)
        assert expected - case.width < elements <= expected
    assert sum(map(bench.run.is_compiled, cases)) == 8 * 12
    part = bench.run.parse(["--op", "layer_norm", "--widths", "4096", "--direction", "forward"])
    assert {(c.rows, c.dtype) for c in bench.run.select(part)} == {
        (16384, "bf16"), (16384, "fp16"), (16384, "fp32"),
        (1, "bf16"), (8, "bf16"), (64, "bf16"), (256, "bf16"),
    }  # fmt: skip


# Correctness before time -----------------------------------------------------------------------


def test_fusedops_and_torch_pass(bench: Any, options: Any) -> None:
    timer = ClockStub(fusedops=5.0)
    content = bench.run.benchmark(options("--provider", "fusedops", "torch"), timer, "cpu")
    assert [line["status"] for line in content["rows"]] == ["ok"] * 16
    assert timer.seen == [{"fusedops": 2, "torch": 2}] * 8
    line = content["rows"][0]
    case = bench.providers.Case("rms_norm", "forward", 5, 96, "fp32")
    assert (line["us"], line["us_flushed"]) == (5.0, 10.0)
    assert line["share"] == pytest.approx(case.bytes / 5.0e-6 / 4.0e12, abs=1e-4)
    assert [line["ratio"] for line in content["rows"][:2]] == [1.0, pytest.approx(0.5, rel=0.05)]


def test_the_wrong_and_the_broken_are_recorded_and_not_timed(bench: Any) -> None:
    right = bench.providers.torch_functions()

    def unwritten(case: Any) -> Any:
        return lambda x, *_: torch.full_like(x, torch.nan)

    def slightly_off(case: Any) -> Any:
        return lambda x, *rest: right(case)(x, *rest) * 1.0001

    def no_sum(case: Any) -> Any:
        return lambda *inputs: right(case)(*inputs)[0]

    def broken(case: Any) -> Any:
        raise RuntimeError("rows of 96 are not served\nand more")

    def absent(case: Any) -> Any:
        raise bench.providers.NotOfferedError("nothing of the kind")

    functions = {
        "unwritten": unwritten, "off": slightly_off, "broken": broken, "absent": absent,
        "torch": right, "compile": right,
    }  # fmt: skip
    timer = ClockStub()
    lines = measure(bench, functions, timer)
    assert timer.seen == [{"torch": 2}]
    assert {name: line["status"] for name, line in lines.items()} == {
        "unwritten": "wrong", "off": "wrong", "broken": "fails", "absent": "not offered",
        "torch": "ok", "compile": "not run",
    }  # fmt: skip
    assert lines["broken"]["reason"] == "RuntimeError: rows of 96 are not served"
    assert lines["off"]["reason"].startswith("y is off by 0.000")
    lines = measure(bench, {"no sum": no_sum}, timer, "add_rms_norm")
    assert lines["no sum"]["reason"].startswith("summed is off")


def test_a_failure_while_timing_stays_with_its_contestant(bench: Any) -> None:
    right = bench.providers.torch_functions()
    timer = ClockStub(bad=ValueError("no capture"))
    assert not bench.run.fatal("CUDA error: operation not permitted when stream is capturing")
    assert bench.run.fatal("CUDA_ERROR_ILLEGAL_ADDRESS")
    lines = measure(bench, {"torch": right, "bad": right}, timer)
    assert lines["bad"]["status"] == "fails"
    assert lines["bad"]["reason"] == "in a captured graph: ValueError: no capture"
    assert lines["torch"]["us"] == 10.0


def test_after_a_broken_gpu_a_new_process_goes_on(
    bench: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bench.providers.torch_functions
    monkeypatch.setitem(bench.providers.LOADERS, "liger", right)
    monkeypatch.setattr(bench.run.os, "execv", lambda *_: sys.exit("restarted"))
    few = ("--op", "rms_norm", "--direction", "forward", "--provider", "torch", "liger")
    timer = ClockStub(liger=RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(SystemExit, match="restarted"):
        bench.run.benchmark(options(*few), timer, "cpu")
    timer = ClockStub()
    content = bench.run.benchmark(options(*few, "--resume"), timer, "cpu")
    assert timer.seen == [{"torch": 2}]
    assert {line["provider"]: line["status"] for line in content["rows"]} == {
        "liger": "fails",
        "torch": "ok",
    }


# Files -----------------------------------------------------------------------------------------


def test_missing_libraries_are_named(
    bench: Any, options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise ImportError("no module named liger")

    monkeypatch.setitem(bench.providers.LOADERS, "liger", missing)
    few = ("--op", "rms_norm", "--direction", "forward", "--provider", "torch", "liger")
    content = bench.run.benchmark(options(*few), ClockStub(), "cpu")
    assert content["runs"][0]["missing"] == {"liger": "ImportError: no module named liger"}
    assert "missing: liger (ImportError: no module named liger)" in capsys.readouterr().out
    assert content["runs"][0]["versions"]["torch"] == metadata.version("torch")
    assert content["runs"][0]["commit"]


def test_budget(bench: Any, options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options("--provider", "torch", "--budget", "0")
    bench.run.benchmark(chosen, ClockStub(), "cpu", started=0.0)
    content = json.loads(chosen.out.read_text())
    assert content["rows"] == []
    assert content["runs"][0]["left_out"] == 8
    assert "out of time: 8 cases left out" in capsys.readouterr().out


def content_of(shares: dict[str, dict[tuple[int, int], float]], gpu: str = "NVIDIA H200") -> Any:
    """Rows of rms_norm, forward; {provider: {(rows, width): share}}."""
    rows = [
        {"operator": "rms_norm", "direction": "forward", "rows": rows, "width": width,
         "dtype": "bf16", "provider": provider, "status": "ok", "us": 10.0, "share": share,
         "run": 0}
        for provider, by_shape in shares.items()
        for (rows, width), share in by_shape.items()
    ]  # fmt: skip
    versions = {"torch": "2.11.0", "triton": "3.6.0", "liger-kernel": "0.8.5"}
    run = {"gpu": gpu, "versions": versions, "missing": {"quack": "ImportError: none"}}
    return {"benchmark": "norms", "runs": [run], "rows": rows}


WIDE, NARROW = (16384, 4096), (65536, 1024)


def test_merge_keeps_the_last_of_a_case_and_ranks_anew(bench: Any, tmp_path: Path) -> None:
    first = content_of({"fusedops": {WIDE: 0.5, NARROW: 0.9}})
    second = content_of({"fusedops": {WIDE: 0.96}, "liger": {WIDE: 0.48}})
    merged = bench.record.merge([first, second])
    bench.record.write(tmp_path / "new" / "merged.json", merged)
    assert json.loads((tmp_path / "new" / "merged.json").read_text()) == merged
    found = {
        (m["provider"], m["width"]): (m["share"], m["ratio"], m["run"]) for m in merged["rows"]
    }
    assert found == {
        ("fusedops", 4096): (0.96, 1.0, 1),
        ("fusedops", 1024): (0.9, 1.0, 0),
        ("liger", 4096): (0.48, 0.5, 1),
    }
    again = bench.record.merge([merged, content_of({"fusedops": {NARROW: 0.8}})])
    assert [line["run"] for line in again["rows"]] == [0, 1, 0]  # nothing of the first is left
    assert again["runs"] == [second["runs"][0]] * 2
    with pytest.raises(ValueError, match="one GPU"):
        bench.record.merge([first, content_of({}, gpu="other")])


def test_summary(bench: Any) -> None:
    content = content_of(
        {
            "fusedops": {WIDE: 0.9, NARROW: 0.4},
            "liger": {WIDE: 0.45, NARROW: 0.8},
            "torch": {WIDE: 0.9},
        }
    )
    content["rows"].append({**content["rows"][0], "status": "wrong", "reason": "dx is off"})
    del content["rows"][-1]["share"]
    _, line, trouble = bench.record.summary(content["rows"])
    for part in (
        "rms_norm forward bf16",
        " 60.0%  low  40.0% at 1024",  # the root of 0.9 x 0.4
        "vs best 0.707  low 0.500 (liger, 65536x1024)",  # of 1 and 0.5
        "liger 1.00  torch 1.00",
    ):
        assert part in line
    assert trouble == "wrong: fusedops forward rms_norm 16384x4096 bf16: dx is off"


def test_plots_and_tables(bench: Any, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nbelow\n")
    arguments = ["--results", str(tmp_path), "--readme", str(readme)]
    assert bench.plot.main(arguments) == 0
    assert bench.plot.NOTHING in readme.read_text()
    assert "old" not in readme.read_text()
    assert bench.plot.main([*arguments, "--check"]) == 0

    content = content_of(
        {"fusedops": {WIDE: 0.96, NARROW: 0.9}, "liger": {WIDE: 0.48, NARROW: 0.9}}
    )
    bench.record.write(tmp_path / "h200-run.json", content)
    (tmp_path / "unrelated.json").write_text("[]")
    assert "README.md: the tables, h200-run.svg" in bench.plot.main([*arguments, "--check"])
    assert bench.plot.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n")
    assert "| `rms_norm`, forward | 90% | 96% |" in text
    assert "| `rms_norm`, forward | 1.41 | 1.41 (1.00) |" in text
    assert "QuACK could not be imported" in text
    assert (tmp_path / "h200-run.svg").stat().st_size < 200_000
    assert bench.plot.main([*arguments, "--check"]) == 0

    content["rows"][0]["share"] = 0.5
    bench.record.write(tmp_path / "h200-run.json", content)
    assert "h200-run.svg" in bench.plot.main([*arguments, "--check"])
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        bench.plot.main(arguments)


def test_every_width_of_the_set_is_drawn_once(bench: Any) -> None:
    shapes = list(bench.run.shapes("bf16", bench.run.WIDTHS))
    lines = content_of({"fusedops": dict.fromkeys(shapes, 0.9)})["rows"]
    drawn = [line["width"] for line in bench.plot.large(lines, "forward", "rms_norm")]
    assert drawn == list(bench.run.WIDTHS)


def test_readme_and_plots_are_what_the_results_give(bench: Any) -> None:
    assert bench.plot.stale(bench.plot.RESULTS, bench.plot.README) == []


# CPU time --------------------------------------------------------------------------------------


def test_launch_on_the_cpu(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.launch, "SHAPES", ((1, 64),))
    monkeypatch.setattr(bench.launch, "CALLS", 2)
    out = tmp_path / "h200-launch.json"
    chosen = bench.launch.parse(
        ["--provider", "torch", "fusedops", "--rounds", "2", "--out", str(out)]
    )
    rows = bench.launch.benchmark(chosen, "cpu")
    assert len(rows) == 2 * 4 * 2
    assert all(line["us"] > 0 for line in rows)
    assert [line["of_torch"] for line in rows if line["provider"] == "torch"] == [1.0] * 8
    text = bench.plot.launch_text(json.loads(out.read_text()), out)
    assert "| `add_layer_norm`, training | " in text


# Whole models -----------------------------------------------------------------------------------


def test_variants_of_whole_models(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    model = build_llama()
    (plan,) = bench.e2e.plans("llama-1b", ["decode", "train"], 0.0)
    titles = [case.title for case in plan.cases(model)]
    assert titles == ["decode, 1 x 1 token", "decode, 16 x 1 token", "train, 4 x 64 tokens"]
    large = bench.e2e.plans("llama-8b", ["prefill", "train"], 0.0)
    assert [(p.measures, p.sequences) for p in large] == [(["prefill"], 4), (["train"], 1)]
    models = {name: build(model) for name, build in bench.e2e.CONTESTANTS.items()}
    times = timing.time_case(plan.cases(model)[0], models, 0.0).times
    assert list(times) == ["unpatched", "norms", "fused", "in block", "across"]
    states = [vars(layer)[BLOCK] for layer in models["in block"].model.layers]
    assert [state.successor for state in states] == [None] * 3
    assert not any(BLOCK in vars(layer) for layer in models["norms"].model.layers)


def test_the_table_of_whole_models(bench: Any, tmp_path: Path) -> None:
    def line(model: str, measure: str, contestant: str, ms: float, **values: Any) -> Any:
        shape = {"sequences": 16, "tokens": 1} if measure == "decode" else {
            "sequences": 4, "tokens": 2048}  # fmt: skip
        row = {"model": model, "measure": measure, **shape, "contestant": contestant, "run": 0}
        return row | {"min_ms": ms, "best_ratio": 10 / ms, "ratio": 9 / ms} | values

    rows = [
        line("llama-1b", "train", "unpatched", 10.0, kernels=90, peak_memory=28 * 2**30),
        line("llama-1b", "train", "fused", 8.0, kernels=60, peak_memory=26 * 2**30),
        line("llama-1b", "decode", "unpatched", 10.0, kernels=9, peak_memory=None),
        line("llama-1b", "decode", "norms", 9.0, kernels=6, peak_memory=None),
        line("llama-1b", "decode", "fused", 9.5, kernels=6, peak_memory=None),
        line("llama-1b", "decode", "liger", 12.5, kernels=7, peak_memory=None),
        line("gpt2-xl", "decode", "unpatched", 10.0, kernels=9, peak_memory=None),
    ]
    run = {"gpu": "NVIDIA H200", "versions": {"transformers": "5.17.0"}}
    content = {"benchmark": "models", "runs": [run], "rows": rows}
    text = bench.plot.models_text(content, tmp_path / "h200-e2e.json")
    assert text.splitlines()[-2:] == [
        "| Llama 1B | decode, batch 16 | 10.00 | 1.11 (1.00) | 1.05 (0.95) | 0.80 (0.72) | 9 → 6 "
        "| – |",
        "| Llama 1B | train, 4 x 2048 | 10.00 | – | 1.25 (1.12) | – | 90 → 60 | 28.0 → 26.0 |",
    ]
    newer = {**content, "rows": [line("llama-1b", "train", "fused", 5.0)]}
    merged = bench.record.merge([content, newer])
    assert len(merged["rows"]) == 7
    assert [(row["min_ms"], row["run"]) for row in merged["rows"][:3]] == [
        (10.0, 0), (5.0, 1), (10.0, 0),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="one benchmark"):
        bench.record.merge([content, content_of({})])


def test_what_is_left_to_gain(bench: Any, tmp_path: Path) -> None:
    def lines(measure: str, sequences: int, *milliseconds: float) -> Any:
        kernels = [
            {"elementwise": (30, 4.0), "norm": (4, 0.9), "add": (9, 2.1), "matmul": (7, 12.0)},
            {"matmul": (7, 12.0), "norm": (5, 1.5), "add": (2, 0.5), "elementwise": (8, 0.75),
             "other": (1, 0.5), "copy or fill": (1, 0.25)},
        ]  # fmt: skip
        return [
            {"model": "llama-1b", "measure": measure, "sequences": sequences, "tokens": 1,
             "contestant": name, "min_ms": ms, "best_ratio": 1.2, "ratio": 1.2, "run": 0,
             "kernels": 50, "peak_memory": None,
             "profile": {kind: {"kernels": n, "gpu_ms": spent} for kind, (n, spent) in of.items()}}
            for name, ms, of in zip(("unpatched", "fused"), milliseconds, kernels, strict=True)
        ]  # fmt: skip

    old = lines("prefill", 2, 20.0, 16.0) + lines("prefill", 3, 20.0, 16.0)
    del old[0]["profile"]
    old[3]["profile"] = {}
    rows = [
        *lines("decode", 1, 38.0, 31.0),
        *lines("decode", 16, 38.0, 31.0),
        *lines("prefill", 4, 20.0, 16.0),  # 95% and 97%
        *lines("train", 1, 20.0, 17.5),  # 95% and 89%
        *old,
    ]
    run = {"gpu": "NVIDIA H200", "versions": {"transformers": "5.17.0"}}
    content = {"benchmark": "models", "runs": [run], "rows": rows}
    text = bench.plot.models_text(content, tmp_path / "h200-e2e.json")
    models, profile = text.split("What is left to gain")
    assert models.count("| Llama 1B |") == 6
    assert profile.splitlines()[4:] == [
        "| Llama 1B | decode, batch 1 | 31.00 | 19.00 → 15.50 | 50% → 50% | 12.00 (7) | – "
        "| 2.00 (7) | 1.50 (10) | – |",
        "| Llama 1B | prefill, 4 x 1 | 16.00 | 19.00 → 15.50 | 95% → 97% | 12.00 (7) | – "
        "| 2.00 (7) | 1.50 (10) | 1.23 of 1.41 |",  # 19 / 15.5, 19 / 13.5
        "| Llama 1B | train, 1 x 1 | 17.50 | 19.00 → 15.50 | 95% → 89% | 12.00 (7) | – "
        "| 2.00 (7) | 1.50 (10) | – |",
    ]
    without = bench.plot.models_text({**content, "rows": old}, tmp_path / "h200-e2e.json")
    assert without.count("| Llama 1B |") == 2
    assert "left to gain" not in without
    known = {kind for kind, _ in timing.KINDS}
    assert {"matmul", "attention", *bench.plot.REMOVABLE} <= known


def test_profiles_of_whole_models_are_kept_and_merged(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_timings(report: Any, model: Any, contestants: Any, plan: Any) -> None:
        for case in plan.cases(model):
            shape = (case.measure, case.sequences, case.tokens)
            for name in contestants:
                times = {"median_ms": 2.0, "min_ms": 1.0, "unpatched_ms": 2.0, "ratio": 1.0}
                row = TimingRow(*shape, contestant=name, **times, best_ratio=1.0, rounds=3)
                report.rows.append(row)
                for kind, spent in (("norm", 0.1 + 0.2), ("matmul", float(case.sequences))):
                    report.profile.append(KernelTime(*shape, name, kind, len(name), spent))

    def measured(name: str, *arguments: str) -> Path:
        out = tmp_path / name
        call(["--models", "llama-1b", "--against", "--out", str(out), *arguments])
        return out

    def call(arguments: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["e2e.py", *arguments])
        bench.e2e.main()

    monkeypatch.setattr(bench.e2e, "load", lambda *_: SimpleNamespace(model=build_llama()))
    monkeypatch.setattr(bench.e2e, "add_timings", add_timings)
    new = measured("new.json", "--measures", "decode", "--variants", "fused")
    rows = json.loads(new.read_text())["rows"]
    assert [(row["sequences"], row["contestant"], row["profile"]) for row in rows] == [
        (batch, name, {"norm": {"kernels": len(name), "gpu_ms": 0.3},
                       "matmul": {"kernels": len(name), "gpu_ms": batch}})
        for batch in (1, 16) for name in ("unpatched", "fused")
    ]  # fmt: skip

    old = measured("old.json", "--measures", "decode", "prefill", "--variants", "norms", "fused")
    content = json.loads(old.read_text())
    for row in content["rows"]:
        del row["profile"]
    bench.record.write(old, content)
    both = tmp_path / "both.json"
    call(["--merge", str(old), str(new), "--out", str(both)])
    merged = json.loads(both.read_text())["rows"]
    key = bench.record.identity
    expected = {key(row, "models"): row for row in content["rows"]}
    expected |= {key(row, "models"): {**row, "run": 1} for row in rows}
    assert merged == list(expected.values())
    assert len(merged) == 9


# Real weights and text --------------------------------------------------------------------------


@pytest.fixture
def short_text(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And patched models that run their own code: the interpreter takes too long."""
    text = {"b": "the quick brown fox jumps over the lazy dog; " * 9, "a": "x" * 90}
    monkeypatch.setattr(bench.fidelity.topics, "topics", text)
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


def test_text_is_cut_into_windows(bench: Any, short_text: None) -> None:
    windows = bench.fidelity.text_windows(ByteTokenizer(), 2, 40)
    assert windows.shape == (6, 2, 40)
    assert bytes(windows.flatten().tolist()).startswith(b"x" * 90 + b"\n\nthe quick")


def test_perplexity(bench: Any) -> None:
    model = load("tiny-llama").model
    ids = torch.randint(256, (3, 20))
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss.exp().item()
    assert bench.fidelity.perplexity(model, ids) == pytest.approx(expected, rel=1e-5)


def test_fidelity_of_a_tiny_model(bench: Any, short_text: None, tmp_path: Path) -> None:
    out = tmp_path / "h200-fidelity.json"
    small = ["--sequences", "2", "--tokens", "32", "--steps", "12", "--device", "cpu"]
    bench.fidelity.main(
        ["--model", "tiny-llama", "--dtypes", "fp32", "bf16", "--out", str(out), *small]
    )
    content = json.loads(out.read_text())
    full, half = content["rows"]
    assert full["perplexity"]["fp32"] == full["perplexity"]["unpatched"]
    assert half["perplexity"]["patched"] == pytest.approx(half["perplexity"]["fp32"], rel=0.05)
    assert 0 < half["kl_mean"]["unpatched_to_fp32"] < 0.1
    assert "losses" not in half
    losses = full["losses"]
    assert {name: len(values) for name, values in losses.items()} == {
        "unpatched": 12, "patched": 12, "nudged": 12,
    }  # fmt: skip
    assert losses["unpatched"][-1] < losses["unpatched"][0]
    assert losses["patched"] == losses["unpatched"]  # which here ran the same code
    text = bench.plot.fidelity_text(content, out)
    assert "| tiny-llama, bf16 | " in text
    assert f"the mean loss of the last ones is {losses['unpatched'][-1]:.4f} unpatched" in text
    bench.plot.plot_of(content)(content, tmp_path / "losses.svg")
    assert f"rows {bench.plot.digest(content)}" in (tmp_path / "losses.svg").read_text()
    assert bench.plot.plot_of({**content, "rows": [half]}) is None


def test_a_nudge_is_one_unit_in_the_last_place(bench: Any) -> None:
    model, other = (load("tiny-llama", torch.bfloat16).model for _ in range(2))
    bench.fidelity.nudged(other)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    ((a, b),) = [(a, b) for a, b in pairs if not torch.equal(a, b)]
    changed = (a != b).nonzero().tolist()
    assert changed == [[0, 0]]
    assert (a.view(torch.int16)[0, 0] - b.view(torch.int16)[0, 0]).abs() == 1


# Bytes ------------------------------------------------------------------------------------------

COUNTED = """==PROF== Connected to process 7
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","add","dram__bytes_read.sum","Mbyte","268.5"
"0","add","dram__bytes_write.sum","Kbyte","134,250.5"
"0","add","gpu__time_duration.sum","ns","96,000"
"1","norm","dram__bytes_read.sum","byte","1,000"
"1","norm","dram__bytes_write.sum","Mbyte","0"
"1","norm","gpu__time_duration.sum","us","4"
"""


def test_what_the_profiler_counts(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.traffic, "CALLS", 1)
    read, written, micros, kernels = bench.traffic.parse(COUNTED)
    assert read == pytest.approx(268.501e6)
    assert written == pytest.approx(134.2505e6)
    assert (micros, kernels) == (pytest.approx(100.0), 2)


def test_kernels_belong_to_the_case_before_which_they_are_marked(bench: Any) -> None:
    counted = [("0", "spin_kernel", 1.0), ("1", "norm_forward", 2.0), ("2", "spin_kernel", 3.0)]
    counted += [("3", "norm_backward", 4.0), ("4", "reduce_partials", 1000.5)]
    metrics = list(bench.bounds.METRICS.values())
    text = '==PROF==\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n' + "".join(
        f'"{number}","{kernel}","{metric}","","{value:,}"\n'
        for number, kernel, value in counted
        for metric in metrics
    )
    cases = bench.bounds.CASES[:2]
    rows = bench.bounds.parse(text, cases)
    assert [(row["case"], row["kernel"], row["read"]) for row in rows] == [
        (cases[0], "norm_forward", 2.0),
        (cases[1], "norm_backward", 4.0),
        (cases[1], "reduce_partials", 1000.5),
    ]
    assert "4.0 % of the memory's peak" in bench.bounds.line_of(rows[1])


def test_every_way_to_add_and_normalise_is_the_same(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.traffic, "WIDTH", 32)
    x, residual, weight, bias = (torch.randn(*size) for size in ((3, 32), (3, 32), (32,), (32,)))
    for operator in ("rms_norm", "layer_norm"):
        ways = [bench.traffic.forward_of(operator, w) for w in ("torch apart", "apart", "fused")]
        results = [way(x, residual, weight, bias) for way in ways]
        for y, s in results:
            assert torch.allclose(y, results[0][0], atol=1e-5)
            assert torch.equal(s, residual + x)


# The device ------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["run", "launch", "traffic", "bounds"])
def test_no_gpu_is_one_sentence(bench: Any, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    with pytest.raises(SystemExit, match=rf"bench/{script}\.py needs a CUDA GPU"):
        getattr(bench, script).main()


def test_no_contestant_is_timed_after_a_flush(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the contestants was, in half of its turns, and its median was a cold one."""
    flushes, before = [], [True]

    def replay(graph: str, flushed: bool) -> float:
        cold, before[0] = before[0] or flushed, flushed
        flushes.append(flushed)
        return 160.0 if cold else 16.0

    timer = object.__new__(bench.run.GpuTimer)
    timer.repeats, timer.flushed_repeats, timer.settle = 15, 7, 0.0
    timer.capture, timer.replay = len, replay
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = [lambda: None] * 16
    found = timer.times({"fusedops": calls, "torch": calls, "liger": calls[:1]})
    assert found == {"fusedops": (1.0, 160.0), "torch": (1.0, 160.0), "liger": (16.0, 160.0)}
    assert flushes == [False] * 48 + [True] * 24
    assert timer.times({}) == {}


@pytest.mark.gpu
def test_times_on_a_gpu(bench: Any, options: Any) -> None:
    stream = torch.cuda.current_stream()
    try:
        timer = bench.run.GpuTimer(repeats=3, flushed_repeats=2)
        content = bench.run.benchmark(options("--provider", "fusedops", "torch"), timer)
    finally:
        torch.cuda.set_stream(stream)
    assert [line["status"] for line in content["rows"]] == ["ok"] * 16
    assert all(0 < line["us"] < 1000 for line in content["rows"])
    assert 0.01 < content["runs"][0]["copy_tb_s"] < 20
