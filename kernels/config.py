# SPDX-License-Identifier: Apache-2.0
"""Launch configurations: pure functions of row length, dtype, operator and architecture.

Nothing that varies between calls (the number of rows, alignment, a timing) may enter, so a row's
result never depends on the batch it came in. There is no autotuner for the same reason.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

__all__ = [
    "LOOPED_PARTIALS",
    "Gpu",
    "LaunchConfig",
    "backward_config",
    "forward_config",
    "reduce_config",
    "register_option",
    "slice_columns",
    "warps_apart",
    "weight_gradient_config",
]


@dataclass(frozen=True)
class LaunchConfig:
    """How one kernel is launched.

    block_rows: rows a tile holds.
    block_size: columns a tile holds, a power of two; below H the kernel loops over chunks, unless
        the row is sliced.
    num_warps: warps a program.
    num_stages: depth of the software pipeline of the row loop (1: none).
    programs_per_sm: for persistent kernels, programs launched for each multiprocessor.
    slices: programs that share a row.
    weights_first: the forward loads weight and bias before it has the statistics, which hides
        their latency where there are few rows, and takes registers.
    packed: 2-byte elements are kept as they are between their uses, in half the registers, and
        converted each time.
    reloaded: the forward loads x again once it has the statistics, instead of keeping it.
    apart: each warp makes LayerNorm's statistics of its own columns of a row by itself, and the
        warps then exchange them once instead of twice. In the backward's slices each warp sends
        the sums of its own columns to the other slices, and the warps exchange nothing.
    """

    block_rows: int
    block_size: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 1
    slices: int = 1
    weights_first: bool = False
    packed: bool = False
    reloaded: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Gpu:
    """What configurations depend on of a GPU's architecture.

    processors: multiprocessors, of which each runs at least one program at a time.
    shared_memory: bytes of it that one program may take.
    overlaps: a kernel may be started while the one before it still runs, and wait within
        (programmatic dependent launch).
    """

    processors: int
    shared_memory: int = 99 * 1024  # of sm_86, sm_89 and sm_120; others have more
    overlaps: bool = False


# What slices and packed are made of is NVIDIA's, and Triton's interpreter, which runs programs one
# after another, would wait forever for a row's other slices.
NVIDIA = torch.version.hip is None and not triton.knobs.runtime.interpret


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# The widest row of 2-byte elements that one program holds in registers; wider elements, which
# are kept as they are until the statistics are known, halve it. 1024 threads have 64 registers
# each: 32768 fp32 values take half of them. The backward keeps its weight gradients besides.
MAX_FORWARD_BLOCK = 32768
MAX_RELOADED_BLOCK = 65536  # of RMSNorm's rows, which are not kept; they are to be aligned, too
MAX_BACKWARD_BLOCK = 16384

# The tables below hold the fastest of all tile shapes tried for rows of 2-byte elements on an
# H200 (bench/results/h200-tune.json and, with "r", h200-tune-reloaded.json, by bench/tune.py):
# block_size -> (block_rows, num_warps, flags "w" weights_first, "p" packed, "r" reloaded and "a"
# apart). Of those within two percent of the most bandwidth, the one that is the quickest for 64
# rows, or, if that costs it little, the one with the most.
FORWARD_RMS = {
    64: (16, 4, "r"), 128: (16, 4, "r"), 256: (8, 4, "r"), 512: (2, 2, "wp"), 1024: (1, 2, "wr"),
    2048: (1, 4, "w"), 4096: (1, 8, "wr"), 8192: (1, 8, "wr"), 16384: (1, 16, "wr"),
    32768: (1, 32, "r"), 65536: (1, 32, "r"),
}  # fmt: skip
FORWARD_LAYER = {
    64: (16, 1, ""), 128: (8, 1, ""), 256: (4, 1, "wpr"), 512: (2, 1, "p"), 1024: (1, 2, "r"),
    2048: (1, 2, "wpr"), 4096: (1, 4, "wpra"), 8192: (1, 4, "wra"), 16384: (1, 8, "pa"),
    32768: (1, 32, ""),
}  # fmt: skip
FORWARD_ADD_RMS = {
    64: (16, 4, "wp"), 128: (8, 4, "wp"), 256: (4, 4, "wp"), 512: (2, 4, "wp"), 1024: (1, 4, "w"),
    2048: (1, 4, "w"), 4096: (1, 4, "wp"), 8192: (1, 4, "w"), 16384: (1, 32, "w"),
    32768: (1, 32, ""),
}  # fmt: skip
FORWARD_ADD_LAYER = {
    64: (16, 4, "p"), 128: (16, 8, "wp"), 256: (4, 4, ""), 512: (2, 4, "p"), 1024: (1, 2, "wa"),
    2048: (1, 4, "wa"), 4096: (1, 8, "wa"), 8192: (1, 8, "wa"), 16384: (1, 8, "pa"),
    32768: (1, 32, "p"),
}  # fmt: skip
# Rows that do not fill their block leave warps idle, and masking costs instructions: these want
# fewer warps, and best a number by whose share of the columns the row can be divided. The keys are
# the longest rows that an entry is for (measured at 768, 1600, 2560, 3072, 3584, 5120, 6144, 7168
# and 12288).
MASKED_RMS = {
    1024: (1, 1, "r"), 2048: (1, 4, "wr"), 2560: (1, 4, "w"), 4096: (1, 8, "wr"),
    8192: (1, 8, "wr"), 16384: (1, 16, "wr"),
}  # fmt: skip
MASKED_LAYER = {
    1024: (1, 1, "wp"), 2048: (1, 1, "wpr"), 2560: (1, 2, "ra"), 3072: (1, 4, "wra"),
    4096: (1, 2, "wpra"), 5120: (1, 4, "wpra"), 6144: (1, 4, "pr"), 8192: (1, 4, "pra"),
    16384: (1, 8, "pr"),
}  # fmt: skip
MASKED_ADD_RMS = {
    1024: (1, 4, "wp"), 2048: (1, 4, "w"), 4096: (1, 8, "w"), 8192: (1, 4, "w"), 16384: (1, 16, ""),
}  # fmt: skip
MASKED_ADD_LAYER = {
    1024: (1, 2, "wp"), 2048: (1, 4, "wpa"), 4096: (1, 4, "wpa"), 8192: (1, 8, "wpa"),
    16384: (1, 16, "pa"),
}  # fmt: skip

FORWARD = {  # (centered, adds) -> (of rows that fill their block, of rows that do not)
    (False, False): (FORWARD_RMS, FORWARD_RMS | MASKED_RMS),
    (True, False): (FORWARD_LAYER, FORWARD_LAYER | MASKED_LAYER),
    (False, True): (FORWARD_ADD_RMS, FORWARD_ADD_RMS | MASKED_ADD_RMS),
    (True, True): (FORWARD_ADD_LAYER, FORWARD_ADD_LAYER | MASKED_ADD_LAYER),
}

# LayerNorm without an add, n_cols -> (columns of a chunk, num_warps), by h200-tune-looped.json.
LAYER_CHUNKS = {16384: (4096, 16), 32768: (8192, 32)}


def most_warps() -> int:
    """Of a program, which has 1024 threads at most; AMD's warps have 64."""
    return 32 if NVIDIA else 16


