# SPDX-License-Identifier: Apache-2.0
"""The residual stream: adds that fuse with the norm that reads their sum, in code nobody rewrote.

Every block says ``h = residual + branch`` and then ``self.some_norm(h)``. A patched block runs its
own forward, but with a `ResidualStream` in its hidden states' place. Adding a branch to the stream
adds nothing yet; a patched norm that is handed such a stream runs the fused operator and leaves
the sum in the stream, where the other names for it in the block's code find it. Whatever else
touches a stream makes it do the add first and gets a tensor.

A sum that the block returns is fused with the norm that will read it, in the next block or after
the last: the tensor goes out as always, and the norm's result is kept until that norm is called
with this very tensor, unchanged, under the same conditions. Which norm that is has been seen in
the forward before. Whoever else reads the tensor finds nothing unusual about it.

What a block's own code may not be handed, `fusedops.integrations.screening` finds beforehand. On
the first forward of a block it is noted which of its submodules are handed a stream; these get a
tensor ever after, before their hooks see it. Where others have been put in since, it is noted anew.
"""

import dataclasses
import gc
import operator
import sys
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fusedops import direct, dispatch
from fusedops.integrations.norms import (
    READY,
    SPEC,
    Ready,
    operators_serve,
    read_operands,
    ready_norm,
    run_add_norm,
    run_norm,
)
from fusedops.integrations.recognition import NormSpec
from fusedops.integrations.screening import instance_obstacle, stream_obstacle, writes_in_place

__all__ = [
    "BLOCK",
    "BlockState",
    "Key",
    "ResidualStream",
    "before_submodule",
    "block_frames",
    "call_norm",
    "call_unhooked",
    "holds_same",
    "keys_within",
    "members",
    "run_block",
    "run_plain_norm",
    "watch_block",
    "without_streams",
]

_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode = torch.is_inference_mode_enabled
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_any_autocast = torch._C._is_any_autocast_enabled
any_global_hook = torch_module._has_any_global_hook
_dispatch_modes = torch._C._len_torch_dispatch_stack
_any_function_mode = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_jit_trace = torch._C._get_tracing_state
_forward_ad = torch.autograd.forward_ad

BLOCK = "_fusedops_block"  # instance attribute of a patched block: its BlockState

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
MIN_ELEMENTS = 2**22
"""Hidden states on a GPU that are smaller than this pass through their block as tensors. There the
CPU's time counts, and in a model, whose other code empties the caches, a block's stream takes the
CPU more of it than two adds: GPT-2 small decodes at 0.98 of the unpatched model's speed with
streams, and at 1.02 without; it trains at 0.96 and 0.98. What is computed is the same."""

TRIALS = 2  # forwards, and missed hand-overs, after which what brought nothing is given up
CAPTURE_MODULE = "transformers.utils.output_capturing"  # its hooks only note the tensors they see


Key = int | str | tuple[int]
"""Where a stream's base comes from: an argument's place or name, or the id of a norm."""


Members = tuple[weakref.ref[nn.Module] | None, ...]


