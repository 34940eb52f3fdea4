# SPDX-License-Identifier: Apache-2.0
"""From row views to launched kernels: grids, strides, configurations and partial sums.

Callers have validated. Inputs of rows arrive as views (n_rows, H) or (n_outer, n_inner, H) whose
last stride is 1, all of one call with the same leading shape. Outputs are allocated by the caller;
of theirs only pointer and dtype count, rows are written H apart.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fusedops.kernels.backward import (
    norm_backward_kernel,
    norm_backward_looped_kernel,
    norm_backward_sliced_kernel,
    reduce_partials_kernel,
    weight_gradient_kernel,
)
from fusedops.kernels.config import (
    LOOPED_PARTIALS,
    Gpu,
    LaunchConfig,
    backward_config,
    forward_config,
    reduce_config,
    register_option,
    slice_columns,
    warps_apart,
    weight_gradient_config,
)
from fusedops.kernels.exchange import EMPTY, exchange_size
from fusedops.kernels.forward import norm_forward_kernel, norm_forward_looped_kernel

__all__ = [
    "TRITON_RELEASE",
    "Call",
    "forward_config",
    "gpu_of",
    "launch_backward",
    "launch_forward",
    "prepare_backward",
    "prepare_forward",
]


@cache
def gpu_of(device: torch.device) -> Gpu:
    """What configurations depend on; under the interpreter few programs, so partials are summed."""
    if device.type != "cuda":
        return Gpu(processors=3)
    properties = torch.cuda.get_device_properties(device)
    nvidia = torch.version.hip is None
    return Gpu(
        processors=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin if nvidia else 64 * 1024,
        overlaps=nvidia and (properties.major, properties.minor) >= (9, 0),
    )


FP_FUSION = True
"""Given with each launch: Triton 3.10 changes the default, and the bits must not change with it."""

TRITON_RELEASE = ".".join(triton.__version__.split(".")[:2])


class Call(NamedTuple):
    """A kernel with its grid, its arguments in order, and its constexprs and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    meta: dict[str, Any]


