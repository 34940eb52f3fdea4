# SPDX-License-Identifier: Apache-2.0
"""The operators registered with torch.library, for whatever traces: compile, export, fake tensors.

Eager calls do not come here: the dispatcher would cost them more than the kernels do. Schemas are
fixed and outputs may not alias, so the inference and the training forward are separate operators,
and what a call does not make is an empty tensor.
"""

from typing import Any

import torch
from torch import Tensor

from fusedops import reference
from fusedops.autograd import Spec, kernel_backward, kernel_forward
from fusedops.dispatch import kernel_obstacle

__all__ = ["reference_forward", "traced_forward"]

_INPUTS = (
    "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered, "
    "bool cast_input, float weight_offset, ScalarType y_dtype, bool row_major"
)

_library = torch.library.Library("fusedops", "DEF")
_library.define(f"norm_forward({_INPUTS}) -> (Tensor y, Tensor summed)")
_library.define(
    f"norm_forward_training({_INPUTS}) -> (Tensor y, Tensor summed, Tensor mean, Tensor rstd)"
)
_library.define(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor s, Tensor? weight, Tensor mean, Tensor rstd, "
    "float eps, bool centered, float weight_offset, bool row_major, bool needs_ds, "
    "ScalarType? dweight_dtype, ScalarType? dbias_dtype) "
    "-> (Tensor ds, Tensor dweight, Tensor dbias)"
)


