# SPDX-License-Identifier: Apache-2.0
"""The shortest way from a gradient to the backward's launches, as `fusedops.direct` is for calls.

The first backward of a kind goes the general way and leaves a `Plan`: the compiled kernels and the
arguments that do not vary. The next one whose tensors are like its own launches them with no more
than their pointers. What may vary is the number of rows. Autograd has seen to it that gradients
have the shape and dtype of what they are gradients of, and whoever asks, that kernels may read
them. Anything else returns None before anything is allocated.

A plan is found by all that it depends on. Where the forward was called by C, its plan also keeps a
`Fit` for each set of gradients that may be asked for: a guard, as the forward's, which in one call
into C++ answers all of that and whether a kernel may read the tensors. With it the C goes from
autograd to the launch, past the Python of this module.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops import direct, dispatch

__all__ = [
    "Fit",
    "Gradients",
    "Plan",
    "Saved",
    "Wanted",
    "gradients",
    "launch_backward",
    "remember",
]

Saved = tuple[Tensor, Tensor | None, Tensor | None, Tensor, float]
"""The normalised rows s, weight, mean (None for RMSNorm), rstd, and weight_offset."""

Wanted = tuple[bool, torch.dtype | None, torch.dtype | None]
"""Whether ds is wanted, and the dtypes of dweight and dbias, None where these are not."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""ds, dweight and dbias; None for those that are not wanted."""


class Plan(NamedTuple):
    """How to launch the backward of one kind of call; direct.c knows the places of its parts."""

    main_launch: Any
    main_head: tuple[Any, ...]
    main_tail: tuple[Any, ...]
    block_rows: int
    most_programs: int
    sum_launch: Any  # of the kernel that adds up partial sums; None: no such gradient is wanted
    sum_head: tuple[Any, ...]
    sum_tail: tuple[Any, ...]
    sum_grid_x: int
    sum_grid_y: int
    device: int
    hooks: Any  # Triton's settings, where a profiler would hook itself in
    kept: tuple[Any, ...]  # compiled kernels: their destructors unload the modules


class Fit(NamedTuple):
    """What serves the backwards of one forward's plan; direct.c knows the places of its parts."""

    check: Any  # of s, dy, dsum, weight, mean and rstd, as far as there are
    plan: Plan
    wanted: Wanted
    n_cols: int


SUMS_ALIGNED = 4
"""Elements of fp32, or fp64: 16 bytes, as pointers must be aligned."""

_plans: dict[tuple[Any, ...], Plan | None] = {}  # None: there is no such plan


def _key(dy: Tensor, dsum: Tensor | None, saved: Saved, wanted: Wanted) -> tuple[Any, ...]:
    """Of what was saved, dtypes and devices, too: hooks on saved tensors may give back others."""
    s, weight, mean, rstd, weight_offset = saved
    return (
        s.dtype,
        s.shape[-1],
        s.get_device(),
        dy.dtype,
        None if dsum is None else dsum.dtype,
        None if weight is None else (weight.dtype, weight.get_device()),
        None if mean is None else mean.dtype,
        rstd.dtype,
        rstd.get_device(),
        weight_offset,
        wanted,
    )


def gradients(
    dy: Tensor,
    dsum: Tensor | None,
    saved: Saved,
    wanted: Wanted,
    fits: list[Fit | None] | None = None,
) -> Gradients | None:
    """The gradients of a norm, or None where there is no plan that fits.

    ``fits``: where the C will look for what serves the next backward like this one.
    """
    plan = _plans.get(_key(dy, dsum, saved, wanted))
    if plan is None:
        return None
    launch = direct.launch_backward or launch_backward
    found: Gradients | None = launch(plan, wanted, dy, dsum, *saved[:-1])
    if fits is not None and found is not None and dsum is not dy:  # no guard takes a tensor twice
        needs = (wanted[0], wanted[1] is not None, wanted[2] is not None, dsum is not None)
        fits[sum(needed << place for place, needed in enumerate(needs))] = _fit(
            plan, wanted, dy, dsum, *saved[:-1]
        )
    return found


def _fit(
    plan: Plan,
    wanted: Wanted,
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
) -> Fit:
    def given(*tensors: Tensor | None) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor is not None]

    check = direct.guard(given(s, dy, dsum), given(weight), given(mean, rstd))
    return Fit(check, plan, wanted, s.shape[-1])


