# SPDX-License-Identifier: Apache-2.0
"""Forward of both norms, with or without the residual add.

For each row s of ``n_cols`` elements (s = x, or x + residual rounded to the sum's dtype, which is
also what ``sum_ptr`` receives)::

    CENTERED (LayerNorm)     mean = sum(s) / n_cols    var = sum((s - mean)^2) / n_cols
    not CENTERED (RMSNorm)   mean = 0                  var = sum(s^2) / n_cols
    rstd = 1 / sqrt(var + eps)
    y = (s - mean) * rstd * (weight + WEIGHT_OFFSET) + bias

Shapes: x, residual, y, sum (n_rows, n_cols); weight, bias (n_cols,); mean, rstd (n_rows,) in the
accumulation dtype, which is fp32, or fp64 where s is fp64. Every element is converted to it right
after its load, and y is rounded once at its store; with CAST_INPUT the normalised value is first
rounded to s's dtype, as Llama's norm in Hugging Face transformers does. A pointer that is None
leaves out what it stands for.

LayerNorm's statistics are the corrected two-pass ones (Chan, Golub & LeVeque 1983, "Algorithms for
computing the sample variance", eq. 1.7): the second pass also sums the deviations, which cancels
the rounding error of the first mean. A constant row therefore centres to exactly zero. Rows beyond
one block merge their chunks' statistics by the update of the same paper (eq. 2.1).
"""

import triton
import triton.language as tl

from fusedops.kernels.arithmetic import divide, reciprocal_root, row_offsets

__all__ = ["norm_forward_kernel", "norm_forward_looped_kernel"]


