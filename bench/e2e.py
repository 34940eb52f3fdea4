# SPDX-License-Identifier: Apache-2.0
"""Whole models on a GPU: unpatched, patched, norms alone, always fused in blocks and across them.

    python bench/e2e.py --out e2e.json [--models llama-1b gpt2-xl] [--measures decode-1 prefill]

Random weights, eager, bf16. How variants share weights and take turns, and what decode, prefill
and train are, is in integrations/timing.py, which `fusedops compare --time` runs as well. The
figure is the smallest of the wall times seen, and beside it stands the median of the ratios within
a round. Decode is one step of one token on a cache of 128, prefill the forward of 4 x 2048 tokens
(or as many as the model has positions) with the last logits alone, training a forward and backward
of as many. Kernels are counted by torch's profiler.
"""

import argparse
import json
import sys

import torch
import transformers
import triton
from record import commit

import fusedops
from fusedops.integrations import patch
from fusedops.integrations.loading import load
from fusedops.integrations.stream import BLOCK, TRIALS
from fusedops.integrations.timing import Plan, round_ratio, shared_copy, time_case


def variants(model):
    """name -> model; fused counts stay readable through the reports."""
    models, reports = {"unpatched": shared_copy(model)}, {}
    wanted = {"default": True, "norms": False, "in block": "always", "across": "always"}
    for name, fuse_residual in wanted.items():
        models[name] = shared_copy(model)
        reports[name] = patch(models[name], fuse_residual=fuse_residual)
    for module in models["in block"].modules():
        state = vars(module).get(BLOCK)
        if state is not None:  # as a block whose hand-overs nobody ever fetched
            state.successor, state.misses = None, 2 * TRIALS
    return models, reports


def case_of(measure, model):
    """The case that a name means: "decode-16" is a step for as many sequences."""
    name, _, batch = measure.partition("-")
    plan = Plan(decode_batches=[int(batch or 1)], measures=[name])
    return plan.cases(model)[0]


def write(path, rows):
    with open(path, "w") as file:
        json.dump(
            {
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "transformers": transformers.__version__,
                "fusedops": fusedops.__version__,
                "commit": commit(),
                "command": " ".join(sys.argv),
                "rows": rows,
            },
            file,
            indent=1,
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--models", nargs="+", default=["llama-1b", "llama-8b", "gpt2-small", "gpt2-xl"]
    )
    parser.add_argument("--measures", nargs="+", default=["decode-1", "decode-16", "prefill"])
    parser.add_argument("--seconds", type=float, default=6.0, help="spent on each measure")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        base = load(name, torch.bfloat16, "cuda").model
        for measure in options.measures:
            models, reports = variants(base)
            found = time_case(case_of(measure, base), models, options.seconds)
            times, launched = found.times, found.kernels
            best = {key: min(values) for key, values in times.items()}
            rounds = {key: round_ratio(times, "unpatched", key) for key in times}
            if found.failed:
                print(f"{name} {measure}: {found.failed}", file=sys.stderr)
            for key in times:
                rows.append(
                    {
                        "model": name,
                        "measure": measure,
                        "variant": key,
                        "ms": round(best[key], 4),
                        "ratio": round(best["unpatched"] / best[key], 4),
                        "median_ratio": round(rounds[key], 4),
                        "kernels": launched[key],
                        "runs": len(times[key]),
                        "fused": str(reports[key].fused) if key in reports else None,
                    }
                )
            line = "  ".join(
                f"{key} {best[key]:.3f} ms x{best['unpatched'] / best[key]:.3f} "
                f"({rounds[key]:.3f}, {launched[key]}k)"
                for key in times
            )
            print(f"{name:9s} {measure:10s} {line}", flush=True)
            del models
        del base
        torch.cuda.empty_cache()
    write(options.out, rows)


if __name__ == "__main__":
    main()