def launch_backward(
    plan: Plan,
    wanted: Wanted,
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
) -> Gradients | None:
    """The gradients, by the plan's kernels; None where they do not fit. Once more in direct.c."""
    device, shape, hooks = plan.device, s.shape, plan.hooks
    if (
        device != direct._current_device()
        or not (s.is_contiguous() and dy.is_contiguous())
        or dy.shape != shape
        or not (dsum is None or (dsum.is_contiguous() and dsum.shape == shape))
        or not (weight is None or (weight.is_contiguous() and weight.shape == shape[-1:]))
        or not rstd.is_contiguous()
        or not (mean is None or (mean.is_contiguous() and mean.shape == rstd.shape))
        or rstd.numel() * shape[-1] != s.numel()
        or getattr(hooks.launch_enter_hook, "calls", True)  # or set to a function
        or getattr(hooks.launch_exit_hook, "calls", True)
    ):
        return None
    read = [None if t is None else t.data_ptr() for t in (s, dy, dsum, weight, mean, rstd)]
    n_rows, n_cols = rstd.shape[0], shape[-1]
    if any(pointer and pointer & 15 for pointer in read) or not 0 < n_rows < 2**31:
        return None
    programs = min(-(-n_rows // plan.block_rows), plan.most_programs)

    def empty(shape: tuple[int, ...], dtype: torch.dtype | None) -> tuple[Any, int | None]:
        """A tensor and its pointer, None for both without a dtype."""
        if dtype is None:
            return None, None
        made = direct._empty(shape, direct._contiguous(shape), dtype)
        return made, made.data_ptr()

    needs_ds, *dtypes = wanted
    ds, ds_ptr = empty(tuple(shape), s.dtype if needs_ds else None)
    (dweight, dweight_ptr), (dbias, dbias_ptr) = (empty((n_cols,), dtype) for dtype in dtypes)
    # Partial sums are used up before anything else of this stream can be given their memory.
    most = -(-programs * n_cols // SUMS_ALIGNED) * SUMS_ALIGNED
    n_wanted = sum(dtype is not None for dtype in dtypes)
    sums, sums_ptr = empty((n_wanted * most,), rstd.dtype if n_wanted else None)
    dbias_sums_ptr = sums_ptr
    if sums_ptr is not None and n_wanted == 2:
        dbias_sums_ptr = sums_ptr + most * sums.element_size()
    columns = (
        None if dweight is None else sums_ptr,
        None if dbias is None else dbias_sums_ptr,
        dweight_ptr,
        dbias_ptr,
    )
    stream = direct._current_stream(device)
    start = (1, stream, *plan.main_head, *read, ds_ptr)
    plan.main_launch(programs, 1, *start, *columns, n_rows, *plan.main_tail)
    if programs > 1 and plan.sum_launch is not None:
        grid = (plan.sum_grid_x, plan.sum_grid_y, 1)
        plan.sum_launch(*grid, stream, *plan.sum_head, *columns, programs, *plan.sum_tail)
    return ds, dweight, dbias


def remember(dy: Tensor, dsum: Tensor | None, saved: Saved, wanted: Wanted) -> None:
    """Make the plan for backwards like this one, which the general way has just served."""
    s = saved[0]
    device = s.get_device()
    if device < 0 or device != direct._current_device() or s.numel() == 0:
        return
    key = _key(dy, dsum, saved, wanted)
    if key in _plans or torch.cuda.is_current_stream_capturing():
        return
    with dispatch.launching(s):
        if len(_plans) >= direct.MAX_KINDS:
            _plans.clear()
        if key not in _plans:
            _plans[key] = _plan(dy, dsum, saved, wanted)


def _plan(dy: Tensor, dsum: Tensor | None, saved: Saved, wanted: Wanted) -> Plan | None:
    import triton

    from fusedops.kernels.backward import norm_backward_kernel
    from fusedops.kernels.launch import gpu_of, prepare_backward

    if not direct.is_launched_as_tested():
        return None
    s, weight, mean, rstd, weight_offset = saved
    n_cols = s.shape[-1]

    def like(tensor: Tensor | None, *shape: int) -> Any:
        return direct.stand_in(None if tensor is None else tensor.dtype, *shape)

    needs_ds, dweight_dtype, dbias_dtype = wanted
    prepared = prepare_backward(
        like(s, 2, n_cols),
        like(dy, 2, n_cols),
        like(dsum, 2, n_cols),
        like(weight, n_cols),
        like(mean, 2),
        like(rstd, 2),
        like(s, 2, n_cols) if needs_ds else None,
        direct.stand_in(dweight_dtype, n_cols),
        direct.stand_in(dbias_dtype, n_cols),
        weight_offset=weight_offset,
        gpu=gpu_of(s.device),
    )
    if [call.kernel for call in prepared.calls] != [norm_backward_kernel]:
        return None  # each call of the others needs memory of its own, or more launches
    main = direct.compile_call(prepared.calls[0], "n_rows")
    start = (main.launch, main.head, main.tail, main.block_rows, prepared.most_programs)
    end = (s.get_device(), triton.knobs.runtime)
    direct.load_native()
    if prepared.reduction is None:
        return Plan(*start, None, (), (), 0, 0, *end, (main.compiled,))
    sums = direct.compile_call(prepared.reduction, "n_partials")
    grid_x, grid_y = prepared.reduction.grid
    kept = (main.compiled, sums.compiled)
    return Plan(*start, sums.launch, sums.head, sums.tail, grid_x, grid_y, *end, kept)
