# SPDX-License-Identifier: Apache-2.0
"""Whole models on a GPU: unpatched, patched, norms alone, always fused in blocks and across them.

    python bench/e2e.py --out e2e.json [--models llama-1b gpt2-xl] [--measures decode prefill]

Random weights, eager, bf16. All variants of a model share its weights and take turns in one
process, each time in another order; the figure is the smallest of the wall times seen, each up to a
synchronise, and beside it stands the median of the ratios within a round. Decode is one
step of one token on a cache of 128, prefill the forward of 4 x 2048 tokens (or as many as the
model has positions) with the last logits alone, training a forward and backward of as many.
Kernels are counted by torch's profiler.
"""

import argparse
import copy
import gc
import inspect
import json
import operator
import statistics
import sys
import time

import torch
import transformers
import triton
from record import commit
from transformers import DynamicCache

import fusedops
from fusedops.integrations import patch
from fusedops.integrations.loading import load
from fusedops.integrations.stream import BLOCK, TRIALS


def shared_copy(model):
    """A copy of the modules around the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


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


def decoder(model, batch):
    """A function that takes one step of decoding, and one that takes it back.

    Every step sees a cache of the same length: cuDNN's attention plans anew for each new one, some
    3 ms a layer, which whoever comes first would pay for all.
    """
    ids = torch.randint(0, model.config.vocab_size, (batch, 128), device="cuda")
    # transformers 5.24 renamed the argument.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    arguments = {name: cache, "use_cache": True}
    model(ids, **arguments)
    token = ids[:, :1]

    def step():
        model(token, **arguments)

    return step, lambda: cache.crop(-1)


def measure_of(measure, model):
    """(what is timed, what is done after it)."""
    vocabulary = model.config.vocab_size
    if measure.startswith("decode"):
        return torch.no_grad()(decoder)(model, int(measure.split("-")[1]))
    length = min(2048, model.config.max_position_embeddings)
    ids = torch.randint(0, vocabulary, (4, length), device="cuda")
    if measure == "prefill":
        return (lambda: model(ids, use_cache=False, logits_to_keep=1)), lambda: None

    def train():
        model(ids, labels=ids, use_cache=False).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    return train, lambda: None


def wall(call, reset):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    elapsed = (time.perf_counter() - start) * 1e3
    reset()
    return elapsed


def take_turns(calls, seconds):
    """{name: wall times in ms} of {name: (what is timed, what is done after it)}.

    Each round goes in another order: what ran before heats the GPU or fills caches.
    """
    times = {name: [] for name in calls}
    gc.collect()
    gc.disable()  # a collection, some 40 ms here, would hit one variant or another
    deadline = time.perf_counter() + seconds
    order = list(calls)
    while time.perf_counter() < deadline:
        for name in order:
            times[name].append(wall(*calls[name]))
        order.append(order.pop(0))
    gc.enable()
    return times


def round_ratio(times, base, name):
    """The median, over the rounds, of how much faster ``name`` was than ``base``."""
    return statistics.median(map(operator.truediv, times[base], times[name]))


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


def kernels(call, reset):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    reset()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum("Memcpy" not in e.name and "Memset" not in e.name for e in events)


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
            training = measure == "train"
            for model in models.values():
                model.train(training)
            with torch.set_grad_enabled(training):
                calls = {key: measure_of(measure, model) for key, model in models.items()}
                for _ in range(3):
                    for call in calls.values():
                        wall(*call)
                launched = {key: kernels(*call) for key, call in calls.items()}
                times = take_turns(calls, options.seconds)
            best = {key: min(values) for key, values in times.items()}
            rounds = {key: round_ratio(times, "unpatched", key) for key in times}
            for key in calls:
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
                for key in calls
            )
            print(f"{name:9s} {measure:10s} {line}", flush=True)
            del models, calls
        del base
        torch.cuda.empty_cache()
    write(options.out, rows)


if __name__ == "__main__":
    main()
