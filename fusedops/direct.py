# SPDX-License-Identifier: Apache-2.0
"""The shortest way from a call to a launch, for eager CUDA calls.

At small sizes a call costs its time on the CPU. The first call of a kind goes the general way and
leaves a `Plan`: the compiled kernel, the arguments that do not vary, and a guard. The guard is the
one that torch's compiler uses: in one call into C++ it compares types, dtypes, device, sizes,
`requires_grad` and dispatch keys of all tensors, the last as they are under the modes in force,
so that whatever traces, transforms or stands for other values than its memory holds does not pass.
It also tells whether autocast is on, whose dtype is compared beside it. The next call that fits
launches the kernel with no more than that: no flattening, no dispatcher, and not Triton's own
binder. Whatever does not fit returns None before anything is allocated, and the caller takes the
general way.

What is done for every call stands here in Python, and once more in direct.c: in a whole model,
where other code has filled the processor's caches since the last call, a line of Python costs
several times what it costs in a loop. The C is compiled at the first plan, by Triton's builder and
into its cache; where there is no compiler, or with FUSEDOPS_NATIVE=0, the Python runs.

What Triton specialises on is what the guard and the plan's key compare, and that pointers are
16-byte aligned and tensors contiguous, so that no stride varies.
"""

import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedops import dispatch, reference

if TYPE_CHECKING:
    from fusedops.autograd import Spec

__all__ = [
    "Caller",
    "Plan",
    "ask",
    "asked",
    "compile_call",
    "cuda_header",
    "find",
    "is_launched_as_tested",
    "launch",
    "load_native",
    "norm",
    "remember",
    "stand_in",
]

TESTED_TRITON = ("3.6", "3.7", "3.8", "3.9")
"""Releases whose compiled kernels are known to be launched as `Kernel.launch` does."""

MAX_KINDS = 1024
"""Operators with options, widths and dtypes that plans are kept for: a caller may go through ever
new values of eps, say. After so many, what is in use is planned anew."""

