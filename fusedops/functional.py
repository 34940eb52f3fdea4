# SPDX-License-Identifier: Apache-2.0
"""The public functions: they validate, choose a path, and call it."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from fusedops import direct, dispatch, reference
from fusedops.autograd import NormFunction, Spec, apply_directly, apply_linked, kernel_forward
from fusedops.ops import reference_forward, traced_forward

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

# Asked at import, since the compiler cannot trace the question.
_AUTOCAST_DEVICES = frozenset(
    device for device in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(device)
)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMSNorm over the last dimension: ``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)``.

    Args:
        x: (..., H), of any rank from 1 up and any strides; fp16, bf16, fp32 or fp64.
        weight: (H,), of any of these dtypes, or None for no scale.
        eps: added to the mean square, inside the root; finite and > 0. None: the machine epsilon
            of the dtype the statistics are in, as `torch.nn.functional.rms_norm` resolves it.
        weight_offset: added to the weight in fp32; 1.0 for norms that store ``weight - 1``.
        cast: where the product with the weight is rounded. ``"fp32"``: it is formed in fp32 and
            rounded once to x's dtype, as torch.nn.RMSNorm does. ``"input"``: the normalised value
            is rounded to x's dtype first and the product has the dtype that torch promotes x's
            and the weight's to, as the Llama family in Hugging Face transformers does.
        out_dtype: dtype of the result, in place of the one above.

    Returns:
        (..., H). Statistics are fp32, or fp64 for fp64 x. The result's strides are those of an
        elementwise function of x. Differentiable in x and weight, any number of times; the
        weight's gradient is summed in fp32.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.

    The formula is that of Zhang & Sennrich 2019 (arXiv:1910.07467), eq. 4, with eps.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), eps=1e-12)
    tensor([[0.8485, 1.1314]])
    """
    options = ("rms_norm", eps, weight_offset, cast, out_dtype, type(eps), type(weight_offset))
    if not is_compiling() and (done := direct.norm(options, x, None, weight, None)):
        return done[0]
    return _rms(options, x, None, weight)[0]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """LayerNorm over the last dimension: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Args:
        x: (..., H), of any rank from 1 up and any strides; fp16, bf16, fp32 or fp64.
        weight: (H,), of any of these dtypes, or None for no scale.
        bias: (H,), of any of these dtypes, or None for no shift.
        eps: added to the (biased) variance, inside the root; finite and > 0. None: 1e-5.
        out_dtype: dtype of the result, in place of x's.

    Returns:
        (..., H), contiguous, in x's dtype. Statistics are fp32, or fp64 for fp64 x.
        Differentiable in x, weight and bias, any number of times; gradients of weight and bias
        are summed in fp32.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.

    The formula is that of Ba, Kiros & Hinton 2016 (arXiv:1607.06450), eq. 3 and 4, with eps.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=1e-12)
    tensor([[-1.,  1.]])
    """
    options = ("layer_norm", eps, out_dtype, type(eps))
    if not is_compiling() and (done := direct.norm(options, x, None, weight, bias)):
        return done[0]
    return _layer(options, x, None, weight, bias)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual add and the RMSNorm of the sum, in one pass over memory.

    Args:
        x: (..., H), the branch; fp16, bf16, fp32 or fp64, of any strides.
        residual: of x's shape, in any of these dtypes.
        weight, eps, weight_offset, cast, out_dtype: as in `rms_norm`, with the sum in x's place.

    Returns:
        ``(y, summed)``, both (..., H) and of storage of their own. ``summed`` is
        ``residual + x`` bit for bit, in the dtype that torch promotes the two to; it is rounded
        to that dtype before it is normalised, so y is what `rms_norm` of it gives. The kernels'
        backward takes the two for results beside each other: a gradient asked for at ``summed``
        itself is that of its own readers, without what comes through y.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.

    >>> y, summed = add_rms_norm(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0]), eps=1e-12)
    >>> y, summed
    (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    options = ("add_rms_norm", eps, weight_offset, cast, out_dtype, type(eps), type(weight_offset))
    if not is_compiling() and (done := direct.norm(options, x, residual, weight, None)):
        return done  # type: ignore[return-value]
    return _rms(options, x, _require("residual", residual), weight)  # type: ignore[return-value]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual add and the LayerNorm of the sum, in one pass over memory.

    Args:
        x: (..., H), the branch; fp16, bf16, fp32 or fp64, of any strides.
        residual: of x's shape, in any of these dtypes.
        weight, bias, eps, out_dtype: as in `layer_norm`, with the sum in x's place.

    Returns:
        ``(y, summed)``, both (..., H) and of storage of their own. ``summed`` is
        ``residual + x`` bit for bit, in the dtype that torch promotes the two to; it is rounded
        to that dtype before it is normalised, so y is what `layer_norm` of it gives.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.

    >>> y, summed = add_layer_norm(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), eps=1e-12)
    >>> y, summed
    (tensor([-1.,  1.]), tensor([1., 3.]))
    """
    options = ("add_layer_norm", eps, out_dtype, type(eps))
    if not is_compiling() and (done := direct.norm(options, x, residual, weight, bias)):
        return done  # type: ignore[return-value]
    return _layer(options, x, _require("residual", residual), weight, bias)  # type: ignore[return-value]


LINKED = "linked"
"""Last of the options of `linked_add_norm`."""


def linked_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    *,
    centered: bool,
    weight_offset: float = 0.0,
    cast: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """`add_layer_norm` (``centered``) or `add_rms_norm`, whose sum others may ask gradients for.

    (y, summed), where y is a function of the sum to autograd as well, or three tensors: see
    `fusedops.autograd.apply_linked`.
    """
    options: tuple[Any, ...]
    if centered:
        options = ("add_layer_norm", eps, out_dtype, type(eps), LINKED)
        return direct.norm(options, x, residual, weight, bias) or _layer(  # type: ignore
            options, x, residual, weight, bias
        )
    kinds = type(eps), type(weight_offset)
    options = ("add_rms_norm", eps, weight_offset, cast, out_dtype, *kinds, LINKED)
    return direct.norm(options, x, residual, weight, None) or _rms(  # type: ignore
        options, x, residual, weight
    )


def _rms(
    options: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    autocasts: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Both RMS forms. ``autocasts``: torch's autocast rule for its own rms_norm applies."""
    _, eps, weight_offset, cast, out_dtype, *_ = options
    dtype = _check_rows(x, residual)
    _check_vector("weight", weight, x)
    if cast not in ("fp32", "input"):
        raise ValueError(f'cast: expected "fp32" or "input", got {cast!r}')
    if not isinstance(weight_offset, (int, float)) or isinstance(weight_offset, bool):
        raise TypeError(f"weight_offset: expected a number, got {_describe(weight_offset)}")
    if not abs(weight_offset) < math.inf:  # unlike isfinite, traceable where it is symbolic
        raise ValueError(f"weight_offset: expected a finite number, got {weight_offset}")
    _check_out_dtype(out_dtype)
    if eps is None:
        eps = torch.finfo(reference.compute_dtype(dtype)).eps
    _check_eps(eps)
    if out_dtype is None:
        out_dtype = reference.rms_norm_dtype(dtype, weight, cast)
        if autocasts and cast == "fp32" and _autocasts_to_fp32("rms_norm", dtype, x):
            out_dtype = torch.float32
    spec = Spec(
        centered=False,
        # Where the product is formed in fp32 anyway, both casts are one function.
        cast_input=cast == "input" and weight is not None,
        weight_offset=float(weight_offset) if weight is not None else 0.0,
        y_dtype=out_dtype,
        row_major=False,
    )
    return _apply(options, x, residual, weight, None, float(eps), spec)


