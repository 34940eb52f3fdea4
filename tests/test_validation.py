# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused before anything runs, in words that name it."""

import re

import numpy as np
import pytest
import torch

import fusedops
from fusedops import reference

FP16, FP32 = torch.float16, torch.float32
H = 8


def refuses(op, error, words, *, options=None, **changed):
    """The call with ``changed`` arguments raises ``error``; every one of ``words`` is in it."""
    inputs = {
        n: torch.ones(3, H) if n in ("x", "residual") else torch.ones(H) for n in op.argument_names
    }
    inputs |= changed
    with fusedops.dispatch.count_calls() as calls, pytest.raises(error) as caught:
        op.function(**inputs, **(options or {}))
    assert not calls, "something ran"
    message = str(caught.value)
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message), (
            f"{word!r} not in {message!r}"
        )


@pytest.fixture(autouse=True)
def on_cpu_or_gpu(device):
    """Every test builds its tensors on the device under test."""
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@pytest.fixture(params=["x", "residual", "weight", "bias"])
def name(request, op):
    if request.param not in op.argument_names:
        pytest.skip(f"{op.name} has no {request.param}")
    return request.param


@pytest.mark.parametrize(
    "value",
    [3.0, [1.0] * H, np.ones((3, H), dtype=np.float32), "x"],
    ids=lambda v: type(v).__name__,
)
def test_not_a_tensor(op, name, value):
    refuses(op, TypeError, [name, type(value).__name__], **{name: value})


@pytest.mark.parametrize("missing", ["x", "residual"])
def test_none_where_a_tensor_must_be(op, missing):
    if missing not in op.argument_names:
        pytest.skip("no residual")
    refuses(op, TypeError, [missing, "NoneType"], **{missing: None})


def test_rank_zero(op):
    scalar = torch.ones(())
    changed = {"x": scalar, "residual": scalar} if op.adds else {"x": scalar}
    refuses(op, ValueError, ["x"], **changed)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64], ids=str
)
def test_dtype_that_is_not_real_floating(op, name, dtype):
    shape = (3, H) if name in ("x", "residual") else (H,)
    refuses(op, TypeError, [name, str(dtype)], **{name: torch.ones(shape, dtype=dtype)})


def test_float8(op):
    refuses(op, TypeError, ["x", "torch.float8_e4m3fn"], x=torch.ones(3, H).to(torch.float8_e4m3fn))


@pytest.mark.filterwarnings("ignore:Sparse.*beta:UserWarning")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "_mkldnn"])
def test_layout_that_is_not_strided(op, layout, device):
    if layout == "_mkldnn" and device != "cpu":
        pytest.skip("a CPU layout")
    x = torch.ones(3, H)
    x = {"sparse_coo": x.to_sparse, "_mkldnn": x.to_mkldnn}.get(layout, x.to_sparse_csr)()
    refuses(op, TypeError, ["x", f"torch.{layout}"], x=x)


@pytest.mark.parametrize("vector", ["weight", "bias"])
@pytest.mark.parametrize("shape", [(H - 1,), (H + 1,), (1,), (0,), (1, H), (3, H), ()], ids=str)
def test_weight_or_bias_of_another_shape(op, vector, shape):
    if vector not in op.argument_names:
        pytest.skip("RMSNorm has no bias")
    refuses(op, ValueError, [vector, str(H), str(tuple(shape))], **{vector: torch.ones(shape)})


@pytest.mark.parametrize("shape", [(3, H + 1), (1, H), (H,), (2, 3, H), (H, 3)], ids=str)
def test_residual_of_another_shape(op, shape):
    """Broadcasting is refused: it would hide a mistake."""
    if not op.adds:
        pytest.skip("no residual")
    refuses(op, ValueError, ["residual", str((3, H)), str(shape)], residual=torch.ones(shape))


def test_argument_on_another_device(op, name, device):
    if name == "x":
        pytest.skip("the others are compared with x")
    shape = (3, H) if name == "residual" else (H,)
    elsewhere = torch.ones(shape, device="meta")
    refuses(op, ValueError, [name, "meta", torch.ones(1).device.type], **{name: elsewhere})


