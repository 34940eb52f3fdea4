# SPDX-License-Identifier: Apache-2.0
"""Which path a call takes, and how to watch it.

``kernel_obstacle(tensor)`` says why Triton kernels cannot serve a tensor (None: they can).
``count_calls()`` counts, while it is entered, how often each operator ran and on which path.
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Parameter
from torch.utils._device import DeviceContext

__all__ = [
    "DENSE",
    "DISABLED",
    "INTERPRETED",
    "MEMORY",
    "count_calls",
    "function_modes",
    "is_plain",
    "is_traced",
    "kernel_obstacle",
    "launching",
    "log_once",
    "record",
    "transforms_active",
]

logger = logging.getLogger("fusedops")

DISABLED = os.environ.get("FUSEDOPS_DISABLE", "0") not in ("", "0")
"""FUSEDOPS_DISABLE=1, read at import: functions run the reference, patched norms their original."""

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
"""TRITON_INTERPRET=1, read at import: the kernels run on the CPU under Triton's interpreter."""

try:
    import triton.language  # noqa: F401

    TRITON_OBSTACLE: str | None = None
except Exception as error:  # a broken or foreign `triton` must not break CPU use
    TRITON_OBSTACLE = f"Triton cannot be imported ({type(error).__name__}: {error})"

_logged: set[str] = set()


class _Counting:
    """One `count_calls` that is entered; Counters themselves are equal when they hold the same."""

    __slots__ = ("calls", "lock")

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.lock = threading.Lock()


_counters: list[_Counting] = []
_locks: dict[int, threading.RLock] = {}


def log_once(reason: str) -> None:
    """Log a reason for a fallback, the first time it is met in this process."""
    if reason not in _logged:
        _logged.add(reason)
        logger.info(reason)


def kernel_obstacle(tensor: Tensor) -> str | None:
    """Why the Triton kernels cannot run on ``tensor``'s device, or None when they can."""
    if DISABLED:
        return "FUSEDOPS_DISABLE is set"
    if TRITON_OBSTACLE is not None:
        return TRITON_OBSTACLE
    if tensor.device.type == "cuda" or (tensor.device.type == "cpu" and INTERPRETED):
        return None
    if tensor.device.type == "cpu":
        return (
            "no kernels for device type 'cpu'; with TRITON_INTERPRET=1 set they run there, slowly"
        )
    return f"no kernels for device type {tensor.device.type!r}"


_KEYS = torch._C.DispatchKey


def _raw(key: torch._C.DispatchKey) -> int:
    return torch._C.DispatchKeySet(key).raw_repr()


DENSE = _raw(_KEYS.CPU) & _raw(_KEYS.CUDA)
"""The bit of tensors that have elements in memory; batched ones, of torch's first vmap, lack it."""

MEMORY = (
    DENSE
    | _raw(_KEYS.Conjugate)
    | _raw(_KEYS.Negative)
    | _raw(_KEYS.ZeroTensor)
    | _raw(_KEYS.FuncTorchBatched)
    | _raw(_KEYS.FuncTorchGradWrapper)
    | _raw(_KEYS.Functionalize)
    | _raw(_KEYS.Python)
)
"""With this mask, the dispatch keys of a tensor whose memory holds its values come to `DENSE`."""


def is_plain(tensor: Tensor) -> bool:
    """Whether a kernel may read this object's memory.

    It must be a Tensor or Parameter and no subclass; and not stand for other values than its
    memory holds, as lazily negated and batched tensors do.
    """
    kind = type(tensor)
    return (kind is Tensor or kind is Parameter) and (
        torch._C._dispatch_keys(tensor).raw_repr() & MEMORY == DENSE
    )


def is_traceable(tensor: Tensor) -> bool:
    """Whether this object takes part in operators that are registered with torch.

    Other subclasses need not know them: a DTensor does not.
    """
    kind = type(tensor)
    return kind is Tensor or kind is Parameter or isinstance(tensor, (FakeTensor, FunctionalTensor))


def transforms_active() -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward-mode AD may have wrapped a tensor.

    Such tensors are exactly of type Tensor, so that the type does not tell.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def function_modes() -> bool:
    """Whether a TorchFunctionMode is active that may want to see calls.

    That of a default device (``torch.set_default_device``) changes where tensors are made, no more.
    """
    stack = torch._C
    return any(
        type(stack._get_function_stack_at(i)) is not DeviceContext
        for i in range(stack._len_torch_function_stack())
    )


def is_traced(tensors: Iterable[Tensor]) -> bool:
    """Whether a mode, a jit trace or a fake tensor must see an operator, not a launch."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or function_modes()
        or torch._C._get_tracing_state() is not None
        or any(isinstance(tensor, FakeTensor) for tensor in tensors)
    )


@contextmanager
def count_calls() -> Iterator[Counter[tuple[str, str]]]:
    """Count operator calls: a Counter of ``(operator, path)``.

    ``operator`` is the public function's name, ``path`` one of ``"triton"``, ``"interpreter"``
    and ``"reference"``. Only forward calls of the operators themselves count, of all threads.
    """
    counting = _Counting()
    _counters.append(counting)
    try:
        yield counting.calls
    finally:
        _counters.remove(counting)


def record(operator: str, path: str) -> None:
    """Add one call to every counter in use; there are none as a rule."""
    for counting in _counters:
        with counting.lock:
            counting.calls[operator, path] += 1


def launching(tensor: Tensor) -> threading.RLock:
    """The lock to hold while Triton is asked for a launch on ``tensor``'s device.

    Its first launch of a kernel makes the launcher before the kernel is loaded, where another
    thread may find it; and its interpreter keeps the program that is running in global variables.
    """
    device = tensor.get_device()
    return _locks.get(device) or _locks.setdefault(device, threading.RLock())
