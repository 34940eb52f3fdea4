# SPDX-License-Identifier: Apache-2.0
"""Patch a Llama, see what fuses, prove that it computes the same, and take it all out again.

    python examples/patch_llama.py

The model is tiny and random, so that the script needs neither a download nor a GPU: on a CPU the
kernels run under Triton's interpreter, in some seconds. For a real model put `from_pretrained` in
`build_model`.
"""

import os
import sys

import torch
from torch import Tensor, nn

# Triton reads it when kernels are defined, so before fusedops is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from transformers import LlamaConfig, LlamaForCausalLM

from fusedops.integrations import check_parity, patch, unpatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 64


def build_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval().to(DEVICE)


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits


def main() -> int:
    model = build_model()
    ids = torch.arange(TOKENS, device=DEVICE)[None]
    before = logits(model, ids)

    # A forward this small would keep its own adds on a GPU; "always" shows them fused.
    report = patch(model, fuse_residual="always")
    logits(model, ids)
    print(report)

    parity = check_parity(model, ids, backward=True)
    print(f"\n{parity.verdict}")
    print(f"largest gradient difference: {max(g.max for g in parity.gradients or ()):.1e}")

    restored = unpatch(model)
    same = torch.equal(logits(model, ids), before)
    print(f"\n{restored} norms restored; logits as before, bit for bit: {same}")
    return 0 if parity.ok and same else 1


if __name__ == "__main__":
    sys.exit(main())
