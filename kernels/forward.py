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
the rounding error of the first mean. A constant row therefore centres to exactly zero. The parts of
a row that are summed up apart (its warps' columns, its slices) have their statistics merged by the
update of the same paper (eq. 2.1).
"""

import triton
import triton.language as tl

from fusedops.kernels.arithmetic import (
    divide,
    divide_by,
    opaque,
    reciprocal_root,
    round_to,
    row_offsets,
    start,
    sum_both,
)
from fusedops.kernels.exchange import look, receive, send, take_ticket

__all__ = ["norm_forward_kernel", "norm_forward_looped_kernel"]


@triton.jit
def load_columns(ptr, cols, col_mask, other):
    """A block of weight or bias; where there is none, a value that nothing reads."""
    if ptr is None:
        return tl.zeros((1,), dtype=tl.float32)
    else:
        return tl.load(ptr + cols, mask=col_mask, other=other, eviction_policy="evict_last")


@triton.jit
def scale_and_shift(
    x_hat, weight_ptr, bias_ptr, weight, bias, S_DTYPE, Y_DTYPE, CAST_INPUT, WEIGHT_OFFSET
):
    """y before its last rounding, from x_hat (rows, BLOCK_SIZE)."""
    # The product is formed in fp32, or in fp64 where y is fp64.
    PRODUCT: tl.constexpr = tl.float64 if Y_DTYPE == tl.float64 else x_hat.dtype
    if CAST_INPUT:
        x_hat = round_to(x_hat, S_DTYPE)
    y = x_hat.to(PRODUCT)
    if weight_ptr is not None:
        scale = weight.to(PRODUCT)
        if WEIGHT_OFFSET != 0.0:
            scale += WEIGHT_OFFSET
        y *= scale[None, :]
    if bias_ptr is not None:
        y += bias.to(PRODUCT)[None, :]
    return y


@triton.jit
def again(s, stored, PACKED):
    """``s``, which is ``stored`` converted: PACKED converts once more instead of keeping it."""
    if PACKED:
        return opaque(stored).to(s.dtype)
    else:
        return s


@triton.jit
def merge_two(mean, low, m2, count, other_mean, other_low, other_m2, other_count):
    """Mean, sum of squared deviations and count of two parts together (eq. 2.1 of that paper).

    ``low`` is what the rounding of the mean has left over. Equal means stay as they are, and the
    bits do not depend on which part comes first.
    """
    total = count + other_count
    share = 1.0 / tl.maximum(total, 1.0)
    delta = (other_mean - mean) + (other_low - low)
    m2 += other_m2 + delta * (delta * (count * other_count * share))
    # From the part with more columns on, which makes the smaller step.
    swap = tl.where(count == other_count, other_mean < mean, other_count > count)
    base = tl.where(swap, other_mean, mean)
    step = tl.where(swap, -delta, delta) * (tl.where(swap, count, other_count) * share)
    merged = base + step
    low = tl.where(swap, other_low, low) + (step - (merged - base))
    return merged, low, m2, total


@triton.jit
def corrected(squares, deviation_sum, correction):
    """Squared deviations, summed, after their mean's ``correction`` (eq. 1.7 of that paper).

    Squares that overflow stay infinite, which gives an rstd of zero. Those of a constant row of
    1e30 do if its first mean is off by a unit in the last place, and it still centres to zero.
    """
    return tl.where(squares < float("inf"), squares - deviation_sum * correction, squares)


@triton.jit
def moments(s, stored, col_mask, count, ALL: tl.constexpr, MASKED, PACKED):
    """Mean and sum of squared deviations, each (rows,), of the ``count`` columns of rows s.

    ALL is that count where it is constant, otherwise 0.
    """
    total, number = tl.sum(s, axis=1), tl.cast(count, s.dtype)
    mean = divide_by(total, ALL) if ALL else divide(total, number)
    deviation = again(s, stored, PACKED) - mean[:, None]
    if MASKED:
        deviation = tl.where(col_mask[None, :], deviation, 0.0)
    deviation_sum, squares = sum_both(deviation, deviation * deviation)
    correction = divide_by(deviation_sum, ALL) if ALL else divide(deviation_sum, number)
    return mean + correction, corrected(squares, deviation_sum, correction)


@triton.jit
def moments_by_warps(s, stored, col_mask, count, WARPS: tl.constexpr, MASKED, PACKED):
    """`moments` of a single row, with one exchange between the warps in place of two.

    The warps hold the columns in turn, 16 bytes a thread. Each makes the statistics of its own
    without waiting for another, and then all are merged.
    """
    EACH: tl.constexpr = 4096 // stored.dtype.primitive_bitwidth
    TURNS: tl.constexpr = s.shape[1] // (EACH * WARPS)
    rest = count % (EACH * WARPS) - tl.arange(0, WARPS) * EACH
    counts = count // (EACH * WARPS) * EACH + tl.minimum(tl.maximum(rest, 0), EACH)
    counts = counts.to(s.dtype)
    share = 1.0 / tl.maximum(counts, 1.0)

    total = tl.sum(tl.reshape(s, (TURNS, WARPS, EACH)), axis=0)
    mean = tl.sum(total, axis=1) * share
    deviation = tl.reshape(again(s, stored, PACKED), (TURNS, WARPS, EACH)) - mean[None, :, None]
    if MASKED:
        deviation = tl.where(tl.reshape(col_mask, (TURNS, WARPS, EACH)), deviation, 0.0)
    deviation_sum = tl.sum(tl.sum(deviation, axis=0), axis=1)
    squares = tl.sum(tl.sum(deviation * deviation, axis=0), axis=1)
    correction = deviation_sum * share
    m2 = corrected(squares, deviation_sum, correction)
    first, mean = mean, mean + correction
    low = correction - (mean - first)
    mean, low, m2, _ = tl.reduce((mean, low, m2, counts), 0, merge_two, keep_dims=True)
    return mean + low, m2


@triton.jit
def merge_moments(means, m2s, N_COLS: tl.constexpr, SLICE_COLS: tl.constexpr):
    """Mean and sum of squared deviations of a row, each (1,), from those of its slices.

    Eq. 2.1 of the paper above for many parts at once: means are taken relative to the first, so
    that constant rows stay exact.
    """
    indices = tl.arange(0, means.shape[0])
    counts = tl.minimum(tl.maximum(N_COLS - indices * SLICE_COLS, 0), SLICE_COLS).to(tl.float32)
    first = tl.sum(tl.where(indices == 0, means, 0.0), axis=0, keep_dims=True)
    shift = tl.sum((means - first) * counts, axis=0, keep_dims=True)
    mean = first + divide_by(shift, N_COLS)
    deviations = means - mean
    return mean, tl.sum(m2s + counts * deviations * deviations, axis=0, keep_dims=True)


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
    n_rows,
    n_inner,
    x_row_stride,
    x_outer_stride,
    residual_row_stride,
    residual_outer_stride,
    y_row_stride,
    eps: tl.float64,
    exchange_ptr,
    N_COLS: tl.constexpr,
    CENTERED: tl.constexpr,
    CAST_INPUT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLICE_COLS: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    PACKED: tl.constexpr,
    RELOADED: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """BLOCK_ROWS whole rows a program, or (BLOCK_ROWS = 1) a slice of SLICE_COLS columns of a row.

    SLICE_COLS is N_COLS where rows are not sliced; BLOCK_SIZE is the next power of two. With
    RELOADED (without a residual) x is loaded again, from L1 or L2, for its last use: registers that
    need not keep it meanwhile make room for more programs, and the caches are told when it is done
    with.

    The row length is a constant here so that the compiler drops the lanes beyond it, and all
    masking of columns where it is a power of two itself.
    """
    N_SLICES: tl.constexpr = (N_COLS - 1) // SLICE_COLS + 1
    MASKED: tl.constexpr = N_SLICES * BLOCK_SIZE != N_COLS
    S_DTYPE: tl.constexpr = (x_ptr if sum_ptr is None else sum_ptr).dtype.element_ty
    Y_DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if tl.float64 == S_DTYPE else tl.float32
    FIRST_LOAD: tl.constexpr = "evict_last" if RELOADED else ""

    start(OVERLAPPED)
    cols = tl.arange(0, BLOCK_SIZE)
    if N_SLICES == 1:
        rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = (rows < n_rows) if BLOCK_ROWS > 1 else tl.full((1,), True, tl.int1)
        slice_mask = row_mask  # rows whose statistics this program stores
        end = N_COLS
        count = N_COLS
    else:
        ticket = take_ticket(exchange_ptr)
        row = ticket // N_SLICES
        index = (ticket % N_SLICES).to(tl.int32)
        rows = row + tl.arange(0, 1)
        row_mask = rows < n_rows
        slice_mask = row_mask & (index == 0)
        cols += index * SLICE_COLS
        end = tl.minimum((index + 1) * SLICE_COLS, N_COLS)
        count = end - index * SLICE_COLS
    col_mask = (cols < end) if MASKED else tl.full((BLOCK_SIZE,), True, tl.int1)
    mask = row_mask[:, None] & col_mask[None, :]

    if WEIGHTS_FIRST:
        weight = load_columns(weight_ptr, cols, col_mask, 1.0)
        bias = load_columns(bias_ptr, cols, col_mask, 0.0)
    x_offsets = row_offsets(rows, n_inner, x_outer_stride, x_row_stride)
    y_offsets = (rows * y_row_stride)[:, None] + cols[None, :]
    x_ptrs = x_ptr + x_offsets[:, None] + cols[None, :]
    stored = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy=FIRST_LOAD)
    s = stored.to(ACC)
    if residual_ptr is not None:
        r_offsets = row_offsets(rows, n_inner, residual_outer_stride, residual_row_stride)
        residual = tl.load(
            residual_ptr + r_offsets[:, None] + cols[None, :], mask=mask, other=0.0
        ).to(ACC)
        stored = round_to(residual + s, S_DTYPE)
        tl.store(sum_ptr + y_offsets, stored, mask=mask)
        s = stored.to(ACC)

    if CENTERED:
        if WARPS > 1:
            mean, m2 = moments_by_warps(s, stored, col_mask, count, WARPS, MASKED, PACKED)
        else:
            ALL: tl.constexpr = N_COLS if N_SLICES == 1 else 0
            mean, m2 = moments(s, stored, col_mask, count, ALL, MASKED, PACKED)
        if N_SLICES > 1:
            send(exchange_ptr, rows, index, mean, m2, row_mask, N_SLICES)
            means, m2s = receive(*look(exchange_ptr, row, True, N_SLICES))
            mean, m2 = merge_moments(means, m2s, N_COLS, SLICE_COLS)
        variance = divide_by(m2, N_COLS)
        variance = tl.maximum(variance, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if mean_ptr is not None:
            tl.store(mean_ptr + rows, mean, mask=slice_mask)
    else:
        squares = tl.sum(s * s, axis=1)
        if N_SLICES > 1:
            send(exchange_ptr, rows, index, squares, squares, row_mask, N_SLICES)
            squares, _ = receive(*look(exchange_ptr, row, True, N_SLICES))
            squares = tl.sum(squares, axis=0, keep_dims=True)
        variance = divide_by(squares, N_COLS)
    rstd = reciprocal_root(variance, eps)  # eps inside the root: PyTorch's convention
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, rstd, mask=slice_mask)

    if RELOADED:
        s = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC)
    else:
        s = again(s, stored, PACKED)
    if CENTERED:
        s -= mean[:, None]
    if not WEIGHTS_FIRST:
        weight = load_columns(weight_ptr, cols, col_mask, 1.0)
        bias = load_columns(bias_ptr, cols, col_mask, 0.0)
    y = scale_and_shift(
        s * rstd[:, None],
        weight_ptr,
        bias_ptr,
        weight,
        bias,
        S_DTYPE,
        Y_DTYPE,
        CAST_INPUT,
        WEIGHT_OFFSET,
    )
    tl.store(y_ptr + y_offsets, round_to(y, Y_DTYPE), mask=mask)


@triton.jit
def chunk_columns(begin, N_COLS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The columns of a chunk, and which of them are in the row, each (BLOCK_SIZE,)."""
    cols = begin + tl.arange(0, BLOCK_SIZE)
    if N_COLS % BLOCK_SIZE == 0:
        return cols, tl.full((BLOCK_SIZE,), True, tl.int1)
    else:
        return cols, cols < N_COLS


@triton.jit
def load_chunk(ptr, cols, mask, ACC, EVICTION: tl.constexpr):
    """Columns of a row, (1, BLOCK_SIZE), zero where there are none."""
    return tl.load(ptr + cols[None, :], mask=mask, other=0.0, eviction_policy=EVICTION).to(ACC)


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
    n_rows,
    n_inner,
    x_row_stride,
    x_outer_stride,
    residual_row_stride,
    residual_outer_stride,
    y_row_stride,
    eps: tl.float64,
    N_COLS: tl.constexpr,
    CENTERED: tl.constexpr,
    CAST_INPUT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One row a program (BLOCK_ROWS is 1), in chunks of BLOCK_SIZE columns.

    Nothing of a row is kept but its sums: for each pass over it the row is loaded again, from L1 or
    L2 as long as the rows in flight fit there. RMSNorm makes two passes, LayerNorm three.
    """
    S_DTYPE: tl.constexpr = (x_ptr if sum_ptr is None else sum_ptr).dtype.element_ty
    Y_DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if tl.float64 == S_DTYPE else tl.float32

    start(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_offsets(row, n_inner, x_outer_stride, x_row_stride)
    y_ptr += row * y_row_stride
    if residual_ptr is not None:
        residual_ptr += row_offsets(row, n_inner, residual_outer_stride, residual_row_stride)
        sum_ptr += row * y_row_stride

    totals = tl.zeros((1, BLOCK_SIZE), dtype=ACC)  # one a lane, of s if CENTERED, else of squares
    for begin in range(0, N_COLS, BLOCK_SIZE):
        cols, col_mask = chunk_columns(begin, N_COLS, BLOCK_SIZE)
        mask = col_mask[None, :]
        s = load_chunk(x_ptr, cols, mask, ACC, "evict_last" if residual_ptr is None else "")
        if residual_ptr is not None:
            residual = load_chunk(residual_ptr, cols, mask, ACC, "")
            summed = round_to(residual + s, S_DTYPE)
            tl.store(sum_ptr + cols[None, :], summed, mask=mask)
            s = summed.to(ACC)
        totals += s if CENTERED else s * s
    if residual_ptr is not None:
        x_ptr = sum_ptr
        tl.debug_barrier()  # the sums that other threads stored must be visible

    mean = tl.zeros((1,), dtype=ACC)
    if CENTERED:
        mean = divide_by(tl.sum(totals, axis=1), N_COLS)
        sums = tl.zeros((1, BLOCK_SIZE), dtype=ACC)
        squares = tl.zeros((1, BLOCK_SIZE), dtype=ACC)
        for begin in range(0, N_COLS, BLOCK_SIZE):
            cols, col_mask = chunk_columns(begin, N_COLS, BLOCK_SIZE)
            s = load_chunk(x_ptr, cols, col_mask[None, :], ACC, "evict_last")
            deviation = tl.where(col_mask[None, :], s - mean[:, None], 0.0)
            sums += deviation
            squares += deviation * deviation
        sums, squares = sum_both(sums, squares)
        correction = divide_by(sums, N_COLS)
        mean += correction
        m2 = corrected(squares, sums, correction)
        variance = tl.maximum(divide_by(m2, N_COLS), 0.0, propagate_nan=tl.PropagateNan.ALL)
        if mean_ptr is not None:
            tl.store(mean_ptr + row + tl.arange(0, 1), mean)
    else:
        variance = divide_by(tl.sum(totals, axis=1), N_COLS)
    rstd = reciprocal_root(variance, eps)  # eps inside the root: PyTorch's convention
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row + tl.arange(0, 1), rstd)

    for begin in range(0, N_COLS, BLOCK_SIZE):
        cols, col_mask = chunk_columns(begin, N_COLS, BLOCK_SIZE)
        mask = col_mask[None, :]
        s = load_chunk(x_ptr, cols, mask, ACC, "evict_first")
        if CENTERED:
            s -= mean[:, None]
        y = scale_and_shift(
            s * rstd[:, None],
            weight_ptr,
            bias_ptr,
            load_columns(weight_ptr, cols, col_mask, 1.0),
            load_columns(bias_ptr, cols, col_mask, 0.0),
            S_DTYPE,
            Y_DTYPE,
            CAST_INPUT,
            WEIGHT_OFFSET,
        )
        tl.store(y_ptr + cols[None, :], round_to(y, Y_DTYPE), mask=mask)
