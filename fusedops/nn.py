# SPDX-License-Identifier: Apache-2.0
"""The operators as modules, with the constructors and state_dicts of torch's own norms."""

from typing import Any

import torch
from torch import Tensor, nn

from fusedops import functional

__all__ = ["AddLayerNorm", "AddRMSNorm", "LayerNorm", "RMSNorm"]

_Shape = int | list[int] | tuple[int, ...] | torch.Size


def _flat(tensor: Tensor, normalized_shape: tuple[int, ...], name: str) -> Tensor:
    """``tensor`` with the normalised dimensions as one."""
    n_dims = len(normalized_shape)
    if tuple(tensor.shape[-n_dims:]) != normalized_shape:
        raise ValueError(
            f"{name}: expected shape (..., {', '.join(map(str, normalized_shape))}), "
            f"got {tuple(tensor.shape)}"
        )
    return tensor if n_dims == 1 else tensor.flatten(-n_dims)


def _vector(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.flatten()


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` on the kernels of `fusedops.rms_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in torch.nn.RMSNorm.
            The mean is over all dimensions of normalized_shape together.
        weight_offset, cast: as in `fusedops.rms_norm`.

    Shapes: x (..., *normalized_shape) to the same.

    >>> RMSNorm(64)(torch.randn(2, 8, 64)).shape
    torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        normalized_shape: _Shape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        weight_offset: float = 0.0,
        cast: str = "fp32",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.weight_offset = weight_offset
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        y = functional.rms_norm(
            _flat(x, self.normalized_shape, "x"),
            _vector(self.weight),
            self.eps,
            weight_offset=self.weight_offset,
            cast=self.cast,
        ).contiguous()  # as torch.nn.RMSNorm's result always is
        return y.view(x.shape) if y.shape != x.shape else y

    def extra_repr(self) -> str:
        extra = super().extra_repr()
        if self.weight_offset or self.cast != "fp32":
            extra += f", weight_offset={self.weight_offset}, cast={self.cast!r}"
        return extra


class AddRMSNorm(RMSNorm):
    """The residual add and the RMSNorm of the sum: `fusedops.add_rms_norm` as a module.

    Constructor and state_dict are `RMSNorm`'s. A pre-norm block reads
    ``y, residual = self.norm(branch, residual)``.

    Shapes: x and residual (..., *normalized_shape) to ``(y, summed)``, both the same.

    >>> y, summed = AddRMSNorm(64)(torch.randn(2, 8, 64), torch.randn(2, 8, 64))
    >>> y.shape, summed.shape
    (torch.Size([2, 8, 64]), torch.Size([2, 8, 64]))
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y, summed = functional.add_rms_norm(
            _flat(x, self.normalized_shape, "x"),
            _flat(residual, self.normalized_shape, "residual"),
            _vector(self.weight),
            self.eps,
            weight_offset=self.weight_offset,
            cast=self.cast,
        )
        if y.shape != x.shape:
            return y.reshape(x.shape), summed.reshape(x.shape)
        return y, summed


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` on the kernels of `fusedops.layer_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in torch.nn.LayerNorm.
            Mean and variance are over all dimensions of normalized_shape together.

    Shapes: x (..., *normalized_shape) to the same.

    >>> LayerNorm((4, 16))(torch.randn(2, 4, 16)).shape
    torch.Size([2, 4, 16])
    """

    def forward(self, x: Tensor) -> Tensor:
        y = functional.layer_norm(
            _flat(x, self.normalized_shape, "x"),
            _vector(self.weight),
            _vector(self.bias),
            self.eps,
        )
        return y.view(x.shape) if y.shape != x.shape else y


class AddLayerNorm(LayerNorm):
    """The residual add and the LayerNorm of the sum: `fusedops.add_layer_norm` as a module.

    Constructor and state_dict are `LayerNorm`'s. A pre-norm block reads
    ``y, residual = self.norm(branch, residual)``.

    Shapes: x and residual (..., *normalized_shape) to ``(y, summed)``, both the same.

    >>> y, summed = AddLayerNorm(64)(torch.randn(2, 8, 64), torch.randn(2, 8, 64))
    >>> y.shape, summed.shape
    (torch.Size([2, 8, 64]), torch.Size([2, 8, 64]))
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y, summed = functional.add_layer_norm(
            _flat(x, self.normalized_shape, "x"),
            _flat(residual, self.normalized_shape, "residual"),
            _vector(self.weight),
            _vector(self.bias),
            self.eps,
        )
        if y.shape != x.shape:
            return y.reshape(x.shape), summed.reshape(x.shape)
        return y, summed
