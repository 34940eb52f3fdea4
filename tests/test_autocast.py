# SPDX-License-Identifier: Apache-2.0
"""Under autocast modules and patched models give what torch's own modules give.

The functions are compared with torch's in test_operators.py, their gradients in test_tracing.py.
"""

import pytest
import torch
from tiny_models import build_llama
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import fusedops
from fusedops import dispatch
from fusedops.integrations import patch, unpatch

pytestmark = pytest.mark.usefixtures("tree_sums")

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

MODULES = {
    fusedops.RMSNorm: nn.RMSNorm,
    fusedops.LayerNorm: nn.LayerNorm,
    fusedops.AddRMSNorm: nn.RMSNorm,
    fusedops.AddLayerNorm: nn.LayerNorm,
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("autocast_dtype", [BF16, FP16])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("ours", "torchs"), MODULES.items(), ids=lambda c: c.__name__)
def test_modules_between_linears(ours, torchs, dtype, autocast_dtype, device):
    """fp32 weights; what comes in is autocast's own dtype, fp32, or a half type that it is not."""
    size = 24
    linear = nn.Linear(size, size).to(device)
    theirs, module = torchs(size, eps=1e-5).to(device), ours(size, eps=1e-5).to(device)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(size))
    module.load_state_dict(theirs.state_dict())
    adds = ours in (fusedops.AddRMSNorm, fusedops.AddLayerNorm)
    rows = torch.randn(5, size).to(device, dtype)

    def run(norm):
        x = rows.clone().requires_grad_()
        norm.zero_grad()
        with torch.autocast(device, dtype=autocast_dtype):
            branch = linear(x)
            y, summed = norm(branch, x) if norm is module and adds else (None, None)
            if y is None:
                summed = x + branch if adds else branch
                y = norm(summed)
            out = linear(y)
        out.square().sum().backward()
        return y, summed, out, x.grad, *(p.grad for p in norm.parameters())

    for found, expected in zip(run(module), run(theirs), strict=True):
        assert found.dtype == expected.dtype
        # A value that rounds to another bf16 moves what is computed from it by as much.
        limit = 2 * torch.finfo(BF16).eps * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=limit)
    assert run(module)[1].dtype == (
        torch.promote_types(autocast_dtype, dtype) if adds else autocast_dtype
    )


def build_gpt2():
    torch.manual_seed(11)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("weights", [FP32, BF16])
@pytest.mark.parametrize("build", [build_llama, build_gpt2])
def test_patched_models_train(build, weights, device):
    model = build().to(device, weights)
    ids = torch.tensor([[5, 9, 33, 2, 17, 60, 8]], device=device)

    def run():
        model.zero_grad()
        with torch.autocast(device, dtype=BF16):
            outputs = model(ids, labels=ids)
        outputs.loss.backward()
        return [outputs.logits, outputs.loss, *(p.grad for p in model.parameters())]

    with torch.no_grad():
        truth = model(ids).logits.float()
    expected = run()
    patch(model)
    with dispatch.count_calls() as calls:
        for _ in range(2):
            found = run()
    if device == "cuda" or dispatch.INTERPRETED:
        assert sum(n for (name, _), n in calls.items() if name.startswith("add_")) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        limit = 0.05 * theirs.float().square().mean().sqrt().item()
        assert (ours - theirs).float().square().mean().sqrt() <= limit
    error = (expected[0] - truth).float().square().mean().sqrt()
    assert (found[0] - truth).float().square().mean().sqrt() <= 1.2 * error + 1e-6
    unpatch(model)
    assert torch.equal(run()[0], expected[0])
