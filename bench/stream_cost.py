# SPDX-License-Identifier: Apache-2.0
"""CPU time of a decoder layer's own code: adds, norms, stream and hand-over, nothing else.

    python bench/stream_cost.py --out stream-cost.json

A Llama of 32 layers in which attention and MLP return a tensor made beforehand, so that what
remains is what patching changes. One token, no gradients. Variants share weights, take turns, and
the smallest time counts; it is the time until the last launch is made, not until it has run.
"""

import argparse
import time
from pathlib import Path

import record
import torch
from e2e import CONTESTANTS
from torch import nn
from transformers import LlamaConfig, LlamaModel

LAYERS, HIDDEN = 32, 4096


class Stub(nn.Module):
    """Stands for attention or MLP: gives a tensor that is there already."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, *args, **kwargs):
        return self.output


def stubbed(device, dtype):
    config = LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaModel(config).to(dtype).eval()
        branch = torch.randn(1, 1, HIDDEN, dtype=dtype)
    for layer in model.layers:
        layer.self_attn, layer.mlp = Stub((branch, None)), Stub(branch)
    return model


def call_layers(model, hidden):
    for layer in model.layers:
        hidden = layer(hidden)
    return model.norm(hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    model = stubbed("cuda", torch.bfloat16)
    models = {name: build(model) for name, build in CONTESTANTS.items()}
    hidden = torch.randn(1, 1, HIDDEN, dtype=torch.bfloat16, device="cuda")
    best = dict.fromkeys(models, float("inf"))
    with torch.no_grad():
        reference = call_layers(model, hidden)
        for name, variant in models.items():
            for _ in range(5):
                last = call_layers(variant, hidden)
            assert (last - reference).abs().max() < 0.1, name
        for _ in range(options.repeats):
            for name, variant in models.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                call_layers(variant, hidden)
                best[name] = min(best[name], time.perf_counter() - start)
        x = torch.randn(1, 1, HIDDEN, dtype=torch.bfloat16, device="cuda")
        add = float("inf")
        for _ in range(options.repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(32):
                x + hidden
            add = min(add, (time.perf_counter() - start) / 32)
    rows = {name: round(seconds / LAYERS * 1e6, 2) for name, seconds in best.items()}
    for name, cost in rows.items():
        print(f"{name:10s} {cost:7.2f} us a layer")
    print(f"one add    {add * 1e6:7.2f} us")
    lines = [{"contestant": name, "us_a_layer": cost, "run": 0} for name, cost in rows.items()]
    lines.append({"contestant": "one add", "us": round(add * 1e6, 2), "run": 0})
    runs = [record.environment({})]
    record.write(options.out, {"benchmark": "stream cost", "runs": runs, "rows": lines})


if __name__ == "__main__":
    main()
