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

__all__ = ["EMPTY", "exchange_size", "look", "receive", "send", "take_ticket"]

EMPTY = tl.constexpr(-1)
SLOTS = tl.constexpr(16)  # a line of the cache away from the counter


def exchange_size(n_rows: int, n_parts: int) -> int:
    """Elements of the memory for ``n_rows`` rows of ``n_parts`` parts."""
    return SLOTS.value + n_rows * n_parts


@triton.jit
def take_ticket(exchange_ptr):
    """How many programs have asked before this one (int64)."""
    return tl.atomic_add(exchange_ptr, 1, sem="relaxed") - EMPTY


@triton.jit
def send(
    exchange_ptr, row, part, a, b, mask, N_PARTS: tl.constexpr, BY_WARPS: tl.constexpr = False
):
    """Part ``part`` of each of ``row`` (rows,) tells fp32 a and b (rows,), where ``mask``.

    BY_WARPS: element i belongs to warp i, which stores it without asking the others. Its threads
    all store the same.
    """
    high = a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    message = high | low
    message = tl.where(message == EMPTY, EMPTY - 1, message)  # both stand for two NaNs
    slots = exchange_ptr + SLOTS + row * N_PARTS + part
    if BY_WARPS and not INTERPRETED:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred sends;
                setp.ne.s32 sends, $3, 0;
                @sends st.relaxed.gpu.global.b64 [$1], $2;
                mov.b32 $0, 0;
            }
            """,
            "=r,l,l,r",
            [slots, message, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(slots, message, mask=mask, sem="relaxed")


@triton.jit
def look(exchange_ptr, row, wanted, N_SLICES: tl.constexpr):
    """For `receive`: where the messages of ``row`` are, if it is ``wanted``, and what is there now.

    The sooner after `send`, the less likely is it that they are there; the sooner before `receive`,
    the longer does that one wait for what is on its way from the L2 cache. Relaxed loads pass by
    the L1 cache, which would not notice what other multiprocessors write.
    """
    indices = tl.arange(0, triton.next_power_of_2(N_SLICES))
    expected = (indices < N_SLICES) & wanted
    # The counter is not EMPTY: nothing is waited for there.
    slots = exchange_ptr + tl.where(expected, SLOTS + row * N_SLICES + indices, 0)
    if INTERPRETED:
        seen = tl.load(slots)
    else:
        seen = tl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.b64 $0, [$1];",
            "=l,l",
            [slots],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    return slots, expected, seen


@triton.jit
def receive(slots, expected, seen):
    """What all slices of the row told that was looked for: (a, b), each a number a slice.

    There are as many as the next power of two of N_SLICES. Zeros stand behind the last slice, and
    everywhere where the row was not wanted.

    The loop is hidden from Triton, which loads nothing ahead in loops that contain others. Each
    thread is on its own in it.
    """
    if not INTERPRETED:  # it runs the programs one after another: tests launch them twice
        seen = tl.inline_asm_elementwise(
            """
            {
                .reg .pred empty;
                mov.b64 $0, $2;
            again:
                setp.eq.s64 empty, $0, -1;
                @empty ld.relaxed.gpu.global.b64 $0, [$1];
                @empty bra again;
            }
            """,
            "=&l,l,l",
            [slots, seen],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    messages = tl.where(expected, seen, 0)
    a = (messages >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    b = messages.to(tl.int32).to(tl.float32, bitcast=True)
    return a, b
