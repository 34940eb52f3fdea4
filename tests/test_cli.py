# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, its exit status, and that a user never sees a traceback."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedops
from fusedops import cli, dispatch, environment, functional
from fusedops.integrations import check_parity, parity, timing, timing_report

ROOT = Path(fusedops.__file__).resolve().parent.parent
OPERATORS = {"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"}

Run = Callable[..., SimpleNamespace]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: status, out, err."""

    def call(*arguments: object) -> SimpleNamespace:
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return SimpleNamespace(status=status, out=out, err=err)

    return call


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it, in a process that has not decided on an interpreter."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "fusedops", *arguments],
        cwd=ROOT,
        env={**inherited, "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


# --- compare -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_compare_proves_the_tiny_models(run: Run, path: str, tmp_path: Path, model: str) -> None:
    report, plot = tmp_path / "report.json", tmp_path / "drift.png"
    drawn = importlib.util.find_spec("matplotlib") is not None
    done = run(
        "compare", model, "--backward", "--json", report, *(["--plot", plot] if drawn else []),
        "--dtype", "fp32", "--batch", 2, "--tokens", 32, "--continuation", 3,
    )  # fmt: skip
    assert done.status == 0, done.out + done.err
    assert "7 norms patched, 0 left alone" in done.out
    assert f"path: {path}, fused calls in a forward: 7" in done.out
    assert "parity holds" in done.out
    assert "continuation: " in done.out
    assert "patched model" in done.err
    found = json.loads(report.read_text())
    assert found["ok"] is True
    assert found["path"] == path
    assert found["fused_calls"] == 7
    assert found["tokens"] == 64
    assert found["batch"] == 2
    assert found["dtype"] == "float32"
    assert model in found["source"]
    assert (
        found["environment"]["packages"]["torch"]
        == environment.describe(probe=False)["packages"]["torch"]
    )
    assert len(found["blocks"]) == 3
    assert found["gradients"]
    if drawn:
        assert plot.read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in tmp_path.iterdir()} == {"report.json"} | (
        {"drift.png"} if drawn else set()
    )


@pytest.mark.usefixtures("kernels_run")
def test_compare_proves_bf16_under_the_interpreter_too(run: Run, path: str) -> None:
    done = run("compare", "tiny-llama", "--dtype", "bf16", "--continuation", 0)
    assert done.status == 0, done.out + done.err
    assert f"parity holds: 7 fused calls through {path}" in done.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_the_kernels_run_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = command("compare", "tiny-gpt2", "--continuation", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "path: interpreter, fused calls in a forward: 7" in done.stdout
    assert "float32 on cpu, 64 tokens" in done.stdout


def test_disabled_is_not_proven() -> None:
    done = command("compare", "tiny-gpt2", "--device", "cpu", FUSEDOPS_DISABLE="1")
    assert done.returncode == 1
    assert "path: none, fused calls in a forward: 0" in done.stdout
    assert "parity not proven: no fused operator ran (FUSEDOPS_DISABLE is set)" in done.stdout
    assert "Traceback" not in done.stderr


def test_no_fused_call_is_no_success(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    done = run("compare", "tiny-llama", "--device", "cpu", "--continuation", 0)
    assert done.status == 1
    assert "parity not proven: no fused operator ran" in done.out


@pytest.mark.usefixtures("kernels_run")
def test_a_wrong_norm_is_found(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, add = functional.layer_norm, functional.linked_add_norm

    def slightly_off(*args: Any, **options: Any) -> Any:
        return plain(*args, **options) * 1.001

    def slightly_off_sum(*args: Any, **options: Any) -> Any:
        y, *sums = add(*args, **options)
        return y * 1.001, *sums

    monkeypatch.setattr(functional, "layer_norm", slightly_off)
    monkeypatch.setattr(functional, "linked_add_norm", slightly_off_sum)
    report = tmp_path / "report.json"
    done = run(
        "compare", "tiny-gpt2", "--dtype", "fp32", "--continuation", 0, "--json", report
    )  # fmt: skip
    assert done.status == 1
    assert "parity fails: max |Δ| " in done.out
    assert json.loads(report.read_text())["outcome"] == "fails"


def _arguments_seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What compare hands to check_parity; which then runs without kernels, fast."""
    seen: dict[str, Any] = {}

    def watch(model: Any, inputs: Any, **options: Any) -> Any:
        seen.update(options, ids=inputs["input_ids"], dtype=next(model.parameters()).dtype)
        return check_parity(model, inputs, **options | {"continuation": 0})

    monkeypatch.setattr(parity, "check_parity", watch)
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    return seen


