# SPDX-License-Identifier: Apache-2.0
"""`warmup`: everything that calls of the operators would compile, compiled before the first call.

Triton compiles a kernel for each set of dtypes, constants and missing arguments that it meets. The
number of rows is in none of these, so calls on two rows, through the public functions themselves,
make ready whatever calls on any number of rows will launch.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedops import dispatch, functional
from fusedops.nn import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm

__all__ = ["Dtypes", "NormShape", "WarmupReport", "describe_by", "devices_of", "warmup"]

OPERATORS: dict[str, Callable[..., Any]] = {
    "rms_norm": functional.rms_norm,
    "layer_norm": functional.layer_norm,
    "add_rms_norm": functional.add_rms_norm,
    "add_layer_norm": functional.add_layer_norm,
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class NormShape:
    """A kind of call whose kernels `warmup` makes ready: all in it that kernels are compiled for.

    Args:
        operator: ``"rms_norm"``, ``"layer_norm"``, ``"add_rms_norm"`` or ``"add_layer_norm"``.
        size: H, the length of a row.
        dtype: of x.
        residual_dtype: of the residual in the add forms; None: x's.
        weight_dtype: of weight and bias; None: x's.
        weight, bias: whether there are any; only the LayerNorms have a bias.
        weight_offset, cast, out_dtype: as the call will have them.
        eps: as the call will have it, None for the operator's default. No kernel depends on it,
            but the first call with another one takes a few hundred microseconds.
        input_grad, weight_grad, bias_grad: what the backward will be asked for.

    Raises ValueError or TypeError naming the argument.

    >>> NormShape("add_rms_norm", 4096, torch.bfloat16, cast="input").adds
    True
    """

    operator: str
    size: int
    dtype: torch.dtype
    _: KW_ONLY
    residual_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype | None = None
    weight: bool = True
    bias: bool = True
    weight_offset: float = 0.0
    cast: str = "fp32"
    out_dtype: torch.dtype | None = None
    eps: float | None = None
    input_grad: bool = True
    weight_grad: bool = True
    bias_grad: bool = True

    def __post_init__(self) -> None:
        if self.operator not in OPERATORS:
            names = ", ".join(map(repr, OPERATORS))
            raise ValueError(f"operator: expected one of {names}, got {self.operator!r}")
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"size: expected a whole number > 0, got {self.size!r}")
        _require_dtype("dtype", self.dtype)
        for name in ("residual_dtype", "weight_dtype", "out_dtype"):
            if getattr(self, name) is not None:
                _require_dtype(name, getattr(self, name))
        if self.residual_dtype is not None and not self.adds:
            raise ValueError(f"residual_dtype: {self.operator} takes no residual")
        if self.centered and (self.weight_offset != 0.0 or self.cast != "fp32"):
            raise ValueError(f"weight_offset, cast: {self.operator} takes neither")
        if self.cast not in ("fp32", "input"):
            raise ValueError(f'cast: expected "fp32" or "input", got {self.cast!r}')

    @property
    def adds(self) -> bool:
        return self.operator.startswith("add_")

    @property
    def centered(self) -> bool:
        return self.operator.endswith("layer_norm")


class Dtypes(NamedTuple):
    """What a model's norms are fed: the residual stream's dtype and the branches'."""

    stream: torch.dtype
    branch: torch.dtype


@dataclass(frozen=True)
class WarmupReport:
    """What `warmup` did.

    calls: kinds of calls that will compile nothing from now on.
    kernels: names of the kernels that Triton compiled for them, or took from its cache on disk;
        one for each variant that this process did not hold yet.
    seconds: how long it took.
    skipped: what was left out, and why.
    """

    calls: int
    kernels: tuple[str, ...]
    seconds: float
    skipped: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        text = f"{len(self.kernels)} kernels for {self.calls} kinds of calls, {self.seconds:.1f} s"
        return "\n".join([text, *(f"left out: {reason}" for reason in self.skipped)])


Found = Mapping[nn.Module, "list[tuple[torch.device, NormShape]] | str"]
"""Modules that call operators: the calls, each with its device, or why there are none."""

_describers: list[Callable[[nn.Module, Dtypes], Found]] = []


def describe_by(describer: Callable[[nn.Module, Dtypes], Found]) -> None:
    """Ask ``describer``, too, which calls a model makes: integrations know of patched norms."""
    _describers.append(describer)


