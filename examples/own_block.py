# SPDX-License-Identifier: Apache-2.0
"""A transformer's pre-norm blocks written with `AddRMSNorm`, beside the usual ones.

    python examples/own_block.py

Both models have the same parameters under the same names. The fused one passes the branch and the
residual on instead of their sum, so that every add happens in the norm that reads it, also from
one block to the next. The script compares results and gradients, and then a few training steps.
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Triton reads it when kernels are defined, so before fusedops is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import fusedops
from fusedops.dispatch import count_calls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, WIDTH, HEADS, BLOCKS = 64, 128, 4, 2
STEPS = 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(-2, -3).flatten(-2))


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class FusedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = fusedops.AddRMSNorm(WIDTH), fusedops.AddRMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, branch: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The block's last branch and the stream that it is still to be added to."""
        if residual is None:  # the first block: there is nothing to add yet
            y, residual = fusedops.rms_norm(branch, self.norm1.weight, self.norm1.eps), branch
        else:
            y, residual = self.norm1(branch, residual)
        y, residual = self.norm2(self.attention(y), residual)
        return self.mlp(y), residual


class PlainModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class FusedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(FusedBlock() for _ in range(BLOCKS))
        self.norm = fusedops.AddRMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        branch, residual = self.embedding(ids), None
        for block in self.blocks:
            branch, residual = block(branch, residual)
        return self.head(self.norm(branch, residual)[0])


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def main() -> int:
    torch.manual_seed(0)
    plain, fused = PlainModel().to(DEVICE), FusedModel().to(DEVICE)
    fused.load_state_dict(plain.state_dict())
    ids = torch.randint(VOCABULARY, (2, 17), device=DEVICE)

    with count_calls() as calls:
        loss_of(fused, ids).backward()
    loss_of(plain, ids).backward()
    print("calls in a forward:", {f"{name} ({path})": n for (name, path), n in calls.items()})
    with torch.no_grad():
        difference = (fused(ids) - plain(ids)).abs().max().item()
    # Not the same bits: the statistics are summed in another order than torch sums them.
    print(f"largest difference of logits: {difference:.1e}")
    pairs = zip(fused.parameters(), plain.parameters(), strict=True)
    furthest = max(((a.grad - b.grad).abs().max() / b.grad.abs().max()).item() for a, b in pairs)
    print(f"largest difference of gradients, relative: {furthest:.1e}")

    losses = []
    for model in (plain, fused):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    print(f"loss after {STEPS} steps: plain {losses[0]:.6f}, fused {losses[1]:.6f}")
    return 0 if difference < 1e-5 and furthest < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
