# SPDX-License-Identifier: Apache-2.0
"""The shortest way from a gradient to the backward's launches, as `fusedops.direct` is for calls.

The first backward of a kind goes the general way and leaves a `Plan`: the compiled kernels and the
arguments that do not vary. The next one whose tensors are like its own launches them with no more
than their pointers. What may vary is the number of rows. Autograd has seen to it that gradients
have the shape and dtype of what they are gradients of, and whoever asks, that kernels may read
them. Anything else returns None before anything is allocated.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops import direct, dispatch

__all__ = ["Gradients", "Plan", "gradients", "remember"]

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""ds, dweight and dbias; None for those that are not wanted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to launch the backward of one kind of call."""

    main: direct.Kernel
    reduction: direct.Kernel | None  # None: no weight gradient is wanted
    reduction_grid: tuple[int, ...]  # column blocks, weight gradients
    most_programs: int
    hooks: Any  # Triton's settings, where a profiler would hook itself in


_plans: dict[tuple[Any, ...], Plan | None] = {}  # None: there is no such plan


def _key(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    weight_offset: float,
    wanted: tuple[Any, ...],
) -> tuple[Any, ...]:
    return (
        s.dtype,
        s.shape[-1],
        s.get_device(),
        dy.dtype,
        None if dsum is None else dsum.dtype,
        None if weight is None else weight.dtype,
        mean is None,
        weight_offset,
        wanted,
    )


def gradients(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    wanted: tuple[bool, torch.dtype | None, torch.dtype | None],
) -> Gradients | None:
    """The gradients of a norm of the rows ``s``, or None where there is no plan that fits.

    ``wanted``: whether ds is, and the dtypes of dweight and dbias, None where they are not.
    """
    plan = _plans.get(_key(dy, dsum, s, weight, mean, weight_offset, wanted))
    if plan is None:
        return None
    hooks = plan.hooks
    if (
        s.get_device() != direct._current_device()
        or not s.is_contiguous()
        or not dy.is_contiguous()
        or dy.shape != s.shape
        or getattr(hooks.launch_enter_hook, "calls", True)  # or set to a function
        or getattr(hooks.launch_exit_hook, "calls", True)
    ):
        return None
    dsum_ptr = weight_ptr = mean_ptr = None
    s_ptr, dy_ptr, rstd_ptr = s.data_ptr(), dy.data_ptr(), rstd.data_ptr()
    bits = s_ptr | dy_ptr | rstd_ptr
    if dsum is not None:
        if not dsum.is_contiguous() or dsum.shape != s.shape:
            return None
        dsum_ptr = dsum.data_ptr()
        bits |= dsum_ptr
    if weight is not None:
        if not weight.is_contiguous():
            return None
        weight_ptr = weight.data_ptr()
        bits |= weight_ptr
    if mean is not None:
        mean_ptr = mean.data_ptr()
        bits |= mean_ptr
    n_rows, n_cols = rstd.shape[0], s.shape[-1]
    if bits & 15 or not 0 < n_rows < 2**31:
        return None

    main = plan.main
    programs = min(-(-n_rows // main.block_rows), plan.most_programs)
    empty, vector = direct._empty, (n_cols,)
    needs_ds, dweight_dtype, dbias_dtype = wanted
    ds = dweight = dbias = None
    ds_ptr = dweight_ptr = dbias_ptr = dweight_sums_ptr = dbias_sums_ptr = None
    if needs_ds:
        shape = tuple(s.shape)
        ds = empty(shape, direct._contiguous(shape), s.dtype)
        ds_ptr = ds.data_ptr()
    # Partial sums are used up before anything else of this stream can be given their memory.
    if dweight_dtype is not None:
        dweight = empty(vector, (1,), dweight_dtype)
        dweight_ptr = dweight.data_ptr()
        dweight_sums = empty((programs, n_cols), (n_cols, 1), rstd.dtype)
        dweight_sums_ptr = dweight_sums.data_ptr()
    if dbias_dtype is not None:
        dbias = empty(vector, (1,), dbias_dtype)
        dbias_ptr = dbias.data_ptr()
        dbias_sums = empty((programs, n_cols), (n_cols, 1), rstd.dtype)
        dbias_sums_ptr = dbias_sums.data_ptr()
    sums = (dweight_sums_ptr, dbias_sums_ptr, dweight_ptr, dbias_ptr)
    stream = direct._current_stream(s.get_device())
    main.launch(
        programs,
        1,
        1,
        stream,
        *main.head,
        s_ptr,
        dy_ptr,
        dsum_ptr,
        weight_ptr,
        mean_ptr,
        rstd_ptr,
        ds_ptr,
        *sums,
        n_rows,
        *main.tail,
    )
    reduction = plan.reduction
    if reduction is not None and programs > 1:
        reduction.launch(
            *plan.reduction_grid,
            1,
            stream,
            *reduction.head,
            *sums,
            programs,
            *reduction.tail,
        )
    return ds, dweight, dbias


def remember(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    wanted: tuple[bool, torch.dtype | None, torch.dtype | None],
) -> None:
    """Make the plan for backwards like this one, which the general way has just served."""
    key = _key(dy, dsum, s, weight, mean, weight_offset, wanted)
    device = s.get_device()
    if (
        key in _plans
        or device < 0
        or device != direct._current_device()
        or torch.cuda.is_current_stream_capturing()
        or s.numel() == 0
    ):
        return
    with dispatch.launching(s):
        if len(_plans) >= direct.MAX_KINDS:
            _plans.clear()
        if key not in _plans:
            _plans[key] = _plan(dy, dsum, s, weight, mean, rstd, weight_offset, wanted)


def _plan(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    wanted: tuple[bool, torch.dtype | None, torch.dtype | None],
) -> Plan | None:
    import triton

    from fusedops.kernels.backward import norm_backward_kernel
    from fusedops.kernels.launch import gpu_of, prepare_backward

    if not direct.is_launched_as_tested():
        return None
    n_cols = s.shape[-1]

    def stand_in(dtype: torch.dtype | None, *shape: int) -> Any:
        return None if dtype is None else s.new_empty(shape, dtype=dtype, device="meta")

    def like(tensor: Tensor | None, *shape: int) -> Any:
        return None if tensor is None else stand_in(tensor.dtype, *shape)

    needs_ds, dweight_dtype, dbias_dtype = wanted
    prepared = prepare_backward(
        like(s, 2, n_cols),
        like(dy, 2, n_cols),
        like(dsum, 2, n_cols),
        like(weight, n_cols),
        like(mean, 2),
        like(rstd, 2),
        like(s, 2, n_cols) if needs_ds else None,
        stand_in(dweight_dtype, n_cols),
        stand_in(dbias_dtype, n_cols),
        weight_offset=weight_offset,
        gpu=gpu_of(s.device),
    )
    if [call.kernel for call in prepared.calls] != [norm_backward_kernel]:
        return None  # each call of the others needs memory of its own, or more launches
    reduction: direct.Kernel | None = None
    grid: tuple[int, ...] = ()
    if prepared.reduction is not None:
        reduction = direct.compile_call(prepared.reduction, "n_partials")
        grid = prepared.reduction.grid
    return Plan(
        main=direct.compile_call(prepared.calls[0], "n_rows"),
        reduction=reduction,
        reduction_grid=grid,
        most_programs=prepared.most_programs,
        hooks=triton.knobs.runtime,
    )