def warmup(
    model_or_shapes: nn.Module | Iterable[NormShape | tuple[str, int, torch.dtype]],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    training: bool | None = None,
    strided: bool = False,
) -> WarmupReport:
    """Compile ahead whatever the norms of a model, or calls of these shapes, would compile.

    Call it when the model is patched and stands on its devices, and in the autocast context, if
    any, that it will run in. After that neither the first token nor a step nor the capture of a
    CUDA graph compiles a kernel of this library, for any number of rows. The kernels run on
    tensors of two rows; no code of the model runs, and nothing of it changes.

    Args:
        model_or_shapes: a model that `fusedops.integrations.patch` has patched or that holds
            modules of this library; or `NormShape` s, of which ``(operator, H, dtype)`` is short
            for one with no more than that.
        dtype: of the model's hidden states; None: the dtype that most of its parameters have.
            Under autocast, branches are taken to have autocast's.
        device: where calls of these shapes will be; None: the current CUDA device. For a model
            it is where the parameters are.
        training: also what calls with gradients and their backward launch. None: for a model, if
            one of its parameters requires a gradient and gradients are not switched off, as by
            ``torch.no_grad()``; for shapes, no.
        strided: also what calls launch whose rows are reached by two strides, as the head slices
            of a packed projection are, or the gradients of heads; for H that 16 divides.

    Returns:
        A `WarmupReport`. Where no kernels run it tells why, nothing is done, and the reason is
        logged once.

    Raises:
        TypeError, ValueError: naming the argument; also for a model that calls no operator.
        RuntimeError: while a CUDA graph is being captured.

    >>> report = warmup([("add_rms_norm", 64, torch.float32), ("rms_norm", 64, torch.float32)])
    >>> report.calls == (0 if report.skipped else 2)
    True
    """
    start = time.perf_counter()
    if dtype is not None:
        _require_dtype("dtype", dtype)
    if isinstance(model_or_shapes, nn.Module):
        if device is not None:
            raise ValueError("device: a model's is where its parameters are; move the model")
        if training is None:
            training = torch.is_grad_enabled() and any(
                parameter.requires_grad for parameter in model_or_shapes.parameters()
            )
        wanted, skipped = _of_model(model_or_shapes, dtype, training)
    else:
        if dtype is not None:
            raise ValueError("dtype: each shape names its own")
        at = _device(device)
        wanted, skipped = dict.fromkeys((at, shape) for shape in _shapes(model_or_shapes)), {}
    served: dict[tuple[torch.device, NormShape], None] = {}
    for at, shape in wanted:
        obstacle = _obstacle(at)
        if obstacle is None:
            served[at, shape] = None
        else:
            skipped[obstacle] = None
    for reason in skipped:
        dispatch.log_once(f"warmup: left out: {reason}")
    kernels: list[str] = []
    if served:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("warmup: expected before, not during, the capture of a CUDA graph")
        with _noting_compiles(kernels), _uncounted():
            for at, shape in served:
                with torch.cuda.device(at if at.type == "cuda" else -1):
                    _run(shape, at, training=bool(training), strided=strided)
    return WarmupReport(len(served), tuple(kernels), time.perf_counter() - start, tuple(skipped))


# --- which calls -------------------------------------------------------------------------------


def _require_dtype(name: str, dtype: object) -> None:
    if dtype not in DTYPES:
        raise TypeError(
            f"{name}: expected torch.float16, bfloat16, float32 or float64, got {dtype!r}"
        )


def _device(device: torch.device | str | int | None) -> torch.device:
    """That device, with its index; by default the current one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _obstacle(device: torch.device) -> str | None:
    """Why no kernel can be compiled for that device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "no CUDA device is available"
    return dispatch.kernel_obstacle(torch.empty(0, device=device))


def _shapes(given: object) -> Iterator[NormShape]:
    expected = "a torch.nn.Module, or NormShapes or tuples (operator, H, dtype)"
    if isinstance(given, (str, Tensor, NormShape)) or not isinstance(given, Iterable):
        raise TypeError(f"model_or_shapes: expected {expected}, got {type(given).__name__}")
    items = list(given)
    if not items:
        raise ValueError(f"model_or_shapes: expected {expected}, got none")
    for place, item in enumerate(items):
        if isinstance(item, tuple) and len(item) == 3:
            item = NormShape(*item)
        if not isinstance(item, NormShape):
            raise TypeError(f"model_or_shapes[{place}]: expected {expected}, got {item!r}")
        yield item


def devices_of(model: nn.Module) -> list[torch.device]:
    """The devices that its parameters and buffers are on: where norms without any may be called."""
    tensors = (*model.parameters(), *model.buffers())
    return list(dict.fromkeys(tensor.device for tensor in tensors)) or [torch.device("cpu")]


def _autocast_dtype(model: nn.Module) -> torch.dtype | None:
    """What matrix products give under the autocast that is on for the model's devices."""
    for kind in {device.type for device in devices_of(model)}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return None


