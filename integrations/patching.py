# SPDX-License-Identifier: Apache-2.0
"""Put fusedops' operators into the norms of a model, and take them out again.

A patched norm keeps its identity, parameters and hooks; only its ``__class__`` changes, to a
generated subclass of its own class with another ``forward``. There is one such subclass for each
original class. What the module computes stands in its `NormSpec`, in an instance attribute.

Pickles (also ``torch.save(model)``) hold the original class and the instruction to patch the copy
again. Where fusedops is not installed such a pickle fails to load with ModuleNotFoundError: save
the ``state_dict``, which is the same patched or not, or `unpatch` first.
"""

import copyreg
import functools
import threading
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusedops import dispatch, functional
from fusedops.integrations.recognition import (
    NormSpec,
    UnrecognisedNorm,
    is_candidate,
    recognise,
    recognition_key,
)
from fusedops.integrations.report import NormRow, PatchReport

__all__ = ["force_operators", "patch", "patched", "unpatch"]

SPEC = "_fusedops_norm"  # instance attribute of a patched norm: its NormSpec
ORIGINAL = "__fusedops_original__"  # class attribute of a generated class: the class it stands for

_forced = 0
_class_lock = threading.Lock()
_classes: dict[type, type] = {}


@contextmanager
def force_operators() -> Iterator[None]:
    """Make patched norms call fusedops' functions where no kernel runs, too.

    For tests and proofs: on a CPU the functions then run their reference, where otherwise the
    model's original code would run.
    """
    global _forced
    _forced += 1
    try:
        yield
    finally:
        _forced -= 1


# --- the forward of a patched norm -------------------------------------------------------------


def norm_operands(
    module: nn.Module, x: Tensor
) -> tuple[NormSpec, Tensor | None, Tensor | None, float | None] | None:
    """(spec, weight, bias, eps) with which an operator serves this call; None: the original does.

    Everything is read from the module anew, since anyone may have changed it.
    """
    state = module.__dict__
    spec: NormSpec | None = state.get(SPEC)
    if spec is None or torch.compiler.is_compiling():
        return None
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        return None
    if not _forced or dispatch.DISABLED:
        obstacle = dispatch.kernel_obstacle(x)
        if obstacle is not None:
            dispatch.log_once(f"patched norms run their original forward: {obstacle}")
            return None
    shape = x.shape
    if len(shape) not in spec.ranks or (spec.size is not None and shape[-1] != spec.size):
        return None
    if 0 in shape:
        return None
    eps = state[spec.eps]
    if type(eps) is float:
        if not 0.0 < eps < float("inf"):
            return None
    elif eps is not None or not spec.eps_may_be_none:
        return None
    weight = bias = None
    if spec.weight is not None:
        weight = _vector(module, spec.weight, x)
        if weight is None:
            return None
    if spec.bias is not None:
        bias = _vector(module, spec.bias, x)
        if bias is None or weight is None or bias.dtype != weight.dtype:
            return None
    if (x.dtype, None if weight is None else weight.dtype) not in spec.dtypes and not (
        spec.autocast == "torch" and torch.is_autocast_enabled(x.device.type)
    ):
        return None
    if spec.autocast == "unknown" and torch.is_autocast_enabled(x.device.type):
        return None
    if spec.layout == "unknown" and not x.is_contiguous():
        return None
    return spec, weight, bias, eps


def _vector(module: nn.Module, name: str, x: Tensor) -> Tensor | None:
    """The weight or bias of that name, None where it is not a plain tensor that fits x."""
    tensor = module._parameters.get(name)
    if tensor is None:  # a buffer, a replica's plain attribute or a parametrization's property
        tensor = getattr(module, name, None)
    if (type(tensor) is not nn.Parameter and type(tensor) is not Tensor) or tensor is None:
        return None
    if tensor.device != x.device or tensor.dim() != 1 or tensor.shape[0] != x.shape[-1]:
        return None
    return tensor


def run_norm(
    spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None
) -> Tensor:
    """The operator that ``spec`` names, with the strides that the original's result would have."""
    out_dtype = _dtype_without_autocast(spec, x)
    if spec.kind == "layer":
        y = functional.layer_norm(x, weight, bias, eps, out_dtype=out_dtype)
    else:
        y = functional.rms_norm(
            x,
            weight,
            eps,
            weight_offset=spec.weight_offset,
            cast=spec.cast,
            out_dtype=out_dtype,
        )
    if x.is_contiguous() or spec.layout == _OPERATOR_LAYOUT[spec.kind]:
        return y
    if spec.layout == "contiguous":
        return y.contiguous()
    strides = torch.empty_like(x, device="meta").stride()
    return y if y.stride() == strides else y.new_empty_strided(y.shape, strides).copy_(y)


