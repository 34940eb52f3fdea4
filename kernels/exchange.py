# SPDX-License-Identifier: Apache-2.0
"""How programs that share a row tell each other their part of its statistics.

A row too long for one program's registers is cut into slices. Each slice's program reduces its own
columns to two fp32 numbers, sends them, receives those of all slices, and merges them in the order
of the slices: all get the same bits, whoever was first.

``exchange_ptr`` is int64 memory of `exchange_size` elements that holds EMPTY everywhere when the
kernel starts. The first element counts programs, from SLOTS on there is a slot for each (row,
slice). The two numbers are packed into the 64 bits of a slot: the message is the signal that it is
there, so no fence and no order of stores is needed.

Programs of one row wait for each other, so all of them must get to run. Therefore a program's
place is not its program id but its ticket, which follows the order in which programs really
start: only the newest row can lack programs, those that the GPU starts next, and all older rows
are complete, come to their end and make room. That holds also where other kernels share the GPU.
"""

import triton
import triton.language as tl

from fusedops.kernels.arithmetic import INTERPRETED

__all__ = ["EMPTY", "exchange_size", "receive", "send", "take_ticket"]

EMPTY = tl.constexpr(-1)
SLOTS = tl.constexpr(16)  # a line of the cache away from the counter


def exchange_size(n_rows: int, n_slices: int) -> int:
    """Elements of the memory for ``n_rows`` rows of ``n_slices`` slices."""
    return SLOTS.value + n_rows * n_slices


@triton.jit
def take_ticket(exchange_ptr):
    """How many programs have asked before this one (int64)."""
    return tl.atomic_add(exchange_ptr, 1, sem="relaxed") - EMPTY


@triton.jit
def send(exchange_ptr, row, index, a, b, mask, N_SLICES: tl.constexpr):
    """Slice ``index`` of each of ``row`` (rows,) tells fp32 a and b (rows,), where ``mask``."""
    high = a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    message = high | low
    message = tl.where(message == EMPTY, EMPTY - 1, message)  # both stand for two NaNs
    tl.atomic_xchg(exchange_ptr + SLOTS + row * N_SLICES + index, message, mask=mask, sem="relaxed")


@triton.jit
def receive(exchange_ptr, row, N_SLICES: tl.constexpr):
    """What all slices of ``row`` told: (a, b), each (the next power of two of N_SLICES,).

    Zeros stand behind the last slice. Volatile loads pass by the L1 cache, which would not notice
    what other multiprocessors write.
    """
    slots = exchange_ptr + SLOTS + row * N_SLICES
    if not INTERPRETED:  # it runs the programs one after another: tests launch them twice
        # On scalars, each thread loops on its own: the warps need not agree when they leave.
        waiting = True
        while waiting:
            waiting = False
            for index in tl.static_range(N_SLICES):
                waiting |= tl.load(slots + index, volatile=True) == EMPTY
    indices = tl.arange(0, triton.next_power_of_2(N_SLICES))
    messages = tl.load(slots + indices, mask=indices < N_SLICES, other=0, volatile=True)
    a = (messages >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    b = messages.to(tl.int32).to(tl.float32, bitcast=True)
    return a, b
