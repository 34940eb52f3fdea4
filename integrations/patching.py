# SPDX-License-Identifier: Apache-2.0
"""Put fusedops' operators into a model, and take them out again.

`patch` looks for norms (see `fusedops.integrations.recognition`) and for the blocks that hold them
(see `fusedops.integrations.stream`), and changes their classes (see
`fusedops.integrations.classes`); `unpatch` is its inverse.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fusedops.integrations import stream
from fusedops.integrations.classes import (
    GUARDED,
    Kind,
    forward_obstacle,
    generated_class,
    into_kind,
    kind_of,
    original_class,
    restore,
)
from fusedops.integrations.norms import SPEC, force_operators
from fusedops.integrations.recognition import (
    NormSpec,
    UnrecognisedNorm,
    is_candidate,
    own_tensors,
    recognise,
    recognition_key,
)
from fusedops.integrations.report import NormRow, PatchReport
from fusedops.integrations.stream import BLOCK, BlockState

__all__ = ["SPEC", "force_operators", "is_patched", "patch", "patched", "suspended", "unpatch"]


def is_patched(module: nn.Module) -> bool:
    """Whether ``module`` is a norm that `patch` treated and `unpatch` did not."""
    return SPEC in vars(module)


# --- plan, change, restore ---------------------------------------------------------------------


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_found: dict[object, NormSpec | str] = {}  # what was proven in this process, or the reason


def _recognise(module: nn.Module, cls: type) -> NormSpec | str:
    try:
        spec = recognise(module, cls)
        generated_class(cls, Kind.NORM)
    except UnrecognisedNorm as error:
        return str(error)
    except Exception as error:
        return f"its class cannot be subclassed: {error}"
    return spec


def _plan_norms(model: nn.Module) -> tuple[list[tuple[nn.Module, NormSpec]], list[NormRow]]:
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
        outcome: NormSpec | str | None = forward_obstacle(module)
        if any(map(is_lazy, own_tensors(module).values())):
            outcome = "its parameters have no shape before its first forward"
        if outcome is None:
            key, lasting = recognition_key(module, cls)
            outcomes = _found if lasting else found
            if key not in outcomes:
                outcomes[key] = _recognise(module, cls)
            outcome = outcomes[key]
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


def _plan_blocks(model: nn.Module, norms: set[nn.Module]) -> dict[nn.Module, tuple[nn.Module, ...]]:
    """Modules that hold a norm and are, or are part of, a member of a repeated container.

    With the modules around each, up to that member.
    """
    blocks: dict[nn.Module, tuple[nn.Module, ...]] = {}

    def holds_norm(module: nn.Module) -> bool:
        return any(inner in norms for inner in module.modules())

    def visit(module: nn.Module, repeated: bool, outer: tuple[nn.Module, ...]) -> None:
        children = list(module.children())
        if (
            repeated
            and not isinstance(module, _CONTAINERS)
            and any(child in norms for child in children)
            and forward_obstacle(module) is None
        ):
            blocks.setdefault(module, outer)
        for child in children:
            member = isinstance(module, _CONTAINERS) and child not in norms
            inside = (*outer, module) if repeated else ()
            visit(child, repeated or (member and holds_norm(child)), inside)

    visit(model, False, ())
    return blocks


def _note_order(model: nn.Module, states: dict[nn.Module, BlockState]) -> None:
    """Tell each block which one follows it in a list."""
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            members = list(container)
            for member, following in zip(members, members[1:], strict=False):
                if member in states and type(following) is type(member):
                    states[member].successor = weakref.ref(following)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def patch(model: nn.Module, *, fuse_residual: bool | str = True) -> PatchReport:
    """Make the norms of ``model`` call fusedops, with the residual adds before them, in place.

    Every module whose forward provably computes an RMSNorm or LayerNorm over the last dimension
    is changed, whatever its class is called; the report lists them and those that were left
    alone, with the reason. Parameters, buffers, hooks, ``state_dict`` and ``isinstance`` stay as
    they are, other models of the same classes are not touched. A norm runs its original code
    while there is no kernel for its input (on a CPU, without Triton, while ``torch.compile``
    traces), for dtypes that were not proven, and when it is called with further arguments.

    Args:
        model: any module; Hugging Face's, PEFT's, with or without accelerate's hooks.
        fuse_residual: also run the blocks that hold the norms so that an add and the norm that
            reads its sum become one operator, within a block and from a block to the next
            (``report.fused`` counts). Sums are bit for bit the original's. On a GPU hidden states
            of less than 2^22 elements are left out while no graph is captured, because putting an
            add off costs the CPU more there than the add does; ``"always"`` includes them.

    Nothing is changed before everything is checked. What is patched already stays so; a second
    call picks up what was added since.

    Inverse: `unpatch`. Raises TypeError if ``model`` is no module, ValueError if none of its
    modules can be patched or ``fuse_residual`` is none of the values above.

    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))
    >>> patch(model).patched
    1
    >>> unpatch(model)
    1
    """
    _require_module(model)
    if fuse_residual not in (True, False, "always"):
        raise ValueError(f'fuse_residual: expected True, False or "always", got {fuse_residual!r}')
    changes, rows = _plan_norms(model)
    blocks: dict[nn.Module, tuple[nn.Module, ...]] = {}
    if fuse_residual:
        norms = {module for module in model.modules() if is_patched(module)}
        norms.update(module for module, _ in changes)
        for block, outer in _plan_blocks(model, norms).items():
            with suppress(Exception):  # a class that refuses to be subclassed
                generated_class(original_class(block), Kind.BLOCK)
                if BLOCK not in vars(block):
                    blocks[block] = outer
    if not any(row.operator for row in rows):
        raise ValueError(
            f"model: expected at least one norm to patch, found none in {type(model).__name__}"
            + "".join(f"; {row.norm_class} {row.describe()}" for row in rows)
        )
    min_elements = 0 if fuse_residual == "always" else stream.MIN_ELEMENTS
    states = {block: BlockState(original_class(block), min_elements) for block in blocks}
    for block, outer in blocks.items():
        states[block].outer = tuple(map(weakref.ref, outer))
    _note_order(model, states)
    for module, spec in changes:
        into_kind(module, Kind.NORM)
        vars(module)[SPEC] = spec
    for block, state in states.items():
        into_kind(block, Kind.BLOCK)
        vars(block)[BLOCK] = state
    present = [vars(module)[BLOCK] for module in model.modules() if BLOCK in vars(module)]
    return PatchReport(original_class(model).__name__, tuple(rows), tuple(present))


def unpatch(model: nn.Module) -> int:
    """Undo `patch`: every module gets its class and attributes back.

    Returns how many norms were restored, 0 if none was patched. Where another tool has put a
    class of its own on top since (``fully_shard``, a parametrization), that class stays, and ours
    below it runs the original code from then on.
    """
    _require_module(model)
    count = sum(is_patched(module) for module in model.modules())
    for module in model.modules():
        restore(module)
    return count


@contextmanager
def patched(model: nn.Module, *, fuse_residual: bool | str = True) -> Iterator[PatchReport]:
    """`patch` for the length of a ``with`` block; what was patched before stays patched.

    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(32))
    >>> with patched(model) as report:
    ...     print(report.patched)
    1
    """
    _require_module(model)
    before = {module for module in model.modules() if is_patched(module) or BLOCK in vars(module)}
    report = patch(model, fuse_residual=fuse_residual)
    try:
        yield report
    finally:
        for module in model.modules():
            if module not in before:
                restore(module)


@contextmanager
def suspended(model: nn.Module) -> Iterator[bool]:
    """The model unpatched for the length of a ``with`` block, then patched as it was.

    Gives whether it was patched at all.
    """
    _require_module(model)
    kept: list[tuple[nn.Module, Kind, dict[str, Any]]] = []
    learned: list[tuple[BlockState, set[bool]]] = []
    for module in model.modules():
        attributes = {n: vars(module)[n] for n in (SPEC, BLOCK, GUARDED) if n in vars(module)}
        if BLOCK in attributes:
            learned.append((attributes[BLOCK], set(attributes[BLOCK].learned)))
        kind = kind_of(module)
        if attributes and kind is not None:
            kept.append((module, kind, attributes))
    for module in model.modules():
        restore(module)
    try:
        yield bool(kept)
    finally:
        for module, kind, attributes in kept:
            into_kind(module, kind)
            vars(module).update(attributes)
        for state, modes in learned:
            state.learned = modes


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
