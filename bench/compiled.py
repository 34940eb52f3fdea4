# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile: should a patched model's norms be the compiler's, or calls of our kernels?

    python bench/compiled.py --out compiled.json [--layers 4] [--measures prefill train]

A Llama of the 1B model's widths, fewer layers, bf16, random weights. Contestants, which share the
weights and take turns in one process: eager; the model compiled as it is, which is what a patched
model does under the compiler; with each norm a call of `fusedops.rms_norm`; and with the add within
the block a call of `fusedops.add_rms_norm`, too. Milliseconds, the smallest of the wall times seen,
each up to a synchronise.
"""

import argparse
from pathlib import Path

import record
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops
from fusedops.integrations.timing import Work, round_ratio, shared_copy, take_turns, wall

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def norm_forward(norm):
    def forward(hidden_states):
        return fusedops.rms_norm(hidden_states, norm.weight, norm.variance_epsilon, cast="input")

    return forward


def layer_forward(layer):
    """Llama's block with its first add and second norm in one call."""

    def forward(hidden_states, **arguments):
        branch = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **arguments)
        norm = layer.post_attention_layernorm
        normed, hidden_states = fusedops.add_rms_norm(
            branch[0], hidden_states, norm.weight, norm.variance_epsilon, cast="input"
        )
        return hidden_states + layer.mlp(normed)

    return forward


def contestants(model):
    models = {
        name: shared_copy(model)
        for name in ("eager", "compiled", "compiled, our norms", "compiled, our adds and norms")
    }
    for name, one in models.items():
        if "our" in name:
            for module in list(one.modules()):
                if type(module).__name__ == "LlamaRMSNorm":
                    module.forward = norm_forward(module)
        if "adds" in name:
            for layer in one.model.layers:
                layer.forward = layer_forward(layer)
    return {n: torch.compile(m) if "compiled" in n else m for n, m in models.items()}


def measured(measure, model, ids):
    if measure == "prefill":
        return lambda: model(ids, use_cache=False, logits_to_keep=1).logits

    def train():
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    return train


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--measures", nargs="+", default=["prefill", "train"])
    parser.add_argument("--seconds", type=float, default=4.0, help="spent on each measure")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("cuda"):
        base = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, **SIZES)).bfloat16()
        ids = torch.randint(0, SIZES["vocab_size"], (4, 2048))
    rows = []
    for measure in options.measures:
        training = measure == "train"
        torch._dynamo.reset()
        models = contestants(base.train(training))
        with torch.set_grad_enabled(training):
            calls = {name: measured(measure, model, ids) for name, model in models.items()}
            works = {name: Work(call, devices={ids.device}) for name, call in calls.items()}
            expected = calls["eager"]()
            for name, call in calls.items():
                torch.testing.assert_close(call(), expected, rtol=0.1, atol=0.1)
                wall(works[name])
                print(f"{measure} {name}: ready", flush=True)
            times = take_turns(works, options.seconds)
        for name, values in times.items():
            ratio = round_ratio(times, "compiled", name)
            rows.append(
                {
                    "measure": measure,
                    "variant": name,
                    "ms": round(min(values), 4),
                    "median_ratio_to_compiled": round(ratio, 4),
                    "rounds": len(values),
                    "run": 0,
                }
            )
            print(f"{measure:8s} {name:28s} {min(values):8.3f} ms  x{ratio:.3f}", flush=True)
    runs = [record.environment({})]
    record.write(options.out, {"benchmark": "compiled", "runs": runs, "rows": rows})


if __name__ == "__main__":
    main()
