# SPDX-License-Identifier: Apache-2.0
"""Kernels compile for GPUs that are not here, and come out as they were meant to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = {  # bytes that a program may take
    "cuda:80": 163 * 1024, "cuda:86": 99 * 1024, "cuda:90": 227 * 1024, "cuda:100": 227 * 1024,
    "cuda:120": 99 * 1024, "hip:gfx942": 64 * 1024,
}  # fmt: skip

# One for each entry of the tables in kernels/config.py, and one beyond them.
WIDTHS = (
    64, 128, 192, 256, 400, 512, 768, 896, 1024, 1600, 2048, 2560, 3072, 3584, 4096, 5120, 6144,
    7168, 8192, 12288, 16384, 32768, 65536,
)  # fmt: skip
# Those GPUs take what sm_80 and sm_100 do, unless its shared memory is more than they have.
FEW_WIDTHS = dict.fromkeys(("cuda:86", "cuda:120"), (768, 2560, 5120, 12288, 16384, 65536))

# Bytes a thread, beside 256 to 1020 in registers. Still the fastest of all tried on an H200:
# these by one of Triton 3.6 to 3.9, less or none by the others.
SPILLS = {
    ("norm_backward_kernel", "add_rms_norm", 12288): 8,
    ("norm_forward_kernel", "rms_norm", 65536): 8,
}

# For rows beyond one block where they are not sliced: fp64, and on AMD's GPUs. The first is for
# LayerNorm's widest blocks on NVIDIA's larger GPUs, too.
LOOPED = {"norm_forward_looped_kernel", "norm_backward_looped_kernel", "weight_gradient_kernel"}


def compile_kernels(*arguments):
    """The reports of tests/compile_kernels.py, run where Triton does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "compile_kernels.py", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", list(SHARED_MEMORY))
def test_compiles_within_limits(target):
    widths = FEW_WIDTHS.get(target, WIDTHS)
    reports = compile_kernels("--targets", target, "--widths", *map(str, widths))
    assert {report["kernel"] for report in reports} == {
        "norm_forward_kernel",
        "norm_backward_kernel",
        "reduce_partials_kernel",
        *({"norm_forward_looped_kernel"} if target not in FEW_WIDTHS else ()),
        *(LOOPED if target.startswith("hip") else {"norm_backward_sliced_kernel"}),
    }
    wide = [report for report in reports if report["width"] == 65536]
    assert any(report["sliced"] for report in wide) == target.startswith("cuda")
    for report in reports:
        assert report["shared"] <= SHARED_MEMORY[target], report
        if target.startswith("cuda"):
            assert report["widest_load"] == 16, report
            # A multiprocessor has a kilobyte more than a program may take, and reserves one each.
            together = report.get("programs", 1) * (report["shared"] + 1024)
            assert together <= SHARED_MEMORY[target] + 1024, report
        else:
            assert report["warps"] * 64 <= 1024, report  # threads
        if target == "cuda:90":
            assert_spills_little(report)


def assert_spills_little(report):
    most = SPILLS.get((report["kernel"], report["operator"], report["width"]), 0)
    assert report["spilled"] <= most, report


@pytest.mark.timeout(900)
def test_slices_whose_warps_send_compile_within_limits():
    """For the tuner: no table has them yet."""
    options = ("--widths", "12288", "16384", "--dtypes", "bf16", "fp32", "--apart")
    reports = compile_kernels("--targets", "cuda:90", *options)
    assert any(report["kernel"] == "norm_backward_sliced_kernel" for report in reports)
    for report in reports:
        assert_spills_little(report)


@pytest.mark.timeout(900)
def test_rows_of_a_few_elements_compile():
    """Two elements to a register, and there is only one."""
    reports = compile_kernels("--targets", "cuda:90", "--widths", "1", "2", "3", "17")
    assert {report["width"] for report in reports} == {1, 2, 3, 17}


@pytest.mark.timeout(900)
def test_looped_kernels_compile_within_limits():
    reports = compile_kernels(
        "--targets", "cuda:90", "--widths", "65536", "--dtypes", "fp64",
        "--operators", "add_layer_norm",
    )  # fmt: skip
    assert {report["kernel"] for report in reports} == {*LOOPED, "reduce_partials_kernel"}
    for report in reports:
        assert report["shared"] <= SHARED_MEMORY["cuda:90"], report
        assert report["spilled"] == 0, report
