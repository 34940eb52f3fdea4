# SPDX-License-Identifier: Apache-2.0
"""What bounds a kernel: memory, instructions or waiting, as Nsight Compute sees it.

    python bench/bounds.py                              the cases below, into bench/results
    python bench/bounds.py --case layer_norm:backward:13107x5120 --out bounds.json

bf16. Of each kernel of a call, once it is warm: bytes and share of the memory's peak, registers,
occupancy, instructions, how many of the cycles issue one, and for what the warps wait (warps of a
scheduler that wait so, for each instruction it issues).
"""

import argparse
import sys
from pathlib import Path

import ncu
import providers
import record
import torch
from run import need_gpu, shape

WAITS = (
    "barrier", "long_scoreboard", "short_scoreboard", "wait", "not_selected", "math_pipe_throttle",
)  # fmt: skip
METRICS = {
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "memory_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "duration": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
} | {
    f"waits_{name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
    for name in WAITS
}
MARK = "spin_kernel"  # that of torch.cuda._sleep
NAMES = {metric: name for name, metric in METRICS.items()}
CASES = (
    "layer_norm:forward:4096x32768", "layer_norm:forward:2048x65536",
    "layer_norm:forward:262144x256", "layer_norm:forward:256x8192",
    "layer_norm:backward:13107x5120", "layer_norm:backward:10922x12288",
    "layer_norm:backward:8192x16384", "layer_norm:backward:4096x32768",
    "rms_norm:backward:9362x7168", "rms_norm:backward:10922x12288",
    "rms_norm:backward:8192x16384", "rms_norm:backward:64x4096", "layer_norm:backward:64x4096",
)  # fmt: skip
"""Shapes of bench/run.py that stay behind what they should reach."""


def case_of(text):
    operator, direction, size = text.split(":")
    return providers.Case(operator, direction, *shape(size), "bf16")


def profile_these(cases):
    """What runs under ncu: each call once, warm, after a kernel that marks where it begins."""
    functions, _ = providers.load(["fusedops"])
    for text in cases:
        case = case_of(text)
        call = providers.bind(functions["fusedops"](case), case, providers.tensors(case, "cuda"))
        for _ in range(3):
            call()
        with ncu.counted():
            torch.cuda._sleep(1)
            call()


def parse(text, cases):
    """A row for each kernel of the cases, in the order of their launches, from ncu's CSV."""
    rows, left, case, seen = {}, iter(cases), None, None
    for launch, kernel, metric, _, value in ncu.readings(text):
        marks = MARK in kernel
        if launch != seen:
            case, seen = next(left) if marks else case, launch
        if not marks:
            rows.setdefault(launch, {"case": case, "kernel": kernel})[NAMES[metric]] = value
    return list(rows.values())


def measure(cases):
    options = ("--print-units", "base")
    text = ncu.run(__file__, ["--case", *cases], METRICS.values(), *options, timeout=600)
    return parse(text, cases)


def line_of(row):
    """One kernel in one line of text."""
    waits = sorted(((row[f"waits_{name}"], name) for name in WAITS), reverse=True)[:3]
    total = (row["read"] + row["written"]) / 1e6
    return (
        f"{row['case']:34s} {row['kernel'][:28]:28s} {row['duration'] / 1e3:7.1f} us "
        f"{total:7.1f} MB {row['memory_percent']:5.1f} % of the memory's peak, "
        f"{row['registers']:.0f} registers, {row['warps_percent']:.0f} % of the warps, issuing "
        f"{row['issue_percent']:.0f} %; "
        + ", ".join(f"{name} {value:.1f}" for value, name in waits)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs="+", default=CASES, metavar="OPERATOR:DIRECTION:ROWSxWIDTH")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.profile:
        return profile_these(options.case)
    need_gpu("bench/bounds.py")
    run = record.environment(missing={})
    rows = measure(options.case)
    out = options.out or record.default_path(run["gpu"], "bounds")
    record.write(out, {"benchmark": "bounds", "runs": [run], "rows": rows})
    print("\n".join(map(line_of, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