def _of_model(
    model: nn.Module, dtype: torch.dtype | None, training: bool
) -> tuple[dict[tuple[torch.device, NormShape], None], dict[str, None]]:
    """The calls that the model's modules make, each once, and why others are left out."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype in DTYPES:
            sizes[parameter.dtype] += parameter.numel()
    stream = dtype or (sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype())
    found: dict[nn.Module, list[tuple[torch.device, NormShape]] | str] = {}
    for describer in (_describe_own, *_describers):
        found.update(describer(model, Dtypes(stream, _autocast_dtype(model) or stream)))
    if not found:
        raise ValueError(
            "model_or_shapes: expected a model with patched norms or with modules of fusedops, "
            f"found none in {type(model).__name__}; patch it first"
        )
    # Where a part of the model is trained, the first norms may get rows that need no gradient.
    partly = training and len({parameter.requires_grad for parameter in model.parameters()}) > 1
    wanted: dict[tuple[torch.device, NormShape], None] = {}
    skipped: dict[str, None] = {}
    for calls in found.values():
        if isinstance(calls, str):
            skipped[calls] = None
            continue
        for device, shape in calls:
            wanted[device, shape] = None
            if partly and (shape.weight_grad or shape.bias_grad):
                wanted[device, replace(shape, input_grad=False)] = None
    return wanted, skipped


def _describe_own(model: nn.Module, dtypes: Dtypes) -> Found:
    """The calls of this library's own modules."""
    found: dict[nn.Module, list[tuple[torch.device, NormShape]] | str] = {}
    for module in model.modules():
        if not isinstance(module, (RMSNorm, LayerNorm)):
            continue
        rms, adds = isinstance(module, RMSNorm), isinstance(module, (AddRMSNorm, AddLayerNorm))
        weight: Tensor | None = module.weight
        bias: Tensor | None = getattr(module, "bias", None)  # an RMSNorm has none
        devices = devices_of(model) if weight is None else [weight.device]
        shape = NormShape(
            ("add_" if adds else "") + ("rms_norm" if rms else "layer_norm"),
            torch.Size(module.normalized_shape).numel(),
            dtypes.branch,
            residual_dtype=dtypes.stream if adds else None,
            weight_dtype=None if weight is None else weight.dtype,
            weight=weight is not None,
            bias=bias is not None,
            weight_offset=module.weight_offset if isinstance(module, RMSNorm) else 0.0,
            cast=module.cast if isinstance(module, RMSNorm) else "fp32",
            eps=module.eps,
            weight_grad=weight is not None and weight.requires_grad,
            bias_grad=bias is not None and bias.requires_grad,
        )
        found[module] = [
            (device, each)
            for device in devices
            for each in ([shape] if adds else [shape, replace(shape, dtype=dtypes.stream)])
        ]
    return found


# --- running them ------------------------------------------------------------------------------


def _run(shape: NormShape, device: torch.device, *, training: bool, strided: bool) -> None:
    """Make calls of that shape, and backwards, on rows of zeros."""

    def rows(dtype: torch.dtype, in_groups: bool) -> Tensor:
        groups = torch.zeros(2, 3, shape.size, dtype=dtype, device=device)
        return groups[:, :2] if in_groups else groups[:1, :2]

    def vector(requires_grad: bool) -> Tensor:
        dtype = shape.weight_dtype or shape.dtype
        zeros = torch.zeros(shape.size, dtype=dtype, device=device)
        return nn.Parameter(zeros, requires_grad)  # as the model's: the direct path looks at that

    function = OPERATORS[shape.operator]
    options: dict[str, Any] = {"out_dtype": shape.out_dtype}
    if shape.eps is not None:
        options["eps"] = shape.eps
    if not shape.centered:
        options |= {"weight_offset": shape.weight_offset, "cast": shape.cast}
    with torch.inference_mode(False):
        if shape.weight:
            options["weight"] = vector(shape.weight_grad)
        if shape.centered and shape.bias:
            options["bias"] = vector(shape.bias_grad)
        for in_groups in (False, True) if strided else (False,):
            inputs = [rows(shape.dtype, in_groups)]
            if shape.adds:
                inputs.append(rows(shape.residual_dtype or shape.dtype, in_groups))
            with torch.no_grad():
                function(*inputs, **options)
            if training:
                with torch.enable_grad():
                    for x in inputs:
                        x.requires_grad_(shape.input_grad)
                    outputs = function(*inputs, **options)
                    _run_backward(outputs if shape.adds else (outputs,), inputs, options, rows)


def _run_backward(
    outputs: tuple[Tensor, ...],
    inputs: list[Tensor],
    options: Mapping[str, Any],
    rows: Callable[[torch.dtype, bool], Tensor],
) -> None:
    """The backward with y's gradient, and with the sum's as well."""
    leaves = [
        tensor
        for tensor in (*inputs, options.get("weight"), options.get("bias"))
        if tensor is not None and tensor.requires_grad
    ]
    if not leaves:
        return
    in_groups = inputs[0].shape[0] == 2
    differentiable = [output for output in outputs if output.requires_grad]
    for count in range(1, len(differentiable) + 1):
        sent = differentiable[:count]
        gradients = [rows(output.dtype, in_groups) for output in sent]
        torch.autograd.grad(sent, leaves, gradients, retain_graph=True)


@contextmanager
def _noting_compiles(names: list[str]) -> Iterator[None]:
    """Append to ``names`` the kernels that Triton compiles meanwhile."""
    from triton import knobs

    earlier: Any = knobs.runtime.jit_post_compile_hook

    def note(**details: Any) -> Any:
        names.append(details["fn"].name)
        return None if earlier is None else earlier(**details)

    knobs.runtime.jit_post_compile_hook = note
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = earlier


@contextmanager
def _uncounted() -> Iterator[None]:
    """Keep calls out of the counters that are open, which are there for the caller's own."""
    counters = dispatch._counters
    held = list(counters)
    counters.clear()
    try:
        yield
    finally:
        counters[:0] = held
