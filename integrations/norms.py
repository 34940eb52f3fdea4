# SPDX-License-Identifier: Apache-2.0
"""How a patched norm calls an operator: operands read from the module, strides as it had them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedops import direct, dispatch, functional
from fusedops.integrations.recognition import NormSpec

__all__ = [
    "READY",
    "SPEC",
    "Operands",
    "Ready",
    "force_operators",
    "operators_serve",
    "read_operands",
    "ready_norm",
    "run_add_norm",
    "run_norm",
]

SPEC = "_fusedops_norm"  # instance attribute of a patched norm: its NormSpec
READY = "_fusedops_ready"  # and another: how its last calls on a GPU were launched, a Ready

_any_autocast = torch._C._is_any_autocast_enabled
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
    if not dispatch.DISABLED and (_forced or (x.is_cuda and dispatch.TRITON_OBSTACLE is None)):
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


class Ready:
    """How a patched norm's calls are launched that are like one found in order before.

    Of the module's tensors it holds nothing: the calls' guards see them anew. eps counts as the
    same object only.
    """

    __slots__ = ("add_call", "bias", "call", "eps", "eps_name", "weight")

    def __init__(self, operands: Operands) -> None:
        spec = operands.spec
        self.eps_name, self.eps = spec.eps, operands.eps
        self.weight, self.bias = spec.weight, spec.bias
        self.call: direct.Caller | None = None
        self.add_call: direct.Caller | None = None

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy finds out anew


def ready_norm(
    module: nn.Module, x: Tensor, residual: Tensor | None = None
) -> tuple[Tensor | None, ...] | None:
    """(norm, None) of ``x``, or what `run_add_norm` gives, where a call like it was in order."""
    state = module.__dict__
    ready: Ready | None = state.get(READY)
    if ready is None or state[ready.eps_name] is not ready.eps:
        return None
    call = ready.call if residual is None else ready.add_call
    if call is None:
        return None
    parameters = state["_parameters"]
    return call(x, residual, parameters.get(ready.weight), parameters.get(ready.bias))


def read_operands(module: nn.Module, x: Tensor, dtype: torch.dtype) -> Operands | None:
    """What to call an operator with for rows like ``x`` of that dtype; None: the original serves.

    Everything is read from the module anew, since anyone may have changed it.
    """
    return _check_operands(module, x, dtype) if operators_serve(x) else None


def _make_ready(module: nn.Module, operands: Operands, x: Tensor, residual: Tensor | None) -> None:
    """Note how the call just made is launched, if it is one that can be launched directly."""
    spec, weight, bias, eps, out_dtype = operands
    if type(weight) is Tensor or type(bias) is Tensor:
        return
    prefix, linked = ("", ()) if residual is None else ("add_", (functional.LINKED,))
    options: tuple[object, ...] = (f"{prefix}layer_norm", eps, out_dtype, type(eps), *linked)
    if spec.kind == "rms":
        offset = spec.weight_offset
        kinds = type(eps), type(offset)
        options = (f"{prefix}rms_norm", eps, offset, spec.cast, out_dtype, *kinds, *linked)
    call = direct.find(options, x, residual, weight, bias)
    if call is None:
        return
    state = module.__dict__
    ready: Ready | None = state.get(READY)
    if ready is None or ready.eps is not eps:
        ready = state[READY] = Ready(operands)
    if residual is None:
        ready.call = call
    else:
        ready.add_call = call


def _check_operands(module: nn.Module, x: Tensor, dtype: torch.dtype) -> Operands | None:
    state = module.__dict__
    spec: NormSpec | None = state.get(SPEC)
    if spec is None:
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
    if _any_autocast() and torch.is_autocast_enabled(x.device.type):
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
    shape = tensor.shape
    if len(shape) != 1 or shape[0] != x.shape[-1]:
        return None
    if x.is_cuda:  # comparing indices is quicker than comparing devices
        same_device = tensor.is_cuda and tensor.get_device() == x.get_device()
    else:
        same_device = tensor.device == x.device
    return tensor if same_device else None


_OPERATOR_LAYOUT = {"layer": "contiguous", "rms": "preserve"}


def run_norm(module: nn.Module, operands: Operands, x: Tensor) -> Tensor | None:
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
    if contiguous:
        _make_ready(module, operands, x, None)
        return y
    if spec.layout == _OPERATOR_LAYOUT[spec.kind]:
        return y
    if spec.layout == "contiguous":
        return y.contiguous()
    strides = torch.empty_like(x, device="meta").stride()
    return y if y.stride() == strides else y.new_empty_strided(y.shape, strides).copy_(y)


def run_add_norm(
    module: nn.Module, operands: Operands, delta: Tensor, base: Tensor
) -> tuple[Tensor, ...]:
    """What `linked_add_norm` gives; both inputs are contiguous and of one shape."""
    spec, weight, bias, eps, out_dtype = operands
    done = functional.linked_add_norm(
        delta,
        base,
        weight,
        bias,
        eps,
        centered=spec.kind == "layer",
        weight_offset=spec.weight_offset,
        cast=spec.cast,
        out_dtype=out_dtype,
    )
    _make_ready(module, operands, delta, base)
    return done
