# SPDX-License-Identifier: Apache-2.0
"""The scripts in examples/ run as their docstrings say, and find what they are there to show."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from fusedops import dispatch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# Arguments of each script ("{}" is a folder that is not there yet) and what it has to print.
SCRIPTS: dict[str, tuple[list[str], list[str]]] = {
    "char_gpt2.py": (["{}", "--steps", "2"], [r"trained on \d+ characters", r"saved in "]),
    "own_block.py": (
        [],
        [
            r"'add_rms_norm \((triton|interpreter|reference)\)': 4",
            r"plain (\d\.\d{4})\d+, fused \1",
        ],
    ),
    "patch_llama.py": (
        [],
        [
            r"LlamaDecoderLayer +2 +2 +1 +1 ",
            "parity holds: 5 fused calls",
            "5 norms restored; logits as before, bit for bit: True",
        ],
    ),
}


def test_every_script_is_run() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kernels_run: None,
) -> None:
    arguments, expected = SCRIPTS[name]
    script = str(EXAMPLES / name)
    # What the scripts set by themselves would stay for the tests that follow.
    monkeypatch.setenv("TRITON_INTERPRET", str(int(dispatch.INTERPRETED)))
    monkeypatch.setattr(sys, "argv", [script, *(a.format(tmp_path / "new") for a in arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    for pattern in expected:
        assert re.search(pattern, printed), printed
