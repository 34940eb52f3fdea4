# SPDX-License-Identifier: Apache-2.0
"""The classes that patched modules get, and how a module changes into one and back.

Only ``__class__`` changes, to a generated subclass of the module's own class with the same name,
one for each class and `Kind`. That keeps gradient checkpointing, hooks and ``isinstance`` as they
are, which a forward replaced in the instance does not. What a patched module does stands in
instance attributes; without these it behaves as its original class.

Pickles (also ``torch.save(model)``) hold the original class and the instruction to change it
again. Where fusedops is not installed such a pickle fails to load with ModuleNotFoundError: save
the ``state_dict``, which is the same patched or not, or `unpatch` first.
"""

import copyreg
import enum
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.utils.parametrize import is_parametrized

from fusedops import direct
from fusedops.integrations.norms import READY, SPEC
from fusedops.integrations.stream import (
    BLOCK,
    BlockState,
    Key,
    ResidualStream,
    before_submodule,
    block_frames,
    call_norm,
    call_unhooked,
    holds_same,
    keys_within,
    members,
    run_block,
    run_plain_norm,
    watch_block,
    without_streams,
)

__all__ = [
    "GUARDED",
    "Guard",
    "Kind",
    "forward_obstacle",
    "generated_class",
    "into_kind",
    "is_outermost",
    "kind_of",
    "original_class",
    "restore",
]

ORIGINAL = "__fusedops_original__"  # class attribute of a generated class: the class it stands for
KIND = "__fusedops_kind__"
GUARDED = "_fusedops_guarded"  # instance attribute of a guarded submodule: its `Guard`


class Kind(enum.Enum):
    """What a generated class overrides."""

    NORM = "norm"  # runs an operator, and takes streams
    BLOCK = "block"  # runs its forward with streams
    GUARD = "guard"  # is handed tensors for streams
    INNER_BLOCK = "inner block"  # is a block, and handed tensors for the streams of one around it


class Guard:
    """What is known of a submodule that is handed tensors for streams.

    keys: of the streams that it was handed when called; None where no forward that was watched
        has called it: another may, and hand it one.
    blocks: those that rely on the guard.
    """

    __slots__ = ("blocks", "keys")

    def __init__(self) -> None:
        self.keys: set[Key] | None = None
        self.blocks: weakref.WeakSet[BlockState] = weakref.WeakSet()


_lock = threading.Lock()
_classes: dict[tuple[type, Kind], type] = {}


def generated_class(original: type, kind: Kind) -> type:
    """The one subclass of ``original`` for modules of that kind."""
    with _lock:
        if (original, kind) not in _classes:
            _classes[original, kind] = _generate(original, kind)
        return _classes[original, kind]


def is_outermost(module: nn.Module) -> bool:
    """Whether ``module``'s class is a generated one, with nobody's on top of it."""
    return ORIGINAL in type(module).__dict__


def original_class(module: nn.Module) -> type:
    """The class that ``module`` has, or had before it was patched."""
    return type(module).__dict__.get(ORIGINAL, type(module))


def kind_of(module: nn.Module) -> Kind | None:
    """What the generated class overrides that ``module`` has, perhaps below somebody else's."""
    return getattr(type(module), KIND, None)


