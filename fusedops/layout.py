# SPDX-License-Identifier: Apache-2.0
"""Tensors of any rank and stride as the rows that the kernels walk over, copying only if it must.

A kernel reaches rows by one stride (n_rows, H), or by two (n_outer, n_inner, H), which covers the
head slice of a packed projection. It writes dense rows. So a tensor is first permuted into the
order in which the result will lie in memory, then its leading dimensions are merged.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

__all__ = ["ROW_MAJOR", "Layout", "as_rows", "result_layout"]


class Layout(NamedTuple):
    """Where a result of the kernels lies in memory.

    order: its dimensions in the order of its memory, the last one last; None if row-major.
    strides: its strides where they are not the row-major ones, else None.
    dense_rows: False where its last dimension is not innermost: it must be copied there.
    """

    order: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    dense_rows: bool = True

    def empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised result for a kernel to write its rows to, in this layout's order."""
        if self.strides is None or not self.dense_rows:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty_strided(shape, self.strides, dtype=dtype, device=device)

    def finish(self, result: Tensor) -> Tensor:
        """The result with its final strides."""
        if self.strides is None or self.dense_rows:
            return result
        strided = torch.empty_strided(
            result.shape, self.strides, dtype=result.dtype, device=result.device
        )
        return strided.copy_(result)


ROW_MAJOR = Layout()


def result_layout(x: Tensor, residual: Tensor | None = None) -> Layout:
    """The layout of ``residual + x``, or of an elementwise function of x, as torch chooses it."""
    if x.is_contiguous() and (residual is None or residual.is_contiguous()):
        return ROW_MAJOR
    meta = torch.empty_strided(x.shape, x.stride(), device="meta")
    if residual is None:
        strides = torch.empty_like(meta).stride()
    else:
        strides = (
            torch.empty_strided(residual.shape, residual.stride(), device="meta") + meta
        ).stride()
    last = x.dim() - 1
    sizes = [dim for dim in range(x.dim()) if x.shape[dim] != 1]
    order = sorted(sizes, key=lambda dim: -strides[dim])
    if order == sizes:
        return Layout(strides=strides)  # row-major, but for dimensions of one
    if order[-1] != last and x.shape[last] != 1:
        return Layout(strides=strides, dense_rows=False)
    leading = sorted(range(last), key=lambda dim: -strides[dim])
    return Layout((*leading, last), strides)


def splits(tensor: Tensor) -> set[int]:
    """Leading dimensions before which rows cannot be reached by going on with the same stride."""
    shape, strides = tensor.shape, tensor.stride()
    breaks = set()
    inner = None  # the nearest dimension to the right that has more than one element
    for dim in range(tensor.dim() - 2, -1, -1):
        if shape[dim] == 1:
            continue
        if inner is not None and strides[dim] != strides[inner] * shape[inner]:
            breaks.add(inner)
        inner = dim
    return breaks


def as_rows(tensors: Sequence[Tensor | None], order: tuple[int, ...] | None = None) -> list[Any]:
    """Views (n_rows, H) or, all alike, (n_outer, n_inner, H) of tensors of one shape.

    A tensor is copied when its last dimension has gaps, or when two strides cannot reach its rows.
    None stays None.
    """
    if order is None and all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return [None if tensor is None else tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    rows: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is not None:
            if order is not None:
                tensor = tensor.permute(order)
            if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                tensor = tensor.contiguous()
        rows.append(tensor)
    breaks = [set() if t is None or t.is_contiguous() else splits(t) for t in rows]
    split = next((own for own in breaks if len(own) == 1), set())
    return [
        None
        if tensor is None
        else merge_leading(tensor if own <= split else tensor.contiguous(), split)
        for tensor, own in zip(rows, breaks, strict=True)
    ]


def merge_leading(tensor: Tensor, split: set[int]) -> Tensor:
    """(n_rows, H), or (n_outer, n_inner, H) where the leading dimensions part at ``split``."""
    if not split:
        return rearrange(tensor, "... h -> (...) h")
    (at,) = split
    outer = " ".join(f"o{dim}" for dim in range(at))
    inner = " ".join(f"i{dim}" for dim in range(at, tensor.dim() - 1))
    return rearrange(tensor, f"{outer} {inner} h -> ({outer}) ({inner}) h")