MAX_PLANS = 16
"""Plans kept for one operator, options, width and dtype: ranks, subsets that need gradients, grad
modes and autocasts."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel and the arguments that do not change."""

    launch: Any  # direct.c's `Launcher`, or called with grid, stream, head, pointers, n_rows, tail
    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    block_rows: int
    compiled: Any  # kept alive: its destructor unloads the module


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in a call whose tensors pass ``check``."""

    check: Callable[..., bool]  # of the tensors that there are, in the operator's order
    grad: bool  # the grad mode that it is for
    train: Callable[..., Any] | None  # makes the launch where a gradient will be needed
    autocast: tuple[str, torch.dtype] | None  # where ``check`` is of tensors under autocast: which
    kernel: Kernel
    has_weight: bool
    has_bias: bool
    n_cols: int
    device: int
    y_dtype: torch.dtype
    sum_dtype: torch.dtype | None  # None: no add
    statistics: torch.dtype | None  # None: not wanted
    hooks: Any  # Triton's settings, where a profiler would hook itself in
    eps: float
    spec: "Spec"

    def caller(self) -> Any:
        """A function of (x, residual, weight, bias) that gives (y, summed), or None."""
        native = load_native()
        if native is None:
            return self.python_caller()
        return native.Caller(
            check=self.check,
            grad=self.grad,
            train=self.train,
            autocast=self.autocast,
            hooks=self.hooks,
            launch=self.kernel.launch,
            head=self.kernel.head,
            tail=self.kernel.tail,
            y_dtype=self.y_dtype,
            sum_dtype=self.sum_dtype,
            statistics=self.statistics,
            eps=self.eps,
            spec=self.spec,
            plan=self,
            n_cols=self.n_cols,
            block_rows=self.kernel.block_rows,
            device=self.device,
            has_weight=self.has_weight,
            has_bias=self.has_bias,
            centered=self.spec.centered,
        )

    def python_caller(self) -> Any:
        """`caller`, in Python.

        What does not change stands in its closure, which is read quicker than attributes are.
        """
        check, grad, train, n_cols = self.check, self.grad, self.train, self.n_cols
        device, hooks, adds = self.device, self.hooks, self.sum_dtype is not None
        has_weight, has_bias, autocast = self.has_weight, self.has_bias, self.autocast

        def call(
            x: Tensor, residual: Any, weight: Any, bias: Any
        ) -> tuple[Tensor, Tensor | None] | None:
            # A tensor that is missing does not pass.
            if has_bias:
                fits = check(x, residual, weight, bias) if adds else check(x, weight, bias)
            elif has_weight:
                fits = check(x, residual, weight) if adds else check(x, weight)
            else:
                fits = check(x, residual) if adds else check(x)
            if (
                not fits
                or grad is not _is_grad_enabled()
                or (autocast and _autocast_dtype(autocast[0]) is not autocast[1])
                or _forward_ad._current_level >= 0
                or (_any_function_mode() and dispatch.function_modes())
                or _counters
                or not x.is_contiguous()
                or getattr(hooks.launch_enter_hook, "calls", True)  # or set to a function
                or getattr(hooks.launch_exit_hook, "calls", True)
                or device != _current_device()
            ):
                return None
            n_rows = x.numel() // n_cols
            x_ptr = bits = x.data_ptr()
            residual_ptr = weight_ptr = bias_ptr = None
            if adds:
                if residual.shape != x.shape or not residual.is_contiguous():
                    return None
                residual_ptr = residual.data_ptr()
                bits |= residual_ptr
            if has_weight:
                weight_ptr = weight.data_ptr()
                bits |= weight_ptr
            if has_bias:
                bias_ptr = bias.data_ptr()
                bits |= bias_ptr
            if bits & 15 or not 0 < n_rows < 2**31:
                return None
            prepared = (self, n_rows, (x_ptr, residual_ptr, weight_ptr, bias_ptr))
            if train is not None:
                outputs = train(x, residual, weight, bias, self.eps, self.spec, prepared)
                return outputs if adds else (outputs, None)
            y, summed, _, _ = launch(x, *prepared)
            return y, summed

        return call


Caller = Callable[
    [Tensor, Tensor | None, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None] | None
]

_plans: dict[tuple[Any, ...], tuple[tuple[Plan, Caller], ...]] = {}
_kernels: dict[tuple[Any, ...], Kernel] = {}

_guards: Any = torch._C._dynamo.guards
_is_grad_enabled = torch.is_grad_enabled
_autocast_dtype = torch.get_autocast_dtype
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_any_function_mode = torch._C._len_torch_function_stack
_forward_ad = torch.autograd.forward_ad
_counters = dispatch._counters


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


# What the compiler's generated code allocates with: half the time, for it parses less.
_empty: Any = getattr(_guards, "_empty_strided_cuda", _empty_strided)


@lru_cache(1024)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a new tensor; a contiguous x may have others in dimensions of size 1."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, size * strides[0])
    return tuple(strides)


NATIVE = os.environ.get("FUSEDOPS_NATIVE", "1") not in ("", "0")
"""FUSEDOPS_NATIVE=0, read at import, leaves the C out."""

call_module: Any = None
is_hooked: Any = None
launch_backward: Any = None
ready_norm: Any = None
run_block: Any = None
"""direct.c's functions of these names once it is loaded: the backward, patched norms and blocks."""

EXPORTED = ("call_module", "is_hooked", "launch_backward", "ready_norm", "run_block")

asked: dict[str, Any] = {
    "is_grad_enabled": _is_grad_enabled,
    "autocast_dtype": _autocast_dtype,
    "any_function_mode": _any_function_mode,
    "function_modes": dispatch.function_modes,
    "current_device": _current_device,
    "current_stream": _current_stream,
    "empty": _empty,
    "counters": _counters,
    "forward_ad": vars(_forward_ad),
    "detach": Tensor.detach,
    "tensor_type": Tensor,
    "example": torch.empty(2, 3, device="cpu"),
}
"""What the C asks and calls, by name."""


def ask(**objects: Any) -> None:
    """Let the C have these, too, loaded or not: of autograd's Functions, and of streams."""
    asked.update(objects)
    if call_module is not None:
        load_native().configure(**objects)


_building = threading.Lock()


