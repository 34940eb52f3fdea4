# SPDX-License-Identifier: Apache-2.0
"""Time launch configurations against each other: where the numbers in kernels/config.py come from.

    python bench/tune.py --out tune.json [--directions forward backward] [--widths 1024 4096]

Compiles every candidate in parallel first, then times each by replaying a captured graph, in
shares of the copy bandwidth measured in the same run. bf16, 2^26 elements, 2^27 from H = 8192 on.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import sys

import torch

from fusedops.kernels import config, launch

OPERATORS = {  # centered, adds
    "rms_norm": (False, False),
    "add_rms_norm": (False, True),
    "layer_norm": (True, False),
    "add_layer_norm": (True, True),
}
WIDTHS = [64, 128, 256, 512, 768, 1024, 1600, 2048, 3072, 4096, 5120, 8192, 12288, 16384, 32768]


def candidates(direction, width):
    block = config.next_power_of_2(width)
    for rows, warps in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32)):
        tile = rows * block
        each = tile // (32 * warps)  # elements a thread
        if direction == "forward":
            if 8 <= each <= 64 and (rows == 1 or tile <= 16384) and (tile >= 1024 or rows >= 16):
                yield config.LaunchConfig(rows, block, warps)
        elif block <= 16384 and 8 <= each <= 64 and 2048 <= tile <= 16384 and warps >= 4:
            for stages in (1, 2, 3):
                if tile * 6 * (stages - 1) < 200_000:
                    yield config.LaunchConfig(rows, block, warps, stages, 1)


def tensors(width, rows, adds, centered):
    def rand(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, dy = rand(rows, width), rand(rows, width)
    residual = rand(rows, width) if adds else None
    weight, bias = rand(width), rand(width) if centered else None
    return x, dy, residual, weight, bias


def calls(direction, operator, width, rows, chosen):
    """A function that makes the launches of one direction with a given configuration."""
    centered, adds = OPERATORS[operator]
    x, dy, residual, weight, bias = tensors(width, rows, adds, centered)
    y = torch.empty_like(x)
    if direction == "forward":
        summed = torch.empty_like(x) if adds else None

        def call():
            launch.forward_config = lambda *_, **__: chosen
            launch.launch_forward(
                x, residual, weight, bias, y, summed, None, None, 1e-6,
                centered=centered, cast_input=False, weight_offset=0.0,
            )  # fmt: skip

        return call
    rstd = torch.rand(rows, device="cuda") + 0.5
    mean = torch.randn(rows, device="cuda") if centered else None
    dweight = torch.empty_like(weight)
    dbias = torch.empty_like(weight) if centered else None

    def call():
        launch.backward_config = lambda *_: chosen
        launch.launch_backward(
            x, dy, residual, weight, mean, rstd, y, dweight, dbias, weight_offset=0.0
        )

    return call


def precompile(job):
    direction, operator, width, chosen = job
    try:
        calls(direction, operator, width, 64, chosen)()
        torch.cuda.synchronize()
    except Exception as error:  # out of shared memory: the timing run meets it again
        return f"{job}: {type(error).__name__}"
    return None


def graph_time(call, repeats=9):
    """Median microseconds of a replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def copy_bandwidth():
    """TB/s of a device-to-device copy, bytes read and written."""
    source = torch.randn(2**27, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return source.numel() * 4 / graph_time(lambda: target.copy_(source)) * 1e-6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"])
    parser.add_argument("--operators", nargs="+", default=list(OPERATORS))
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    options = parser.parse_args()

    jobs = [
        (direction, operator, width, chosen)
        for direction in options.directions
        for operator in options.operators
        for width in options.widths
        for chosen in candidates(direction, width)
    ]
    print(f"{len(jobs)} candidates", flush=True)
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        failures = [f for f in pool.imap_unordered(precompile, jobs, chunksize=4) if f]
    print(f"compiled, {len(failures)} failed", flush=True)

    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s", flush=True)

    results = []
    for (direction, operator, width), group in itertools.groupby(jobs, key=lambda job: job[:3]):
        _, adds = OPERATORS[operator]
        # Tensors of n_rows x H that have to pass: x, y (and residual, sum); s, dy, ds (and dsum).
        streams = (4 if adds else 2) if direction == "forward" else (4 if adds else 3)
        elements = 2**26 if width < 8192 else 2**27
        rows = elements // width
        timed = []
        for *_, chosen in group:
            per_sm = (1, 2, 3, 4) if direction == "backward" else (1,)
            for programs in per_sm:
                one = dataclasses.replace(chosen, programs_per_sm=programs)
                try:
                    time = graph_time(calls(direction, operator, width, rows, one))
                except Exception as error:
                    print(width, one, type(error).__name__)
                    continue
                share = streams * rows * width * 2 / time * 1e-6 / copy * 100
                timed.append((round(share, 1), one))
        timed.sort(key=lambda pair: -pair[0])
        for share, one in timed:
            results.append(
                {"direction": direction, "operator": operator, "width": width, "share": share,
                 "rows": one.block_rows, "warps": one.num_warps, "stages": one.num_stages,
                 "per_sm": one.programs_per_sm}
            )  # fmt: skip
        best = "  ".join(
            f"{share}:({one.block_rows},{one.num_warps},{one.num_stages},{one.programs_per_sm})"
            for share, one in timed[:4]
        )
        print(f"{direction[:3]} {operator:15s}{width:6d} {best}", flush=True)
    with open(options.out, "w") as file:
        json.dump(
            {"copy_tb_s": copy, "gpu": torch.cuda.get_device_name(), "results": results}, file
        )


if __name__ == "__main__":
    sys.exit(main())