def test_a_timing_that_fails_leaves_the_comparison(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("the GPU is gone")

    _arguments_seen(monkeypatch)
    monkeypatch.setattr(timing, "time_model", fail)
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    done = run(
        "compare", "tiny-gpt2", "--device", "cpu", "--time",
        "--json", str(report), "--html", str(page),
    )  # fmt: skip
    assert done.status != 0
    assert "the GPU is gone" in done.err
    found = json.loads(report.read_text())
    assert found["outcome"] == "not proven"
    assert "timing" not in found
    assert "<title>Parity not proven: tiny-gpt2" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "shape", "text"),
    [
        ([], (1, 64), "A river"),
        (["--prompt", "ab"], (1, 64), "ababab"),
        (["--prompt", "x" * 70], (1, 70), "xxx"),
        (["--prompt", "abc", "--tokens", "4", "--batch", "2"], (2, 4), "abca"),
    ],
)
def test_prompt_tokens_and_batch(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    shape: tuple[int, int],
    text: str,
) -> None:
    seen = _arguments_seen(monkeypatch)
    run("compare", "tiny-gpt2", "--device", "cpu", *arguments)
    assert seen["ids"].shape == shape
    assert bytes(seen["ids"][0].tolist()).decode().startswith(text)
    assert seen["dtype"] == torch.float32
    assert seen["backward"] is False


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp16", torch.float16), ("bfloat16", torch.bfloat16), ("fp64", torch.float64)],
)
def test_dtype(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    seen = _arguments_seen(monkeypatch)
    run("compare", "tiny-llama", "--device", "cpu", "--dtype", name)
    assert seen["dtype"] == dtype


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no-such-model"], "cannot load no-such-model"),
        (["./absent"], "./absent does not exist"),
        (["{tmp}"], "holds neither config.json nor a GGUF file"),
        (["tiny-llama", "--json", "{tmp}/absent/report.json"], "absent is no folder"),
        (["tiny-llama", "--json", "{tmp}"], "is a folder, expected a file"),
        (["tiny-llama", "--html", "{tmp}/absent/report.html"], "absent is no folder"),
        (["tiny-llama", "--html", "{tmp}"], "is a folder, expected a file"),
        (["tiny-llama", "--html", "{tmp}/r", "--json", "{tmp}/./r"], "expected a file for each"),
        (["tiny-llama", "--device", "abacus"], "--device abacus"),
        (["tiny-llama", "--device", "cuda:99"], "--device cuda:99: torch sees"),
        (["tiny-llama", "--dtype", "fp16", "--tokens", "10"], "at least 64 tokens"),
        (["tiny-llama", "--prompt", ""], "prompt must hold at least one token"),
        (["tiny-llama", "--tokens", "5000"], "2048 positions"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    run: Run, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    done = run("compare", *(a.replace("{tmp}", str(tmp_path)) for a in arguments))
    assert done.status == 2
    errors = [line for line in done.err.splitlines() if not line.startswith("... ")]
    assert len(errors) == 1, done.err
    assert errors[0].startswith("fusedops: error: ")
    assert reason in errors[0]
    assert not done.out
    assert not list(tmp_path.iterdir())


def test_plot_of_an_unknown_kind(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("compare", "tiny-llama", "--plot", tmp_path / "drift.nothing")
    assert done.status == 2
    assert "expected a name that ends in" in done.err
    assert "loading" not in done.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "COMMAND"),
        (["compare"], "MODEL"),
        (["compare", "tiny-llama", "--dtype", "int8"], "expected one of fp32, fp16, bf16, fp64"),
        (["compare", "tiny-llama", "--batch", "0"], "expected a whole number from 1, got '0'"),
        (["compare", "tiny-llama", "--tokens", "many"], "got 'many'"),
        (["compare", "tiny-llama", "--continuation", "-1"], "from 0, got '-1'"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], reason: str) -> None:
    done = run(*arguments)
    assert done.status == 2
    assert reason in done.err


@pytest.mark.parametrize(
    ("package", "extra"), [("matplotlib", "cli"), ("jinja2", "cli"), ("transformers", "hf")]
)
def test_missing_package_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    done = run(
        "compare",
        "tiny-llama",
        "--plot",
        tmp_path / "drift.png",
        "--html",
        tmp_path / "report.html",
    )
    assert done.status == 2
    assert f"needs {package}" in done.err
    assert f"pip install 'fusedops[{extra}]'" in done.err


def test_without_rich_there_is_no_bar_but_a_hint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _arguments_seen(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich", None)
    done = run("compare", "tiny-gpt2", "--device", "cpu")
    assert "pip install 'fusedops[cli]'" in done.err
    assert "... patched model" in done.err
    assert "parity not proven" in done.out


def test_bar_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    _arguments_seen(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    done = run("compare", "tiny-gpt2", "--device", "cpu")
    assert "━" in done.err
    assert "... patched model" not in done.err


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), 2, "out of memory; fewer --tokens"),
        (MemoryError(), 2, "out of memory"),
        (KeyError("what"), 2, "KeyError: 'what' (--traceback shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_in_the_comparison_are_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, reason: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(parity, "check_parity", fail)
    done = run("compare", "tiny-llama")
    assert done.status == status
    assert f"fusedops: error: {reason}" in done.err
    if isinstance(error, KeyError):
        with pytest.raises(KeyError):
            cli.main(["compare", "tiny-llama", "--traceback"])


# --- compare --time ------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels_run")
def test_time_comes_after_parity(
    run: Run, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setattr(timing, "WARM_UP", 1)
    file = tmp_path / "report.json"
    done = run(
        "compare", "tiny-gpt2", "--dtype", "fp32", "--continuation", 0, "--json", file,
        "--time", "--measure", "decode", "--decode-batch", 2, "--seconds", 0, "--against", "liger",
    )  # fmt: skip
    assert done.status == 0, done.out + done.err
    assert done.out.index("parity holds") < done.out.index("speed of GPT2LMHeadModel")
    assert "decode, 2 x 1 token\n" in done.out
    assert "note: liger left out: liger-kernel is not installed" in done.out
    assert "decode, 2 x 1 token: taking turns" in done.err
    found = json.loads(file.read_text())
    assert found["ok"] is True
    rows = found["timing"]["rows"]
    assert [row["contestant"] for row in rows] == ["unpatched", "norms", "fused"]
    assert [row["path"] for row in rows] == ["none", path, path]
    assert str(timing_report.TimingReport.from_dict(found["timing"])) in done.out


def test_an_interrupt_shows_what_is_done(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, interrupted_turns: list[float]
) -> None:
    _arguments_seen(monkeypatch)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # the table is then rich's, if present
    file = tmp_path / "report.json"
    done = run(
        "compare", "tiny-gpt2", "--device", "cpu", "--time", "--measure", "prefill", "train",
        "--shape", "2x4", "--seconds", "7", "--against", "liger", "--json", file,
    )  # fmt: skip
    assert done.status == 130
    assert interrupted_turns == [7.0, 7.0]
    assert "interrupted: this is what was done until then" in done.out
    assert "fusedops: error: interrupted" in done.err
    found = json.loads(file.read_text())["timing"]
    assert found["interrupted"] is True
    assert {(row["measure"], row["sequences"], row["tokens"]) for row in found["rows"]} == {
        ("prefill", 2, 4)
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--seconds", "2"], "--seconds says what to time, and needs --time"),
        (["--decode-batch", "2"], "--decode-batch says what to time, and needs --time"),
        (["--time", "--shape", "4"], "expected sequences x tokens, as 4x2048, got '4'"),
        (["--time", "--shape", "0x4"], "expected a whole number from 1, got '0'"),
        (["--time", "--seconds", "nan"], "expected a number of seconds, got 'nan'"),
        (["--time", "--against", "compile,jax"], "expected compile, liger or both, got 'jax'"),
        (["--time", "--measure", "sleep"], "invalid choice: 'sleep'"),
    ],
)
def test_wrong_usage_of_time(run: Run, arguments: list[str], reason: str) -> None:
    done = run("compare", "tiny-llama", *arguments)
    assert done.status == 2
    assert reason in done.err
    assert "loading" not in done.err


# --- info ----------------------------------------------------------------------------------------


def test_info_tells_the_path_of_every_operator(run: Run, path: str, device: str) -> None:
    done = run("info")
    assert done.status == 0
    assert fusedops.__version__ in done.out
    assert environment.describe(probe=False)["packages"]["torch"] in done.out
    rows = [line.split() for line in done.out.splitlines() if line]
    for operator in OPERATORS:
        assert any(row[0] == operator and path in row for row in rows)
    assert ("none usable" in done.out) == (device == "cpu")


def test_info_tells_commit_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    if (ROOT / ".git").exists():
        assert environment.describe(probe=False)["commit"]
    monkeypatch.setattr(fusedops, "__file__", "/nowhere/fusedops/__init__.py")
    found = environment.describe(probe=False)
    assert found["commit"] is None
    if not torch.cuda.is_available():
        assert found["driver"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(environment, "_output", lambda *command: "570.1\n570.1")
    assert environment.driver() == "570.1"
    shown = environment.render({**found, "commit": "abc", "driver": "570.1", "operators": {}})
    assert f"fusedops      {fusedops.__version__}, commit abc\n" in shown
    assert "\ndriver        570.1\n" in shown


def test_info_as_json(run: Run, path: str, device: str) -> None:
    done = run("info", "--json")
    assert done.status == 0
    found = json.loads(done.out)
    assert found["fusedops"] == fusedops.__version__
    assert found["operators"].keys() == OPERATORS
    for devices in found["operators"].values():
        taken = next(taken for name, taken in devices.items() if name.startswith(device))
        assert taken["path"] == path
        assert taken["why"]


def test_info_shows_an_operator_that_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no driver\nmore of it")

    monkeypatch.setattr(fusedops, "rms_norm", fail)
    found = json.loads(run("info", "--json").out)["operators"]["rms_norm"]
    assert all(taken == {"path": "error", "why": "no driver"} for taken in found.values())


def test_info_says_why_the_reference_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "DISABLED", True)
    found = json.loads(run("info", "--json").out)["operators"]["add_rms_norm"]
    assert all(
        taken == {"path": "reference", "why": "FUSEDOPS_DISABLE is set"} for taken in found.values()
    )


def test_info_says_how_kernels_run_on_a_cpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    found = json.loads(run("info", "--json").out)["operators"]["rms_norm"]["cpu"]
    assert found["path"] == "reference"
    assert "TRITON_INTERPRET=1" in found["why"]


def test_version(run: Run) -> None:
    done = run("--version")
    assert (done.status, done.out.strip()) == (0, fusedops.__version__)


def test_available_memory_is_known_on_linux() -> None:
    found = environment.available_memory(torch.device("cpu"))
    if sys.platform == "linux":
        assert found is not None
        assert 2**20 < found < 2**50
    assert environment.available_memory(torch.device("meta")) is None
