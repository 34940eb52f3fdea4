# SPDX-License-Identifier: Apache-2.0
"""The public functions."""

import torch
from torch import Tensor

from fusedops import reference

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return reference.rms_norm(
        x, weight, eps, weight_offset=weight_offset, cast=cast, out_dtype=out_dtype
    )


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return reference.layer_norm(x, weight, bias, eps, out_dtype=out_dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    return reference.add_rms_norm(
        x, residual, weight, eps, weight_offset=weight_offset, cast=cast, out_dtype=out_dtype
    )


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    return reference.add_layer_norm(x, residual, weight, bias, eps, out_dtype=out_dtype)
