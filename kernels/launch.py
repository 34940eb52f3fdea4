# SPDX-License-Identifier: Apache-2.0
"""From row views to launched kernels: grids, strides, configurations and partial sums.

Callers have validated. Inputs of rows arrive as views (n_rows, H) or (n_outer, n_inner, H) whose
last stride is 1, all of one call with the same leading shape. Outputs are allocated by the caller;
of theirs only pointer and dtype count, rows are written H apart.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from fusedops.kernels.backward import (
    norm_backward_kernel,
    norm_backward_looped_kernel,
    reduce_partials_kernel,
    weight_gradient_kernel,
)
from fusedops.kernels.config import (
    LOOPED_PARTIALS,
    backward_config,
    forward_config,
    reduce_config,
    weight_gradient_config,
)
from fusedops.kernels.forward import norm_forward_kernel, norm_forward_looped_kernel

__all__ = ["launch_backward", "launch_forward"]


@cache
def multiprocessors(device: torch.device) -> int:
    """Programs that run side by side; under the interpreter a few, so that partials are summed."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def run(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """Launch on ``device``, which need not be the current one."""
    # Triton 3.10 changes the default of fp fusion; the bits must not change with it.
    meta["enable_fp_fusion"] = True
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)
    else:
        kernel[grid](*args, **meta)


def row_strides(rows: Tensor | None, n_rows: int) -> tuple[int | None, int | None]:
    """(row stride, stride between groups of rows) of a view of rows, in elements."""
    if rows is None:
        return None, None
    if rows.dim() == 3:
        return rows.stride(1), rows.stride(0)
    # A single row's stride carries no meaning; one value for it spares a compiled variant.
    return (rows.shape[-1] if n_rows == 1 else rows.stride(0)), None


def launch_forward(
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
) -> None:
    """Write y, and summed, mean and rstd where they are given."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    if n_rows == 0:
        return
    s = x if summed is None else summed
    config = forward_config(n_cols, s.dtype.itemsize, residual is not None)
    looped = config.block_size < n_cols
    run(
        norm_forward_looped_kernel if looped else norm_forward_kernel,
        (triton.cdiv(n_rows, config.block_rows),),
        x.device,
        x,
        residual,
        weight,
        bias,
        y,
        summed,
        mean,
        rstd,
        *row_strides(x, n_rows),
        *row_strides(residual, n_rows),
        n_cols,
        x.shape[1] if x.dim() == 3 else None,
        n_rows,
        n_cols,
        eps,
        CENTERED=centered,
        CAST_INPUT=cast_input,
        WEIGHT_OFFSET=weight_offset,
        BLOCK_ROWS=config.block_rows,
        BLOCK_SIZE=config.block_size,
        num_warps=config.num_warps,
    )


def launch_backward(
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
) -> None:
    """Write ds (n_rows, H) and dweight, dbias (H,), those that are given.

    ``s`` are the rows that the forward normalised; ``mean`` is None for RMSNorm.
    """
    n_cols = s.shape[-1]
    n_rows = s.numel() // n_cols
    if n_rows == 0:
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.zero_()
        return
    device = s.device
    config = backward_config(n_cols, s.dtype.itemsize, dsum is not None)
    looped = config.block_size < n_cols
    n_partials = min(
        triton.cdiv(n_rows, config.block_rows),
        LOOPED_PARTIALS if looped else multiprocessors(device) * config.programs_per_sm,
    )

    def partial_sums(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        return torch.empty((n_partials, n_cols), dtype=rstd.dtype, device=device)

    dweight_partial, dbias_partial = partial_sums(dweight), partial_sums(dbias)
    n_inner = s.shape[1] if s.dim() == 3 else None
    s_strides, dy_strides = row_strides(s, n_rows), row_strides(dy, n_rows)
    dsum_strides = row_strides(dsum, n_rows)
    sizes = (n_inner, n_rows, n_cols)
    meta = {
        "CENTERED": mean is not None,
        "WEIGHT_OFFSET": weight_offset,
        "BLOCK_SIZE": config.block_size,
        "num_warps": config.num_warps,
    }
    inputs = (s, dy, dsum, weight, mean, rstd)
    if not looped:
        run(
            norm_backward_kernel,
            (n_partials,),
            device,
            *inputs,
            ds,
            dweight_partial,
            dbias_partial,
            *s_strides,
            *dy_strides,
            *dsum_strides,
            n_cols,
            *sizes,
            BLOCK_ROWS=config.block_rows,
            NUM_STAGES=config.num_stages,
            **meta,
        )
    else:
        if ds is not None:
            run(
                norm_backward_looped_kernel,
                (n_rows,),
                device,
                *inputs,
                ds,
                *s_strides,
                *dy_strides,
                *dsum_strides,
                n_cols,
                *sizes,
                **meta,
            )
        if dweight is not None or dbias is not None:
            columns = weight_gradient_config(n_cols)
            run(
                weight_gradient_kernel,
                (triton.cdiv(n_cols, columns.block_size), n_partials),
                device,
                s,
                dy,
                mean,
                rstd,
                dweight_partial,
                dbias_partial,
                *s_strides,
                *dy_strides,
                *sizes,
                CENTERED=mean is not None,
                BLOCK_ROWS=columns.block_rows,
                BLOCK_SIZE=columns.block_size,
                num_warps=columns.num_warps,
            )
    if dweight is not None or dbias is not None:
        columns = reduce_config(n_cols)
        run(
            reduce_partials_kernel,
            (triton.cdiv(n_cols, columns.block_size),),
            device,
            dweight_partial,
            dbias_partial,
            dweight,
            dbias,
            n_partials,
            n_cols,
            BLOCK_ROWS=columns.block_rows,
            BLOCK_SIZE=columns.block_size,
            num_warps=columns.num_warps,
        )
