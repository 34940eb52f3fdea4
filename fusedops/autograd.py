# SPDX-License-Identifier: Apache-2.0
"""Kernels on tensors of any layout, and the autograd Function around them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops import direct, direct_backward, dispatch, reference
from fusedops.layout import ROW_MAJOR, as_rows, result_layout

__all__ = [
    "NormFunction",
    "Outputs",
    "Spec",
    "apply_directly",
    "apply_linked",
    "kernel_backward",
    "kernel_forward",
]


SavedTensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""s, weight, mean and rstd, as autograd gives them back."""


class Spec(NamedTuple):
    """What distinguishes one norm from another.

    centered: LayerNorm; otherwise RMSNorm.
    cast_input: the normalised value is rounded to the row's dtype before the weight product.
    weight_offset: added to the weight in fp32.
    y_dtype: dtype of y.
    row_major: y is contiguous; otherwise it lies as an elementwise function of the row would.
    """

    centered: bool
    cast_input: bool
    weight_offset: float
    y_dtype: torch.dtype
    row_major: bool


class Kept(NamedTuple):
    """What a call leaves for its backward beside tensors; direct.c knows the places of its parts.

    One object, which the C makes once for all calls of a plan.
    """

    eps: float
    spec: Spec
    x_dtype: torch.dtype
    residual_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    fits: list[direct_backward.Fit | None] | None  # None: the backward is not called from C


class Outputs(NamedTuple):
    """y and summed have the input's shape; mean and rstd (n_rows,) are for the backward."""

    y: Tensor
    summed: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


def kernel_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: Spec,
    *,
    save_statistics: bool,
) -> Outputs:
    """Run the forward kernel; statistics are allocated only where a backward will want them."""
    from fusedops.kernels.launch import launch_forward

    sum_dtype, summed, layout = x.dtype, None, ROW_MAJOR
    if residual is not None or not spec.row_major:
        layout = result_layout(x, residual)
    if residual is not None:
        sum_dtype = torch.promote_types(x.dtype, residual.dtype)
        summed = layout.empty(x.shape, sum_dtype, x.device)
    y = layout.empty(x.shape, spec.y_dtype, x.device)
    mean = rstd = None
    if save_statistics:
        n_rows = x.numel() // x.shape[-1]
        dtype = reference.compute_dtype(sum_dtype)
        rstd = torch.empty(n_rows, dtype=dtype, device=x.device)
        mean = torch.empty_like(rstd) if spec.centered else None
    x_rows, residual_rows = as_rows((x, residual), layout.order)
    _launch(
        launch_forward,
        x_rows,
        residual_rows,
        unit_stride(weight),
        unit_stride(bias),
        y,
        summed,
        mean,
        rstd,
        eps,
        centered=spec.centered,
        cast_input=spec.cast_input,
        weight_offset=spec.weight_offset,
    )
    if spec.row_major:
        y = y.contiguous()
    else:
        y = layout.finish(y)
    if summed is not None:
        summed = layout.finish(summed)
    return Outputs(y, summed, mean, rstd)


