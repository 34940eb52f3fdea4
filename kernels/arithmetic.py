# SPDX-License-Identifier: Apache-2.0
"""Device functions that every kernel shares."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "INTERPRETED",
    "NVIDIA",
    "divide",
    "divide_by",
    "opaque",
    "reciprocal_root",
    "round_to",
    "row_offsets",
    "start",
    "start_next",
    "sum_both",
    "widen",
]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
NVIDIA = tl.constexpr(torch.version.hip is None and not INTERPRETED)


@triton.jit
def start(OVERLAPPED: tl.constexpr):
    """Comes before a kernel's first access to memory.

    OVERLAPPED: the kernel was started while those before it in the stream still ran, so that its
    launch takes no time of its own. Here it waits for their end.
    """
    if OVERLAPPED:
        gdc_wait()


@triton.jit
def start_next(OVERLAPPED: tl.constexpr):
    """Lets the kernel that follows be started: for persistent ones, near their end.

    Of a kernel with many programs it would take longer than it saves, some 1.2 ns a program.
    """
    if OVERLAPPED:
        gdc_launch_dependents()


@triton.jit
def divide(a, b):
    """Correctly rounded a / b; plain division of fp32 is an approximation on GPUs."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def divide_by(a, N: tl.constexpr):
    """Correctly rounded a / N for a constant row length N, in fewer instructions than `divide`.

    The quotient by the rounded reciprocal is corrected by its exact remainder (Markstein 1990,
    "Computation of elementary functions on the IBM RISC System/6000 processor", theorem 5).
    """
    RECIPROCAL: tl.constexpr = 1.0 / N
    if a.dtype == tl.float64:
        return a / N
    elif N & (N - 1) == 0:
        return a * RECIPROCAL  # which is exact
    elif INTERPRETED:  # NumPy has no fused multiply-add
        return tl.div_rn(a, tl.cast(N, tl.float32))
    else:
        quotient = a * RECIPROCAL
        rest = tl.fma(-quotient, tl.cast(N, tl.float32), a)
        exact = tl.fma(rest, tl.cast(RECIPROCAL, tl.float32), quotient)
        return tl.where(tl.abs(quotient) < float("inf"), exact, quotient)


@triton.jit
def round_to(value, DTYPE: tl.constexpr):
    """``value`` in DTYPE, rounded to nearest even.

    That is what a cast does, except under Triton's interpreter, which cuts bf16's low bits off.
    """
    if INTERPRETED and DTYPE == tl.bfloat16:
        value = value.to(tl.float32)
        bits = value.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(value == value, rounded, bits | 0x400000)  # a NaN stays one when cut off
        return (bits >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def widen(value, ACC: tl.constexpr):
    """``value`` in the accumulation dtype ACC: as a cast, in fewer instructions.

    A bf16 number is the upper half of an fp32 one. Two of them lie in a register, and the compiler
    takes three instructions to get both out of it, where one for each does.
    """
    if not NVIDIA or value.dtype != tl.bfloat16 or ACC != tl.float32 or value.numel == 1:
        return value.to(ACC)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def opaque(value):
    """``value``, of which the compiler does not know that it is the same.

    What is computed from it is computed here, from 2-byte elements say, instead of being kept from
    earlier in more registers. For NVIDIA GPUs; values of 8 bytes stay as they are, and so does a
    single one that does not fill a register.
    """
    BITS: tl.constexpr = value.dtype.primitive_bitwidth
    if INTERPRETED or BITS > 32 or value.numel * BITS < 32:
        return value
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r",
            [value],
            dtype=value.dtype,
            is_pure=False,
            pack=32 // BITS,
        )


@triton.jit
def reciprocal_root(variance, eps):
    """1 / sqrt(variance + eps), where only the sum is rounded before; ``eps`` is a double.

    eps is added to the variance, inside the root: PyTorch's convention.

    The error of rstd goes into every element of a row. The GPU's approximation is off by up to two
    units in the last place; a Newton step with the residual 1 - v r^2 taken exactly, by fused
    multiply-adds, leaves half a unit.
    """
    if variance.dtype == tl.float64:
        return 1.0 / tl.sqrt(variance + eps)
    else:
        v = variance + tl.cast(eps, tl.float32)
        if INTERPRETED:  # NumPy has no fused multiply-add
            return tl.div_rn(1.0, tl.sqrt_rn(v))
        else:
            # The approximation takes subnormal v for zero, whose root would be infinite.
            tiny = v < 2.0**-64
            r = tl.rsqrt(tl.where(tiny, v * 2.0**64, v))
            r = tl.where(tiny, r * 2.0**32, r)
            product = v * r
            rest = tl.fma(v, r, -product)
            residual = tl.fma(-product, r, 1.0) - rest * r
            # Infinite v has r = 0, and no residual.
            return tl.where(v < float("inf"), tl.fma(0.5 * r, residual, r), r)


@triton.jit
def row_offsets(rows, n_inner, outer_stride, row_stride):
    """Offsets of the first elements of int64 ``rows``, in elements.

    ``n_inner`` None: rows lie ``row_stride`` apart. Otherwise they come in groups of n_inner
    with ``outer_stride`` between the groups, as in a head slice of a packed projection.
    """
    if n_inner is None:
        return rows * row_stride
    else:
        return (rows // n_inner) * outer_stride + (rows % n_inner) * row_stride


@triton.jit
def sum_both(a, b):
    """Row sums of two tiles, by one exchange between the warps instead of two."""
    if INTERPRETED:  # NumPy would add the joined tile up one by one, and lose digits
        return tl.sum(a, axis=1), tl.sum(b, axis=1)
    else:
        return tl.sum(tl.join(a, b), axis=1).split()