def slice_columns(n_cols: int, slices: int) -> int:
    """Columns of each slice, the last of which may have fewer.

    All slices begin where 16-byte loads may.
    """
    return n_cols if slices == 1 else triton.cdiv(triton.cdiv(n_cols, slices), 16) * 16


# The widest slice of 2-byte elements, half as many of 4 bytes. Programs wait for those they share a
# row with, so several should fit a multiprocessor: four of the backward with 2048 columns each,
# whose weight gradients are in registers, and what they load ahead in shared memory.
FORWARD_SLICE = 8192
BACKWARD_SLICE = 2048
MAX_SLICES = 64


def slices_of(n_cols: int, itemsize: int, widest: int, gpu: Gpu) -> int:
    """Programs that are to share a row; 1 where rows cannot be sliced.

    All programs of a row must run at once, and a multiprocessor may have room for no more than one.
    Nor should rows be sliced where Triton cannot tell that all are aligned as the first one is:
    with addresses element by element, slices do not fit into registers.
    """
    slices = triton.cdiv(n_cols * itemsize, widest * 2)
    suits = itemsize <= 4 and n_cols % 16 == 0 and slices <= min(MAX_SLICES, gpu.processors)
    return slices if NVIDIA and suits else 1


def least_rows(block_size: int) -> int:
    """The fewest rows a tile holds: more than one only under Triton's interpreter.

    The interpreter takes its time a program and little for the tile: 0.84 s for 64 x 576 with one
    row a program, 0.05 s with 16. Rows do not see each other, so no row's result changes.
    """
    return max(16, 4096 // block_size) if triton.knobs.runtime.interpret else 1


MAX_BYTES_OF_THREAD = 128
"""Of a row, in the forward's tables."""


def entry(table: dict[int, tuple[Any, ...]], n_cols: int) -> tuple[Any, ...]:
    """Of the entries for rows as long as these or longer, the one for the shortest."""
    return table[min(columns for columns in table if columns >= n_cols)]


@cache
def forward_config(
    n_cols: int, itemsize: int, centered: bool, adds: bool, gpu: Gpu
) -> LaunchConfig:
    """Configuration of the forward kernels for rows of ``n_cols`` elements of ``itemsize`` bytes.

    ``centered`` tells LayerNorm, ``adds`` the residual-add form.
    """
    block_size = next_power_of_2(n_cols)
    block_bytes = block_size * itemsize
    # Masks of nearly full blocks take registers that the widest have not: 65520 columns spill.
    aligned = n_cols % 16 == 0 and not block_size * 7 // 8 < n_cols < block_size
    reloads = not centered and not adds and itemsize <= 4 and aligned
    fits = block_bytes <= (MAX_RELOADED_BLOCK if reloads else MAX_FORWARD_BLOCK) * 2
    # The widest blocks leave a multiprocessor with one program or two, which have nothing to do
    # while they wait for their reductions. RMSNorm does not mind (98 to 100 % of copy). LayerNorm
    # of 16384 and 32768 columns is faster in chunks, which take so few registers that many
    # programs run at once, and with the add, which would have to read the sum again, in slices.
    # Where a multiprocessor runs 1536 threads (sm_86, sm_89, sm_120), it would run one of them.
    chunked = centered and not adds and itemsize == 2 and NVIDIA
    if chunked and n_cols in LAYER_CHUNKS and gpu.shared_memory > 100 * 1024:
        chunk, num_warps = LAYER_CHUNKS[n_cols]
        return LaunchConfig(1, chunk, num_warps)
    alone = block_bytes == MAX_FORWARD_BLOCK * 2 and centered
    if alone or not fits:
        slices = slices_of(n_cols, itemsize, FORWARD_SLICE, gpu)
        if slices > 1:
            block_size = next_power_of_2(slice_columns(n_cols, slices))
            return LaunchConfig(
                1,
                block_size,
                num_warps=4,
                slices=slices,
                weights_first=not centered and (adds or slices <= 16),
                packed=itemsize == 2 and not (centered and adds),
            )
    if not fits:
        return LaunchConfig(1, 32768 // itemsize, num_warps=most_warps() if itemsize == 2 else 16)
    table = FORWARD[centered, adds][block_size != n_cols]
    # fp64 takes two registers a value.
    block_rows, num_warps, flags = entry(table, n_cols * 2 if itemsize == 8 else n_cols)
    if itemsize == 4:  # as many bytes a thread as 2-byte elements take at most
        num_warps = max(num_warps, block_rows * block_bytes // (32 * MAX_BYTES_OF_THREAD))
    return LaunchConfig(
        max(block_rows, least_rows(block_size)),
        block_size,
        min(num_warps, most_warps()),
        weights_first="w" in flags and itemsize < 8,
        packed="p" in flags and itemsize == 2 and NVIDIA,
        reloaded="r" in flags,
        apart="a" in flags,
    )


def warps_apart(config: LaunchConfig, itemsize: int) -> int:
    """How many warps make their part of a row's sums each by itself; 1 for all together."""
    turn = config.num_warps * 512 // itemsize  # each of their threads loads 16 bytes at a time
    whole = config.block_rows == 1 and config.block_size >= turn
    return config.num_warps if config.apart and whole else 1


# Likewise for the backward (bench/results/h200-tune-backward.json): block_size -> (block_rows,
# num_warps, programs_per_sm, num_stages, flags "p" packed). Most have 60 to 80 KB on their way to a
# multiprocessor (up to 98 with an add), programs and stages together; 40 KB have cost up to 10 %.
BACKWARD_RMS = {
    64: (128, 8, 1, 3, "p"), 128: (64, 8, 1, 3, ""), 256: (8, 4, 2, 4, ""), 512: (8, 8, 1, 5, "p"),
    1024: (4, 8, 1, 5, ""), 2048: (4, 8, 1, 3, ""), 4096: (2, 8, 1, 3, "p"),
    8192: (1, 8, 1, 3, "p"), 16384: (1, 16, 1, 3, ""),
}  # fmt: skip
BACKWARD_LAYER = {
    64: (128, 8, 1, 3, ""), 128: (64, 8, 1, 3, ""), 256: (8, 2, 4, 3, "p"), 512: (4, 2, 4, 3, "p"),
    1024: (2, 4, 2, 5, ""), 2048: (2, 8, 2, 3, "p"), 4096: (2, 16, 1, 4, ""),
    8192: (1, 8, 1, 3, ""), 16384: (1, 8, 1, 3, ""),
}  # fmt: skip
BACKWARD_ADD_RMS = {
    64: (64, 8, 1, 4, ""), 128: (64, 8, 1, 3, ""), 256: (32, 8, 1, 3, ""), 512: (16, 8, 1, 3, ""),
    1024: (4, 4, 2, 3, "p"), 2048: (4, 8, 1, 3, ""), 4096: (2, 8, 1, 3, ""),
    8192: (1, 8, 1, 3, "p"), 16384: (1, 16, 1, 3, ""),
}  # fmt: skip
BACKWARD_ADD_LAYER = BACKWARD_ADD_RMS | {
    64: (64, 8, 1, 4, "p"), 1024: (8, 8, 1, 3, ""), 2048: (4, 8, 1, 3, "p"),
}  # fmt: skip
MASKED_BACKWARD_RMS = {
    768: (2, 4, 3, 4, "p"), 1024: (2, 4, 2, 5, ""), 2048: (1, 4, 3, 4, "p"),
    2560: (2, 8, 1, 5, ""), 3072: (2, 16, 1, 4, ""), 4096: (1, 8, 1, 6, ""),
    5120: (1, 8, 1, 5, ""), 6144: (1, 16, 1, 4, "p"), 8192: (1, 8, 1, 3, ""),
}  # fmt: skip
MASKED_BACKWARD_LAYER = {
    768: (2, 2, 4, 5, "p"), 1024: (2, 4, 2, 5, ""), 2048: (1, 4, 3, 4, ""),
    2560: (1, 4, 3, 3, ""), 3072: (2, 8, 1, 4, ""), 4096: (1, 4, 2, 3, ""),
    5120: (1, 8, 1, 5, ""), 6144: (1, 8, 1, 4, "p"), 8192: (1, 16, 1, 4, ""),
}  # fmt: skip
MASKED_BACKWARD_ADD_RMS = {
    256: (8, 4, 2, 4, ""), 512: (8, 8, 1, 4, ""), 1024: (4, 4, 2, 3, ""), 2048: (4, 8, 1, 3, ""),
    2560: (1, 4, 2, 3, ""), 5120: (1, 8, 1, 4, "p"), 8192: (1, 8, 1, 3, ""),
}  # fmt: skip
MASKED_BACKWARD_ADD_LAYER = MASKED_BACKWARD_ADD_RMS | {2048: (2, 4, 2, 3, "")}

BACKWARD = {  # as FORWARD
    (False, False): (BACKWARD_RMS, BACKWARD_RMS | MASKED_BACKWARD_RMS),
    (True, False): (BACKWARD_LAYER, BACKWARD_LAYER | MASKED_BACKWARD_LAYER),
    (False, True): (BACKWARD_ADD_RMS, BACKWARD_ADD_RMS | MASKED_BACKWARD_ADD_RMS),
    (True, True): (BACKWARD_ADD_LAYER, BACKWARD_ADD_LAYER | MASKED_BACKWARD_ADD_LAYER),
}


RESERVED = 1024
"""Bytes of shared memory that each program takes beside its own: of sm_80 and later."""

SCRATCH = 512
"""Bytes of it in which the warps of a backward exchange their sums, where it is short of them.

Tiles of many short rows take up to 2048, far from the limit.
"""


@cache
def backward_config(
    n_cols: int, itemsize: int, centered: bool, adds: bool, gpu: Gpu
) -> LaunchConfig:
    """Configuration of the persistent backward kernels; arguments as in `forward_config`."""
    block_size = next_power_of_2(n_cols)
    tile = (3 if adds else 2) * block_size * itemsize  # bytes of the inputs of one row
    # A wider one of RMSNorm's rows that one program has registers for is faster than slices of it,
    # if it fills most of three turns of 16 warps, and two of it fit shared memory.
    whole = not centered and itemsize == 2 and 10240 < n_cols <= 12288
    whole = whole and 2 * tile + SCRATCH <= gpu.shared_memory
    if block_size * itemsize > MAX_BACKWARD_BLOCK and not whole:  # half of the widest block
        for num_warps in (4, 8):  # 32 bytes of a row a thread
            slices = slices_of(n_cols, itemsize, BACKWARD_SLICE * num_warps // 4, gpu)
            block_size = next_power_of_2(slice_columns(n_cols, slices))
            # Two tiles ahead of each input, s and dy for both of their uses.
            taken = 2 * (5 if adds else 4) * block_size * itemsize + SCRATCH + RESERVED
            programs_per_sm = min(16 // num_warps, (gpu.shared_memory + RESERVED) // taken)
            if slices > 1 and programs_per_sm > 0:
                warps = num_warps // 2 if adds else num_warps
                return LaunchConfig(1, block_size, warps, 3, programs_per_sm, slices)
        block_size = next_power_of_2(n_cols)
    # LayerNorm's two gradients of 16384 columns do not fit into registers: 32 and 40 % of copy.
    spills = centered and n_cols > 12288
    if spills or block_size * itemsize > MAX_BACKWARD_BLOCK * 2:
        return LaunchConfig(1, 16384 // itemsize, num_warps=16)
    table = BACKWARD[centered, adds][block_size != n_cols]
    rows, num_warps, programs_per_sm, num_stages, flags = entry(table, n_cols)
    # A tile of wider elements has as many bytes, in fewer rows, or is not loaded as deep.
    block_rows = max(least_rows(block_size), rows * 2 // itemsize)
    num_stages = max(3, 1 + (num_stages - 1) * 2 * rows // (block_rows * itemsize))
    while (
        programs_per_sm * ((num_stages - 1) * block_rows * tile + SCRATCH + RESERVED)
        > gpu.shared_memory + RESERVED
    ):
        if num_stages > 3:
            num_stages -= 1
        elif programs_per_sm > 1:
            programs_per_sm -= 1
        elif block_rows > least_rows(block_size):
            block_rows //= 2
        else:
            num_stages = 1  # no pipeline, and no buffers
    return LaunchConfig(
        block_rows,
        block_size,
        num_warps,
        num_stages,
        programs_per_sm,
        packed="p" in flags and itemsize == 2 and NVIDIA,
    )


def register_option(config: LaunchConfig) -> dict[str, int]:
    """Options with which as many programs fit a multiprocessor as ``config`` counts on.

    They limit each thread to its share of the 65536 registers. Without a limit, ptxas may take more
    than that, or restrict itself for the sake of more programs, of which there are none.
    """
    share = 65536 // (32 * config.num_warps * config.programs_per_sm)
    return {"maxnreg": min(255, share // 8 * 8)} if NVIDIA else {}


LOOPED_PARTIALS = 16
"""Rows of partial sums for rows beyond one block, where the columns fill the machine already."""


@cache
def weight_gradient_config(n_cols: int) -> LaunchConfig:
    """Configuration of the kernel that makes weight gradients of rows beyond one block."""
    return LaunchConfig(block_rows=4, block_size=min(1024, next_power_of_2(n_cols)), num_warps=8)


@cache
def reduce_config(n_cols: int, most_partials: int) -> LaunchConfig:
    """Configuration of the kernel that sums the programs' partial weight gradients.

    It has little to read, and the time goes into waiting: as many as possible of the up to
    ``most_partials`` rows at once, and many programs.
    """
    block_rows = min(256, max(8, next_power_of_2(most_partials)))
    block_size = min(max(32, 8192 // block_rows), next_power_of_2(n_cols))
    return LaunchConfig(block_rows, block_size, num_warps=8)
