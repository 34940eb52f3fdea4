# SPDX-License-Identifier: Apache-2.0
"""What direct.c asks the driver for, word by word, beside what Triton's own launcher asks for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusedops import direct

pytest.importorskip("triton")
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tests/fake_driver.c as libcuda.so.1."""
    header = direct.cuda_header()
    if direct.load_native() is None:
        pytest.skip("no C compiler with Python's headers")
    if not header.exists():
        pytest.skip("this Triton brings no cuda.h")
    assert hasattr(direct.load_native(), "Launcher")
    folder: Path = tmp_path_factory.mktemp("driver")
    source, library = TESTS / "fake_driver.c", folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", f"-I{header.parent}", "-Wl,-soname,libcuda.so.1"]
    compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"
    subprocess.run([compiler, source, *flags, "-o", library], check=True)
    return folder


@pytest.mark.timeout(300)
def test_launches_are_those_of_triton(fake_driver: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "FUSEDOPS_NATIVE": "1",
        "LD_LIBRARY_PATH": str(fake_driver),
        "TRITON_LIBCUDA_PATH": str(fake_driver),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), environment.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, TESTS / "launch_kernels.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["36"]  # 3 widths, 4 operators, 3 kernels