def _layer(
    options: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Both LayerNorm forms."""
    _, eps, out_dtype, *_ = options
    dtype = _check_rows(x, residual)
    _check_vector("weight", weight, x)
    _check_vector("bias", bias, x)
    _check_out_dtype(out_dtype)
    if eps is None:
        eps = 1e-5
    _check_eps(eps)
    if out_dtype is None:
        out_dtype = torch.float32 if _autocasts_to_fp32("layer_norm", dtype, x) else dtype
    spec = Spec(
        centered=True, cast_input=False, weight_offset=0.0, y_dtype=out_dtype, row_major=True
    )
    return _apply(options, x, residual, weight, bias, float(eps), spec)


def _apply(
    options: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: Spec,
) -> tuple[Tensor, Tensor | None]:
    """Choose the path of a validated call and take it."""
    name = options[0]
    tensors = [t for t in (x, residual, weight, bias) if t is not None]
    obstacle = dispatch.kernel_obstacle(x)
    if obstacle is None and x.shape[-1] == 0:
        obstacle = "rows are empty (H = 0)"
    traced = is_compiling()
    if obstacle is None and not traced:
        if dispatch.transforms_active():
            obstacle = "a torch.func transform or forward-mode AD is active"
        else:
            traced = dispatch.is_traced(tensors)
            suits = dispatch.is_traceable if traced else dispatch.is_plain
            if not all(map(suits, tensors)):
                obstacle = (
                    f"tensor subclasses ({', '.join(sorted({type(t).__name__ for t in tensors}))})"
                )
                traced = False
    if obstacle is not None:
        if not traced:
            dispatch.log_once(f"{name}: reference, because {obstacle}")
            dispatch.record(name, "reference")
        return reference_forward(x, residual, weight, bias, eps, spec)

    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if traced:
        return traced_forward(x, residual, weight, bias, eps, spec, needs_grad=needs_grad)
    dispatch.record(name, "interpreter" if x.device.type == "cpu" else "triton")
    outputs: Any
    linked = options[-1] is LINKED
    if needs_grad and linked and residual is not None:
        outputs = apply_linked(x, residual, weight, bias, eps, spec, None)
    elif needs_grad:
        outputs = NormFunction.apply(x, residual, weight, bias, eps, spec, None)
        outputs = outputs if residual is not None else (outputs, None)
    else:
        outputs = kernel_forward(x, residual, weight, bias, eps, spec, save_statistics=False)[:2]
    train = (apply_linked if linked else apply_directly) if needs_grad else None
    direct.remember(options, x, residual, weight, bias, eps, spec, train)
    return outputs


def _ask_autocast(operator: str, device_type: str, dtype: torch.dtype) -> bool:
    """Whether autocast to ``dtype`` makes torch's own operator return fp32: asked of torch."""
    row = torch.zeros(1, 1, dtype=dtype, device=device_type)
    with torch.autocast(device_type, dtype=dtype):
        return getattr(F, operator)(row, (1,)).dtype == torch.float32


_autocast_rule = cache(_ask_autocast)


def _autocasts_to_fp32(operator: str, dtype: torch.dtype, x: Tensor) -> bool:
    device_type = x.device.type
    rule = _ask_autocast if is_compiling() else _autocast_rule  # the compiler warns of caches
    return (
        device_type in _AUTOCAST_DEVICES
        and torch.is_autocast_enabled(device_type)
        and dtype.itemsize == 2
        and rule(operator, device_type, torch.get_autocast_dtype(device_type))
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}, {value.dtype}, device {str(value.device)!r}"
    return f"{value!r} ({type(value).__name__})"


def _require(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {_describe(value)}")
    return value


def _check_dtype(name: str, tensor: Any) -> None:
    if _require(name, tensor).layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor, got layout {tensor.layout}, {tensor.dtype}"
            + (", nested" if tensor.is_nested else "")
        )
    if tensor.dtype not in _DTYPES:
        raise TypeError(
            f"{name}: expected dtype float16, bfloat16, float32 or float64, got {_describe(tensor)}"
        )


def _check_rows(x: Tensor, residual: Tensor | None) -> torch.dtype:
    """Check x and residual; the dtype of the rows to normalise."""
    _check_dtype("x", x)
    if x.dim() == 0:
        raise ValueError(f"x: expected at least one dimension (..., H), got {_describe(x)}")
    if residual is None:
        return x.dtype
    _check_dtype("residual", residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"residual: expected x's shape {tuple(x.shape)}, got {_describe(residual)}"
        )
    if residual.device != x.device:
        raise ValueError(
            f"residual: expected x's device {str(x.device)!r}, got {_describe(residual)}"
        )
    return torch.promote_types(x.dtype, residual.dtype)


def _check_vector(name: str, vector: Tensor | None, x: Tensor) -> None:
    if vector is None:
        return
    _check_dtype(name, vector)
    if vector.dim() != 1 or vector.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name}: expected shape ({x.shape[-1]},), the last dimension of x "
            f"{tuple(x.shape)}, got {_describe(vector)}"
        )
    if vector.device != x.device:
        raise ValueError(f"{name}: expected x's device {str(x.device)!r}, got {_describe(vector)}")


def _check_eps(eps: Any) -> None:
    if not isinstance(eps, (int, float)) or isinstance(eps, bool):
        raise TypeError(f"eps: expected a number or None, got {_describe(eps)}")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps: expected a finite number > 0, got {eps}")


def _check_out_dtype(out_dtype: Any) -> None:
    if out_dtype is not None and out_dtype not in _DTYPES:
        raise TypeError(
            "out_dtype: expected torch.float16, bfloat16, float32, float64 or None, "
            f"got {_describe(out_dtype)}"
        )
