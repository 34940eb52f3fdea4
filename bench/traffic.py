# SPDX-License-Identifier: Apache-2.0
"""Bytes that reach the GPU's memory: an add and its norm apart, and fused. Needs Nsight Compute.

    python bench/traffic.py                             into bench/results

16384 x 4096, bf16. ncu counts what the memory (DRAM) reads and writes for every kernel of a call,
without replaying kernels and without emptying caches, so that what a cache saves is seen; the mean
of a few calls counts. Backward is that of y and of the sum, both of which are used, with respect
to x, residual, weight and bias.
"""

import argparse
import sys
from pathlib import Path

import ncu
import record
import torch
from run import need_gpu
from torch.nn import functional

import fusedops

ROWS, WIDTH = 16384, 4096
WARM, CALLS = 3, 4
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
TIMES = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3}
# Tensors of rows that each way reads and writes at least.
STREAMS = {
    # x, residual -> sum; sum -> y
    ("apart", "forward"): 5,
    ("fused", "forward"): 4,
    # sum, dy -> ds of the norm; that and dsum -> ds
    ("apart", "backward"): 6,
    ("fused", "backward"): 4,
}


def torch_norm(operator):
    if operator == "rms_norm":
        return lambda s, weight, bias: functional.rms_norm(s, (WIDTH,), weight, 1e-6)
    return lambda s, weight, bias: functional.layer_norm(s, (WIDTH,), weight, bias)


def our_norm(operator):
    if operator == "rms_norm":
        return lambda s, weight, bias: fusedops.rms_norm(s, weight)
    return lambda s, weight, bias: fusedops.layer_norm(s, weight, bias)


def forward_of(operator, way):
    """A function of (x, residual, weight, bias) that gives (y, sum)."""
    if way == "fused":
        if operator == "rms_norm":
            return lambda x, residual, weight, bias: fusedops.add_rms_norm(x, residual, weight)
        return fusedops.add_layer_norm
    norm = torch_norm(operator) if way == "torch apart" else our_norm(operator)

    def apart(x, residual, weight, bias):
        s = residual + x
        return norm(s, weight, bias), s

    return apart


def call_of(operator, way, direction):
    def rand(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    backward = direction == "backward"
    inputs = [rand(ROWS, WIDTH), rand(ROWS, WIDTH), rand(WIDTH)]
    inputs.append(rand(WIDTH) if operator == "layer_norm" else None)
    needed = [t.requires_grad_(backward) for t in inputs if t is not None]
    forward = forward_of(operator, way)
    if not backward:
        return lambda: forward(*inputs)
    outputs = forward(*inputs)
    gradients = (rand(ROWS, WIDTH), rand(ROWS, WIDTH))
    return lambda: torch.autograd.grad(outputs, needed, gradients, retain_graph=True)


def profile_this(operator, way, direction):
    """What runs under ncu."""
    call = call_of(operator, way, direction)
    for _ in range(WARM):
        call()
    with ncu.counted():
        for _ in range(CALLS):
            call()


def parse(text):
    """(bytes read, bytes written, microseconds, kernels) of a call, from ncu's CSV."""
    sums, launches = dict.fromkeys(METRICS, 0.0), set()
    for launch, _, metric, unit, value in ncu.readings(text):
        sums[metric] += value * (UNITS.get(unit) or TIMES[unit])
        launches.add(launch)
    return (*(sums[name] / CALLS for name in METRICS), len(launches) / CALLS)


def measure(operator, way, direction):
    what, options = (operator, way, direction), ("--cache-control", "none")
    text = ncu.run(__file__, what, METRICS, *options, timeout=120)
    read, written, micros, kernels = parse(text)
    tensor = ROWS * WIDTH * 2
    return {
        "operator": operator, "way": way, "direction": direction,
        "read_mb": round(read / 1e6, 1), "written_mb": round(written / 1e6, 1),
        "us": round(micros, 1), "kernels": kernels,
        "least_mb": round(STREAMS[way.split()[-1], direction] * tensor / 1e6, 1),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--op", nargs="+", default=["rms_norm", "layer_norm"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.profile:
        return profile_this(*options.profile)
    need_gpu("bench/traffic.py")
    run = record.environment(missing={})
    out = options.out or record.default_path(run["gpu"], "traffic")
    rows = []
    for operator in options.op:
        for direction in ("forward", "backward"):
            for way in ("torch apart", "apart", "fused"):
                rows.append(measure(operator, way, direction))
                print(rows[-1], flush=True)
                record.write(out, {"benchmark": "traffic", "runs": [run], "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
