# SPDX-License-Identifier: Apache-2.0
"""Device functions that every kernel shares."""

import triton
import triton.language as tl

__all__ = ["divide", "reciprocal_root", "row_offsets"]


@triton.jit
def divide(a, b):
    """Correctly rounded a / b; plain division of fp32 is an approximation on GPUs."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def reciprocal_root(variance, eps):
    """1 / sqrt(variance + eps), each step correctly rounded; ``eps`` is a double.

    eps is added to the variance, inside the root: PyTorch's convention.
    """
    if variance.dtype == tl.float64:
        return 1.0 / tl.sqrt(variance + eps)
    else:
        return tl.div_rn(1.0, tl.sqrt_rn(variance + tl.cast(eps, tl.float32)))


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
