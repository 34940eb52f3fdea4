# SPDX-License-Identifier: Apache-2.0
"""Launch configurations: pure functions of row length, dtype, operator and architecture.

Nothing that varies between calls (the number of rows, alignment, a timing) may enter, so a row's
result never depends on the batch it came in. There is no autotuner for the same reason.
"""

from dataclasses import dataclass
from functools import cache

__all__ = [
    "LOOPED_PARTIALS",
    "LaunchConfig",
    "backward_config",
    "forward_config",
    "reduce_config",
    "weight_gradient_config",
]


@dataclass(frozen=True)
class LaunchConfig:
    """How one kernel is launched.

    block_rows: rows a tile holds.
    block_size: columns a tile holds, a power of two; below H the kernel loops over chunks.
    num_warps: warps a program.
    num_stages: depth of the software pipeline of the row loop (1: none).
    programs_per_sm: for persistent kernels, programs launched for each multiprocessor.
    """

    block_rows: int
    block_size: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 1


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# The widest row that one program holds in registers. 1024 threads have 64 registers each: 32768
# fp32 values take half of them, and 65536 spill.
MAX_FORWARD_BLOCK = 32768
MAX_BACKWARD_BLOCK = 16384
LOOP_BLOCK = 16384


@cache
def forward_config(n_cols: int, itemsize: int, adds: bool) -> LaunchConfig:
    """Configuration of the forward kernels for rows of ``n_cols`` elements of ``itemsize`` bytes.

    ``adds`` tells the residual-add form, which holds twice the data in flight.
    """
    scale = 2 if itemsize == 8 else 1  # fp64 takes two registers a value
    block_size = next_power_of_2(n_cols)
    if block_size * scale > MAX_FORWARD_BLOCK:
        return LaunchConfig(1, LOOP_BLOCK // scale, num_warps=32 if scale == 1 else 16)
    tile = 4096 // scale  # below this a program has too little in flight to hide latency
    block_rows = max(1, tile // max(block_size, 64)) if block_size < 1024 else 1
    elements = block_rows * block_size * scale
    num_warps = min(32, max(4, elements // 512))
    return LaunchConfig(block_rows, block_size, num_warps)


@cache
def backward_config(n_cols: int, itemsize: int, adds: bool) -> LaunchConfig:
    """Configuration of the persistent backward kernels; arguments as in `forward_config`."""
    scale = 2 if itemsize == 8 else 1
    block_size = next_power_of_2(n_cols)
    if block_size * scale > MAX_BACKWARD_BLOCK:
        return LaunchConfig(1, LOOP_BLOCK // scale, num_warps=32 if scale == 1 else 16)
    if scale == 2 or itemsize == 4:
        tile, stages = 2048, 1  # twice the bytes an element: the pipeline's buffers would not fit
    else:
        tile, stages = 8192, 3
    block_rows = max(1, min(32, tile // max(block_size, 64)))
    if block_size * scale >= 16384:
        return LaunchConfig(1, block_size, num_warps=16 if adds else 8)
    return LaunchConfig(block_rows, block_size, num_warps=8, num_stages=stages)


LOOPED_PARTIALS = 16
"""Rows of partial sums for rows beyond one block, where the columns fill the machine already."""


@cache
def weight_gradient_config(n_cols: int) -> LaunchConfig:
    """Configuration of the kernel that makes weight gradients of rows beyond one block."""
    return LaunchConfig(block_rows=4, block_size=min(1024, next_power_of_2(n_cols)), num_warps=8)


@cache
def reduce_config(n_cols: int) -> LaunchConfig:
    """Configuration of the kernel that sums the programs' partial weight gradients."""
    return LaunchConfig(block_rows=32, block_size=min(64, next_power_of_2(n_cols)), num_warps=4)
