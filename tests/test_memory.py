# SPDX-License-Identifier: Apache-2.0
"""What operators and patched models keep: no more than the unpatched, and nothing for good.

What a single call saves for its backward is counted in test_gradients.py.
"""

import gc
import sys
import weakref

import pytest
import torch
from tiny_models import build_llama, randomised
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fusedops import add_rms_norm, dispatch
from fusedops.integrations import patch, unpatch
from fusedops.integrations.patching import force_operators

pytestmark = pytest.mark.usefixtures("tree_sums")

BF16, FP32 = torch.bfloat16, torch.float32


def build_gpt2():
    torch.manual_seed(11)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    return randomised(GPT2LMHeadModel(config))


def ids_of(model, batch, length):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    return ids.to(model.device)


# A training step ---------------------------------------------------------------------------------


def saved_bytes(model, ids):
    """Bytes that the graph of a forward keeps beside the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, labels=ids, use_cache=False)
    return sum(size for address, (size, _) in kept.items() if address not in own)


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        (build_llama, FP32),
        (build_llama, BF16),
        (build_gpt2, FP32),
        # On the CPU torch rounds LayerNorm's statistics to bf16, and saves half of ours.
        pytest.param(build_gpt2, BF16, marks=pytest.mark.gpu),
    ],
)
def test_a_forward_saves_no_more_than_the_unpatched_models(build, dtype, device):
    model = build().to(device, dtype)
    ids = ids_of(model, 2, 7)
    expected = saved_bytes(model, ids)
    patch(model)
    for _ in range(2):
        assert saved_bytes(model, ids) <= expected


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peak_of_a_training_step_is_no_higher_than_the_unpatched_models(family, checkpointed):
    torch.manual_seed(0)
    if family == "llama":
        config = LlamaConfig(
            vocab_size=2048, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4,
            num_attention_heads=16, num_key_value_heads=4,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    else:
        config = GPT2Config(
            vocab_size=2048, n_embd=1024, n_layer=4, n_head=16, n_positions=512,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    model = model.to("cuda", BF16).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters())
    ids = ids_of(model, 8, 512)

    def peak():
        for _ in range(3):  # the first ones compile, and make the optimizer's state
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    before = peak()
    patch(model)
    assert peak() <= before
    unpatch(model)
    assert peak() <= before


# Leaks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, pytest.param(65544, marks=pytest.mark.gpu)])
def test_a_call_keeps_nothing_alive(op, width, device):
    """No scratch memory, and no cycle that holds a tensor until the next garbage collection."""
    gc.collect()
    gc.disable()
    in_use = torch.cuda.memory_allocated() if device == "cuda" else None
    try:
        inputs = op.inputs((4, width), FP32, device)
        held = [weakref.ref(t) for t in inputs.values()]
        for _ in range(3):
            op.call(inputs)
            leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
            outputs = [out for out in op.call(leaves) if out is not None]
            torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
            held += [weakref.ref(t) for t in (*leaves.values(), *outputs)]
            held += [weakref.ref(t.grad) for t in leaves.values()]
            del leaves, outputs
        del inputs
        assert not [ref for ref in held if ref() is not None]
        assert in_use is None or torch.cuda.memory_allocated() == in_use
    finally:
        gc.enable()


@pytest.fixture
def forced(device, monkeypatch):
    """On the CPU patched models call the reference: many times what the interpreter can do."""
    if device == "cuda":
        yield
        return
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    with force_operators():
        yield


class Usage:
    """What there is now: Python's objects, its blocks of memory, the GPU's memory in use."""

    def __init__(self):
        gc.collect()
        self.objects = len(gc.get_objects())
        self.blocks = sys.getallocatedblocks()
        self.device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def assert_no_leak(step, rounds):
    """``step(i)`` for so many rounds leaves less behind than one object in four rounds."""
    for i in range(8):
        step(i)
    before = Usage()
    for i in range(rounds):
        step(i)
    after = Usage()
    # Other tests' garbage may go meanwhile; a leak is there each time. Of blocks, about a thousand
    # come to be by and by, without anything of ours too: Python's own caches.
    assert after.objects - before.objects < rounds / 4
    assert after.blocks - before.blocks < 1500 + rounds / 4
    assert after.device == before.device


def test_patching_leaves_nothing_behind(device, forced):
    model = build_llama().to(device)
    ids = ids_of(model, 1, 3)

    def step(i):
        patch(model)
        if i % 8 == 0:
            with torch.no_grad():
                model(ids)
        unpatch(model)

    assert_no_leak(step, 1000 if device == "cuda" else 120)


class Failing(nn.Module):
    """A branch that fails in the forward or in the backward when it is told to."""

    where = None

    def forward(self, x):
        if self.where == "forward":
            raise ArithmeticError("in the forward")
        x = x.clone()
        if self.where == "backward" and x.requires_grad:
            x.register_hook(self.fail)
        return x

    def fail(self, grad):
        raise ArithmeticError("in the backward")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mix, self.mlp = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def test_forwards_with_exceptions_leave_nothing_behind(device, forced):
    model = nn.Sequential(*(Block() for _ in range(3)), nn.LayerNorm(32)).to(device)
    failing = Failing()
    model[1].mlp = nn.Sequential(model[1].mlp, failing)
    report = patch(model)
    x = torch.randn(2, 3, 32, device=device)

    def step(i):
        failing.where = (None, "forward", None, "backward")[i % 4]
        train = i % 8 >= 2
        with torch.set_grad_enabled(train):
            try:
                loss = model(x).square().sum()
                if train:
                    loss.backward()
                assert failing.where is None
            except ArithmeticError:
                assert failing.where is not None
        model.zero_grad()
        with pytest.raises(ValueError, match="residual: expected x's shape"):
            add_rms_norm(x, x[:1])

    assert_no_leak(step, 10_000 if device == "cuda" else 400)
    assert device == "cpu" or report.fused[0].across > 10_000
