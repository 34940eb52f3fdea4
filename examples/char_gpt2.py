# SPDX-License-Identifier: Apache-2.0
"""Train a small character-level GPT-2, to have one with trained weights without a download.

    python examples/char_gpt2.py FOLDER
    fusedops compare FOLDER

The text is the language reference that ships with Python for ``help("topics")``. A folder that
holds a finished model is left as it is. Takes about half a minute on two cores.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

CONTEXT = 128
BATCH = 8
STEPS = 250
PEAK_RATE = 2e-3


def reference_text() -> str:
    """Python's language reference, ASCII only, topics in alphabetical order."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return "".join(character for character in text if character.isascii())


def build_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """One token a character, as a tokenizer that ``AutoTokenizer`` can load."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<unk>": 0}
    for character in sorted(set(text)):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def build_model(vocabulary: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=CONTEXT,
        n_embd=96,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def train(model: nn.Module, data: Tensor, steps: int) -> float:
    """AdamW with a warm-up and a cosine; the mean loss (nats a character) of the last tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    losses = []
    model.train()
    for step in range(steps):
        warm_up = min(1.0, (step + 1) / 20)
        rate = PEAK_RATE * warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
        ids = data[starts[:, None] + torch.arange(CONTEXT)]
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Fill a new folder and move it into place: a run that is cut short leaves no half of one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        os.rename(made, folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the model is kept")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    folder = arguments.folder
    if (folder / "config.json").is_file():
        print(f"{folder} holds a trained model already")
        return 0
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        print(f"{folder} exists and holds something else; name another folder", file=sys.stderr)
        return 1
    logging.disable_progress_bar()
    torch.manual_seed(0)
    # Matrices this small gain little from threads, and wait long for them on a busy machine.
    torch.set_num_threads(1)
    started = time.monotonic()
    text = reference_text()
    tokenizer = build_tokenizer(text)
    data = torch.tensor(tokenizer.encode(text))
    model = build_model(len(tokenizer))
    loss = train(model, data, arguments.steps)
    model.eval()
    save(model, tokenizer, folder)
    print(
        f"trained on {len(data)} characters in {time.monotonic() - started:.0f} s, "
        f"loss {loss:.2f} nats a character; saved in {folder}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