def run(call: Call, device: torch.device) -> None:
    """Launch on ``device``, which need not be the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            call.kernel[call.grid](*call.arguments, **call.meta)
    else:
        call.kernel[call.grid](*call.arguments, **call.meta)


def overlap_meta(gpu: Gpu) -> dict[str, Any]:
    """Constexpr and option of a kernel that begins with `arithmetic.start`, as they all do."""
    return {"OVERLAPPED": True, "launch_pdl": True} if gpu.overlaps else {"OVERLAPPED": False}


def is_looped(config: LaunchConfig, n_cols: int) -> bool:
    """Whether a program walks over its row in chunks."""
    return config.slices == 1 and config.block_size < n_cols


def row_strides(rows: Tensor | None, n_rows: int) -> tuple[int | None, int | None]:
    """(row stride, stride between groups of rows) of a view of rows, in elements."""
    if rows is None:
        return None, None
    if rows.dim() == 3:
        return rows.stride(1), rows.stride(0)
    # A single row's stride carries no meaning; one value for it spares a compiled variant.
    return (rows.shape[-1] if n_rows == 1 else rows.stride(0)), None


def exchange_memory(n_rows: int, parts: int, device: torch.device) -> Tensor | None:
    """What programs that share rows tell each other through; None where none do."""
    if parts == 1:
        return None
    size = exchange_size(n_rows, parts)
    return torch.full((size,), EMPTY.value, dtype=torch.int64, device=device)


def prepare_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    summed: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    *,
    centered: bool,
    cast_input: bool,
    weight_offset: float,
    gpu: Gpu | None = None,
) -> Call:
    """The call that writes y, and summed, mean and rstd where they are given.

    ``gpu`` is that of the tensors, if these are not on the device that the call is for.
    """
    gpu = gpu or gpu_of(x.device)
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    s = x if summed is None else summed
    config = forward_config(n_cols, s.dtype.itemsize, centered, residual is not None, gpu)
    arguments = (
        x,
        residual,
        weight,
        bias,
        y,
        summed,
        mean,
        rstd,
        n_rows,
        x.shape[1] if x.dim() == 3 else None,
        *row_strides(x, n_rows),
        *row_strides(residual, n_rows),
        n_cols,
        eps,
    )
    meta = {
        "N_COLS": n_cols,
        "CENTERED": centered,
        "CAST_INPUT": cast_input,
        "WEIGHT_OFFSET": weight_offset,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_SIZE": config.block_size,
        "num_warps": config.num_warps,
        "enable_fp_fusion": FP_FUSION,
        **overlap_meta(gpu),
    }
    if is_looped(config, n_cols):
        return Call(norm_forward_looped_kernel, (n_rows,), arguments, meta)
    arguments = (*arguments, exchange_memory(n_rows, config.slices, x.device))
    meta |= {
        "SLICE_COLS": slice_columns(n_cols, config.slices),
        "WEIGHTS_FIRST": config.weights_first,
        "PACKED": config.packed,
        "RELOADED": config.reloaded,
        "WARPS": warps_apart(config, s.dtype.itemsize) if centered else 1,
    }
    grid = (triton.cdiv(n_rows, config.block_rows) * config.slices,)
    return Call(norm_forward_kernel, grid, arguments, meta)


def launch_forward(x: Tensor, *arguments: Any, **options: Any) -> None:
    """Make the call of `prepare_forward`, whose arguments these are; nothing for no rows."""
    if x.numel() > 0:
        run(prepare_forward(x, *arguments, **options), x.device)


class Backward(NamedTuple):
    """Calls in the order of their launches: ``calls``, then ``reduction`` unless ``alone``.

    most_programs: as many as the first call would have of any number of rows, if it is persistent.
    reduction: sums up what the programs have for the weight gradients; None: none are wanted.
    alone: there is one program, which writes these gradients itself.
    """

    calls: tuple[Call, ...]
    most_programs: int
    reduction: Call | None
    alone: bool


def prepare_backward(
    s: Tensor,
    dy: Tensor,
    dsum: Tensor | None,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    ds: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    *,
    weight_offset: float,
    gpu: Gpu | None = None,
) -> Backward:
    """The calls that write ds (n_rows, H) and dweight, dbias (H,), those that are given.

    ``s`` are the rows that the forward normalised, at least one; ``mean`` is None for RMSNorm;
    ``gpu`` as for `prepare_forward`.
    """
    n_cols = s.shape[-1]
    n_rows = s.numel() // n_cols
    device = s.device
    gpu = gpu or gpu_of(device)
    config = backward_config(n_cols, s.dtype.itemsize, mean is not None, dsum is not None, gpu)
    looped = is_looped(config, n_cols)
    walkers = max(1, gpu.processors * config.programs_per_sm // config.slices)
    most_partials = LOOPED_PARTIALS if looped else walkers
    n_partials = min(triton.cdiv(n_rows, config.block_rows), most_partials)

    def partial_sums(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        return torch.empty((n_partials, n_cols), dtype=rstd.dtype, device=device)

    partials = (partial_sums(dweight), partial_sums(dbias))
    gradients = (dweight, dbias)
    reduction = prepare_reduction(partials, gradients, n_partials, most_partials, gpu)
    n_inner = s.shape[1] if s.dim() == 3 else None
    s_strides, dy_strides = row_strides(s, n_rows), row_strides(dy, n_rows)
    counts = (n_rows, n_inner)
    meta = {
        "N_COLS": n_cols,
        "CENTERED": mean is not None,
        "WEIGHT_OFFSET": weight_offset,
        "BLOCK_SIZE": config.block_size,
        "num_warps": config.num_warps,
        "enable_fp_fusion": FP_FUSION,
        **overlap_meta(gpu),
    }
    inputs = (s, dy, dsum, weight, mean, rstd)
    strides = (*s_strides, *dy_strides, *row_strides(dsum, n_rows), n_cols)
    calls = []
    if config.slices > 1:
        warps = warps_apart(config, s.dtype.itemsize)
        meta |= {
            "SLICE_COLS": slice_columns(n_cols, config.slices),
            "NUM_STAGES": config.num_stages,
            "WARPS": warps,
            **register_option(config),
        }
        exchange = exchange_memory(n_rows, config.slices * warps, device)
        arguments = (*inputs, ds, *partials, *gradients, exchange, *counts, *strides)
        grid = (n_partials * config.slices,)
        calls.append(Call(norm_backward_sliced_kernel, grid, arguments, meta))
    elif not looped:
        meta |= {
            "BLOCK_ROWS": config.block_rows,
            "NUM_STAGES": config.num_stages,
            "PACKED": config.packed,
            **register_option(config),
        }
        arguments = (*inputs, ds, *partials, *gradients, *counts, *strides)
        calls.append(Call(norm_backward_kernel, (n_partials,), arguments, meta))
    elif ds is not None:
        arguments = (*inputs, ds, *counts, *strides)
        calls.append(Call(norm_backward_looped_kernel, (n_rows,), arguments, meta))
    if looped and reduction is not None:
        columns = weight_gradient_config(n_cols)
        grid = (triton.cdiv(n_cols, columns.block_size), n_partials)
        arguments = (s, dy, mean, rstd, *partials, *counts, *s_strides, *dy_strides)
        meta = {"N_COLS": n_cols, "CENTERED": mean is not None, **column_meta(columns, gpu)}
        calls.append(Call(weight_gradient_kernel, grid, arguments, meta))
    alone = n_partials == 1 and not looped
    return Backward(tuple(calls), most_partials, reduction, alone)


def launch_backward(s: Tensor, *tensors: Tensor | None, weight_offset: float) -> None:
    """Make the calls of `prepare_backward`, whose arguments these are.

    Of no rows the weight gradients, the last two, are zero.
    """
    if s.numel() == 0:
        for gradient in tensors[-2:]:
            if gradient is not None:
                gradient.zero_()
        return
    prepared = prepare_backward(s, *tensors, weight_offset=weight_offset)
    reduction = prepared.reduction
    if prepared.alone and reduction is not None:
        compile_once(reduction, s.device)
    for call in prepared.calls:
        run(call, s.device)
    if reduction is not None and not prepared.alone:
        run(reduction, s.device)


def prepare_reduction(
    partials: tuple[Tensor | None, Tensor | None],
    gradients: tuple[Tensor | None, Tensor | None],
    n_partials: int,
    most_partials: int,
    gpu: Gpu,
) -> Call | None:
    """The call that makes dweight and dbias from partial sums; None where neither is wanted."""
    wanted = [gradient for gradient in gradients if gradient is not None]
    if not wanted:
        return None
    n_cols = wanted[0].shape[0]
    columns = reduce_config(n_cols, most_partials)
    grid = (triton.cdiv(n_cols, columns.block_size), len(wanted))
    arguments = (*partials, *gradients, n_partials, n_cols)
    return Call(reduce_partials_kernel, grid, arguments, column_meta(columns, gpu))


_compiled: set[tuple[Any, ...]] = set()


def compile_once(reduction: Call, device: torch.device) -> None:
    """Have what another number of rows will need, which may come in a graph's capture.

    It sums up no rows at all, and what it writes is written over.
    """
    partials, gradients, (_, n_cols) = (reduction.arguments[i : i + 2] for i in (0, 2, 4))
    dtypes = [None if tensor is None else tensor.dtype for tensor in (*partials, *gradients)]
    key = (device, n_cols, reduction.meta["BLOCK_ROWS"], *dtypes)
    if key not in _compiled:
        run(reduction._replace(arguments=(*partials, *gradients, 0, n_cols)), device)
        _compiled.add(key)


def column_meta(config: LaunchConfig, gpu: Gpu) -> dict[str, Any]:
    """Constexprs and options of the kernels whose programs keep a block of columns."""
    return {
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_SIZE": config.block_size,
        "num_warps": config.num_warps,
        "enable_fp_fusion": FP_FUSION,
        **overlap_meta(gpu),
    }