def kernel_backward(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    row_major: bool,
    *,
    needs_ds: bool,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Run the backward kernels: (ds, dweight, dbias), None for what is not asked for.

    ``row_major`` tells the order of mean and rstd: that of the rows' indices, else of their memory.
    """
    from fusedops.kernels.launch import launch_backward

    layout = ROW_MAJOR if row_major else result_layout(s)

    def columns(dtype: torch.dtype | None) -> Tensor | None:
        return None if dtype is None else torch.empty(s.shape[-1:], dtype=dtype, device=s.device)

    ds = layout.empty(s.shape, s.dtype, s.device) if needs_ds else None
    dweight, dbias = columns(dweight_dtype), columns(dbias_dtype)
    s_rows, dy_rows, dsum_rows = as_rows((s, dy, dsum), layout.order)
    _launch(
        launch_backward,
        s_rows,
        dy_rows,
        dsum_rows,
        unit_stride(weight),
        mean,
        rstd,
        ds,
        dweight,
        dbias,
        weight_offset=weight_offset,
    )
    return ds, dweight, dbias


def _launch(launch: Callable[..., None], rows: Tensor, *arguments: Any, **options: Any) -> None:
    with dispatch.launching(rows):
        try:
            launch(rows, *arguments, **options)
        except OSError as error:
            raise RuntimeError(
                f"Triton could not compile a kernel ({error}): it needs a C compiler (CC, else "
                "gcc or clang) and a folder that it can write to (TRITON_CACHE_DIR, else ~/.triton)"
            ) from error


def unit_stride(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def training_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: Spec,
    prepared: tuple[Any, ...] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`kernel_forward` with statistics; `direct.launch` with ``prepared`` where that serves."""
    if prepared is None:
        return kernel_forward(x, residual, weight, bias, eps, spec, save_statistics=True)
    return direct.launch(x, *prepared)


def keep(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: Spec,
    fits: list[direct_backward.Fit | None] | None = None,
) -> Kept:
    """The `Kept` of a call."""
    return Kept(
        eps,
        spec,
        x.dtype,
        None if residual is None else residual.dtype,
        None if bias is None else bias.dtype,
        fits,
    )


# The Functions below are called for every norm of a training step. Once direct.c is loaded it puts
# its own `forward` in the place of theirs, and itself between autograd and their `backward`. It
# does what they do in calls that a plan's C has prepared, and calls what stands here for all
# others: the first of a kind, gradients that are to be differentiated again, tensors that a kernel
# may not read. A backward then comes with ``saved``, the node's saved tensors, which hooks may not
# let anyone ask for twice.


class NormFunction(torch.autograd.Function):
    """(x, residual, weight, bias) -> y, or (y, summed) with a residual.

    Saves the normalised rows (x itself, or the sum), the weight, and one or two fp32 numbers a row.
    ``prepared`` are the arguments of `direct.launch`, where that serves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        spec: Spec,
        prepared: tuple[Any, ...] | None,
    ) -> Any:
        y, summed, mean, rstd = training_forward(x, residual, weight, bias, eps, spec, prepared)
        s = x if summed is None else summed
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        if summed is not None and not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(summed)  # as `residual + x` would not require a gradient
        ctx.kept = keep(x, residual, bias, eps, spec)
        return y if summed is None else (y, summed)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dsum: Tensor | None = None, saved: SavedTensors | None = None
    ) -> Any:
        kept: Kept = ctx.kept
        needs_x, needs_residual, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        ds, dweight, dbias = gradients(
            kept,
            dy,
            dsum,
            saved or ctx.saved_tensors,
            needs=(needs_x or needs_residual, needs_weight, needs_bias),
            row_major=kept.spec.row_major and kept.residual_dtype is None,
        )
        return (
            ds.to(kept.x_dtype) if needs_x and ds is not None else None,
            ds.to(kept.residual_dtype) if needs_residual and ds is not None else None,
            dweight,
            dbias,
            None,
            None,
            None,
        )


def gradients(
    kept: Kept,
    dy: Tensor | None,
    dsum: Tensor | None,
    saved: SavedTensors,
    *,
    needs: tuple[bool, bool, bool],
    row_major: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(ds, dweight, dbias) of a norm that saved (s, weight, mean, rstd); None where no need is."""
    s, weight, mean, rstd = saved
    needs_ds, needs_weight, needs_bias = needs
    spec, bias_dtype = kept.spec, kept.bias_dtype
    check_saved(saved, s.shape if dy is None else dy.shape)
    if dy is None or torch.is_grad_enabled() or not readable(dy, dsum, *saved):
        # Nothing to normalise, or something to differentiate through: torch's own operations.
        ds, dweight, dbias = reference.norm_backward(
            dy,
            dsum,
            s,
            weight,
            kept.eps,
            centered=spec.centered,
            weight_offset=spec.weight_offset,
        )
        dbias = None if dbias is None or bias_dtype is None else dbias.to(bias_dtype)
        return ds, dweight if needs_weight else None, dbias if needs_bias else None
    weight_dtype = None if weight is None or not needs_weight else weight.dtype
    wanted = needs_ds, weight_dtype, bias_dtype if needs_bias else None
    read = (s, weight, mean, rstd, spec.weight_offset)
    found = direct_backward.gradients(dy, dsum, read, wanted, kept.fits)
    if found is None:
        found = kernel_backward(
            dy,
            dsum,
            *read,
            row_major,
            needs_ds=needs_ds,
            dweight_dtype=wanted[1],
            dbias_dtype=wanted[2],
        )
        direct_backward.remember(dy, dsum, read, wanted)
    return found


def check_saved(saved: SavedTensors, shape: torch.Size) -> None:
    """Refuse what hooks on saved tensors gave back in other shapes, before a kernel reads it."""
    s, weight, mean, rstd = saved
    n_rows, n_cols = (math.prod(shape[:-1]),), shape[-1:]
    for name, tensor, expected in (
        ("the rows", s, shape),
        ("the weight", weight, n_cols),
        ("the means", mean, n_rows),
        ("the reciprocal deviations", rstd, n_rows),
    ):
        if tensor is not None and tensor.shape != expected:
            raise RuntimeError(
                f"{name} saved for the backward: expected shape {tuple(expected)}, but a hook on "
                f"saved tensors gave back {tuple(tensor.shape)}"
            )


class SumFunction(torch.autograd.Function):
    """(x, residual) -> residual + x, by the kernel that makes the sum's norm as well.

    What `NormOfSum` needs of it is put into the list ``made``: y, mean, rstd and a `Kept`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        vectors: tuple[Tensor | None, Tensor | None],
        eps: float,
        spec: Spec,
        prepared: tuple[Any, ...] | None,
        made: list[Any],
    ) -> Any:
        y, summed, mean, rstd = training_forward(x, residual, *vectors, eps, spec, prepared)
        ctx.set_materialize_grads(False)
        ctx.kept = keep(x, residual, vectors[1], eps, spec)
        made += y, mean, rstd, ctx.kept
        return summed

    @staticmethod
    def backward(ctx: Any, dsum: Tensor | None) -> Any:
        needs_x, needs_residual = ctx.needs_input_grad[:2]
        return (
            dsum.to(ctx.kept.x_dtype) if needs_x and dsum is not None else None,
            dsum.to(ctx.kept.residual_dtype) if needs_residual and dsum is not None else None,
            None,
            None,
            None,
            None,
            None,
        )


class NormOfSum(torch.autograd.Function):
    """(s, weight, bias) -> (y, s again), y from ``made``."""

    @staticmethod
    def forward(
        ctx: Any, s: Tensor, weight: Tensor | None, bias: Tensor | None, made: list[Any]
    ) -> Any:
        y, mean, rstd, ctx.kept = made
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        after = s.detach()
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(after)
        return y, after

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dsum: Tensor | None, saved: SavedTensors | None = None
    ) -> Any:
        found = gradients(
            ctx.kept,
            dy,
            dsum,
            saved or ctx.saved_tensors,
            needs=ctx.needs_input_grad[:3],
            row_major=False,
        )
        return (*found, None)


def apply_linked(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: Spec,
    prepared: tuple[Any, ...] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`NormFunction` of a sum, where somebody may look at the sum: (y, summed, summed again).

    To autograd the sum of `NormFunction` stands beside y: its gradient is what comes from those
    who read the sum, and lacks what comes through y. Here y is a function of the sum. Those who
    read the second sum in its place leave its gradient to the norm's backward, which adds it in
    the same kernel.
    """
    made: list[Any] = []
    summed = _apply_sum(x, residual, (weight, bias), eps, spec, prepared, made)
    y, after = _apply_norm_of_sum(summed, weight, bias, made)
    return y, summed, after


# `NormFunction.apply` without its Python, which looks for transforms and what they left behind:
# for tensors that are known to be none of these.
apply_directly = super(torch.autograd.Function, NormFunction).apply
_apply_sum = super(torch.autograd.Function, SumFunction).apply
_apply_norm_of_sum = super(torch.autograd.Function, NormOfSum).apply

direct.ask(
    apply_linked=apply_linked,
    apply_norm_of_sum=_apply_norm_of_sum,
    apply_sum=_apply_sum,
    keep=keep,
    norm_backward=NormFunction.backward,
    norm_forward=NormFunction.forward,
    norm_function=NormFunction,
    norm_of_sum=NormOfSum,
    norm_of_sum_backward=NormOfSum.backward,
    norm_of_sum_forward=NormOfSum.forward,
    sum_forward=SumFunction.forward,
    sum_function=SumFunction,
)


def readable(*tensors: Tensor | None) -> bool:
    """Whether a kernel may read these.

    A batched backward (vmap) hands in wrapped gradients, and hooks on saved tensors what they like.
    """
    return not dispatch.transforms_active() and all(
        tensor is None or dispatch.is_plain(tensor) for tensor in tensors
    )
