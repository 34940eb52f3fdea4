# SPDX-License-Identifier: Apache-2.0
"""The device functions that replace a division and a root by fewer instructions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from fusedops.kernels.arithmetic import divide_by, reciprocal_root  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")
LENGTHS = (1, 3, 7, 48, 64, 127, 576, 768, 1600, 2880, 4095, 4097, 5120, 12288, 131071)
BLOCK = 1024


@triton.jit
def divide_kernel(x_ptr, y_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, divide_by(tl.load(x_ptr + at), N))


@triton.jit
def root_kernel(x_ptr, y_ptr, eps: tl.float64, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, reciprocal_root(tl.load(x_ptr + at), eps))


def sums(device, dtype, n_blocks):
    """Both signs and all magnitudes of which quotients are no subnormals; and what is special."""
    generator = torch.Generator().manual_seed(n_blocks)
    exponents = torch.rand(n_blocks * BLOCK, generator=generator, dtype=torch.float64) * 220 - 100
    x = torch.exp2(exponents) * torch.randn(len(exponents), generator=generator)
    x[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3e38])
    return x.to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", LENGTHS)
def test_quotients_are_correctly_rounded(device, dtype, n):
    x = sums(device, dtype, 4 if device == "cpu" else 256)
    y = torch.empty_like(x)
    divide_kernel[(len(x) // BLOCK,)](x, y, n, BLOCK)
    expected = (x.cpu() / n).to(device)  # on a GPU torch multiplies by 1 / n
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", [3, 768, 1600, 4097, 131071])
def test_corrected_quotients_of_every_significand(n):
    """The formula itself, in NumPy with the remainder exact: no significand is rounded wrongly."""
    x = (np.arange(2**23, 2**24, dtype=np.int64) * 2.0**-23).astype(np.float32)
    reciprocal = np.float32(1.0 / n)
    error = abs(Fraction(float(reciprocal)) - Fraction(1, n))
    for other in (0, 1):
        neighbour = np.nextafter(reciprocal, np.float32(other))
        assert error <= abs(Fraction(float(neighbour)) - Fraction(1, n))
    quotient = x * reciprocal
    rest = x.astype(np.float64) - quotient.astype(np.float64) * n  # 41 bits at most
    wide = np.longdouble
    corrected = quotient.astype(wide) + rest.astype(wide) * wide(reciprocal)
    assert np.array_equal(corrected.astype(np.float32), (x.astype(wide) / n).astype(np.float32))


@pytest.mark.parametrize("eps", [1e-6, 1e-12, 1e-30, 1e-40])
def test_reciprocal_roots_are_within_a_unit(device, eps):
    """Half a unit where there are fused multiply-adds; the interpreter rounds root and quotient."""
    variance = sums(device, torch.float32, 4 if device == "cpu" else 256).abs()
    variance[6:200] = torch.rand(194, device=device) * 2.0**-126  # subnormal
    y = torch.empty_like(variance)
    root_kernel[(len(y) // BLOCK,)](variance, y, eps, BLOCK)
    # The sum is rounded to fp32, which what is under the root is allowed to be.
    v = (variance + torch.tensor(eps, dtype=torch.float32, device=device)).double()
    truth = v.rsqrt()
    finite = truth.isfinite() & (v > 0) & (v < math.inf)
    exponents = torch.floor(torch.log2(truth[finite]))
    units = (y[finite].double() - truth[finite]).abs() / torch.exp2(exponents - 23)
    assert units.max() <= (1.51 if device == "cpu" else 0.51)
    assert y[v == math.inf].eq(0).all()
    assert torch.equal(y.isnan(), variance.isnan())
