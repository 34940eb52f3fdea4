# SPDX-License-Identifier: Apache-2.0
"""How a patched norm calls an operator: operands read from the module, strides as it had them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fusedops import dispatch, functional
from fusedops.integrations.recognition import NormSpec

__all__ = [
    "SPEC",
    "Operands",
    "force_operators",
    "operators_serve",
    "read_operands",
    "run_add_norm",
    "run_norm",
]

SPEC = "_fusedops_norm"  # instance attribute of a patched norm: its NormSpec

_forced = 0


@contextmanager
def force_operators() -> Iterator[None]:
    """Make patched models call fusedops' functions where no kernel runs, too.

    For tests and proofs: on a CPU the functions then run their reference, where otherwise the
    model's original code would run.
    """
    global _forced
    _forced += 1
    try:
        yield
    finally:
        _forced -= 1


def operators_serve(x: Tensor) -> bool:
    """Whether patched code should call operators for tensors on x's device."""
    if _forced and not dispatch.DISABLED:
        return True
    obstacle = dispatch.kernel_obstacle(x)
    if obstacle is not None:
        dispatch.log_once(f"patched modules run their original forward: {obstacle}")
    return obstacle is None


class Operands(NamedTuple):
    """What an operator needs beside its rows."""

    spec: NormSpec
    weight: Tensor | None
    bias: Tensor | None
    eps: float | None
    out_dtype: torch.dtype | None


def read_operands(module: nn.Module, x: Tensor, dtype: torch.dtype) -> Operands | None:
    """What to call an operator with for rows like ``x`` of that dtype; None: the original serves.

    Everything is read from the module anew, since anyone may have changed it.
    """
    state = module.__dict__
    spec: NormSpec | None = state.get(SPEC)
    if spec is None or not operators_serve(x):
        return None
    shape = x.shape
    if len(shape) not in spec.ranks or 0 in shape:
        return None
    if spec.size is not None and shape[-1] != spec.size:
        return None
    eps = state[spec.eps]
    if type(eps) is float:
        if not 0.0 < eps < float("inf"):
            return None
    elif eps is not None or not spec.eps_may_be_none:
        return None
    weight = bias = weight_dtype = None
    if spec.weight is not None:
        weight = _read_vector(module, spec.weight, x)
        if weight is None:
            return None
        weight_dtype = weight.dtype
    if spec.bias is not None:
        bias = _read_vector(module, spec.bias, x)
        if bias is None or bias.dtype != weight_dtype:
            return None
    out_dtype = None
    autocast = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)
    if autocast:
        if spec.autocast == "unknown":
            return None
        if spec.autocast == "torch":
            return Operands(spec, weight, bias, eps, None)
        if spec.cast == "fp32":
            out_dtype = dtype  # not what torch's rule for its own norms would make of it
    if (dtype, weight_dtype) not in spec.dtypes:
        return None
    return Operands(spec, weight, bias, eps, out_dtype)


def _read_vector(module: nn.Module, name: str, x: Tensor) -> Tensor | None:
    """The weight or bias of that name, None where it is not a plain tensor that fits x."""
    tensor = module._parameters.get(name)
    if tensor is None:  # a buffer, a replica's plain attribute or a parametrization's property
        tensor = getattr(module, name, None)
    if type(tensor) is not nn.Parameter and type(tensor) is not Tensor:
        return None
    if tensor.device != x.device or tensor.dim() != 1 or tensor.shape[0] != x.shape[-1]:
        return None
    return tensor


_OPERATOR_LAYOUT = {"layer": "contiguous", "rms": "preserve"}


def run_norm(operands: Operands, x: Tensor) -> Tensor | None:
    """The norm of ``x``, with the strides of the original's result; None where they are unknown."""
    spec, weight, bias, eps, out_dtype = operands
    contiguous = x.is_contiguous()
    if not contiguous and spec.layout == "unknown":
        return None
    if spec.kind == "layer":
        y = functional.layer_norm(x, weight, bias, eps, out_dtype=out_dtype)
    else:
        y = functional.rms_norm(
            x, weight, eps, weight_offset=spec.weight_offset, cast=spec.cast, out_dtype=out_dtype
        )
    if contiguous or spec.layout == _OPERATOR_LAYOUT[spec.kind]:
        return y
    if spec.layout == "contiguous":
        return y.contiguous()
    strides = torch.empty_like(x, device="meta").stride()
    return y if y.stride() == strides else y.new_empty_strided(y.shape, strides).copy_(y)


def run_add_norm(operands: Operands, delta: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of base + delta, base + delta); both inputs are contiguous and of one shape."""
    spec, weight, bias, eps, out_dtype = operands
    if spec.kind == "layer":
        return functional.add_layer_norm(delta, base, weight, bias, eps, out_dtype=out_dtype)
    return functional.add_rms_norm(
        delta,
        base,
        weight,
        eps,
        weight_offset=spec.weight_offset,
        cast=spec.cast,
        out_dtype=out_dtype,
    )