@triton.jit
def scale_and_shift(
    x_hat, weight_ptr, bias_ptr, cols, col_mask, S_DTYPE, Y_DTYPE, CAST_INPUT, WEIGHT_OFFSET
):
    """y before its last rounding, from x_hat (rows, BLOCK_SIZE)."""
    # The product is formed in fp32, or in fp64 where y is fp64.
    PRODUCT: tl.constexpr = tl.float64 if tl.float64 == Y_DTYPE else x_hat.dtype
    if CAST_INPUT:
        x_hat = x_hat.to(S_DTYPE)
    y = x_hat.to(PRODUCT)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=1.0).to(PRODUCT)
        if WEIGHT_OFFSET != 0.0:
            weight += WEIGHT_OFFSET
        y *= weight[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(PRODUCT)[None, :]
    return y


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    x_row_stride,
    x_outer_stride,
    residual_row_stride,
    residual_outer_stride,
    y_row_stride,
    n_inner,
    n_rows,
    n_cols,
    eps: tl.float64,
    CENTERED: tl.constexpr,
    CAST_INPUT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """BLOCK_ROWS whole rows a program; BLOCK_SIZE >= n_cols."""
    S_DTYPE: tl.constexpr = (x_ptr if sum_ptr is None else sum_ptr).dtype.element_ty
    Y_DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if tl.float64 == S_DTYPE else tl.float32

    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_SIZE)
    row_mask = rows < n_rows
    col_mask = cols < n_cols
    mask = row_mask[:, None] & col_mask[None, :]

    x_offsets = row_offsets(rows, n_inner, x_outer_stride, x_row_stride)
    y_offsets = (rows * y_row_stride)[:, None] + cols[None, :]
    s = tl.load(x_ptr + x_offsets[:, None] + cols[None, :], mask=mask, other=0.0).to(ACC)
    if residual_ptr is not None:
        r_offsets = row_offsets(rows, n_inner, residual_outer_stride, residual_row_stride)
        residual = tl.load(
            residual_ptr + r_offsets[:, None] + cols[None, :], mask=mask, other=0.0
        ).to(ACC)
        summed = (residual + s).to(S_DTYPE)
        tl.store(sum_ptr + y_offsets, summed, mask=mask)
        s = summed.to(ACC)

    count = tl.cast(n_cols, ACC)
    if CENTERED:
        mean = divide(tl.sum(s, axis=1), count)
        deviation = tl.where(mask, s - mean[:, None], 0.0)
        correction = divide(tl.sum(deviation, axis=1), count)
        variance = divide(tl.sum(deviation * deviation, axis=1), count) - correction * correction
        variance = tl.maximum(variance, 0.0, propagate_nan=tl.PropagateNan.ALL)
        mean += correction
        s = tl.where(mask, s - mean[:, None], 0.0)
        if mean_ptr is not None:
            tl.store(mean_ptr + rows, mean, mask=row_mask)
    else:
        variance = divide(tl.sum(s * s, axis=1), count)
    rstd = reciprocal_root(variance, eps)  # eps inside the root: PyTorch's convention
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, rstd, mask=row_mask)

    y = scale_and_shift(
        s * rstd[:, None],
        weight_ptr,
        bias_ptr,
        cols,
        col_mask,
        S_DTYPE,
        Y_DTYPE,
        CAST_INPUT,
        WEIGHT_OFFSET,
    )
    tl.store(y_ptr + y_offsets, y.to(Y_DTYPE), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def norm_forward_looped_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    x_row_stride,
    x_outer_stride,
    residual_row_stride,
    residual_outer_stride,
    y_row_stride,
    n_inner,
    n_rows,
    n_cols,
    eps: tl.float64,
    CENTERED: tl.constexpr,
    CAST_INPUT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One row a program (BLOCK_ROWS is 1), in chunks of BLOCK_SIZE columns, read twice.

    The second read comes from L2 as long as the rows in flight fit there.
    """
    S_DTYPE: tl.constexpr = (x_ptr if sum_ptr is None else sum_ptr).dtype.element_ty
    Y_DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if tl.float64 == S_DTYPE else tl.float32

    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_offsets(row, n_inner, x_outer_stride, x_row_stride)
    y_ptr += row * y_row_stride
    if residual_ptr is not None:
        residual_ptr += row_offsets(row, n_inner, residual_outer_stride, residual_row_stride)
        sum_ptr += row * y_row_stride

    mean = tl.zeros((1,), dtype=ACC)
    m2 = tl.zeros((1,), dtype=ACC)  # CENTERED: sum of squared deviations so far
    squares = tl.zeros((1, BLOCK_SIZE), dtype=ACC)  # otherwise: squares, one sum a lane
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        mask = (cols < n_cols)[None, :]
        s = tl.load(x_ptr + cols[None, :], mask=mask, other=0.0).to(ACC)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + cols[None, :], mask=mask, other=0.0).to(ACC)
            summed = (residual + s).to(S_DTYPE)
            tl.store(sum_ptr + cols[None, :], summed, mask=mask)
            s = summed.to(ACC)
        if CENTERED:
            count = tl.cast(tl.minimum(n_cols - start, BLOCK_SIZE), ACC)
            before = tl.cast(start, ACC)
            chunk_mean = divide(tl.sum(s, axis=1), count)
            deviation = tl.where(mask, s - chunk_mean[:, None], 0.0)
            total_deviation = tl.sum(deviation, axis=1)
            correction = divide(total_deviation, count)
            chunk_m2 = tl.sum(deviation * deviation, axis=1) - total_deviation * correction
            chunk_mean += correction
            delta = chunk_mean - mean
            # The first chunk's mean is taken as it is, so that constant rows stay exact.
            weight_of_chunk = divide(count, before + count)
            mean = tl.where(start == 0, chunk_mean, mean + delta * weight_of_chunk)
            m2 += chunk_m2 + delta * delta * (before * weight_of_chunk)
        else:
            squares += s * s

    count = tl.cast(n_cols, ACC)
    if CENTERED:
        variance = tl.maximum(divide(m2, count), 0.0, propagate_nan=tl.PropagateNan.ALL)
        if mean_ptr is not None:
            tl.store(mean_ptr + row + tl.arange(0, 1), mean)
    else:
        variance = divide(tl.sum(squares, axis=1), count)
    rstd = reciprocal_root(variance, eps)  # eps inside the root: PyTorch's convention
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row + tl.arange(0, 1), rstd)

    if residual_ptr is not None:
        x_ptr = sum_ptr
        tl.debug_barrier()  # the sums that other threads stored must be visible
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        col_mask = cols < n_cols
        mask = col_mask[None, :]
        s = tl.load(x_ptr + cols[None, :], mask=mask, other=0.0).to(ACC)
        if CENTERED:
            s = tl.where(mask, s - mean[:, None], 0.0)
        y = scale_and_shift(
            s * rstd[:, None],
            weight_ptr,
            bias_ptr,
            cols,
            col_mask,
            S_DTYPE,
            Y_DTYPE,
            CAST_INPUT,
            WEIGHT_OFFSET,
        )
        tl.store(y_ptr + cols[None, :], y.to(Y_DTYPE), mask=mask)