_OPERATOR_LAYOUT = {"layer": "contiguous", "rms": "preserve"}


def _dtype_without_autocast(spec: NormSpec, rows: Tensor) -> torch.dtype | None:
    """The result's dtype where autocast must not choose it; None: the operator's own rule."""
    if (
        spec.autocast == "none"
        and spec.cast == "fp32"
        and torch.is_autocast_enabled(rows.device.type)
    ):
        return rows.dtype
    return None


# --- generated classes -------------------------------------------------------------------------


def original_class(module: nn.Module) -> type:
    """The class that ``module`` has, or had before it was patched."""
    cls = type(module)
    return cls.__dict__.get(ORIGINAL, cls)


def is_patched(module: nn.Module) -> bool:
    """Whether ``module`` is a norm that `patch` treated and `unpatch` did not."""
    return SPEC in vars(module)


def _rebuild(original: type, *args: Any) -> nn.Module:
    """Make an empty instance of ``original``'s generated subclass; pickles call this."""
    module = original.__new__(original, *args)
    module.__class__ = generated_class(original)
    return module


def generated_class(original: type) -> type:
    """The one subclass of ``original`` that patched modules of that class get."""
    with _class_lock:
        if original not in _classes:
            _classes[original] = _generate_class(original)
        return _classes[original]


def _generate_class(original: Any) -> type:
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            operands = norm_operands(self, args[0])
            if operands is not None:
                spec, weight, bias, eps = operands
                return run_norm(spec, args[0], weight, bias, eps)
        return original.forward(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = original.__reduce_ex__(self, protocol)
        if reduced[0] is copyreg.__newobj__ and reduced[1][0] is cls:  # type: ignore[attr-defined]
            return _rebuild, (original, *reduced[1][1:]), *reduced[2:]
        return reduced

    cls = type(original)(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            ORIGINAL: original,
            "forward": forward,
            "__reduce_ex__": __reduce_ex__,
        },
    )
    return cls


# --- forwards that stand in the instance ----------------------------------------------------


def _bound_forwards(module: nn.Module, function: Any) -> list[str]:
    """Instance attributes that hold ``function`` bound to ``module``.

    accelerate keeps the forward of a module that it hooks in ``_old_forward``, and leaves it in
    ``forward`` when it takes the hook off; the class's own forward is not looked up then.
    """
    return [
        name
        for name in ("forward", "_old_forward")
        if isinstance(method := vars(module).get(name), types.MethodType)
        and method.__func__ is function
        and method.__self__ is module
    ]


def _rebind_forwards(module: nn.Module, old: Any, new: Any) -> None:
    for name in _bound_forwards(module, old):
        vars(module)[name] = types.MethodType(new, module)
    hooked = vars(module).get("forward")
    wrapped = getattr(hooked, "__wrapped__", None)
    if isinstance(wrapped, types.MethodType) and wrapped.__func__ is old:
        hooked.__wrapped__ = types.MethodType(new, module)  # type: ignore[union-attr]


def _forward_obstacle(module: nn.Module) -> str | None:
    """Why a change of class would not reach the forward of this module."""
    state = vars(module)
    ours = _bound_forwards(module, type(module).forward)
    if "_old_forward" in state and "_old_forward" not in ours:
        return "a hook keeps a forward that is not its class's"
    if "forward" in state and "forward" not in ours and "_old_forward" not in state:
        return "has a forward of its own in the instance"
    return None


