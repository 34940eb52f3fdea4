# SPDX-License-Identifier: Apache-2.0
"""Whole models on a GPU: unpatched, norms patched, adds fused, and with Liger's norms.

    python bench/e2e.py --out e2e.json [--models llama-1b gpt2-xl] [--measures decode prefill]
                        [--variants fused "in block" across] [--against liger] [--seconds 4]
    python bench/e2e.py --merge a.json b.json --out both.json

Random weights, eager, bf16. What decode, prefill and train are, and how contestants share weights
and take turns, is in integrations/timing.py, which `fusedops compare --time` runs as well; Liger
runs in a process of its own (integrations/liger.py), beside an unpatched model of that process.

Variants: "norms" alone; "fused", what `patch` does by default, which leaves small hidden states
their adds; "across", with the adds of all sizes; "in block", the same without hand-overs to the
next block. 4 x 2048 tokens, or as many as the model has positions; training of 8B 1 x 2048.

A row's "profile" holds the GPU kernels of one call by kind: how many, and their milliseconds.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import record
import torch

from fusedops.integrations import patch
from fusedops.integrations.liger import add_liger
from fusedops.integrations.loading import load
from fusedops.integrations.stream import BLOCK, TRIALS
from fusedops.integrations.timing import (
    MEASURES,
    VARIANTS,
    Plan,
    add_timings,
    shared_copy,
    start_report,
)

MODELS = (
    "llama-1b", "llama-8b", "gpt2-small", "gpt2-xl", "qwen3-0.6b", "gemma2-2b", "bert-base",
)  # fmt: skip
ONE_SEQUENCE = {("llama-8b", "train")}  # of which four would not fit


def across(model):
    copied = shared_copy(model)
    patch(copied, fuse_residual="always")
    return copied


def in_block(model):
    """As `across`, with blocks whose hand-overs nobody ever fetched."""
    copied = across(model)
    for module in copied.modules():
        state = vars(module).get(BLOCK)
        if state is not None:
            state.successor, state.misses = None, 2 * TRIALS
    return copied


CONTESTANTS = {**VARIANTS, "in block": in_block, "across": across}


def plans(name, measures, seconds):
    """Of one model: one plan for all measures of the same number of sequences."""
    chosen = {}
    for measure in measures:
        sequences = 1 if (name, measure) in ONE_SEQUENCE else 4
        chosen.setdefault(sequences, []).append(measure)
    return [
        Plan(measures=group, sequences=sequences, seconds=seconds, halves=False)
        for sequences, group in chosen.items()
    ]


def rows_of(name, report):
    """The report's rows as the file has them, each with its own part of the profile."""
    return [
        {
            "model": name,
            **asdict(row),
            "profile": {
                part.kind: {"kernels": part.kernels, "gpu_ms": round(part.gpu_ms, 6)}
                for part in report.profile_of(row)
            },
            "run": 0,
        }
        for row in report.rows
    ]


def line(name, row):
    shape = f"{row.sequences}x{row.tokens}"
    memory = f" {row.peak_memory / 2**30:.2f} GiB" if row.peak_memory else ""
    return (
        f"{name:10s} {row.measure:7s} {shape:7s} {row.contestant:10s} {row.min_ms:9.3f} ms "
        f"x{row.best_ratio:.3f} ({row.ratio:.3f}, {row.rounds} rounds) {row.kernels} kernels"
        f"{memory}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument(
        "--variants", nargs="+", choices=list(CONTESTANTS)[1:], default=["norms", "fused"]
    )
    parser.add_argument("--against", nargs="*", choices=["liger"], default=["liger"])
    parser.add_argument("--seconds", type=float, default=4.0, help="spent on each measure")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="into --out")
    options = parser.parse_args()
    if options.merge:
        contents = [json.loads(path.read_text()) for path in options.merge]
        record.write(options.out, record.merge(contents))
        return
    contestants = {name: CONTESTANTS[name] for name in ("unpatched", *options.variants)}
    content = {"benchmark": "models", "runs": [record.environment({})], "rows": []}
    for name in options.models:
        base = load(name, torch.bfloat16, "cuda").model
        for plan in plans(name, options.measures, options.seconds):
            report = start_report(base, plan)
            add_timings(report, base, contestants, plan)
            if options.against:
                add_liger(report, base, name, plan)
            content["rows"] += rows_of(name, report)
            record.write(options.out, content)
            for row in report.rows:
                print(line(name, row), flush=True)
            for note in report.notes:
                print(f"{name}: {note}", flush=True)
        del base
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
