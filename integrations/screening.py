# SPDX-License-Identifier: Apache-2.0
"""Blocks whose own code may not be handed a stand-in for a tensor.

Torch functions and operators ask their arguments for ``__torch_function__``; autograd Functions,
TorchScript, C extensions and checkpoints do not. The first would compute the right values and
lose the gradients without a word. So before a block gets a `ResidualStream`, the code that it may
run by itself is read: its forward, the functions and methods named there, and those named in
these. Submodules are no part of that, they are handed tensors. Code that asks whether something is
a tensor, or changes tensors behind their version counters, gets none either.
"""

import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["instance_obstacle", "stream_obstacle", "writes_in_place"]

_IN_PLACE_METHODS = frozenset(
    name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")
)
_WRITING_KEYWORDS = frozenset(("inplace", "out"))
_KNOWN_ROOTS = frozenset(sys.stdlib_module_names) | {"torch", "builtins"}


@functools.cache
def stream_obstacle(cls: type) -> str | None:
    """Why instances of ``cls`` must run on plain tensors, or None.

    Errs on the side of an obstacle: that costs a fusion and nothing else.
    """
    return _Reader(cls).read_function(cls.forward)  # type: ignore[attr-defined]


def instance_obstacle(block: torch.nn.Module) -> str | None:
    """As `stream_obstacle`, from what the block's own code finds in the instance, not the class."""
    cls: type = type(block)
    reader = _Reader(cls)
    submodules = {id(module) for module in block.modules()}
    for name in _instance_names(cls):
        value = vars(block).get(name)
        held: Any = (value,)
        if type(value) in (list, tuple):
            held = value
        elif type(value) is dict:
            held = value.values()
        for item in held:
            if callable(item) and id(item) not in submodules:
                obstacle = reader.read_value(item)
                if obstacle is not None:
                    return obstacle
    return None


@functools.cache
def _instance_names(cls: type) -> frozenset[str]:
    reader = _Reader(cls)
    reader.read_function(cls.forward)  # type: ignore[attr-defined]
    return frozenset(reader.instance_names)


@functools.cache
def writes_in_place(cls: type) -> bool:
    """Whether the own code of ``cls`` may change a tensor in place.

    Version counters find out when that meets an add that is still to be done; inference tensors
    have none.
    """
    reader = _Reader(cls)
    reader.read_function(cls.forward)  # type: ignore[attr-defined]
    codes = [code for function in reader.seen for code in _nested_codes(function.__code__)]
    return any(
        isinstance(constant, tuple) and _WRITING_KEYWORDS.intersection(constant)
        for code in codes
        for constant in code.co_consts  # among them the names of the keywords in its calls
    ) or any(
        instruction.opname in ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR")
        or instruction.opname.startswith("INPLACE_")
        or (instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("="))
        or (
            instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
            and instruction.argval in _IN_PLACE_METHODS
        )
        for code in codes
        for instruction in dis.get_instructions(code)
    )


class _Reader:
    """Follows the names in a function's bytecode to what they stand for."""

    def __init__(self, owner: type) -> None:
        self.owner = owner
        self.seen: set[types.FunctionType] = set()
        self.instance_names: set[str] = set()  # attributes of self that its class does not have

    def read_function(self, function: Any) -> str | None:
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType) or function in self.seen:
            return None
        self.seen.add(function)
        for code in _nested_codes(function.__code__):
            obstacle = self.read_code(code, function)
            if obstacle is not None:
                return obstacle
        return None

    def read_code(self, code: types.CodeType, function: types.FunctionType) -> str | None:
        closure = _closure(function)
        own_names = {"self", *function.__code__.co_varnames[:1]}
        unknown = object()
        value: Any = unknown  # what the instruction before has put on the stack, where known
        for instruction in dis.get_instructions(code):
            name, operation = instruction.argval, instruction.opname
            if operation in ("PRECALL", "CACHE", "PUSH_NULL", "NOP", "EXTENDED_ARG"):
                continue
            if operation == "STORE_ATTR":
                return f"keeps something as {name!r}"  # which would outlive the block
            if operation in ("LOAD_ATTR", "LOAD_METHOD"):
                if "checkpoint" in name or name == "data":
                    return f"names {name!r} in its own code"
                if value is self.owner:
                    value = inspect.getattr_static(self.owner, name, unknown)
                    if value is unknown:
                        self.instance_names.add(name)
                elif isinstance(value, types.ModuleType | type):
                    # Not getattr: what is not there yet may be loaded, or fail, on the way.
                    value = inspect.getattr_static(value, name, unknown)
                else:
                    value = unknown
            elif operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = function.__globals__.get(name, unknown)
            elif operation in ("LOAD_DEREF", "LOAD_CLOSURE"):
                value = closure.get(name, self.owner if name in own_names else unknown)
            elif operation.startswith("LOAD_FAST"):
                last = name[-1] if isinstance(name, tuple) else name
                value = self.owner if last in own_names else unknown
            else:
                value = unknown
            obstacle = None if value is unknown else self.read_value(value)
            if obstacle is not None:
                return obstacle
        return None

    def read_value(self, value: Any) -> str | None:
        if isinstance(value, staticmethod | classmethod | functools.partialmethod):
            value = value.__func__ if not hasattr(value, "func") else value.func
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, types.MethodType):
            if isinstance(value.__self__, type) and self.read_value(value.__self__) is not None:
                return self.read_value(value.__self__)
            value = value.__func__
        if value is Tensor or value is torch.nn.Parameter or value is torch.is_tensor:
            return "asks whether something is a tensor"
        if value is torch.as_tensor or value is torch.asarray:
            return f"names torch.{value.__name__}"  # they take it for a sequence
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            return f"names the autograd Function {value.__name__}"
        if isinstance(value, torch.jit.ScriptFunction | torch.jit.ScriptModule):
            return "names a TorchScript function"
        if isinstance(value, torch.nn.Module):
            return "calls a module that is none of its submodules"
        if not isinstance(value, type) and isinstance(
            call := inspect.getattr_static(type(value), "__call__", None), types.FunctionType
        ):
            value = call
        if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            return None
        root = (value.__module__ or "builtins").partition(".")[0]
        if isinstance(value, types.FunctionType):
            if "_torchdynamo_orig_callable" in vars(value):
                return "names a compiled function"
            # torch.functional, the home of split and einsum, is another matter.
            if f"{value.__module__}.".startswith(("torch.func.", "torch._functorch.")):
                return f"names {value.__name__!r} of torch.func"
            if value.__module__ == "torch.utils.checkpoint":
                return "names torch.utils.checkpoint"
            return None if root in _KNOWN_ROOTS else self.read_function(value)
        if root not in _KNOWN_ROOTS:
            return f"names {value.__name__!r} of the extension {value.__module__!r}"
        return None


def _closure(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            found[name] = cell.cell_contents
    return found


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested_codes(constant)