# --- plan, change, restore ---------------------------------------------------------------------


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _plan(model: nn.Module) -> tuple[list[tuple[nn.Module, NormSpec]], list[NormRow]]:
    """What to change, and a row for each class and treatment. Changes nothing."""
    found: dict[object, NormSpec | str] = {}
    changes: list[tuple[nn.Module, NormSpec]] = []
    counts: Counter[tuple[str, NormSpec | str]] = Counter()
    for module in model.modules():
        cls = original_class(module)
        if is_patched(module):
            counts[_class_name(cls), vars(module)[SPEC]] += 1
            continue
        looks_like_norm = not module._modules and any(
            "norm" in base.__name__.lower() for base in cls.__mro__
        )
        if not is_candidate(module) and not looks_like_norm:
            continue
        outcome: NormSpec | str | None = _forward_obstacle(module)
        if outcome is None:
            key = recognition_key(module, cls)
            if key not in found:
                try:
                    found[key] = recognise(module, cls)
                    generated_class(cls)
                except UnrecognisedNorm as error:
                    found[key] = str(error)
            outcome = found[key]
        if isinstance(outcome, NormSpec):
            changes.append((module, outcome))
        elif not looks_like_norm:
            continue
        counts[_class_name(cls), outcome] += 1
    rows: dict[NormRow, int] = {}  # norms that differ in size alone share a row
    for (name, outcome), count in counts.items():
        row = _row(name, outcome)
        rows[row] = rows.get(row, 0) + count
    return changes, [replace(row, count=count) for row, count in rows.items()]


def _row(norm_class: str, outcome: NormSpec | str) -> NormRow:
    if isinstance(outcome, str):
        return NormRow(norm_class, reason=outcome)
    rms = outcome.kind == "rms"
    return NormRow(
        norm_class,
        operator="rms_norm" if rms else "layer_norm",
        cast=outcome.cast if rms else None,
        weight_offset=outcome.weight_offset,
        dtypes=tuple(sorted("/".join(map(_dtype_name, pair)) for pair in outcome.dtypes)),
    )


def _dtype_name(dtype: torch.dtype | None) -> str:
    return "-" if dtype is None else str(dtype).removeprefix("torch.")


def _patch_norm(module: nn.Module, spec: NormSpec) -> None:
    vars(module)[SPEC] = spec
    original = type(module)
    if ORIGINAL not in original.__dict__ and not hasattr(original, ORIGINAL):
        module.__class__ = generated_class(original)
        _rebind_forwards(module, original.forward, type(module).forward)


def _unpatch_norm(module: nn.Module) -> None:
    del vars(module)[SPEC]
    generated = type(module)
    if ORIGINAL not in generated.__dict__:
        return  # a class on top of ours; ours passes every call through from now on
    original = original_class(module)
    module.__class__ = original
    _rebind_forwards(module, generated.forward, original.forward)  # type: ignore[attr-defined]


def patch(model: nn.Module) -> PatchReport:
    """Make the norms of ``model`` call fusedops, in place.

    Every module whose forward provably computes an RMSNorm or LayerNorm over the last dimension
    is changed, whatever its class is called; the report lists them and those that were left
    alone, with the reason. Parameters, buffers, hooks, ``state_dict`` and ``isinstance`` stay as
    they are, other models of the same classes are not touched. A norm runs its original code
    while there is no kernel for its input (on a CPU, without Triton, while ``torch.compile``
    traces), for dtypes that were not proven, and when it is called with further arguments.

    Nothing is changed before everything is checked. Norms that are patched already stay so; a
    second call picks up those that were added since.

    Inverse: `unpatch`. Raises TypeError if ``model`` is no module, ValueError if none of its
    modules can be patched.

    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))
    >>> patch(model).patched
    1
    >>> unpatch(model)
    1
    """
    _require_module(model)
    changes, rows = _plan(model)
    report = PatchReport(type(model).__name__, tuple(rows))
    if not report.patched:
        raise ValueError(
            f"model: expected at least one norm to patch, found none in {type(model).__name__}"
            + "".join(f"; {row.norm_class} {row.describe()}" for row in rows)
        )
    for module, spec in changes:
        _patch_norm(module, spec)
    return report


def unpatch(model: nn.Module) -> int:
    """Undo `patch`: every module gets its class and attributes back.

    Returns how many modules were restored, 0 if none was patched. Where another tool has put a
    class of its own on top since (``fully_shard``, a parametrization), that class stays, and ours
    below it runs the original code from then on.
    """
    _require_module(model)
    modules = [module for module in model.modules() if is_patched(module)]
    for module in modules:
        _unpatch_norm(module)
    return len(modules)


@contextmanager
def patched(model: nn.Module) -> Iterator[PatchReport]:
    """`patch` for the length of a ``with`` block; what was patched before stays patched.

    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(32))
    >>> with patched(model) as report:
    ...     print(report.patched)
    1
    """
    _require_module(model)
    before = {id(module) for module in model.modules() if is_patched(module)}
    report = patch(model)
    try:
        yield report
    finally:
        for module in model.modules():
            if is_patched(module) and id(module) not in before:
                _unpatch_norm(module)


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
