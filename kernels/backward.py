# SPDX-License-Identifier: Apache-2.0
"""Backward of both norms, with or without the gradient of the sum, and of weight and bias.

With x_hat = (s - mean) * rstd (mean = 0 unless CENTERED) and g = dy * (weight + WEIGHT_OFFSET)::

    ds      = rstd * (g - x_hat * sum(g * x_hat) / n_cols [- sum(g) / n_cols, CENTERED]) + dsum
    dweight = sum over rows of dy * x_hat
    dbias   = sum over rows of dy

Derivation: Ba, Kiros & Hinton 2016 (arXiv:1607.06450), section 3, differentiated; RMSNorm is the
same with no mean (Zhang & Sennrich 2019, arXiv:1910.07467, section 4).

Shapes: s, dy, dsum, ds (n_rows, n_cols); weight (n_cols,); mean, rstd (n_rows,). Accumulation is
in fp32 (fp64 for fp64 rows), from the load to the store. dweight and dbias are summed within each
program into one row of ``dweight_partial_ptr`` / ``dbias_partial_ptr`` (n_programs, n_cols), and
`reduce_partials_kernel` adds those rows in a fixed order: no atomics, the same bits each run. A
program that is the only one writes the gradients itself.
"""

import triton
import triton.language as tl

from fusedops.kernels.arithmetic import (
    divide_by,
    opaque,
    round_to,
    row_offsets,
    start,
    start_next,
    sum_both,
    widen,
)
from fusedops.kernels.exchange import look, receive, send, take_ticket

__all__ = [
    "norm_backward_kernel",
    "norm_backward_looped_kernel",
    "norm_backward_sliced_kernel",
    "reduce_partials_kernel",
    "weight_gradient_kernel",
]


@triton.jit
def load_weight(weight_ptr, cols, col_mask, ACC, WEIGHT_OFFSET):
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=1.0)
    return as_factor(weight, ACC, WEIGHT_OFFSET)


@triton.jit
def as_factor(weight, ACC, WEIGHT_OFFSET):
    weight = widen(weight, ACC)
    if WEIGHT_OFFSET != 0.0:
        weight += WEIGHT_OFFSET
    return weight[None, :]


@triton.jit
def normalised(s, mean, rstd, mask, ACC, CENTERED: tl.constexpr, MASKED: tl.constexpr):
    """x_hat in the accumulation dtype, zero beyond the row, whose columns ``mask`` tells.

    What is no row at all was loaded as zeros.
    """
    x_hat = widen(s, ACC)
    if CENTERED:
        x_hat -= mean
        if MASKED:
            x_hat = tl.where(mask, x_hat, 0.0)
    return x_hat * rstd