def _generate(original: Any, kind: Kind) -> type:
    def forward_norm(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling() and len(args) == 1 and not kwargs:
            y = run_plain_norm(self, args[0])
            if y is not None:
                return y
        return original.forward(self, *args, **kwargs)

    def forward_block(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # (Export without dynamo runs under a dispatch mode, which ends streams.)
        if is_dynamo_compiling():
            return original.forward(self, *args, **kwargs)
        run = direct.run_block
        if run is not None:
            output = run(original.forward, self, args, kwargs)
            if output is not NotImplemented:
                return output
        state: BlockState | None = self.__dict__.get(BLOCK)
        if state is None or state.obstacle is not None:
            return original.forward(self, *args, **kwargs)
        if self.training not in state.learned or not holds_same(self, state):
            state.obstacle = unguardable(self)
            if state.obstacle is not None:
                return original.forward(self, *args, **kwargs)
            return watch_block(original.forward, self, state, args, kwargs, watch)
        if state.handed:
            unguard_needless(state)
        return run_block(original.forward, self, state, args, kwargs, state.argument_keys)

    block_frames.add(forward_block.__code__)

    def call_norm_or_guard(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # (Export without dynamo traces, which no guard passes.)
        if is_dynamo_compiling():
            return original.__call__(self, *args, **kwargs)
        run = direct.call_module
        if run is not None:
            y = run(self, cls, args, kwargs)
            if y is not None:
                return y
        if len(args) == 1 and not kwargs:
            x = args[0]
            if type(x) is ResidualStream:
                if SPEC in self.__dict__:
                    return call_norm(original.__call__, self, x)
            elif type(x) is Tensor and type(self) is cls:
                y = call_unhooked(self, x)
                if y is not None:
                    return y
        return call_guard(self, *args, **kwargs)

    def call_guard(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        keys: set[Key] = set()
        for value in (*args, *kwargs.values()):
            if type(value) is not Tensor and value is not None:
                keys.update(keys_within(value))
        if keys:
            args, kwargs = without_streams(args), without_streams(kwargs)
        guard: Guard | None = vars(self).get(GUARDED)
        if before_submodule() or keys:
            if guard is None:
                guard = vars(self).setdefault(GUARDED, Guard())
            guard.keys = keys | (guard.keys or set())
        elif guard is not None and guard.keys is None:
            unguard(self)
        return original.__call__(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = original.__reduce_ex__(self, protocol)
        if reduced[0] is not copyreg.__newobj__ or reduced[1][0] is not cls:  # type: ignore[attr-defined]
            return reduced
        state = reduced[2]
        if isinstance(state, dict) and GUARDED in state:
            state = {name: value for name, value in state.items() if name != GUARDED}
        rebuilt = Kind.BLOCK if kind is Kind.INNER_BLOCK else kind
        return _rebuild, (original, rebuilt, *reduced[1][1:]), state, *reduced[3:]

    def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
        replica = original._replicate_for_data_parallel(self)
        if BLOCK in vars(replica):  # what it knows of the original's next norm is not true of it
            vars(replica)[BLOCK] = vars(replica)[BLOCK].for_replica()
        return replica

    overrides: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        ORIGINAL: original,
        KIND: kind,
        "__reduce_ex__": __reduce_ex__,
        "_replicate_for_data_parallel": _replicate_for_data_parallel,
    }
    if kind is Kind.NORM:
        overrides["__call__"] = call_norm_or_guard
    elif kind is not Kind.BLOCK:
        overrides["__call__"] = call_guard
    if kind is not Kind.GUARD:
        overrides["forward"] = functools.wraps(original.forward)(
            forward_norm if kind is Kind.NORM else forward_block
        )
    cls = type(original)(original.__name__, (original,), overrides)
    return cls


def _rebuild(original: Any, kind: Kind, *args: Any) -> nn.Module:
    """Make an empty instance of a generated class; pickles and copies call this."""
    module = original.__new__(original, *args)
    if kind is not Kind.GUARD:  # guards come back when the copy's block has run
        _set_class(module, generated_class(original, kind))
    return module


# --- submodules that are handed streams --------------------------------------------------------


def watch(block: nn.Module, state: BlockState) -> Callable[[], list[nn.Module]]:
    """Give tensors to all submodules that the block's own code hands a stream, and note these.

    Returns what ends it, which returns the modules that were handed one; they keep their guard.
    So do those that the block itself may call and did not, until they are called without one.
    """
    before = {module: members(module) for module in block.modules()}
    guarded = [module for module in before if module is not block and _guard(module, state)]

    def end() -> list[nn.Module]:
        guards = {m: guard for m in guarded if (guard := vars(m).get(GUARDED)) is not None}
        handed = [module for module, guard in guards.items() if guard.keys]
        for module in handed:
            _guard(module, state)  # a lazy module has changed its class in its first forward
        holders = _holders(block, set(handed))
        reached = {child for holder in holders for child in holder.children()}
        for module, guard in guards.items():
            if not guard.keys and (guard.keys is not None or module not in reached):
                _release(module, state)
        state.members = tuple(
            (None if module is block else weakref.ref(module), known)
            for module, known in before.items()
            if module in holders and known is not None
        )
        return handed

    return end


def unguardable(block: nn.Module) -> str | None:
    """Why the block gets no streams: its own code could hand one to a submodule without a guard."""
    for module in _own_modules(block):
        if kind_of(module) is None and _is_callable(module):
            if is_parametrized(module):
                return "holds a submodule with a parametrization"
            try:
                generated_class(type(module), Kind.GUARD)
            except Exception:
                return "holds a submodule whose class cannot be subclassed"
    return None


def _is_callable(module: nn.Module) -> bool:
    """Whether a guard is of use: containers are not called, and TorchScript sees no stream."""
    cls = type(module)
    return not isinstance(module, torch.jit.ScriptModule) and (
        cls.forward is not nn.Module.forward
        or cls.__call__ is not nn.Module.__call__
        or "forward" in vars(module)
    )


def _own_modules(block: nn.Module) -> Iterator[nn.Module]:
    """Those that no other module but a container holds for the block."""
    for child in block.children():
        yield child
        if isinstance(child, _CONTAINERS):
            yield from _own_modules(child)


def _holders(block: nn.Module, handed: set[nn.Module]) -> set[nn.Module]:
    """Modules whose children the block's own code may call: an exchanged child has no guard.

    The block, its containers, and what is around a module that was handed a stream.
    """
    found = {block}

    def visit(module: nn.Module, own: bool) -> bool:
        """Whether the module holds, at any depth, one that was handed a stream."""
        below = False
        for child in module.children():
            contained = own and isinstance(child, _CONTAINERS)
            around = visit(child, contained)
            if contained or around:
                found.add(child)
            below = below or around or child in handed
        return below

    visit(block, True)
    return found


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def _guard(module: nn.Module, state: BlockState) -> bool:
    """Put the guard on, and say whether it is there now; norms of ours have their own."""
    if not _is_callable(module):
        return False
    kind = kind_of(module)
    if kind is Kind.NORM:
        vars(module).pop(GUARDED, None)
        return False
    if kind in (None, Kind.BLOCK):
        if is_parametrized(module):
            return False
        guarded = Kind.GUARD if kind is None else Kind.INNER_BLOCK
        try:
            _set_class(module, generated_class(original_class(module), guarded))
        except Exception:  # a class that refuses to be subclassed
            return False
    vars(module).setdefault(GUARDED, Guard()).blocks.add(state)
    return True


def unguard_needless(state: BlockState) -> None:
    """No guard for those that were handed streams of no use, which will not come again."""
    handed, state.handed = state.handed, []
    for reference in handed:
        module = reference()
        guard: Guard | None = None if module is None else vars(module).get(GUARDED)
        if module is not None and guard is not None and not state.keys & (guard.keys or set()):
            _release(module, state)


def _release(module: nn.Module, state: BlockState) -> None:
    """Take the guard off, unless other blocks rely on it."""
    guard: Guard | None = vars(module).get(GUARDED)
    if guard is not None:
        guard.blocks.discard(state)
        if not guard.blocks:
            unguard(module)


def unguard(module: nn.Module) -> None:
    vars(module).pop(GUARDED, None)
    kind = type(module).__dict__.get(KIND)
    if kind is Kind.GUARD:
        _set_class(module, original_class(module))
    elif kind is Kind.INNER_BLOCK:
        _set_class(module, generated_class(original_class(module), Kind.BLOCK))


# --- into a kind and back ----------------------------------------------------------------------


def _set_class(module: nn.Module, cls: type) -> None:
    """Past a ``__setattr__`` of the module's own, which may not want this."""
    object.__setattr__(module, "__class__", cls)


def into_kind(module: nn.Module, kind: Kind) -> None:
    """Give ``module`` the generated class of its own; the inverse is `restore`."""
    before = type(module)
    original = original_class(module)
    if not is_outermost(module) and hasattr(before, ORIGINAL):
        return  # another class came on top of ours, which still is below and serves again
    _set_class(module, generated_class(original, kind))
    vars(module).pop(GUARDED, None)
    _rebind_forwards(module, before.forward, type(module).forward)


def restore(module: nn.Module) -> None:
    """Take everything of ours off ``module``, except a class that others have built upon."""
    for name in (SPEC, READY, BLOCK):
        vars(module).pop(name, None)
    guard: Guard | None = vars(module).pop(GUARDED, None)
    if guard is not None:
        for state in guard.blocks:
            state.learned.clear()  # it is watched once more, if it is still a block
    if is_outermost(module):
        generated: Any = type(module)
        original: Any = original_class(module)
        _set_class(module, original)
        _rebind_forwards(module, generated.forward, original.forward)


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


def forward_obstacle(module: nn.Module) -> str | None:
    """Why a change of class would not reach the forward of this module."""
    if kind_of(module) is None and is_parametrized(module):
        return "has a parametrization, which changes and takes off the class that it finds"
    state = vars(module)
    ours = _bound_forwards(module, type(module).forward)
    if "_old_forward" in state and "_old_forward" not in ours:
        return "a hook keeps a forward that is not its class's"
    if "forward" in state and "forward" not in ours and "_old_forward" not in state:
        return "has a forward of its own in the instance"
    return None