@pytest.mark.parametrize(
    "eps", [0.0, -1e-6, float("nan"), float("inf"), -float("inf"), 0, 1e400], ids=str
)
def test_eps_out_of_range(op, eps):
    refuses(op, ValueError, ["eps", str(eps)], options={"eps": eps})


@pytest.mark.parametrize("eps", ["1e-6", [1e-6], 1j, True], ids=repr)
def test_eps_of_another_type(op, eps):
    refuses(op, TypeError, ["eps", type(eps).__name__], options={"eps": eps})


def test_eps_may_be_an_integer(op):
    inputs = op.inputs((2, H), FP32, torch.ones(1).device.type)
    y, _ = op.call(inputs, eps=1)
    assert torch.equal(y, op.call(inputs, eps=1.0)[0])


@pytest.mark.gpu
def test_refused_also_after_a_plan_was_made(op):
    """Calls are remembered by their arguments, and to Python ``1.0 == True``."""
    inputs = op.inputs((2, H), FP32, "cuda")
    for _ in range(2):
        op.call(inputs, eps=1.0)
    with pytest.raises(TypeError, match="eps"):
        op.call(inputs, eps=True)


RMS = pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"], indirect=True)


@RMS
@pytest.mark.parametrize("cast", ["float32", "FP32", "bf16", ""])
def test_unknown_cast(op, cast):
    with pytest.raises(ValueError, match="cast: expected .*fp32.*input") as caught:
        op.call(op.inputs((2, H), FP32, torch.ones(1).device.type), cast=cast)
    assert repr(cast) in str(caught.value)


@RMS
@pytest.mark.parametrize("cast", [None, 1, torch.float32])
def test_cast_that_is_no_string(op, cast):
    with pytest.raises((TypeError, ValueError), match="cast"):
        op.call(op.inputs((2, H), FP32, torch.ones(1).device.type), cast=cast)


@RMS
@pytest.mark.parametrize("offset", ["1", None, float("nan"), float("inf")])
def test_bad_weight_offset(op, offset):
    with pytest.raises((TypeError, ValueError), match="weight_offset"):
        op.call(op.inputs((2, H), FP32, torch.ones(1).device.type), weight_offset=offset)


@pytest.mark.parametrize("out_dtype", [torch.int32, "fp32", float, torch.complex64])
def test_bad_out_dtype(op, out_dtype):
    with pytest.raises((TypeError, ValueError), match="out_dtype"):
        op.call(op.inputs((2, H), FP32, torch.ones(1).device.type), out_dtype=out_dtype)


def test_options_are_keyword_only():
    x, weight = torch.ones(2, H), torch.ones(H)
    with pytest.raises(TypeError):
        fusedops.rms_norm(x, weight, 1e-6, 1.0)
    with pytest.raises(TypeError):
        fusedops.add_rms_norm(x, x, weight, 1e-6, "input")


@pytest.mark.filterwarnings("ignore:var_mean")
@pytest.mark.parametrize("rows", [0, 3])
def test_rows_of_no_elements(op, rows):
    """There is no mean of nothing, and nothing to apply it to: an empty result, as torch's."""
    inputs = op.inputs((rows, 4), FP32, torch.ones(1).device.type)
    y, _ = op.call({n: t[..., :0] for n, t in inputs.items()})
    assert y.shape == (rows, 0)


def test_errors_leave_no_trace(op):
    """After a refused call the next one works, and the refused tensors are as they were."""
    inputs = op.inputs((3, H), FP32, torch.ones(1).device.type)
    copies = {n: t.clone() for n, t in inputs.items()}
    with pytest.raises(ValueError, match="weight"):
        op.call({**inputs, "weight": torch.ones(H + 1)})
    for n, t in inputs.items():
        assert torch.equal(t, copies[n])
    y, _ = op.call(inputs, eps=1e-5)
    torch.testing.assert_close(y, op.call(inputs, getattr(reference, op.name), eps=1e-5)[0])