class BlockState:
    """What is known about one patched block, and the counts of its adds.

    A copy of a block starts anew: what is learned names norms of the model it was learned in.
    """

    __slots__ = (
        "__weakref__",
        "across",
        "argument_keys",
        "block_class",
        "calls",
        "entry_norm",
        "handed",
        "inside",
        "keys",
        "learned",
        "link",
        "members",
        "missed",
        "min_elements",
        "misses",
        "obstacle",
        "outer",
        "plain",
        "small",
        "sources",
        "successor",
        "wraps_norms",
        "writes",
    )

    def __init__(self, block_class: type, min_elements: int = 0) -> None:
        self.block_class = block_class
        self.min_elements = min_elements  # of hidden states that go through as streams
        self.obstacle = stream_obstacle(block_class)  # why it runs unstreamed
        self.writes = writes_in_place(block_class)
        self.keys: set[Key] = set()  # where tensors came from that were the base of a useful add
        self.argument_keys: tuple[int | str, ...] = ()  # those of them that are arguments
        self.wraps_norms = False  # whether others of them are norms
        self.sources: dict[Key, Key] = {}  # of a norm's result: where that norm's input came from
        self.learned: set[bool] = set()  # training modes in which a forward was watched
        self.handed: list[weakref.ref[nn.Module]] = []  # submodules handed streams, to look into
        # Of modules in the block (None: the block) the children when it was watched, outer first.
        self.members: tuple[tuple[weakref.ref[nn.Module] | None, Members], ...] = ()
        self.link: weakref.ref[nn.Module] | None = None  # the norm that reads the last sum
        # Modules around the block that are called for it alone: their hooks see its result too.
        self.outer: tuple[weakref.ref[nn.Module], ...] = ()
        # To know the link in the first forward already, where blocks follow each other in a list:
        self.successor: weakref.ref[nn.Module] | None = None  # the next block
        self.entry_norm: weakref.ref[nn.Module] | None = None  # that reads the block's input
        self.misses = 0  # hand-overs in a row that nobody fetched
        self.calls = 0
        self.inside = 0  # adds fused with a norm in the block
        self.across = 0  # adds fused with a norm after it
        self.missed = 0  # of these, those whose norm was not called as foreseen
        self.plain: Counter[str] = Counter()  # reason -> adds done by themselves
        self.small = 0  # forwards whose hidden states were too small for streams

    def __reduce__(self) -> Any:
        return BlockState, (self.block_class, self.min_elements), self.around()

    def __setstate__(self, around: list[nn.Module]) -> None:
        self.outer = tuple(weakref.ref(module) for module in around)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockState":
        copy = BlockState(self.block_class, self.min_elements)
        copy.outer = tuple(weakref.ref(memo.get(id(m), m)) for m in self.around())
        return copy

    def around(self) -> list[nn.Module]:
        return [module for ref in self.outer if (module := ref()) is not None]

    def learn(self, key: Key | None) -> None:
        """A norm read a sum whose base came from there."""
        while key is not None and key not in self.keys:
            self.keys.add(key)
            if isinstance(key, tuple):
                self.wraps_norms = True
            else:
                self.argument_keys += (key,)
            key = self.sources.get(key)

    def for_replica(self) -> "BlockState":
        """For a copy that lives for one forward, with children of its own, which is watched.

        It knows what this one does, but for the next norm.
        """
        replica = BlockState(self.block_class, self.min_elements)
        replica.obstacle, replica.misses = self.obstacle, 2 * TRIALS
        replica.keys, replica.argument_keys = set(self.keys), self.argument_keys
        replica.wraps_norms = self.wraps_norms
        replica.outer = self.outer
        return replica


class _Call:
    """One running forward of a block. At most one add is pending in it."""

    __slots__ = ("pending", "state", "watched")

    def __init__(self, state: BlockState, watched: bool) -> None:
        self.state = state
        self.watched = watched
        self.pending: ResidualStream | None = None


class _Exit:
    """The last sum that left a block unfused, to see which norm reads it."""

    __slots__ = ("key", "state", "tensor")

    def __init__(self, tensor: Tensor, state: BlockState, key: Key) -> None:
        self.tensor, self.state, self.key = weakref.ref(tensor), state, key


class _HandOver:
    """A norm's result, for a call of that norm with this tensor under these conditions."""

    __slots__ = (
        "after",
        "autocast",
        "bias",
        "bias_version",
        "eps",
        "grad",
        "norm_state",
        "spec",
        "state",
        "tensor",
        "version",
        "weight",
        "weight_version",
        "y",
    )

    def __init__(
        self,
        tensor: Tensor,
        y: Tensor,
        after: Tensor | None,
        norm: nn.Module,
        state: BlockState,
    ) -> None:
        self.tensor, self.version = weakref.ref(tensor, _forget), tensor._version
        self.after = after  # for the stream of the block that fetches y
        self.y, self.state = y, state
        norm_state = self.norm_state = norm.__dict__
        spec: NormSpec = norm_state[SPEC]
        self.spec, self.eps = spec, norm_state[spec.eps]
        parameters = norm_state["_parameters"]
        weight = bias = self.weight_version = self.bias_version = None
        if spec.weight is not None:
            weight = parameters.get(spec.weight)
            if weight is None:
                raise RuntimeError("the weight is not a parameter of the norm")
            self.weight_version = weight._version
            if spec.bias is not None:
                bias = parameters.get(spec.bias)
                if bias is None:
                    raise RuntimeError("the bias is not a parameter of the norm")
                self.bias_version = bias._version
        self.weight, self.bias = weight, bias
        self.grad = _is_grad_enabled()
        self.autocast = _autocast_state() if _any_autocast() else None

    def fits(self, norm_state: dict[str, Any], x: Tensor) -> bool:
        """Whether a call with ``x`` of the norm that has this ``__dict__`` is now what it was."""
        if (
            self.tensor() is not x
            or norm_state is not self.norm_state
            or x._version != self.version
            or _is_grad_enabled() is not self.grad
            or (self.grad and _saves_are_watched())
            or (_autocast_state() if _any_autocast() else None) != self.autocast
        ):
            return False
        spec, weight, bias = self.spec, self.weight, self.bias
        parameters = norm_state["_parameters"]
        return (
            norm_state.get(SPEC) is spec
            and norm_state[spec.eps] is self.eps
            and parameters.get(spec.weight) is weight
            and (weight is None or weight._version == self.weight_version)
            and parameters.get(spec.bias) is bias
            and (bias is None or bias._version == self.bias_version)
        )