def cuda_header() -> Path:
    """Where this Triton's copy of cuda.h is, if it brings one."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "include" / "cuda.h"


def _build_native() -> Any:
    """direct.c as a module. What is compiled names the header, for the cache goes by the text."""
    from triton.runtime.build import compile_module_from_src

    source = Path(__file__).with_name("direct.c").read_text()
    header = cuda_header()
    if header.exists():
        source = f'#define CUDA_HEADER "{header}"\n{source}'
    return compile_module_from_src(source, "fusedops_direct")


@cache
def load_native() -> Any:
    """The compiled direct.c, or None where it cannot be had, which is logged."""
    if not NATIVE:
        return None
    try:
        with _building:
            native = _build_native()
            native.configure(**asked)
    except Exception as error:  # no compiler, no headers, a Triton or a torch that is otherwise
        dispatch.log_once(f"calls are launched by Python: direct.c cannot be used ({error})")
        return None
    globals().update({name: getattr(native, name) for name in EXPORTED})
    return native


def _key(options: tuple[Any, ...], x: Tensor, weight: Any, bias: Any) -> tuple[Any, ...]:
    """Where the plans for such calls stand; a call with a residual has options of its own."""
    return options, x.dtype, x.shape[-1], weight is None, bias is None


def norm(
    options: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor | None] | None:
    """(y, summed), or None.

    ``options`` are the operator's name and its remaining arguments, with the types of numbers: as
    a dictionary's key, True would pass for 1.0.
    """
    try:
        plans = _plans.get(_key(options, x, weight, bias))
    except (AttributeError, IndexError, TypeError):  # no tensor, no rows, no hash: not for here
        return None
    if plans is not None:
        for _, call in plans:
            done = call(x, residual, weight, bias)
            if done is not None:
                return done
    return None


def find(
    options: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Caller | None:
    """The `Plan.caller` for calls like this one, in this grad mode and autocast."""
    tensors = [t for t in (x, residual, weight, bias) if t is not None]
    for plan, call in _plans.get(_key(options, x, weight, bias), ()):
        if (
            plan.check(*tensors)
            and plan.grad is _is_grad_enabled()
            and plan.autocast == _autocast_of(x)
        ):
            return call
    return None


def _autocast_of(x: Tensor) -> tuple[str, torch.dtype] | None:
    """The device type and dtype of an autocast that x is under."""
    kind = x.device.type
    return (kind, _autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


Launched = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def launch(x: Tensor, plan: Any, n_rows: int, pointers: tuple[int | None, ...]) -> Launched:
    """(y, summed, mean, rstd) of a call that has passed the checks of ``plan``, or its C form."""
    if type(plan) is not Plan:
        launched: Launched = plan.launch(x, n_rows, pointers)
        return launched
    shape = tuple(x.shape)
    strides = _contiguous(shape)
    y = _empty(shape, strides, plan.y_dtype)
    summed = mean = rstd = sum_ptr = mean_ptr = rstd_ptr = None
    if plan.sum_dtype is not None:
        summed = _empty(shape, strides, plan.sum_dtype)
        sum_ptr = summed.data_ptr()
    if plan.statistics is not None:
        rstd = _empty((n_rows,), (1,), plan.statistics)
        rstd_ptr = rstd.data_ptr()
        if plan.spec.centered:
            mean = _empty((n_rows,), (1,), plan.statistics)
            mean_ptr = mean.data_ptr()
    kernel = plan.kernel
    kernel.launch(
        -(-n_rows // kernel.block_rows),
        1,
        1,
        _current_stream(plan.device),
        *kernel.head,
        *pointers,
        y.data_ptr(),
        sum_ptr,
        mean_ptr,
        rstd_ptr,
        n_rows,
        *kernel.tail,
    )
    return y, summed, mean, rstd


def guard(
    rows: list[Tensor], vectors: list[Tensor], statistics: list[Tensor] | None = None
) -> Callable[..., bool]:
    """The check of tensors like these, in this order, as they are under the modes in force.

    What may vary is the number of rows, and with it that of statistics, and the strides of rows.
    A tensor must not come twice.
    """
    statistics = statistics or []
    made = _guards.TensorGuards(
        *rows,
        *vectors,
        *statistics,
        dynamic_dims_sizes=[
            *([*[None] * (row.dim() - 1), row.shape[-1]] for row in rows),
            *([vector.shape[0]] for vector in vectors),
            *([None] for _ in statistics),
        ],
        dynamic_dims_strides=[
            *([None] * row.dim() for row in rows),
            *([None if vector.shape[0] == 1 else 1] for vector in vectors),
            *([1] for _ in statistics),
        ],
    )
    check: Callable[..., bool] = made.check
    return check


def is_launched_as_tested() -> bool:
    """Whether this Triton launches compiled kernels as `Kernel.launch` does."""
    from fusedops.kernels.launch import TRITON_RELEASE

    return TRITON_RELEASE in TESTED_TRITON and torch.version.hip is None


def remember(
    options: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: "Spec",
    train: Callable[..., Any] | None,
) -> None:
    """Make the plan for calls like this one, which the general way has just served.

    ``train``, where the call needs a gradient: the autograd Function that makes the `launch`.
    """
    device = x.get_device()
    if device < 0 or device != _current_device() or torch.cuda.is_current_stream_capturing():
        return
    vectors = [vector for vector in (weight, bias) if vector is not None]
    if not is_launched_as_tested():
        return
    if weight is None and bias is not None:
        return
    if not all(vector.is_contiguous() for vector in vectors):
        return
    if residual is x or (bias is not None and bias is weight):
        return  # the guard takes no tensor twice: the plan would serve no call
    with dispatch.launching(x):
        if find(options, x, residual, weight, bias) is None:
            _plan(options, x, residual, weight, bias, eps, spec, train)
        # Else this call alone was not to be launched so (misaligned, say), or another thread was
        # quicker.


def _plan(
    options: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: "Spec",
    train: Callable[..., Any] | None,
) -> None:
    """`remember`, where there is no such plan and may be one."""
    import triton

    from fusedops.kernels import launch as kernel_launch

    rows = [x] if residual is None else [x, residual]
    vectors = [vector for vector in (weight, bias) if vector is not None]
    sum_dtype = None if residual is None else torch.promote_types(x.dtype, residual.dtype)
    itemsize = (sum_dtype or x.dtype).itemsize
    config = kernel_launch.forward_config(
        x.shape[-1],
        itemsize,
        spec.centered,
        residual is not None,
        kernel_launch.gpu_of(x.device),
    )
    if config.slices > 1:
        return  # each such call needs memory of its own
    statistics = None if train is None else reference.compute_dtype(sum_dtype or x.dtype)
    plan = Plan(
        check=guard(rows, vectors),
        grad=_is_grad_enabled(),
        train=train,
        autocast=_autocast_of(x),
        kernel=_kernel(options, x, residual, weight, bias, eps, spec, sum_dtype, statistics),
        has_weight=weight is not None,
        has_bias=bias is not None,
        n_cols=x.shape[-1],
        device=x.get_device(),
        y_dtype=spec.y_dtype,
        sum_dtype=sum_dtype,
        statistics=statistics,
        hooks=triton.knobs.runtime,
        eps=eps,
        spec=spec,
    )
    key = _key(options, x, weight, bias)
    if key not in _plans and len(_plans) >= MAX_KINDS:
        _plans.clear()
        _kernels.clear()
    # A new tuple: another thread may be walking through the old one.
    _plans[key] = (*_plans.get(key, ())[-MAX_PLANS + 1 :], (plan, plan.caller()))


def _kernel(
    options: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: "Spec",
    sum_dtype: torch.dtype | None,
    statistics: torch.dtype | None,
) -> Kernel:
    """The kernel compiled for aligned, contiguous tensors of these dtypes and this width."""
    dtypes = [None if t is None else t.dtype for t in (x, residual, weight, bias)]
    n_cols = x.shape[-1]
    key = (options, *dtypes, n_cols, x.get_device(), statistics)
    if key in _kernels:
        return _kernels[key]
    from fusedops.kernels.launch import gpu_of, prepare_forward

    call = prepare_forward(
        stand_in(dtypes[0], 2, n_cols),
        stand_in(dtypes[1], 2, n_cols),
        stand_in(dtypes[2], n_cols),
        stand_in(dtypes[3], n_cols),
        stand_in(spec.y_dtype, 2, n_cols),
        stand_in(sum_dtype, 2, n_cols),
        stand_in(statistics if spec.centered else None, 2),
        stand_in(statistics, 2),
        eps,
        centered=spec.centered,
        cast_input=spec.cast_input,
        weight_offset=spec.weight_offset,
        gpu=gpu_of(x.device),
    )
    _kernels[key] = compile_call(call, "n_rows")
    return _kernels[key]


def stand_in(dtype: torch.dtype | None, *shape: int) -> Any:
    """A tensor without memory for a call that is compiled and not made; None without a dtype."""
    return None if dtype is None else torch.empty(shape, dtype=dtype, device="meta")


def compile_call(call: Any, varying: str) -> Kernel:
    """A `fusedops.kernels.launch.Call`'s kernel, for any aligned tensors of the same dtypes.

    Before the argument of the name ``varying`` stand pointers, after it what does not change.
    """
    # Dtypes stand for aligned tensors.
    arguments = [a.dtype if isinstance(a, Tensor) else a for a in call.arguments]
    compiled = call.kernel.warmup(*arguments, grid=call.grid, **call.meta)
    names = call.kernel.arg_names
    constants = [call.meta[name] for name in names if name in call.meta]
    tail = (*call.arguments[names.index(varying) + 1 :], *constants)
    return Kernel(*_entry(compiled, tail), call.meta["BLOCK_ROWS"], compiled)


Entry = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
"""What to call for a launch, and its arguments after the stream: before and after what varies."""


def _entry(compiled: Any, tail: tuple[Any, ...]) -> Entry:
    """By direct.c where that serves, else by Triton's launcher; ``tail`` are the last arguments."""
    return _own_entry(compiled, tail) or _triton_entry(compiled, tail)


