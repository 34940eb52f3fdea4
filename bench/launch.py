# SPDX-License-Identifier: Apache-2.0
"""CPU time of one call of an operator, and of torch's and other libraries' for the same.

    python bench/launch.py                              into bench/results

bf16, rows too few to keep the GPU busy. Inference is a call of which nothing needs a gradient,
training one that records for the backward. All contestants take turns in one process, each with a
round of calls between two synchronises, and the smallest mean of a round counts: it is the time
until the last launch is made, not until it has run.
"""

import argparse
import gc
import itertools
import math
import time
from pathlib import Path

import providers
import record
import torch
from providers import Case
from run import brief, need_gpu

SHAPES = ((1, 4096), (64, 4096))
MODES = ("inference", "training")
CALLS = 20


def arguments(case, mode, device):
    x, residual, weight, bias, *_ = providers.tensors(case, device)
    inputs = (x, residual, weight, bias)
    if mode == "training":
        inputs = [None if t is None else t.requires_grad_() for t in inputs]
    return inputs


def round_of(function, inputs, synchronise):
    """Seconds a call, over a round of them."""
    synchronise()
    start = time.perf_counter()
    for _ in range(CALLS):
        function(*inputs)
    elapsed = time.perf_counter() - start
    synchronise()
    return elapsed / CALLS


def measure(case, mode, functions, rounds, device="cuda"):
    """The rows of one operator, shape and mode."""
    inputs = arguments(case, mode, device)
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    taken, lines = {}, []
    with torch.set_grad_enabled(mode == "training"):
        for name, function_of in functions.items():
            try:
                function = function_of(case)
                for _ in range(3):
                    round_of(function, inputs, synchronise)
                taken[name] = function, math.inf
            except Exception as error:
                offered = not isinstance(error, providers.NotOfferedError)
                status = "fails" if offered else "not offered"
                lines.append(line_of(case, mode, name, status, reason=brief(error)))
        gc.collect()
        gc.disable()  # a collection would hit one contestant or another
        for _ in range(rounds):
            for name, (function, best) in taken.items():
                taken[name] = function, min(best, round_of(function, inputs, synchronise))
        gc.enable()
    torchs = taken["torch"][1] if "torch" in taken else None
    for name, (_, best) in taken.items():
        times = {"us": round(best * 1e6, 3)}
        if torchs:
            times["of_torch"] = round(best / torchs, 4)
        lines.append(line_of(case, mode, name, "ok", **times))
    return lines


def line_of(case, mode, provider, status, **values):
    key = {"operator": case.operator, "rows": case.rows, "width": case.width, "dtype": case.dtype}
    return {**key, "mode": mode, "provider": provider, "status": status, **values}


def benchmark(options, device="cuda"):
    functions, missing = providers.load(options.provider)
    for name, reason in missing.items():
        print(f"missing: {name} ({reason})", flush=True)
    rows, runs = [], [record.environment(missing)]
    for shape, operator, mode in itertools.product(SHAPES, providers.OPERATORS, MODES):
        case = Case(operator, "forward", *shape)
        lines = measure(case, mode, functions, options.rounds, device)
        rows += [{**line, "run": 0} for line in lines]
        timed = "  ".join(f"{line['provider']} {line['us']:.2f}" for line in lines if "us" in line)
        print(f"{mode:9s} {operator:14s} {shape[0]}x{shape[1]}  {timed}", flush=True)
        record.write(options.out, {"benchmark": "launch", "runs": runs, "rows": rows})
    return rows


def parse(arguments=None):
    names = list(providers.LOADERS)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--provider", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, help="default: bench/results/GPU-launch.json")
    return parser.parse_args(arguments)


def main():
    options = parse()
    need_gpu("bench/launch.py")
    options.out = options.out or record.default_path(torch.cuda.get_device_name(), "launch")
    benchmark(options)


if __name__ == "__main__":
    main()
