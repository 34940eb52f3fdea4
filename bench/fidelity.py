# SPDX-License-Identifier: Apache-2.0
"""A model of real weights on real text: perplexity, parity, and a fine-tuning run.

    python bench/fidelity.py --model SmolLM2-135M-Instruct.Q4_1.gguf --out fidelity.json
                             [--dtypes bf16 fp16] [--sequences 4] [--tokens 1024] [--steps 200]

The text is the language reference that comes with Python (pydoc_data.topics). In each dtype:
`check_parity` on the first sequences of it, and the perplexity of the unpatched model, the patched
one, and the unpatched one in fp32, on these. Then the first dtype's model is trained (AdamW) on the
text that follows, three times from the same weights on the same batches: unpatched, patched, and
unpatched with one weight changed by one unit in the last place, which is what the smallest possible
difference grows to.
"""

import argparse
import copy
import math
from pathlib import Path
from pydoc_data import topics

import record
import torch
from providers import DTYPES

from fusedops.integrations import check_parity, load, patch

LEARNING_RATE = 1e-4


def text_windows(tokenizer, sequences, tokens):
    """The text as token ids (n, sequences, tokens); what is left over is dropped."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = torch.tensor(tokenizer.encode(text))
    count = len(ids) // (sequences * tokens)
    return ids[: count * sequences * tokens].view(count, sequences, tokens)


@torch.no_grad()
def perplexity(model, ids):
    """exp of the mean negative log-likelihood of each token after the first of its sequence."""
    total = torch.zeros((), dtype=torch.float64)
    for sequence in ids.split(1):  # logits of whole vocabularies are large
        logits = model(input_ids=sequence, use_cache=False).logits[:, :-1].double()
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), sequence[:, 1:].flatten(), reduction="sum"
        ).cpu()
    return math.exp(total / (ids.numel() - len(ids)))


def compare(model, ids):
    """Perplexities and what `check_parity` found, as a row."""
    report = check_parity(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    patched, exact = copy.deepcopy(model), copy.deepcopy(model)
    torch.nn.Module.float(exact)  # transformers forbids it to models that came quantised
    patch(patched, fuse_residual="always")
    differences = {
        "patched": report.patched,
        "unpatched_to_fp32": report.unpatched_to_fp32,
        "patched_to_fp32": report.patched_to_fp32,
    }
    return {
        "tokens": ids.numel(),
        "perplexity": {
            "fp32": perplexity(exact, ids),
            "unpatched": perplexity(model, ids),
            "patched": perplexity(patched, ids),
        },
        "kl_mean": {n: d and d.kl_mean for n, d in differences.items()},
        "top1": {n: d and d.top1 for n, d in differences.items()},
        "bit_equal": report.patched.bit_equal,
        "distance_ratio": report.ratio,
        "blocks_bit_equal": [block.bit_equal for block in report.blocks],
        "outcome": report.outcome,
        "path": report.path,
        "fused_calls": report.fused_calls,
    }


def nudged(model):
    """``model`` with the first number of its first matrix one unit in the last place off zero."""
    weight = next(p for p in model.parameters() if p.dim() > 1 and p.is_floating_point())
    with torch.no_grad():
        weight.view(torch.int16 if weight.itemsize == 2 else torch.int32).view(-1)[:1] += 1
    return model


def losses(model, batches, rate=LEARNING_RATE):
    """The loss before each step of training in place."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    found = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.detach())
    return [round(loss.item(), 6) for loss in found]


def fine_tune(model, windows, steps):
    """{contestant: losses}, of batches that begin anew where the text ends."""
    batches = [windows[step % len(windows)] for step in range(steps)]
    contestants = {
        "unpatched": lambda copied: copied,
        "patched": lambda copied: (patch(copied, fuse_residual="always"), copied)[1],
        "nudged": nudged,
    }
    return {n: losses(make(copy.deepcopy(model)), batches) for n, make in contestants.items()}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="as for `fusedops compare`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp16"])
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of each sequence")
    parser.add_argument("--steps", type=int, default=200, help="of training; 0: none")
    options = parser.parse_args(arguments)
    run, name = record.environment({}), Path(options.model).stem
    content = {"benchmark": "fidelity", "runs": [run], "rows": []}
    for number, dtype in enumerate(options.dtypes):
        loaded = load(options.model, DTYPES[dtype], options.device)
        windows = text_windows(loaded.tokenizer, options.sequences, options.tokens)
        windows = windows.to(options.device)
        row = {"model": name, "dtype": dtype, "run": 0, **compare(loaded.model, windows[0])}
        if number == 0 and options.steps:
            row["losses"] = fine_tune(loaded.model, windows[1:], options.steps)
            row["learning_rate"] = LEARNING_RATE
        content["rows"].append(row)
        record.write(options.out, content)
        found = row["perplexity"]
        print(
            f"{name} {dtype}: perplexity {found['fp32']:.4f} in fp32, {found['unpatched']:.4f} "
            f"unpatched, {found['patched']:.4f} patched; parity {row['outcome']}, distance to fp32 "
            f"{row['distance_ratio']}",
            flush=True,
        )
        for contestant, values in row.get("losses", {}).items():
            print(f"{contestant:10s} {values[0]:.4f} ... {values[-1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