@triton.jit
def store_sum(total, partial_ptrs, gradient_ptrs, mask, alone):
    """What a program's rows (BLOCK_ROWS, BLOCK_SIZE) add to a gradient.

    It is the gradient itself where the program is ``alone``; otherwise the partial sum.
    """
    total = tl.sum(total, axis=0)
    if alone:
        tl.store(gradient_ptrs, round_to(total, gradient_ptrs.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_ptrs, total, mask=mask)


@triton.jit
def walk_over_tile(
    tile, s_ptr, dy_ptr, dsum_ptr, mean_ptr, rstd_ptr, ds_ptr, dweight_ptr, dbias_ptr, n_rows,
    n_inner, s_row_stride, s_outer_stride, dy_row_stride, dy_outer_stride, dsum_row_stride,
    dsum_outer_stride, ds_row_stride, weight_ptr, stored_weight, weight, dweight, dbias, cols,
    columns, N_COLS, CENTERED, WEIGHT_OFFSET, BLOCK_ROWS: tl.constexpr, MASKED, PACKED,
):  # fmt: skip
    """Store ds of one tile of rows; (dweight, dbias) with what these rows add to them."""
    ACC: tl.constexpr = tl.float64 if s_ptr.dtype.element_ty == tl.float64 else tl.float32
    rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = (rows < n_rows) if BLOCK_ROWS > 1 else tl.full((1,), True, tl.int1)
    mask = row_mask[:, None] & columns
    s_offsets = row_offsets(rows, n_inner, s_outer_stride, s_row_stride)
    dy_offsets = row_offsets(rows, n_inner, dy_outer_stride, dy_row_stride)
    s = tl.load(s_ptr + s_offsets[:, None] + cols[None, :], mask=mask, other=0.0)
    dy = tl.load(dy_ptr + dy_offsets[:, None] + cols[None, :], mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
    mean = 0.0
    if CENTERED:
        mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)[:, None]
    x_hat = normalised(s, mean, rstd, columns, ACC, CENTERED, MASKED)
    g = widen(dy, ACC)
    if dweight_ptr is not None:
        dweight += g * x_hat
    if dbias_ptr is not None:
        dbias += g
    if ds_ptr is not None:
        if weight_ptr is not None:
            g *= weight
        if CENTERED:
            gx_sum, g_sum = sum_both(g * x_hat, g)
            g_mean = divide_by(g_sum, N_COLS)[:, None]
        else:
            gx_sum = tl.sum(g * x_hat, axis=1)
        gx_mean = divide_by(gx_sum, N_COLS)[:, None]
        if PACKED:
            x_hat = normalised(opaque(s), mean, rstd, columns, ACC, CENTERED, MASKED)
            g = widen(opaque(dy), ACC)
            if weight_ptr is not None:
                g *= as_factor(opaque(stored_weight), ACC, WEIGHT_OFFSET)
        ds = g - x_hat * gx_mean
        if CENTERED:
            ds -= g_mean
        ds *= rstd
        if dsum_ptr is not None:
            dsum_offsets = row_offsets(rows, n_inner, dsum_outer_stride, dsum_row_stride)
            dsum_ptrs = dsum_ptr + dsum_offsets[:, None] + cols[None, :]
            ds += widen(tl.load(dsum_ptrs, mask=mask, other=0.0), ACC)
        ds_offsets = (rows * ds_row_stride)[:, None] + cols[None, :]
        tl.store(ds_ptr + ds_offsets, round_to(ds, ds_ptr.dtype.element_ty), mask=mask)
    return dweight, dbias


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def norm_backward_kernel(
    s_ptr,
    dy_ptr,
    dsum_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    ds_ptr,
    dweight_partial_ptr,
    dbias_partial_ptr,
    dweight_ptr,
    dbias_ptr,
    n_rows,
    n_inner,
    s_row_stride,
    s_outer_stride,
    dy_row_stride,
    dy_outer_stride,
    dsum_row_stride,
    dsum_outer_stride,
    ds_row_stride,
    N_COLS: tl.constexpr,
    CENTERED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Persistent: each program walks over tiles of BLOCK_ROWS whole rows, a grid apart.

    The row length is a constant for the same reason as in the forward. With PACKED (2-byte s, dy
    and weight) what is loaded stays as it is between its uses, and is converted for each.
    """
    MASKED: tl.constexpr = BLOCK_SIZE != N_COLS
    ACC: tl.constexpr = tl.float64 if s_ptr.dtype.element_ty == tl.float64 else tl.float32

    start(OVERLAPPED)
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    col_mask = (cols < N_COLS) if MASKED else tl.full((BLOCK_SIZE,), True, tl.int1)
    columns = col_mask[None, :]
    stored_weight = 0.0  # nothing reads these four where they are not wanted
    weight = 0.0
    dweight = 0.0
    dbias = 0.0
    if weight_ptr is not None:
        stored_weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0)
        weight = as_factor(stored_weight, ACC, WEIGHT_OFFSET)
    if dweight_ptr is not None:
        dweight = tl.zeros((BLOCK_ROWS, BLOCK_SIZE), dtype=ACC)
    if dbias_ptr is not None:
        dbias = tl.zeros((BLOCK_ROWS, BLOCK_SIZE), dtype=ACC)

    n_tiles = (n_rows - 1) // BLOCK_ROWS + 1  # unlike tl.cdiv, cannot overflow
    # A single tile a program: nothing to load ahead, and a pipeline takes time to begin. Where
    # columns are masked there are no registers for what both ways need.
    if not MASKED and n_tiles <= tl.num_programs(0):
        dweight, dbias = walk_over_tile(
            pid, s_ptr, dy_ptr, dsum_ptr, mean_ptr, rstd_ptr, ds_ptr, dweight_ptr, dbias_ptr,
            n_rows, n_inner, s_row_stride, s_outer_stride, dy_row_stride, dy_outer_stride,
            dsum_row_stride, dsum_outer_stride, ds_row_stride, weight_ptr, stored_weight, weight,
            dweight, dbias, cols, columns, N_COLS, CENTERED, WEIGHT_OFFSET, BLOCK_ROWS, MASKED,
            PACKED,
        )  # fmt: skip
    else:
        for tile in tl.range(pid, n_tiles, tl.num_programs(0), num_stages=NUM_STAGES):
            dweight, dbias = walk_over_tile(
                tile, s_ptr, dy_ptr, dsum_ptr, mean_ptr, rstd_ptr, ds_ptr, dweight_ptr, dbias_ptr,
                n_rows, n_inner, s_row_stride, s_outer_stride, dy_row_stride, dy_outer_stride,
                dsum_row_stride, dsum_outer_stride, ds_row_stride, weight_ptr, stored_weight,
                weight, dweight, dbias, cols, columns, N_COLS, CENTERED, WEIGHT_OFFSET, BLOCK_ROWS,
                MASKED, PACKED,
            )  # fmt: skip

    start_next(OVERLAPPED)
    offsets = pid.to(tl.int64) * N_COLS + cols
    alone = tl.num_programs(0) == 1
    if dweight_ptr is not None:
        store_sum(dweight, dweight_partial_ptr + offsets, dweight_ptr + cols, col_mask, alone)
    if dbias_ptr is not None:
        store_sum(dbias, dbias_partial_ptr + offsets, dbias_ptr + cols, col_mask, alone)


@triton.jit
def sum_by_warps(values, EACH: tl.constexpr, WARPS: tl.constexpr):
    """What each warp has of a row (1, BLOCK_SIZE), whose columns they hold in turn: (WARPS,)."""
    turns = tl.reshape(values, (values.shape[1] // (EACH * WARPS), WARPS, EACH))
    return tl.sum(tl.sum(turns, axis=0), axis=1)


LAG = tl.constexpr(2)  # one and three turns were slower


@triton.jit
def load_slice(ptr, row, mask, cols, n_inner, outer_stride, row_stride):
    """Columns ``cols`` of one row, (1, BLOCK_SIZE)."""
    offset = row_offsets(row, n_inner, outer_stride, row_stride)
    return tl.load(ptr + offset + cols[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def norm_backward_sliced_kernel(
    s_ptr,
    dy_ptr,
    dsum_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    ds_ptr,
    dweight_partial_ptr,
    dbias_partial_ptr,
    dweight_ptr,
    dbias_ptr,
    exchange_ptr,
    n_rows,
    n_inner,
    s_row_stride,
    s_outer_stride,
    dy_row_stride,
    dy_outer_stride,
    dsum_row_stride,
    dsum_outer_stride,
    ds_row_stride,
    N_COLS: tl.constexpr,
    CENTERED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLICE_COLS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Persistent, for rows whose weight gradients do not fit one program's registers (not fp64).

    N_SLICES programs walk over the same rows, each with its own columns. Both sums of a row are
    exchanged between them, which takes longer than a slice's share of the memory's time. So a
    program sends the sums of its next row, and then finishes the one LAG rows before, whose
    messages have had the time of LAG turns to arrive. That row is loaded again, from the L2 cache:
    there are no registers to keep it in.

    With WARPS > 1 each of the program's warps sends the sums of its own columns, and none waits for
    another before it does.
    """
    N_SLICES: tl.constexpr = (N_COLS - 1) // SLICE_COLS + 1
    N_PARTS: tl.constexpr = N_SLICES * WARPS
    EACH: tl.constexpr = 4096 // s_ptr.dtype.element_ty.primitive_bitwidth  # 16 bytes a thread
    MASKED: tl.constexpr = N_SLICES * BLOCK_SIZE != N_COLS

    start(OVERLAPPED)
    ticket = take_ticket(exchange_ptr)
    first = ticket // N_SLICES
    index = (ticket % N_SLICES).to(tl.int32)
    step = tl.num_programs(0) // N_SLICES
    cols = index * SLICE_COLS + tl.arange(0, BLOCK_SIZE)
    if MASKED:
        col_mask = cols < tl.minimum((index + 1) * SLICE_COLS, N_COLS)
    else:
        col_mask = tl.full((BLOCK_SIZE,), True, tl.int1)
    mask = col_mask[None, :]
    if weight_ptr is not None:
        weight = as_factor(
            tl.load(weight_ptr + cols, mask=col_mask, other=1.0), tl.float32, WEIGHT_OFFSET
        )
    if dweight_ptr is not None:
        dweight = tl.zeros((1, BLOCK_SIZE), dtype=tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros((1, BLOCK_SIZE), dtype=tl.float32)

    # The first LAG turns only send, the last ones only finish: where a row is not there, its masked
    # loads give zeros, and nothing is sent or stored. Branches, and loops within this one, would
    # keep Triton from loading ahead.
    for next_row in tl.range(first, n_rows + LAG * step, step, num_stages=NUM_STAGES):
        row = next_row - LAG * step
        started = row >= 0
        there = next_row < n_rows
        if ds_ptr is not None:
            slots, expected, seen = look(exchange_ptr, row, started, N_PARTS)
        next_s = load_slice(
            s_ptr, next_row, mask & there, cols, n_inner, s_outer_stride, s_row_stride
        )
        next_dy = load_slice(
            dy_ptr, next_row, mask & there, cols, n_inner, dy_outer_stride, dy_row_stride
        )
        next_rstd = tl.load(rstd_ptr + next_row, mask=there, other=0.0)
        next_mean = 0.0
        if CENTERED:
            next_mean = tl.load(mean_ptr + next_row, mask=there, other=0.0)

        x_hat = normalised(next_s, next_mean, next_rstd, mask, tl.float32, CENTERED, MASKED)
        g = widen(next_dy, tl.float32)
        if dweight_ptr is not None:
            dweight += g * x_hat
        if dbias_ptr is not None:
            dbias += g
        if ds_ptr is not None:
            if weight_ptr is not None:
                g *= weight
            if WARPS > 1:
                gx_sum = sum_by_warps(g * x_hat, EACH, WARPS)
                g_sum = sum_by_warps(g, EACH, WARPS) if CENTERED else gx_sum
            elif CENTERED:
                gx_sum, g_sum = sum_both(g * x_hat, g)
            else:
                gx_sum = tl.sum(g * x_hat, axis=1)
                g_sum = gx_sum
            sent = tl.full((WARPS,), 0, tl.int64) + next_row
            part = index * WARPS + tl.arange(0, WARPS)
            send(exchange_ptr, sent, part, gx_sum, g_sum, sent < n_rows, N_PARTS, WARPS > 1)

            here = mask & started
            s = load_slice(s_ptr, row, here, cols, n_inner, s_outer_stride, s_row_stride)
            dy = load_slice(dy_ptr, row, here, cols, n_inner, dy_outer_stride, dy_row_stride)
            rstd = tl.load(rstd_ptr + row, mask=started, other=0.0)
            mean = 0.0
            if CENTERED:
                mean = tl.load(mean_ptr + row, mask=started, other=0.0)
            if dsum_ptr is not None:
                dsum = load_slice(
                    dsum_ptr, row, here, cols, n_inner, dsum_outer_stride, dsum_row_stride
                )
            gx_sums, g_sums = receive(slots, expected, seen)
            ds = widen(dy, tl.float32)
            if weight_ptr is not None:
                ds *= weight
            s = widen(s, tl.float32)
            if CENTERED:
                s -= mean
            ds -= s * (rstd * divide_by(tl.sum(gx_sums, axis=0), N_COLS))
            if CENTERED:
                ds -= divide_by(tl.sum(g_sums, axis=0), N_COLS)
            ds *= rstd
            if dsum_ptr is not None:
                ds += widen(dsum, tl.float32)
            tl.store(
                ds_ptr + row * ds_row_stride + cols[None, :],
                round_to(ds, ds_ptr.dtype.element_ty),
                mask=here,
            )

    start_next(OVERLAPPED)
    offsets = first * N_COLS + cols
    if dweight_ptr is not None:
        store_sum(dweight, dweight_partial_ptr + offsets, dweight_ptr + cols, col_mask, step == 1)
    if dbias_ptr is not None:
        store_sum(dbias, dbias_partial_ptr + offsets, dbias_ptr + cols, col_mask, step == 1)


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def norm_backward_looped_kernel(
    s_ptr,
    dy_ptr,
    dsum_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    ds_ptr,
    n_rows,
    n_inner,
    s_row_stride,
    s_outer_stride,
    dy_row_stride,
    dy_outer_stride,
    dsum_row_stride,
    dsum_outer_stride,
    ds_row_stride,
    N_COLS: tl.constexpr,
    CENTERED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """ds alone for rows beyond one block: one row a program, in chunks, read twice.

    Weight gradients of such rows do not fit into registers; `weight_gradient_kernel` makes them.
    """
    ACC: tl.constexpr = tl.float64 if s_ptr.dtype.element_ty == tl.float64 else tl.float32

    start(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row_offsets(row, n_inner, s_outer_stride, s_row_stride)
    dy_ptr += row_offsets(row, n_inner, dy_outer_stride, dy_row_stride)
    if dsum_ptr is not None:
        dsum_ptr += row_offsets(row, n_inner, dsum_outer_stride, dsum_row_stride)
    ds_ptr += row * ds_row_stride
    rstd = tl.load(rstd_ptr + row)
    if CENTERED:
        mean = tl.load(mean_ptr + row)

    g_sum = tl.zeros((1, BLOCK_SIZE), dtype=ACC)
    gx_sum = tl.zeros((1, BLOCK_SIZE), dtype=ACC)
    for begin in range(0, N_COLS, BLOCK_SIZE):
        cols = begin + tl.arange(0, BLOCK_SIZE)
        col_mask = cols < N_COLS
        mask = col_mask[None, :]
        s = tl.load(s_ptr + cols[None, :], mask=mask, other=0.0).to(ACC)
        g = tl.load(dy_ptr + cols[None, :], mask=mask, other=0.0).to(ACC)
        if weight_ptr is not None:
            g *= load_weight(weight_ptr, cols, col_mask, ACC, WEIGHT_OFFSET)
        if CENTERED:
            s = tl.where(mask, s - mean, 0.0)
            g_sum += g
        gx_sum += g * (s * rstd)
    gx_mean = divide_by(tl.sum(gx_sum, axis=1), N_COLS)[:, None]
    g_mean = divide_by(tl.sum(g_sum, axis=1), N_COLS)[:, None]

    for begin in range(0, N_COLS, BLOCK_SIZE):
        cols = begin + tl.arange(0, BLOCK_SIZE)
        col_mask = cols < N_COLS
        mask = col_mask[None, :]
        s = tl.load(s_ptr + cols[None, :], mask=mask, other=0.0).to(ACC)
        ds = tl.load(dy_ptr + cols[None, :], mask=mask, other=0.0).to(ACC)
        if weight_ptr is not None:
            ds *= load_weight(weight_ptr, cols, col_mask, ACC, WEIGHT_OFFSET)
        if CENTERED:
            s = tl.where(mask, s - mean, 0.0)
            ds -= g_mean
        ds = (ds - (s * rstd) * gx_mean) * rstd
        if dsum_ptr is not None:
            ds += tl.load(dsum_ptr + cols[None, :], mask=mask, other=0.0).to(ACC)
        tl.store(ds_ptr + cols[None, :], round_to(ds, ds_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def weight_gradient_kernel(
    s_ptr,
    dy_ptr,
    mean_ptr,
    rstd_ptr,
    dweight_partial_ptr,
    dbias_partial_ptr,
    n_rows,
    n_inner,
    s_row_stride,
    s_outer_stride,
    dy_row_stride,
    dy_outer_stride,
    N_COLS: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Partial dweight and dbias for rows beyond one block.

    The grid is (column blocks, partials): each program keeps BLOCK_SIZE columns and walks over
    tiles of BLOCK_ROWS rows, as many tiles apart as there are partials.
    """
    ACC: tl.constexpr = tl.float64 if s_ptr.dtype.element_ty == tl.float64 else tl.float32

    start(OVERLAPPED)
    cols = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    col_mask = cols < N_COLS
    partial = tl.program_id(1)
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_SIZE), dtype=ACC)
    dbias = tl.zeros((BLOCK_ROWS, BLOCK_SIZE), dtype=ACC)
    n_tiles = (n_rows - 1) // BLOCK_ROWS + 1
    for tile in tl.range(partial, n_tiles, tl.num_programs(1)):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        dy_offsets = row_offsets(rows, n_inner, dy_outer_stride, dy_row_stride)
        dy = tl.load(dy_ptr + dy_offsets[:, None] + cols[None, :], mask=mask, other=0.0).to(ACC)
        dbias += dy
        if dweight_partial_ptr is not None:
            s_offsets = row_offsets(rows, n_inner, s_outer_stride, s_row_stride)
            s = tl.load(s_ptr + s_offsets[:, None] + cols[None, :], mask=mask, other=0.0).to(ACC)
            if CENTERED:
                s -= tl.load(mean_ptr + rows, mask=row_mask, other=0.0)[:, None]
            rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
            dweight += tl.where(mask, dy * (s * rstd), 0.0)

    offsets = partial.to(tl.int64) * N_COLS + cols
    if dweight_partial_ptr is not None:
        tl.store(dweight_partial_ptr + offsets, tl.sum(dweight, axis=0), mask=col_mask)
    if dbias_partial_ptr is not None:
        tl.store(dbias_partial_ptr + offsets, tl.sum(dbias, axis=0), mask=col_mask)


FEW = tl.constexpr(32)  # partial sums that are taken at once


@triton.jit
def load_partials(partial_ptr, begin, ROWS: tl.constexpr, n_partials, n_cols, cols):
    """Rows from ``begin`` on, zero where there are none."""
    rows = begin + tl.arange(0, ROWS)
    offsets = tl.cast(rows, tl.int64)[:, None] * n_cols + cols[None, :]
    mask = (rows < n_partials)[:, None] & (cols < n_cols)[None, :]
    return tl.load(partial_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def sum_partials(partial_ptr, out_ptr, n_partials, n_cols, BLOCK_ROWS, BLOCK_SIZE):
    """One block of columns of ``out`` (n_cols,): the sum over partial (n_partials, n_cols)."""
    cols = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    if n_partials <= FEW:  # less to wait for than a block of many rows, most of them missing
        few = load_partials(partial_ptr, 0, FEW, n_partials, n_cols, cols)
        total = tl.sum(few, axis=0)
    else:
        sums = tl.zeros((BLOCK_ROWS, BLOCK_SIZE), dtype=partial_ptr.dtype.element_ty)
        for begin in range(0, n_partials, BLOCK_ROWS):
            sums += load_partials(partial_ptr, begin, BLOCK_ROWS, n_partials, n_cols, cols)
        total = tl.sum(sums, axis=0)
    tl.store(out_ptr + cols, round_to(total, out_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_partials"])
def reduce_partials_kernel(
    dweight_partial_ptr,
    dbias_partial_ptr,
    dweight_ptr,
    dbias_ptr,
    n_partials,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """dweight and dbias (n_cols,) in their own dtype, from the programs' partial sums.

    The grid is (column blocks, gradients that are wanted).
    """
    start(OVERLAPPED)
    if dbias_partial_ptr is None:
        sum_partials(dweight_partial_ptr, dweight_ptr, n_partials, n_cols, BLOCK_ROWS, BLOCK_SIZE)
    elif dweight_partial_ptr is None:
        sum_partials(dbias_partial_ptr, dbias_ptr, n_partials, n_cols, BLOCK_ROWS, BLOCK_SIZE)
    elif tl.program_id(1) == 0:
        sum_partials(dweight_partial_ptr, dweight_ptr, n_partials, n_cols, BLOCK_ROWS, BLOCK_SIZE)
    else:
        sum_partials(dbias_partial_ptr, dbias_ptr, n_partials, n_cols, BLOCK_ROWS, BLOCK_SIZE)