FIXED = {"i32": "i4x", "i64": "q", "fp32": "f4x", "fp64": "d"}
"""Formats of `struct` for parameters of Triton's types, in 8 bytes each."""


def _own_entry(compiled: Any, tail: tuple[Any, ...]) -> Entry | None:
    """A `Launcher` of direct.c, which knows the tail; None where there can be none."""
    launcher, metadata = compiled.run, compiled.metadata  # loads the module, too
    native = load_native()
    if (
        not hasattr(native, "Launcher")  # no C, or no header of CUDA's
        or type(launcher).__name__ != "CudaLauncher"
        or metadata.num_ctas != 1
        or metadata.launch_cooperative_grid
        or metadata.global_scratch_size
        or metadata.profile_scratch_size
    ):
        return None
    kinds = tuple(compiled.src.signature.values())
    first = len(kinds) - len(tail)
    fixed = zip(kinds[first:], tail, strict=True)
    words = [(FIXED.get(kind), value) for kind, value in fixed if kind != "constexpr"]
    passed = bytes(kind != "constexpr" for kind in kinds[:first])
    known = getattr(launcher, "kernel_signature", None)  # of all parameters, from Triton 3.7 on
    if any(code is None for code, _ in words) or (
        known is not None and len(known) != sum(passed) + len(words)  # a sanitizer's, besides
    ):
        return None
    try:
        made = native.Launcher(
            function=compiled.function,
            threads=metadata.num_warps * 32,
            shared=metadata.shared,
            dependent=metadata.launch_pdl,
            passed=passed,
            fixed=b"".join(struct.pack(f"<{code}", value) for code, value in words),
        )
    except RuntimeError as error:
        dispatch.log_once(f"kernels are launched by Triton: direct.c cannot ({error})")
        return None
    return made, (), ()


def _triton_entry(compiled: Any, tail: tuple[Any, ...]) -> Entry:
    """Triton's launcher."""
    from fusedops.kernels.launch import TRITON_RELEASE

    metadata = compiled.packed_metadata
    launcher = compiled.run  # loads the module, too
    hooks = (None, None, None)  # no metadata for hooks, and no hooks
    if (
        TRITON_RELEASE == "3.6"
        and type(launcher).__name__ == "CudaLauncher"
        and launcher.global_scratch_size == launcher.profile_scratch_size == 0
    ):  # past the Python that would allocate the scratch memory
        options = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        head = (compiled.function, *options, None, None, metadata, *hooks)
        return launcher.launch, head, tail
    return launcher, (compiled.function, metadata, *hooks), tail
