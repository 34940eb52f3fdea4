# SPDX-License-Identifier: Apache-2.0
"""The shortest way from a call to a launch, for eager CUDA calls that need no gradient.

At small sizes a call costs its time on the CPU. Here a call makes only those checks that tell
whether a compiled kernel may be launched on raw pointers, and launches it: no flattening, no
dispatcher, no autograd, and not Triton's own binder, whose work does not change between calls that
agree in the key. Whatever does not fit returns None before a pointer is read, and the caller takes
the general path.

The key holds all that Triton specialises on: dtypes, the row length, which pointers there are, and
the device; pointers must be 16-byte aligned and tensors contiguous, so that no stride varies.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedops import dispatch
from fusedops.autograd import Spec
from fusedops.dispatch import DENSE, MEMORY

__all__ = ["norm", "remember"]

TESTED_TRITON = ("3.6", "3.7")
"""Releases whose compiled kernels are known to be launched as `Plan.launch` does."""


class Plan(NamedTuple):
    """A compiled forward kernel and the arguments that do not change."""

    launch: Any  # called with grid and stream, then head, pointers, strides, n_rows, constants
    head: tuple[Any, ...]
    strides: tuple[int | None, ...]
    constants: tuple[Any, ...]
    block_rows: int
    y_dtype: torch.dtype | None  # None: as x
    sum_dtype: torch.dtype | None  # None: as the residual
    hooks: Any  # Triton's settings, where a profiler would hook itself in
    compiled: Any  # kept alive: its destructor unloads the module


_plans: dict[tuple[Any, ...], Plan] = {}

_is_grad_enabled = torch.is_grad_enabled
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_dispatch_keys = torch._C._dispatch_keys
_transforms = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_jit_trace = torch._C._get_tracing_state
_autocast = torch._C._is_any_autocast_enabled
_forward_ad = torch.autograd.forward_ad
_counters = dispatch._counters


def norm(
    options: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor | None] | None:
    """(y, summed), or None.

    ``options`` are the operator's name and its remaining arguments, with the types of numbers: as
    a dictionary's key, True would pass for 1.0.
    """
    if (
        type(x) is not Tensor
        or not x.is_cuda
        # Anything going on but plain eager execution? Asked first: wrapped tensors have no pointer.
        or _transforms() is not None
        or _forward_ad._current_level >= 0
        or _dispatch_modes()
        or _function_modes()
        or _jit_trace() is not None
        or _autocast()
        or _counters
        or _dispatch_keys(x).raw_repr() & MEMORY != DENSE
        or not x.is_contiguous()
    ):
        return None
    shape = x.shape
    if not shape:
        return None
    n_cols = shape[-1]
    device = x.get_device()
    x_ptr = pointers = x.data_ptr()
    needs_grad = x.requires_grad
    residual_ptr = residual_dtype = weight_ptr = weight_dtype = bias_ptr = bias_dtype = None
    if residual is not None:
        if (
            type(residual) is not Tensor
            or residual.get_device() != device
            or _dispatch_keys(residual).raw_repr() & MEMORY != DENSE
            or not residual.is_contiguous()
            or residual.shape != shape
        ):
            return None
        residual_ptr, residual_dtype = residual.data_ptr(), residual.dtype
        pointers |= residual_ptr
        needs_grad = needs_grad or residual.requires_grad
    if weight is not None:
        if not _is_vector(weight, n_cols, device):
            return None
        weight_ptr, weight_dtype = weight.data_ptr(), weight.dtype
        pointers |= weight_ptr
        needs_grad = needs_grad or weight.requires_grad
    if bias is not None:
        if not _is_vector(bias, n_cols, device):
            return None
        bias_ptr, bias_dtype = bias.data_ptr(), bias.dtype
        pointers |= bias_ptr
        needs_grad = needs_grad or bias.requires_grad
    try:
        plan = _plans.get(
            (options, x.dtype, residual_dtype, n_cols, weight_dtype, bias_dtype, device)
        )
    except TypeError:  # an argument that cannot be hashed, for the general path to refuse
        return None
    if (
        plan is None
        or pointers & 15
        or (needs_grad and _is_grad_enabled())
        or plan.hooks.launch_enter_hook.calls
        or plan.hooks.launch_exit_hook.calls
        or device != _current_device()
    ):
        return None
    n_rows = x.numel() // n_cols
    if not 0 < n_rows < 2**31:
        return None
    y = torch.empty_like(x) if plan.y_dtype is None else torch.empty_like(x, dtype=plan.y_dtype)
    summed = summed_ptr = None
    if residual is not None:
        if plan.sum_dtype is None:
            summed = torch.empty_like(residual)
        else:
            summed = torch.empty_like(residual, dtype=plan.sum_dtype)
        summed_ptr = summed.data_ptr()
    plan.launch(
        -(-n_rows // plan.block_rows),
        1,
        1,
        _current_stream(device),
        *plan.head,
        x_ptr,
        residual_ptr,
        weight_ptr,
        bias_ptr,
        y.data_ptr(),
        summed_ptr,
        None,
        None,
        *plan.strides,
        n_rows,
        *plan.constants,
    )
    return y, summed


def _is_vector(vector: Tensor, n_cols: int, device: int) -> bool:
    """Whether a weight or bias may be read by pointer."""
    kind = type(vector)
    return (
        (kind is Parameter or kind is Tensor)
        and vector.get_device() == device
        and not vector.is_neg()
        and vector.shape == (n_cols,)
        and vector.is_contiguous()
    )


def remember(
    options: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: Spec,
) -> None:
    """Make the plan for calls like this one, which the general path has just served."""
    device = x.get_device()
    key = (
        options,
        x.dtype,
        None if residual is None else residual.dtype,
        x.shape[-1],
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        device,
    )
    if device < 0 or device != _current_device() or key in _plans:
        return
    import triton

    from fusedops.kernels import launch

    if launch.TRITON_RELEASE not in TESTED_TRITON:
        return
    sum_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)

    def stand_in(role: Tensor | None, dtype: torch.dtype | None, *shape: int) -> Any:
        """An aligned, contiguous tensor for the kernel to be specialised on."""
        return None if role is None else torch.empty(shape, dtype=dtype, device=x.device)

    n_cols = x.shape[-1]
    call = launch.prepare_forward(
        stand_in(x, x.dtype, 2, n_cols),
        stand_in(residual, key[2], 2, n_cols),
        stand_in(weight, key[4], n_cols),
        stand_in(bias, key[5], n_cols),
        stand_in(x, spec.y_dtype, 2, n_cols),
        stand_in(residual, sum_dtype, 2, n_cols),
        None,
        None,
        eps,
        centered=spec.centered,
        cast_input=spec.cast_input,
        weight_offset=spec.weight_offset,
    )
    compiled = call.kernel.warmup(*call.arguments, grid=call.grid, **call.meta)
    names = call.kernel.arg_names
    first_stride, rows = names.index("x_row_stride"), names.index("n_rows")
    run, head = _entry(compiled, launch.TRITON_RELEASE)
    _plans[key] = Plan(
        launch=run,
        head=head,
        strides=call.arguments[first_stride:rows],
        constants=(eps, *(call.meta[name] for name in names if name in call.meta)),
        block_rows=call.meta["BLOCK_ROWS"],
        y_dtype=None if spec.y_dtype == x.dtype else spec.y_dtype,
        sum_dtype=None if residual is None or sum_dtype == residual.dtype else sum_dtype,
        hooks=triton.knobs.runtime,
        compiled=compiled,
    )


def _entry(compiled: Any, release: str) -> tuple[Any, tuple[Any, ...]]:
    """What to call for a launch, and its arguments between the stream and the kernel's own."""
    metadata = compiled.packed_metadata
    launcher = compiled.run  # loads the module, too
    hooks = (None, None, None)  # no metadata for hooks, and no hooks
    if (
        release == "3.6"
        and type(launcher).__name__ == "CudaLauncher"
        and launcher.global_scratch_size == launcher.profile_scratch_size == 0
    ):  # past the Python that would allocate the scratch memory
        options = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        return launcher.launch, (compiled.function, *options, None, None, metadata, *hooks)
    return launcher, (compiled.function, metadata, *hooks)
