# SPDX-License-Identifier: Apache-2.0
"""Tells `fusedops.warmup` which operators the patched norms of a model call, and how."""

from typing import Any

import torch
from torch import Tensor, nn

from fusedops import dispatch
from fusedops.integrations.norms import SPEC, read_operands
from fusedops.integrations.recognition import NormSpec
from fusedops.integrations.stream import BLOCK
from fusedops.precompile import Dtypes, NormShape, devices_of

__all__ = ["describe_patched"]

Calls = list[tuple[torch.device, NormShape]]


def describe_patched(model: nn.Module, dtypes: Dtypes) -> dict[nn.Module, Calls | str]:
    """The calls of each patched norm, with the adds that its model's blocks leave to it."""
    widths = _stream_widths(model)
    found: dict[nn.Module, Calls | str] = {}
    for module in model.modules():
        spec: NormSpec | None = vars(module).get(SPEC)
        if spec is not None:
            found[module] = _describe(module, spec, dtypes, model, widths)
    return found


def _size(module: nn.Module, spec: NormSpec) -> int | None:
    """The length of the rows that the norm takes; None: any."""
    weight = getattr(module, spec.weight, None) if spec.weight is not None else None
    return weight.shape[0] if isinstance(weight, Tensor) else spec.size


def _stream_widths(model: nn.Module) -> set[int | None]:
    """Row lengths of the norms that may read a sum: those that outermost blocks hold.

    A block in a block, such as an attention with norms for its heads, is no part of the stream.
    """
    widths = set()
    for block in model.modules():
        state = vars(block).get(BLOCK)
        if state is None or state.obstacle is not None:
            continue
        if not any(BLOCK in vars(outer) for outer in state.around()):
            for child in block.children():
                if SPEC in vars(child):
                    widths.add(_size(child, vars(child)[SPEC]))
    return widths


def _describe(
    module: nn.Module, spec: NormSpec, dtypes: Dtypes, model: nn.Module, widths: set[int | None]
) -> Calls | str:
    name, size = type(module).__name__, _size(module, spec)
    if size is None:
        return f"{name} has no weight and takes rows of any length"
    weight = getattr(module, spec.weight) if spec.weight is not None else None
    bias = getattr(module, spec.bias) if spec.bias is not None else None
    stream, branch = dtypes
    pairs: list[tuple[torch.dtype, torch.dtype | None]] = [(branch, None), (stream, None)]
    if size in widths:
        pairs.append((branch, stream))
    calls: Calls = []
    for device in devices_of(model) if weight is None else [weight.device]:
        for dtype, residual_dtype in dict.fromkeys(pairs):
            sum_dtype = dtype
            if residual_dtype is not None:
                sum_dtype = torch.promote_types(dtype, residual_dtype)
            row = torch.empty(1, 1, size, dtype=sum_dtype, device=device)
            operands = read_operands(module, row, sum_dtype)
            if operands is None:
                continue
            prefix = "" if residual_dtype is None else "add_"
            only_rms: dict[str, Any] = {}
            if spec.kind == "rms":
                only_rms = {"weight_offset": spec.weight_offset, "cast": spec.cast}
            shape = NormShape(
                f"{prefix}{spec.kind}_norm",
                size,
                dtype,
                residual_dtype=residual_dtype,
                weight_dtype=None if weight is None else weight.dtype,
                weight=weight is not None,
                bias=bias is not None,
                out_dtype=operands.out_dtype,
                eps=operands.eps,
                weight_grad=weight is not None and weight.requires_grad,
                bias_grad=bias is not None and bias.requires_grad,
                **only_rms,
            )
            calls.append((device, shape))
    if calls:
        return calls
    obstacle = dispatch.kernel_obstacle(torch.empty(0, device=device))
    return obstacle or f"{name} runs its own forward for {stream}, or has no plain tensors"
