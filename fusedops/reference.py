# SPDX-License-Identifier: Apache-2.0
"""The operators in plain torch: the specification that kernels, tests and benchmarks share.

With s the row to normalise (``x``, or ``residual + x`` rounded to its own dtype), H its length
and every operation below in fp32 (fp64 for fp64 rows)::

    RMSNorm    rstd = 1 / sqrt(mean(s^2) + eps)             x_hat = s * rstd
    LayerNorm  rstd = 1 / sqrt(mean((s - mean)^2) + eps)    x_hat = (s - mean) * rstd
    y = x_hat * (weight + weight_offset) + bias

    backward, with g = dy * (weight + weight_offset)
    ds = rstd * (g - x_hat * mean(g * x_hat) [- mean(g), LayerNorm]) + dsummed
    dweight = sum over rows of dy * x_hat        dbias = sum over rows of dy

Sources: Ba, Kiros & Hinton 2016 (arXiv:1607.06450) for LayerNorm; Zhang & Sennrich 2019
(arXiv:1910.07467) for RMSNorm. eps stands inside the root, as in PyTorch.

Everything here is differentiable by autograd, any number of times.
"""

import torch
from torch import Tensor

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "centered_rows",
    "compute_dtype",
    "layer_norm",
    "norm_backward",
    "rms_norm",
    "rms_norm_dtype",
]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and products: fp64 for fp64 rows, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm_dtype(row_dtype: torch.dtype, weight: Tensor | None, cast: str) -> torch.dtype:
    """The dtype of y: the row's own, or with ``cast="input"`` what torch promotes it to."""
    if cast == "input" and weight is not None:
        return torch.promote_types(row_dtype, weight.dtype)
    return row_dtype


def centered_rows(s: Tensor) -> Tensor:
    """s less the mean of each row; the mean of what remains corrects the first one's rounding."""
    mean = s.mean(-1, keepdim=True)
    return s - (mean + (s - mean).mean(-1, keepdim=True))


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMSNorm of the rows of ``x`` (..., H); see `fusedops.rms_norm`."""
    result = out_dtype or rms_norm_dtype(x.dtype, weight, cast)
    compute = compute_dtype(x.dtype)
    s = x.to(compute)
    y = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        if cast == "input":
            y = y.to(x.dtype)
            compute = torch.promote_types(compute, weight.dtype)
        scale = weight.to(compute)
        y = y.to(compute) * (scale + weight_offset if weight_offset else scale)
    return y.to(result)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """LayerNorm of the rows of ``x`` (..., H); see `fusedops.layer_norm`."""
    s = centered_rows(x.to(compute_dtype(x.dtype)))
    # A quotient: the derivative of rsqrt, a third power, leaves fp32's range long before s does.
    y = s / torch.sqrt(s.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(s.dtype)
    if bias is not None:
        y = y + bias.to(s.dtype)
    return y.to(out_dtype or x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(residual + x), residual + x)``; see `fusedops.add_rms_norm`."""
    summed = residual + x
    y = rms_norm(summed, weight, eps, weight_offset=weight_offset, cast=cast, out_dtype=out_dtype)
    return y, summed


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``(layer_norm(residual + x), residual + x)``; see `fusedops.add_layer_norm`."""
    summed = residual + x
    return layer_norm(summed, weight, bias, eps, out_dtype=out_dtype), summed


def norm_backward(
    dy: Tensor | None,
    dsummed: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    centered: bool,
    weight_offset: float = 0.0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of both norms, written out: ``(ds, dweight, dbias)``.

    ``s`` (..., H) is the normalised input, ``dy`` and ``dsummed`` the gradients of y and of the
    sum, either of them None. ds has s's dtype, dweight (H,) weight's, dbias (H,) fp32 (fp64).
    Itself differentiable, which is what makes double backward right.
    """
    if dy is None:
        return dsummed, None, None
    compute = compute_dtype(s.dtype)
    row = centered_rows(s.to(compute)) if centered else s.to(compute)
    g = dy.to(compute)
    rstd = torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    x_hat = row * rstd
    leading = tuple(range(s.dim() - 1))
    dbias = g.sum(leading) if leading else g
    dweight = None
    if weight is not None:
        dweight = g * x_hat
        dweight = (dweight.sum(leading) if leading else dweight).to(weight.dtype)
        g = g * (weight.to(compute) + weight_offset)
    ds = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if centered:
        ds = ds - g.mean(-1, keepdim=True)
    ds = ds * rstd
    if dsummed is not None:
        ds = ds + dsummed.to(compute)
    return ds.to(s.dtype), dweight, dbias