class _Slot(threading.local):
    """At most one exit or hand-over a thread: the next call of any patched norm takes it away."""

    held: _Exit | _HandOver | None = None
    watched: _Call | None = None  # the innermost call whose submodules are watched


_slot = _Slot()


def _forget(tensor: "weakref.ref[Tensor]") -> None:
    """The tensor is gone, and with it every call that could fetch the result."""
    if type(_slot.held) is _HandOver and _slot.held.tensor is tensor:
        _drop_held()


def _drop_held() -> None:
    """Nobody fetched it."""
    held, _slot.held = _slot.held, None
    if type(held) is _HandOver:
        state = held.state
        state.missed += 1
        state.misses += 1
        if state.misses >= TRIALS:
            state.link = None


def _autocast_state() -> object:
    return [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cuda", "cpu")
    ]


# --- the stream --------------------------------------------------------------------------------


class ResidualStream:
    """Stands for ``base``, or for ``base + delta`` while delta is not None.

    Deliberately no Tensor subclass, which would cost more at each touch than an add, and with no
    pretence of being one: C code believes ``__class__`` and reads memory that is not there.
    """

    _delta_first: bool
    _versions: tuple[int, int] | None

    __slots__ = (
        "_after",
        "_base",
        "_call",
        "_delta",
        "_delta_first",
        "_grad",
        "_key",
        "_reshaped",
        "_versions",
    )

    def __init__(self, base: Tensor, call: _Call, key: Key, grad: bool) -> None:
        self._base = base
        self._call = call
        self._key = key
        self._grad = grad  # whether gradients were recorded where the value came to be
        self._delta: Tensor | None = None  # with it come _delta_first and _versions
        # The base again, for further adds, once it has been normed: see `autograd.apply_linked`.
        self._after: Tensor | None = None
        self._reshaped: ResidualStream | None = None  # holds this one's pending sum since

    # Cheap answers, without doing the add.

    @property
    def shape(self) -> torch.Size:
        return self._base.shape

    @property
    def device(self) -> torch.device:
        return self._base.device

    @property
    def dtype(self) -> torch.dtype:
        delta = self._delta
        if delta is None or delta.dtype is self._base.dtype:
            return self._base.dtype
        return torch.promote_types(self._base.dtype, delta.dtype)

    @property
    def ndim(self) -> int:
        return self._base.ndim

    def dim(self) -> int:
        return self._base.dim()

    def size(self, dim: int | None = None) -> Any:
        return self._base.size() if dim is None else self._base.size(dim)

    # Conversions that often change nothing, and then give the stream itself as a tensor would.

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and args[0] is self.dtype:
            return self
        return self._converted(as_tensor(self).to(*args, **kwargs))

    def float(self) -> Any:
        return self.to(torch.float32)

    def contiguous(self) -> Any:
        return self._converted(as_tensor(self).contiguous())

    def _converted(self, tensor: Tensor) -> Any:
        return self if tensor is self._base else tensor

    # Reshapes that keep the rows of a pending sum as they are.

    def view(self, *shape: Any) -> Any:
        return _reshape(self, shape, "view")

    def reshape(self, *shape: Any) -> Any:
        return _reshape(self, shape, "reshape")

    def __add__(self, other: Any) -> Any:
        return _add(self, other)

    def __radd__(self, other: Any) -> Any:
        return _add(self, other, True)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (func is _METHOD_ADD or func is torch.add) and len(args) == 2 and not kwargs:
            first, second = args
            if type(second) is ResidualStream and type(first) is not ResidualStream:
                return second.__radd__(first)
            return first.__add__(second)
        return func(*without_streams(args), **without_streams(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(as_tensor(self), name)

    @property
    def data(self) -> Tensor:
        return as_tensor(self).data

    @data.setter
    def data(self, value: Tensor) -> None:
        as_tensor(self).data = value

    @property
    def requires_grad(self) -> bool:
        return as_tensor(self).requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        as_tensor(self).requires_grad = value

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return bool(as_tensor(self))

    def __deepcopy__(self, memo: Any) -> Tensor:
        return as_tensor(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return as_tensor(self).__reduce_ex__(protocol)


def _add(stream: ResidualStream, other: Any, other_first: bool = False) -> Any:
    """``stream + other`` put off, where other is a tensor like it; else done."""
    call = stream._call
    if call.pending is not None:
        _finish(call.pending, "another add came before a norm read the sum")
    if stream._reshaped is not None:
        as_tensor(stream)
    if type(other) is ResidualStream:
        other = as_tensor(other)
    base = stream._base if stream._after is None else stream._after
    if (
        type(other) is not Tensor
        or call.state is _closed
        or other.shape != base.shape
        or (other.dtype is not base.dtype and other.dtype not in FLOATS)
    ):
        return other + as_tensor(stream) if other_first else as_tensor(stream) + other
    result = ResidualStream(base, call, stream._key, _is_grad_enabled())
    result._delta = other
    result._delta_first = other_first
    try:
        result._versions = (base._version, other._version)
    except RuntimeError:  # inference tensors have no counter
        result._versions = None
    call.pending = result
    return result


_METHOD_ADD = Tensor.add


def _forwarding(name: str) -> Callable:
    operation = getattr(Tensor, name)

    def method(self: ResidualStream, *args: Any) -> Any:
        return operation(as_tensor(self), *without_streams(args))

    return method


def _forwarding_in_place(name: str) -> Callable:
    operation = getattr(Tensor, name)

    def method(self: ResidualStream, *args: Any) -> Any:
        result = operation(as_tensor(self), *without_streams(args))
        # The tensor was changed, for all who hold it; the stream goes on standing for it.
        self._after = None
        return self if result is self._base else result

    return method


_OPERATIONS = (
    "abs and array complex contains delitem div dlpack dlpack_device eq float floordiv format ge "
    "getitem gt index int invert iter le len long lshift lt matmul mod mul ne neg or pos pow rand "
    "rdiv repr reversed rfloordiv rlshift rmatmul rmod rmul ror rpow rrshift rshift rsub rtruediv "
    "rxor setitem sub truediv xor"
)
_IN_PLACE_OPERATIONS = (
    "iadd iand idiv ifloordiv ilshift imod imul ior ipow irshift isub itruediv ixor"
)

for _name in _OPERATIONS.split():
    if hasattr(Tensor, f"__{_name}__"):
        setattr(ResidualStream, f"__{_name}__", _forwarding(f"__{_name}__"))
for _name in _IN_PLACE_OPERATIONS.split():
    if hasattr(Tensor, f"__{_name}__"):
        setattr(ResidualStream, f"__{_name}__", _forwarding_in_place(f"__{_name}__"))


def as_tensor(stream: ResidualStream) -> Tensor:
    """The tensor that ``stream`` stands for, with every add done that is pending in its block."""
    pending = stream._call.pending
    if pending is not None:
        _finish(pending, "something else than a norm read the sum")
    if stream._reshaped is not None:
        stream._base = as_tensor(stream._reshaped).view(stream._base.shape)
        stream._reshaped = None
    if stream._grad and not _is_grad_enabled():
        _refuse_functions(stream._call.state)
    return stream._base


def _reshape(stream: ResidualStream, shape: Any, name: str) -> Any:
    """A pending sum as rows in another arrangement stays pending; the rest is the tensor's."""
    base, delta = stream._base, stream._delta
    if (
        delta is not None
        and base.is_contiguous()
        and delta.is_contiguous()
        and not (stream._grad and _is_inference_mode())
    ):
        with torch.set_grad_enabled(stream._grad):
            new_base = getattr(base, name)(*shape)
            if new_base.dtype is base.dtype and new_base.shape[-1:] == base.shape[-1:]:
                result = ResidualStream(new_base, stream._call, stream._key, stream._grad)
                result._delta = getattr(delta, name)(*shape)
                result._delta_first, result._versions = stream._delta_first, stream._versions
                stream._delta, stream._reshaped = None, result
                stream._call.pending = result
                return result
    return getattr(as_tensor(stream), name)(*shape)


def _finish(stream: ResidualStream, reason: str) -> Tensor:
    """Do a pending add plainly, as at the time when it was written."""
    base, delta = stream._base, stream._delta
    assert delta is not None
    _check_versions(stream)
    with ExitStack() as modes:
        if stream._grad and _is_inference_mode():
            modes.enter_context(torch.inference_mode(False))
        if _is_grad_enabled() is not stream._grad:
            modes.enter_context(torch.set_grad_enabled(stream._grad))
        summed = delta + base if stream._delta_first else base + delta
    _settle(stream, summed)
    stream._call.state.plain[reason] += 1
    return summed


def _settle(stream: ResidualStream, summed: Tensor) -> None:
    stream._base = summed
    stream._delta = None
    stream._call.pending = None


def _check_versions(stream: ResidualStream) -> None:
    versions = stream._versions
    if versions is None:
        return
    assert stream._delta is not None
    if versions != (stream._base._version, stream._delta._version):
        stream._call.pending = None
        raise RuntimeError(
            f"{stream._call.state.block_class.__name__} changed a tensor in place after adding it "
            "to the residual stream and before a norm read the sum, which the stream puts off; "
            "use patch(model, fuse_residual=False)"
        )


def _refuse_functions(state: BlockState) -> None:
    """A stream read where gradients are off: by ``no_grad``, which is fine, or by a Function."""
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    frame = sys._getframe(2)
    while frame is not None and frame.f_code not in block_frames:
        if frame.f_code is apply:
            raise RuntimeError(
                f"{state.block_class.__name__} hands its residual stream to an autograd Function, "
                "which would lose the gradient; use patch(model, fuse_residual=False)"
            )
        frame = frame.f_back  # type: ignore[assignment]


def without_streams(value: Any, depth: int = 4) -> Any:
    """``value`` with tensors for the streams in it, looking into containers and dataclasses.

    Where there is no stream, the same object. Lists, tuples and dicts with one are made anew; what
    models return, dicts of other classes and dataclasses, is changed.
    """
    if type(value) is Tensor or value is None:
        return value
    if type(value) is ResidualStream:
        return as_tensor(value)
    if depth == 0:
        return value
    depth -= 1
    if isinstance(value, tuple) or type(value) is list:
        items = [without_streams(item, depth) for item in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        new = {key: without_streams(item, depth) for key, item in value.items()}
        changed = {key: item for key, item in new.items() if item is not value[key]}
        if not changed:
            return value
        if type(value) is dict:
            return new
        for key, item in changed.items():
            value[key] = item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            item = getattr(value, name, None)
            if (new_item := without_streams(item, depth)) is not item:
                object.__setattr__(value, name, new_item)  # also where it is frozen
    return value


def keys_within(value: Any, depth: int = 4) -> Iterator[Key]:
    """Where the streams come from that `without_streams` finds."""
    items: Any = ()
    if type(value) is ResidualStream:
        yield value._key
    elif isinstance(value, tuple) or type(value) is list:
        items = value
    elif isinstance(value, dict):
        items = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, name, None) for name in value.__dataclass_fields__]
    if depth > 0:
        for item in items:
            yield from keys_within(item, depth - 1)


def _take_back(state: BlockState, call: _Call) -> None:
    """A block's own code has kept streams of a call that has ended.

    They are exchanged for tensors, where that can be done, and the block gets no more streams.
    """
    kept = tuple(item for item in gc.get_referrers(call) if type(item) is ResidualStream)
    if kept:
        state.obstacle = "keeps its hidden states"
    for stream in kept:
        tensor = as_tensor(stream)
        for holder in gc.get_referrers(stream):
            if isinstance(holder, list | deque):
                places: Any = enumerate(list(holder))
            elif isinstance(holder, dict):
                places = list(holder.items())
            elif isinstance(holder, types.CellType):
                holder.cell_contents = tensor
                continue
            else:
                holder = getattr(holder, "__dict__", {})
                places = list(holder.items())
            for place, item in places:
                if item is stream:
                    holder[place] = tensor


# --- norms -------------------------------------------------------------------------------------


def call_norm(call: Callable, norm: nn.Module, stream: ResidualStream) -> Any:
    """``norm(stream)`` for a patched norm; ``call`` is its class's own ``__call__``."""
    block_call = stream._call
    state = block_call.state
    delta = stream._delta
    if block_call.watched:
        if delta is not None:
            state.learn(stream._key)
        elif state.entry_norm is None:
            state.entry_norm = weakref.ref(norm)
    if (direct.is_hooked or is_hooked)(norm):
        if delta is not None:
            _finish(stream, "a hook on the norm")
        return call(norm, as_tensor(stream))
    y: Any
    if delta is None:
        x = stream._base if stream._reshaped is None else as_tensor(stream)
        held = _slot.held
        # Without hooks, and with its class's forward, a module's call is its forward.
        y = run_plain_norm(norm, x)
        if type(held) is _HandOver and y is held.y:
            stream._after = held.after
        if y is None:
            y = call(norm, x)
    else:
        y = _fuse(norm, stream)
        if y is None:
            _finish(stream, _why_unserved(stream))
            return call(norm, as_tensor(stream))
        state.inside += 1
    if state.wraps_norms or block_call.watched:
        return _result_of_norm(y, norm, stream)
    return y


def is_hooked(module: nn.Module) -> bool:
    """Whether calling ``module`` is more than its class's forward, be it by a global hook."""
    state = module.__dict__
    return bool(
        any_global_hook()
        or state["_forward_pre_hooks"]
        or state["_forward_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
        or state.get("_compiled_call_impl") is not None
    )


def _result_of_norm(y: Any, norm: nn.Module, stream: ResidualStream) -> Any:
    """``y``, as a stream where the block adds to it: after a norm that follows its add."""
    call, key = stream._call, (id(norm),)
    if type(y) is Tensor and (call.watched or key in call.state.keys):
        if call.watched:
            call.state.sources[key] = stream._key
        return ResidualStream(y, call, key, _is_grad_enabled())
    return y


def _fuse(norm: nn.Module, stream: ResidualStream) -> Tensor | None:
    """Do a pending add together with the norm of the sum; returns the norm, None: not to be done.

    In the latter case nothing has happened yet.
    """
    base, delta = stream._base, stream._delta
    assert delta is not None
    if stream._grad is not _is_grad_enabled():
        return None
    versions = stream._versions
    if versions is not None and versions != (base._version, delta._version):
        _check_versions(stream)
    done: Any = (direct.ready_norm or ready_norm)(norm, delta, base)
    if done is None:
        if not (base.is_contiguous() and delta.is_contiguous()):
            return None
        if delta.get_device() != base.get_device() or delta.is_cuda is not base.is_cuda:
            return None
        operands = read_operands(norm, base, stream.dtype)
        if operands is None:
            return None
        done = run_add_norm(norm, operands, delta, base)
    if _slot.held is not None:
        _drop_held()
    stream._base = done[1]
    stream._after = done[2] if len(done) > 2 else None
    stream._delta = stream._call.pending = None
    return done[0]


def _why_unserved(stream: ResidualStream) -> str:
    assert stream._delta is not None
    if not (stream._base.is_contiguous() and stream._delta.is_contiguous()):
        return "the rows do not lie one after the other in memory"
    return "the operator does not serve the norm's call"


def call_unhooked(norm: nn.Module, x: Tensor) -> Tensor | None:
    """``norm(x)`` where that is its forward alone, and a call like it was in order before.

    Without hooks, and with its class's forward, a module's call is its forward.
    """
    if READY not in norm.__dict__ or is_hooked(norm):
        return None
    return _known_result(norm, x)


def run_plain_norm(norm: nn.Module, x: Any) -> Tensor | None:
    """The forward of a patched norm on one tensor; None: the original serves."""
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        return None
    y = _known_result(norm, x)
    if y is not None:
        return y
    operands = read_operands(norm, x, x.dtype)
    return None if operands is None else run_norm(norm, operands, x)


def _known_result(norm: nn.Module, x: Tensor) -> Tensor | None:
    """The norm of ``x`` that was handed over, or by a call like one that was in order before."""
    if _slot.held is not None:
        y = _fetch(norm, x)
        if y is not None:
            return y
    done = ready_norm(norm, x)
    return None if done is None else done[0]


def _fetch(norm: nn.Module, x: Tensor) -> Tensor | None:
    """The result that a block handed over for this call, if all is as it was then."""
    held = _slot.held
    if type(held) is _HandOver:
        if held.fits(norm.__dict__, x):
            held.state.misses = 0
            _slot.held = None
            return held.y
    elif type(held) is _Exit and held.tensor() is x:
        held.state.link = weakref.ref(norm)
        held.state.learn(held.key)
    _drop_held()
    return None


def _saves_are_watched() -> bool:
    """Whether what is saved for the backward is being counted or replaced, as by a checkpoint."""
    return (
        torch._C._current_graph_task_id() != -1
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    )


# --- blocks ------------------------------------------------------------------------------------


class _Closed(BlockState):
    """The state of calls that have ended; a stream that outlived its block adds plainly."""


_closed = _Closed(nn.Identity)


block_frames: set[Any] = set()  # the code in which a patched block's call begins

Watch = Callable[[nn.Module, BlockState], Callable[[], list[nn.Module]]]
"""Guards a block's submodules; what it returns says which of them were handed streams."""


def watch_block(
    forward: Callable, block: nn.Module, state: BlockState, args: Any, kwargs: Any, watch: Watch
) -> Any:
    """`run_block` where little is known of the block yet.

    It is seen which arguments become the base of an add that a norm reads, and which submodules
    are handed streams. See ``watch`` in `fusedops.integrations.classes`.
    """
    if not holds_same(block, state):
        state.learned.clear()  # in neither mode
    state.obstacle = instance_obstacle(block)
    if state.obstacle is not None:
        return forward(block, *args, **kwargs)
    keys = tuple(
        key
        for key, value in (*enumerate(args), *kwargs.items())
        if type(value) is Tensor and value.dim() >= 2
    )
    forwards = state.calls
    output = run_block(forward, block, state, args, kwargs, keys, watch)
    if state.calls > forwards:
        state.learned.add(block.training)
    return output


def members(module: nn.Module) -> Members | None:
    """The module's children, in order; None: it keeps them in a way of its own."""
    children: Any = vars(module).get("_modules")
    if not isinstance(children, dict):
        return None
    return tuple(None if child is None else weakref.ref(child) for child in children.values())


def holds_same(block: nn.Module, state: BlockState) -> bool:
    """Whether all those modules have the children that they had when the block was watched."""
    for holder, known in state.members:
        module = block if holder is None else holder()
        found = None if module is None else members(module)
        if found is None or len(found) != len(known) or not all(map(operator.is_, found, known)):
            return False
    return True


def run_block(
    forward: Callable,
    block: nn.Module,
    state: BlockState,
    args: Any,
    kwargs: Any,
    keys: tuple[int | str, ...],
    watch: Watch | None = None,
) -> Any:
    """``forward(block, *args, **kwargs)``, with streams for the arguments of these keys."""
    call: _Call | None = None
    for key in keys:
        if type(key) is str:
            value = kwargs.get(key)
        else:
            value = args[key] if key < len(args) else None  # type: ignore[operator]
        if type(value) is not Tensor or value.dtype not in FLOATS:
            continue
        if call is None:
            if watch is None and _is_small(value, state.min_elements):
                state.small += 1
                return forward(block, *args, **kwargs)
            if not _may_stream(state, value):
                break
            call = _Call(state, watch is not None)
            args, kwargs = list(args), dict(kwargs)
        stream = ResidualStream(value, call, key, _is_grad_enabled())
        if type(key) is str:
            kwargs[key] = stream
        else:
            args[key] = stream
    if call is None:
        if not keys and watch is None:
            state.obstacle = "no norm reads a sum that it makes"
        return forward(block, *args, **kwargs)
    if _slot.held is not None and (
        any_global_hook()
        or block.__dict__["_forward_pre_hooks"]
        or (state.outer and any(module._forward_pre_hooks for module in state.around()))
    ):
        _drop_held()  # a hook has seen the block's input, and may have changed it unnoticed
    unwatch = None
    if watch is not None:
        unwatch, outer, _slot.watched = watch(block, state), _slot.watched, call
    try:
        output = _leave_block(block, call, forward(block, *args, **kwargs))
    except BaseException:
        _slot.held = None
        raise
    finally:
        call.state = _closed
        if unwatch is not None:
            _slot.watched = outer
            state.handed.extend(map(weakref.ref, unwatch()))
    state.calls += 1
    del stream, args, kwargs
    if sys.getrefcount(call) > 2:
        _take_back(state, call)
    return output


def before_submodule() -> bool:
    """A submodule is to be called that is no patched norm; says whether that is watched.

    It may write to the branch of an add that is pending, which inference tensors do not tell.
    """
    call = _slot.watched
    if call is None:
        return False
    pending = call.pending
    if pending is not None:
        call.state.writes = True
        if pending._versions is None:
            _finish(pending, "a submodule was called before a norm read the sum")
    return True


def _is_small(x: Tensor, min_elements: int) -> bool:
    """Whether ``x`` is to pass through as a tensor; a captured graph keeps launches alone."""
    return x.numel() < min_elements and x.is_cuda and not _is_capturing()


def _leave_block(block: nn.Module, call: _Call, output: Any) -> Any:
    """The block's output without streams in it, and every add done."""
    if type(output) is ResidualStream:
        output = _leave_stream(block, output)
    elif type(output) is tuple and output and type(output[0]) is ResidualStream:
        output = (_leave_stream(block, output[0]), *map(without_streams, output[1:]))
    else:
        output = without_streams(output)
    if call.pending is not None:
        _finish(call.pending, "the block did not return the sum")
    return output


def _may_stream(state: BlockState, x: Tensor) -> bool:
    return (
        (x.is_cuda or operators_serve(x))
        and not _dispatch_modes()
        and not (_any_function_mode() and dispatch.function_modes())
        and _transforms() is None
        and _forward_ad._current_level < 0
        and _jit_trace() is None
        and not (state.writes and _is_inference_mode())
    )


def _leave_stream(block: nn.Module, stream: ResidualStream) -> Tensor:
    if stream._delta is None:
        return as_tensor(stream)
    call = stream._call
    state = call.state
    link = state.link
    norm = None if link is None else link()
    if norm is None:
        norm = _find_next_norm(block, state, stream)
        if norm is None:
            summed = _finish(stream, "which norm reads the block's result was not known")
            if state.misses < 2 * TRIALS and not summed.is_inference():
                _slot.held = _Exit(summed, state, stream._key)
            return summed
    hooks = block.__dict__
    if (
        hooks["_forward_hooks"]
        or hooks["_backward_hooks"]
        or hooks["_backward_pre_hooks"]
        or state.outer
        or (direct.is_hooked or is_hooked)(norm)
        or _is_inference_mode()
        or _is_grad_enabled()
    ):
        obstacle = _hand_over_obstacle(block, norm, stream)
        if obstacle is not None:
            return _finish(stream, obstacle)
    y = _fuse(norm, stream)
    if y is None:
        return _finish(stream, _why_unserved(stream))
    state.across += 1
    try:
        _slot.held = _HandOver(stream._base, y, stream._after, norm, state)
    except RuntimeError:  # a weight that is no parameter, or counts no versions
        _give_up(state)
    return stream._base


def _give_up(state: BlockState) -> None:
    """No more hand-overs from this block."""
    state.link, state.misses = None, 2 * TRIALS


def _find_next_norm(block: nn.Module, state: BlockState, stream: ResidualStream) -> Any:
    """The norm that will read the block's result, where blocks follow each other in a list."""
    if state.successor is None:
        return None
    state.link = _expected_link(block, state)
    state.successor = None  # what is seen counts from now on
    if state.link is None:
        return None
    state.learn(stream._key)
    return state.link()


def _expected_link(block: nn.Module, state: BlockState) -> weakref.ref[nn.Module] | None:
    """The norm of the following block that stands where this block's first norm stands in it."""
    entry = None if state.entry_norm is None else state.entry_norm()
    following = None if state.successor is None else state.successor()
    if entry is None or following is None:
        return None
    for name, module in block.named_modules():
        if module is entry:
            try:
                norm = following.get_submodule(name)
            except AttributeError:
                return None
            return weakref.ref(norm) if type(norm) is type(entry) else None
    return None


def _hand_over_obstacle(block: nn.Module, norm: nn.Module, stream: ResidualStream) -> str | None:
    """Why the norm of the sum must not be computed now."""
    call, hooks = stream._call, block.__dict__
    if (
        hooks["_backward_hooks"]
        or hooks["_backward_pre_hooks"]
        or (hooks["_forward_hooks"] and _may_edit(hooks["_forward_hooks"]))
        or is_hooked(norm)
        or (call.state.outer and any(_may_edit(m._forward_hooks) for m in call.state.around()))
    ):
        return "a hook on the block or on the next norm"
    if _is_inference_mode():
        return "inference mode, whose tensors count no versions"
    grad = _is_grad_enabled()
    if grad is not stream._grad or (grad and _saves_are_watched()):
        return "a checkpoint, a backward or another grad mode"
    return None


def _may_edit(hooks: dict[int, Any]) -> bool:
    return any(getattr(hook, "__module__", None) != CAPTURE_MODULE for hook in hooks.values())


PYTHON_METHODS = {
    name: vars(ResidualStream)[name] for name in ("__add__", "__radd__", "__torch_function__")
}
"""What direct.c puts its own in the place of."""

direct.ask(
    add_in_python=_add,
    any_autocast=_any_autocast,
    block_type=BlockState,
    call_type=_Call,
    closed=_closed,
    dispatch_modes=_dispatch_modes,
    drop_held=_drop_held,
    floats=FLOATS,
    forget=_forget,
    function_add=torch.add,
    give_up=_give_up,
    global_hooks=vars(torch_module),
    handed_type=_HandOver,
    is_capturing=_is_capturing,
    is_cuda=Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    is_inference=_is_inference_mode,
    jit_trace=_jit_trace,
    leave_block=_leave_block,
    method_add=_METHOD_ADD,
    saves_are_watched=_saves_are_watched,
    ready_type=Ready,
    slot=_slot,
    spec_type=NormSpec,
    stream_type=ResidualStream,
    take_back=_take_back,
    torch_function_in_python=ResidualStream.__torch_function__,
    transforms=_transforms,
)
