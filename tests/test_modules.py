# SPDX-License-Identifier: Apache-2.0
"""The modules: torch's own to the outside, the fused functions inside."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fusedops

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

PARENTS = {
    fusedops.RMSNorm: nn.RMSNorm,
    fusedops.LayerNorm: nn.LayerNorm,
    fusedops.AddRMSNorm: nn.RMSNorm,
    fusedops.AddLayerNorm: nn.LayerNorm,
}
ADDING = (fusedops.AddRMSNorm, fusedops.AddLayerNorm)

ours_and_torchs = pytest.mark.parametrize(
    ("ours", "torchs"), PARENTS.items(), ids=lambda c: f"{c.__module__.split('.')[0]}.{c.__name__}"
)
rms_or_layer = pytest.mark.parametrize(
    ("ours", "torchs"), list(PARENTS.items())[:2], ids=lambda c: c.__name__
)
layer_norms = pytest.mark.parametrize(
    "ours", [fusedops.LayerNorm, fusedops.AddLayerNorm], ids=lambda c: c.__name__
)


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


def forward(module, shape, device, dtype=FP32):
    """What ``module`` and the torch norm it stands for give for the same input."""
    x = torch.randn(shape).to(device, dtype)
    if isinstance(module, ADDING):
        residual = torch.randn(shape).to(device, dtype)
        y, summed = module(x, residual)
        assert torch.equal(summed, residual + x)
        return y, residual + x
    return module(x), x


@ours_and_torchs
def test_is_a_torch_norm(ours, torchs):
    module = ours(8)
    assert isinstance(module, torchs)
    assert module.normalized_shape == (8,)


@ours_and_torchs
@pytest.mark.parametrize("shape", [40, [40], (4, 10), torch.Size((2, 4, 5))])
def test_agrees_with_torchs_module(ours, torchs, shape, device):
    module = randomise(ours(shape, device=device))
    other = torchs(shape, device=device)
    other.load_state_dict(module.state_dict())
    y, s = forward(module, (3, *module.normalized_shape), device)
    torch.testing.assert_close(y, other(s), atol=1e-5, rtol=1e-5)


@ours_and_torchs
@pytest.mark.parametrize("shape", [12, (3, 4)])
def test_trains_like_torchs_module(ours, torchs, shape, device):
    module = randomise(ours(shape, device=device))
    other = torchs(shape, device=device)
    other.load_state_dict(module.state_dict())
    y, s = forward(module, (5, *module.normalized_shape), device)
    dy = torch.randn_like(y)
    y.backward(dy)
    other(s).backward(dy)
    for (name, mine), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        assert mine.grad.shape == mine.shape, name
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5)


@ours_and_torchs
def test_state_dicts_are_exchangeable(ours, torchs):
    mine, theirs = randomise(ours((2, 8))), randomise(torchs((2, 8)))
    assert list(mine.state_dict()) == list(theirs.state_dict())
    mine.load_state_dict(theirs.state_dict())
    assert torch.equal(mine.weight, theirs.weight)
    randomise(mine)
    theirs.load_state_dict(mine.state_dict())
    assert torch.equal(mine.weight, theirs.weight)


@ours_and_torchs
def test_without_affine_parameters(ours, torchs, device):
    module = ours(24, elementwise_affine=False, device=device)
    assert module.weight is None
    assert not module.state_dict() and not list(module.parameters())
    y, s = forward(module, (3, 24), device)
    other = torchs(24, elementwise_affine=False, device=device)
    torch.testing.assert_close(y, other(s), atol=1e-5, rtol=1e-5)


@layer_norms
def test_without_bias(ours, device):
    module = randomise(ours(24, bias=False, device=device))
    assert module.bias is None and list(module.state_dict()) == ["weight"]
    y, s = forward(module, (3, 24), device)
    other = nn.LayerNorm(24, bias=False, device=device)
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(y, other(s), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ours", [fusedops.RMSNorm, fusedops.AddRMSNorm], ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64])
def test_eps_none_is_resolved_as_torch_does(ours, dtype, device):
    """On rows small enough for eps to decide the result."""
    module = ours(8, device=device, dtype=dtype)
    assert module.eps is None
    x = torch.full((2, 8), 1e-4, dtype=FP64).to(device, dtype)
    y = module(x, torch.zeros_like(x))[0] if isinstance(module, ADDING) else module(x)
    theirs = nn.RMSNorm(8, device=device, dtype=dtype)(x)
    torch.testing.assert_close(y, theirs, rtol=1e-3, atol=0)


def test_default_eps_are_torchs():
    assert fusedops.RMSNorm(8).eps == nn.RMSNorm(8).eps
    assert fusedops.LayerNorm(8).eps == nn.LayerNorm(8).eps
    assert fusedops.AddRMSNorm(8).eps == nn.RMSNorm(8).eps
    assert fusedops.AddLayerNorm(8).eps == nn.LayerNorm(8).eps


@ours_and_torchs
def test_eps_is_read_at_each_call(ours, torchs, device):
    module = ours(8, eps=1e-5, device=device)
    x = 1e-3 * torch.randn(2, 8, device=device)
    arguments = (x, x) if isinstance(module, ADDING) else (x,)
    before = module(*arguments)
    module.eps = 1.0
    after = module(*arguments)
    if isinstance(module, ADDING):
        before, after = before[0], after[0]
    assert (after.abs() < 0.1 * before.abs()).all()


@ours_and_torchs
@pytest.mark.parametrize("dtype", [FP16, BF16, FP64])
def test_device_and_dtype_keywords(ours, torchs, dtype, device):
    module = ours(8, device=device, dtype=dtype)
    assert module.weight.dtype == dtype and module.weight.device.type == device
    y, _ = forward(module, (2, 8), device, dtype)
    assert y.dtype == dtype


@ours_and_torchs
def test_meta_device_builds_and_infers_shapes(ours, torchs):
    module = ours(8, device="meta")
    assert module.weight.is_meta
    x = torch.empty(2, 3, 8, device="meta")
    y = module(x, x)[0] if isinstance(module, ADDING) else module(x)
    assert y.is_meta and y.shape == x.shape


@rms_or_layer
def test_repr_is_torchs(ours, torchs):
    assert repr(ours((2, 8), eps=1e-3)) == repr(torchs((2, 8), eps=1e-3))


@ours_and_torchs
def test_repr_names_class_and_options(ours, torchs):
    text = repr(ours((2, 8), eps=1e-3, elementwise_affine=False))
    assert text.startswith(ours.__name__ + "(")
    assert "(2, 8)" in text and "eps=0.001" in text and "elementwise_affine=False" in text


def round_trip(how, module):
    if how == "deepcopy":
        return copy.deepcopy(module)
    if how == "pickle":
        return pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@ours_and_torchs
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_equal_and_independent(ours, torchs, how, device):
    module = randomise(ours(8, eps=1e-3, device=device))
    twin = round_trip(how, module)
    assert type(twin) is ours and twin.eps == module.eps
    x = torch.randn(2, 8, device=device)
    arguments = (x, x) if isinstance(module, ADDING) else (x,)
    y, other = module(*arguments), twin(*arguments)
    if isinstance(module, ADDING):
        y, other = y[0], other[0]
    assert torch.equal(y, other)
    before = module.weight.clone()
    randomise(twin)
    assert torch.equal(module.weight, before)


@ours_and_torchs
def test_calls_the_function_it_is_named_after(ours, torchs, path, device):
    names = {
        fusedops.RMSNorm: "rms_norm",
        fusedops.LayerNorm: "layer_norm",
        fusedops.AddRMSNorm: "add_rms_norm",
        fusedops.AddLayerNorm: "add_layer_norm",
    }
    with fusedops.dispatch.count_calls() as calls:
        forward(ours((2, 8), device=device), (3, 2, 8), device)
    assert dict(calls) == {(names[ours], path): 1}


@rms_or_layer
def test_wrong_trailing_shape_is_refused(ours, torchs, device):
    module = ours((2, 8), device=device)
    with pytest.raises((ValueError, RuntimeError), match=r"8") as caught:
        module(torch.randn(3, 16, device=device))
    assert "16" in str(caught.value)


@pytest.mark.parametrize("ours", ADDING, ids=lambda c: c.__name__)
def test_add_modules_refuse_different_shapes(ours, device):
    with pytest.raises(ValueError, match="residual"):
        ours(8, device=device)(torch.randn(3, 8, device=device), torch.randn(1, 8, device=device))


@ours_and_torchs
def test_inside_a_model(ours, torchs, device):
    """to(), half(), zero_grad, state_dict prefixes and requires_grad_ as for any module."""
    module = nn.ModuleDict({"norm": ours(8)}).to(device).half()
    assert module["norm"].weight.dtype == FP16
    assert "norm.weight" in module.state_dict()
    module.requires_grad_(False)
    y, _ = forward(module["norm"], (2, 8), device, FP16)
    assert y.dtype == FP16 and not y.requires_grad


def test_removed_weight_follows_the_parameter(device):
    """As torch's module does: what counts is the parameter at the time of the call."""
    module = fusedops.RMSNorm(8, device=device)
    module.weight = nn.Parameter(torch.full((8,), 2.0, device=device))
    x = torch.randn(2, 8, device=device)
    doubled = module(x)
    module.weight = None
    torch.testing.assert_close(doubled, 2 * module(x))


@pytest.mark.parametrize("ours", [fusedops.RMSNorm, fusedops.AddRMSNorm], ids=lambda c: c.__name__)
def test_options_of_the_function_are_options_of_the_module(ours, device):
    module = randomise(ours((2, 12), eps=1e-5, device=device, weight_offset=1.0, cast="input"))
    assert "weight_offset=1.0" in repr(module)
    assert "cast='input'" in repr(module)
    y, s = forward(module.bfloat16(), (3, 2, 12), device, BF16)
    expected = fusedops.rms_norm(
        s.flatten(-2), module.weight.flatten(), 1e-5, weight_offset=1.0, cast="input"
    )
    assert torch.equal(y, expected.view(3, 2, 12))
    twin = copy.deepcopy(module)
    assert (twin.weight_offset, twin.cast) == (1.0, "input")