def traced_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: Spec,
    *,
    needs_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, summed or None) through the registered operators."""
    op = torch.ops.fusedops.norm_forward_training if needs_grad else torch.ops.fusedops.norm_forward
    y, summed = op(x, residual, weight, bias, eps, *spec)[:2]
    if residual is None:
        return y, None
    if not (x.requires_grad or residual.requires_grad):
        summed = summed.detach()
    return y, summed


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


def reference_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: Spec,
) -> tuple[Tensor, Tensor | None]:
    """(y, summed) in plain torch, for whatever no kernel serves."""
    summed = None if residual is None else residual + x
    s = x if summed is None else summed
    if spec.centered:
        y = reference.layer_norm(s, weight, bias, eps, out_dtype=spec.y_dtype)
    else:
        y = reference.rms_norm(
            s,
            weight,
            eps,
            weight_offset=spec.weight_offset,
            cast="input" if spec.cast_input else "fp32",
            out_dtype=spec.y_dtype,
        )
    return y.contiguous() if spec.row_major else y, summed


def _reference_statistics(s: Tensor, eps: float, spec: Spec) -> tuple[Tensor, Tensor]:
    """(mean, rstd), each (n_rows,)."""
    row = s.to(reference.compute_dtype(s.dtype)).reshape(-1, s.shape[-1])
    mean = row.mean(-1)
    if spec.centered:
        row = reference.centered_rows(row)
    return mean, torch.rsqrt(row.square().mean(-1) + eps)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, residual, weight, bias, eps, *spec = inputs
    if kernel_obstacle(x) is None and x.shape[-1] > 0:
        y, summed, _, _ = kernel_forward(
            x, residual, weight, bias, eps, Spec(*spec), save_statistics=False
        )
    else:
        y, summed = reference_forward(x, residual, weight, bias, eps, Spec(*spec))
    return y, _empty(x) if summed is None else summed


def _forward_training(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, residual, weight, bias, eps, *spec = inputs
    if kernel_obstacle(x) is None and x.shape[-1] > 0:
        y, summed, mean, rstd = kernel_forward(
            x, residual, weight, bias, eps, Spec(*spec), save_statistics=True
        )
    else:
        y, summed = reference_forward(x, residual, weight, bias, eps, Spec(*spec))
        mean, rstd = _reference_statistics(x if summed is None else summed, eps, Spec(*spec))
    assert rstd is not None
    return (
        y,
        _empty(x) if summed is None else summed,
        mean if mean is not None and Spec(*spec).centered else _empty(rstd),
        rstd,
    )


def _backward(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    centered: bool,
    weight_offset: float,
    row_major: bool,
    needs_ds: bool,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if kernel_obstacle(s) is None and s.shape[-1] > 0:
        gradients = kernel_backward(
            dy,
            dsum,
            s,
            weight,
            mean if centered else None,
            rstd,
            weight_offset,
            row_major,
            needs_ds=needs_ds,
            dweight_dtype=dweight_dtype,
            dbias_dtype=dbias_dtype,
        )
    else:
        ds, dweight, dbias = reference.norm_backward(
            dy, dsum, s, weight, eps, centered=centered, weight_offset=weight_offset
        )
        gradients = (
            ds if needs_ds else None,
            dweight if dweight_dtype is not None else None,
            dbias.to(dbias_dtype) if dbias is not None and dbias_dtype is not None else None,
        )
    ds, dweight, dbias = (_empty(s) if gradient is None else gradient for gradient in gradients)
    return ds, dweight, dbias


for _key in ("CPU", "CUDA"):
    _library.impl("norm_forward", _forward, _key)
    _library.impl("norm_forward_training", _forward_training, _key)
    _library.impl("norm_backward", _backward, _key)


@torch.library.register_fake("fusedops::norm_forward", lib=_library)
def _forward_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    cast_input: bool,
    weight_offset: float,
    y_dtype: torch.dtype,
    row_major: bool,
) -> tuple[Tensor, Tensor]:
    s = x if residual is None else residual + x
    if row_major:
        y = torch.empty_like(s, dtype=y_dtype, memory_format=torch.contiguous_format)
    else:
        y = torch.empty_like(s, dtype=y_dtype)
    return y, _empty(x) if residual is None else s


@torch.library.register_fake("fusedops::norm_forward_training", lib=_library)
def _forward_training_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *spec: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, summed = _forward_fake(x, residual, weight, bias, *spec)
    s = x if residual is None else summed
    rstd = s.new_empty(s.numel() // s.shape[-1], dtype=reference.compute_dtype(s.dtype))
    centered = spec[1]
    return y, summed, torch.empty_like(rstd) if centered else _empty(rstd), rstd


@torch.library.register_fake("fusedops::norm_backward", lib=_library)
def _backward_fake(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    centered: bool,
    weight_offset: float,
    row_major: bool,
    needs_ds: bool,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    def columns(dtype: torch.dtype | None) -> Tensor:
        return _empty(s) if dtype is None else s.new_empty(s.shape[-1:], dtype=dtype)

    if not needs_ds:
        ds = _empty(s)
    elif row_major:
        ds = torch.empty_like(s, memory_format=torch.contiguous_format)
    else:
        ds = torch.empty_like(s)
    return ds, columns(dweight_dtype), columns(dbias_dtype)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, eps, *spec = inputs
    ctx.spec, ctx.eps = Spec(*spec), eps
    ctx.row_major = ctx.spec.row_major and residual is None
    ctx.input_dtypes = [None if t is None else t.dtype for t in (x, residual, bias)]
    ctx.save_for_backward(x if residual is None else output[1], weight, *output[2:])
    ctx.set_materialize_grads(False)


def _backward_of_training(
    ctx: Any, dy: Tensor | None, dsum: Tensor | None, dmean: None, drstd: None
) -> tuple[Any, ...]:
    s, weight, mean, rstd = ctx.saved_tensors
    return _gradients(ctx, dy, dsum, s, weight, mean, rstd)


def _backward_of_inference(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Any, ...]:
    s, weight = ctx.saved_tensors
    spec = ctx.spec._replace(row_major=ctx.row_major)
    _, _, mean, rstd = torch.ops.fusedops.norm_forward_training(s, None, None, None, ctx.eps, *spec)
    return _gradients(ctx, dy, dsum, s, weight, mean, rstd)


def _gradients(
    ctx: Any,
    dy: Tensor | None,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Any, ...]:
    x_dtype, residual_dtype, bias_dtype = ctx.input_dtypes
    needs_x, needs_residual, needs_weight, needs_bias = ctx.needs_input_grad[:4]
    spec: Spec = ctx.spec
    dsum = None if residual_dtype is None else dsum
    if dy is None or torch.is_grad_enabled():
        ds, dweight, dbias = reference.norm_backward(
            dy, dsum, s, weight, ctx.eps, centered=spec.centered, weight_offset=spec.weight_offset
        )
        dbias = None if dbias is None or bias_dtype is None else dbias.to(bias_dtype)
    else:
        ds, dweight, dbias = torch.ops.fusedops.norm_backward(
            dy,
            dsum,
            s,
            weight,
            mean,
            rstd,
            ctx.eps,
            spec.centered,
            spec.weight_offset,
            ctx.row_major,
            needs_x or needs_residual,
            weight.dtype if needs_weight and weight is not None else None,
            bias_dtype if needs_bias else None,
        )
    return (
        ds.to(x_dtype) if needs_x and ds is not None else None,
        ds.to(residual_dtype) if needs_residual and ds is not None else None,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        *(None for _ in range(6)),
    )


torch.library.register_autograd(
    "fusedops::norm_forward", _backward_of_inference, setup_context=_save_for_backward, lib=_library
)
torch.library.register_autograd(
    "fusedops::norm_forward_training",
    _backward_of_training,
    setup_context=_save_for_backward,
    lib=_library,
)
