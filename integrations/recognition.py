# SPDX-License-Identifier: Apache-2.0
"""Which norm a module computes, found by running it.

Names prove nothing: `post_attention_layernorm` is another thing in Llama than in Gemma 2, classes
with the same attributes round at different places, and subclasses of ``nn.LayerNorm`` may add 1 to
the weight or normalise another dimension. So a module is copied, given random weights, and its
forward is compared with the reference for every norm that this library has. What agrees is
described by a `NormSpec`; for everything else `recognise` raises `UnrecognisedNorm` with a reason.
"""

import copy
import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fusedops import reference
from fusedops.nn import LayerNorm as OwnLayerNorm
from fusedops.nn import RMSNorm as OwnRMSNorm

__all__ = [
    "NormSpec",
    "UnrecognisedNorm",
    "is_candidate",
    "own_tensors",
    "recognise",
    "recognition_key",
]

HALF_DTYPES = (torch.bfloat16, torch.float16)
DTYPE_PAIRS: list[tuple[torch.dtype, torch.dtype | None]] = [
    *(
        (x, weight)
        for x in (torch.float32, *HALF_DTYPES)
        for weight in (torch.float32, *HALF_DTYPES)
    ),
    (torch.float64, torch.float64),
]
ULPS = 32  # slack for another order of the same fp32 operations
HALF_MISMATCHES = 0.02  # another order flips about 0.1 % of half roundings, another cast 25 %
EPS_SCALE = 64.0
SPARE_SIZE = 48  # width for norms that take any


class UnrecognisedNorm(ValueError):
    """The module computes none of this library's norms; the message says what was found."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """What a norm module was proven to compute.

    ``kind`` is ``"rms"`` or ``"layer"``. ``weight``, ``bias`` and ``eps`` name the module's
    attributes, read anew at every call. ``size`` is the only row length that the module takes,
    None for any. ``ranks`` and ``dtypes``, pairs of x's and the weight's, are those that were
    proven. ``layout`` says which strides the result of a non-contiguous x has: ``"contiguous"``,
    ``"preserve"`` (as ``torch.empty_like``) or ``"unknown"``. ``autocast`` says what autocast
    does to the module: ``"torch"`` treats it as torch's own norm function, ``"none"`` leaves it
    alone, ``"unknown"`` for modules that wrap torch's function.
    """

    kind: str
    eps: str
    weight: str | None = None
    bias: str | None = None
    weight_offset: float = 0.0
    cast: str = "fp32"
    size: int | None = None
    ranks: frozenset[int] = frozenset()
    dtypes: frozenset[tuple[torch.dtype, torch.dtype | None]] = frozenset()
    layout: str = "unknown"
    autocast: str = "none"
    eps_may_be_none: bool = False

    def describe(self) -> str:
        """The operator call in words, as reports print it.

        >>> NormSpec("rms", "eps", weight="weight", weight_offset=1.0).describe()
        'rms_norm, cast=fp32, weight_offset=1'
        """
        if self.kind == "layer":
            return "layer_norm"
        text = f"rms_norm, cast={self.cast}" if self.weight else "rms_norm, no weight"
        return text + (f", weight_offset={self.weight_offset:g}" if self.weight_offset else "")


def apply_reference(
    spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """What ``spec`` claims that the module returns for ``x``."""
    if spec.kind == "layer":
        return reference.layer_norm(x, weight, bias, eps)
    return reference.rms_norm(x, weight, eps, weight_offset=spec.weight_offset, cast=spec.cast)


# --- what is looked at, and what makes two modules the same case ------------------------------

# Attributes that every module has, and those that accelerate adds to a module it hooks.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {
    "forward",
    "_old_forward",
    "_hf_hook",
    "_is_hf_initialized",
}


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The instance attributes that ``module``'s class put there (no tensors' or hooks' dicts)."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _MODULE_ATTRIBUTES and not name.startswith("_fusedops")
    }


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that ``module`` itself holds."""
    return {
        name: tensor
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items())
        if tensor is not None
    }


def eps_names(module: nn.Module) -> list[str]:
    """Attributes that could be the module's eps; the proof finds out."""
    names = [name for name, value in own_attributes(module).items() if type(value) is float]
    if type(module) is nn.RMSNorm and module.eps is None:
        names.append("eps")
    return names


def is_candidate(module: nn.Module) -> bool:
    """Whether `recognise` is worth trying: no children, at most two vectors, and a float."""
    if module._modules or isinstance(module, torch.jit.ScriptModule):
        return False
    tensors = own_tensors(module).values()
    return (
        len(tensors) <= 2
        and not any(map(is_lazy, tensors))
        and all(t.dim() == 1 and t.is_floating_point() for t in tensors)
        and len({t.shape for t in tensors}) <= 1
        and bool(eps_names(module))
    )


def recognition_key(module: nn.Module, cls: Any = None) -> tuple[object, bool]:
    """Equal for modules that one proof covers: class, forward, attributes, shapes of tensors.

    The second item is whether the key says so for good. Objects count by identity, and a key with
    one in it is good for as long as the object lives.
    """
    cls = cls or type(module)
    identities: list[object] = []

    def key_of(value: Any) -> object:
        if value is None or isinstance(
            value, bool | int | float | str | torch.dtype | torch.device
        ):
            return type(value), value
        if isinstance(value, tuple | list):
            return type(value), tuple(map(key_of, value))
        identities.append(value)
        return type(value), id(value)

    attributes = frozenset(
        (name, key_of(value))
        for name, value in own_attributes(module).items()
        if not isinstance(value, Tensor)
    )
    tensors = tuple((name, tuple(tensor.shape)) for name, tensor in own_tensors(module).items())
    return (cls, cls.forward, attributes, tensors), not identities


# --- the proof ---------------------------------------------------------------------------------


def _bare_copy(module: nn.Module, cls: Any) -> nn.Module:
    """A CPU copy with no hooks, no instance forward and no shared tensors."""
    bare = object.__new__(cls)  # whatever its own __new__ wants
    vars(bare).update(vars(nn.Module()))
    for name, value in own_attributes(module).items():
        if isinstance(value, Tensor):
            raise UnrecognisedNorm(f"keeps a plain tensor in its attribute {name!r}")
        vars(bare)[name] = copy.copy(value) if isinstance(value, list | dict | set) else value
    for name, tensor in own_tensors(module).items():
        fresh = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        if name in module._parameters:
            bare._parameters[name] = nn.Parameter(fresh)
        else:
            bare._buffers[name] = fresh
    for name in module._parameters.keys() - bare._parameters.keys():
        bare._parameters[name] = None
    for name in module._buffers.keys() - bare._buffers.keys():
        bare._buffers[name] = None
    return bare.eval()


_TORCH_FORWARDS = (nn.LayerNorm.forward, nn.RMSNorm.forward)


class _NativeCalls(TorchFunctionMode):
    """Notes whether torch's own norm functions are called."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("layer_norm", "rms_norm", "native_layer_norm"):
            self.seen = True
        return func(*args, **(kwargs or {}))


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing leaks in or out: random state, device, grad mode, autocast, warnings."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


class _Proof:
    """One bare copy, run on many inputs, each result compared with all specs still standing."""

    def __init__(self, bare: nn.Module, eps_name: str, size: int) -> None:
        self.bare, self.eps_name, self.size = bare, eps_name, size
        self.generator = torch.Generator("cpu").manual_seed(20170707)
        self.eps = vars(bare)[eps_name]
        if self.eps is None:
            self.eps = 1e-6
        self.tensors = own_tensors(bare)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float32)

    def rows(self, name: str) -> Tensor:
        if name == "tiny":  # eps matters
            return self.randn(4, self.size) * math.sqrt(self.eps)
        if name == "large mean":
            return self.randn(4, self.size) + 60.0
        count = max(4, min(24, 2**15 // self.size))  # enough roundings to tell the casts apart
        return self.randn(count, self.size) * torch.logspace(-1, 1, count)[:, None]

    def set_tensors(self, dtype: torch.dtype | None) -> None:
        for tensor in self.tensors.values():
            tensor.data = (1.0 + 0.5 * self.randn(self.size)).to(dtype)

    def run(self, x: Tensor) -> Tensor | None:
        """The module's own result; None where it refuses."""
        try:
            with torch.inference_mode(False):
                y = self.bare(x)
        except Exception:
            return None
        return y if isinstance(y, Tensor) else None

    def agrees(self, spec: NormSpec, x: Tensor, y: Tensor, loose: bool) -> bool:
        weight, bias = self.weights(spec)
        eps = vars(self.bare)[self.eps_name]
        expected = apply_reference(spec, x, weight, bias, self.eps if eps is None else eps)
        if y.dtype != expected.dtype or y.shape != expected.shape:
            return False
        if not y.isfinite().all():
            return False
        fine = torch.finfo(reference.compute_dtype(x.dtype)).eps
        row = expected.abs().amax(-1, keepdim=True).double()
        slack = ULPS * fine * (60.0 if loose else 1.0) * row
        coarse = torch.finfo(y.dtype).eps
        if spec.cast == "input" and x.dtype in HALF_DTYPES:
            coarse = max(coarse, torch.finfo(x.dtype).eps)
        difference = (y.double() - expected.double()).abs()
        if coarse <= fine:
            return bool((difference <= slack).all())
        # A half result may differ by one rounding, and only where the roundings nearly tied.
        near = difference <= 1.01 * coarse * expected.abs().double() + slack
        equal = (difference <= slack).double().mean()
        return bool(near.all()) and (loose or bool(equal >= 1 - HALF_MISMATCHES))

    def weights(self, spec: NormSpec) -> tuple[Tensor | None, Tensor | None]:
        tensors: dict[str | None, Tensor] = dict(self.tensors.items())
        return tensors.get(spec.weight), tensors.get(spec.bias)

    def proven_dtypes(self, specs: list[NormSpec]) -> dict[NormSpec, set]:
        """For each spec the dtype pairs in which the module agrees with it on all rows."""
        proven: dict[NormSpec, set] = {spec: set() for spec in specs}
        pairs = DTYPE_PAIRS
        if not self.tensors:
            pairs = [(dtype, None) for dtype in (torch.float32, *HALF_DTYPES, torch.float64)]
        own_eps = vars(self.bare)[self.eps_name]
        for pair in pairs:
            standing = set(specs)
            # Once more with another eps, to see that the attribute is what the forward reads.
            for eps, names in (
                (self.eps, ("ordinary", "tiny", "large mean")),
                (self.eps * EPS_SCALE, ("tiny",)),
            ):
                vars(self.bare)[self.eps_name] = self.eps = eps
                self.set_tensors(pair[1])
                for name in names:
                    rows = self.rows(name)
                    x = rows.to(pair[0])
                    y = self.run(x)
                    standing = {
                        spec
                        for spec in standing
                        if y is not None and self.agrees(spec, x, y, name == "large mean")
                    }
                    if not standing:
                        break
                if not standing:
                    break
            self.eps = 1e-6 if own_eps is None else own_eps
            vars(self.bare)[self.eps_name] = own_eps
            for spec in standing:
                proven[spec].add(pair)
        return proven

    def proven_ranks(self, spec: NormSpec) -> frozenset[int]:
        """Ranks that the module takes; raises where it takes one and computes something else."""
        ranks = set()
        for rank in range(1, 6):
            x = self.randn(*(2, 3, 2, 3)[: rank - 1], self.size)
            y = self.run(x)
            if y is None:
                continue
            if not self.agrees(spec, x, y, False):
                raise UnrecognisedNorm(f"computes something else for tensors of rank {rank}")
            ranks.add(rank)
        return frozenset(ranks)

    def layout(self, spec: NormSpec) -> str:
        """How the module lays out the result of an x that is not contiguous."""
        h = self.size
        layouts = {"contiguous", "preserve"}
        for x in (
            self.randn(3, 2, h).transpose(0, 1),
            self.randn(2, h, 3).transpose(1, 2),
            self.randn(2, 3, 2 * h)[..., :h],
            self.randn(2, 3, 2 * h)[..., ::2],
            self.randn(1, 3, h).expand(2, 3, h),
        ):
            y = self.run(x)
            if y is None or not self.agrees(spec, x, y, False):
                return "unknown"
            if not y.is_contiguous():
                layouts.discard("contiguous")
            if y.stride() != torch.empty_like(x).stride():
                layouts.discard("preserve")
        return layouts.pop() if len(layouts) == 1 else "unknown"

    def check_training(self, spec: NormSpec) -> None:
        """The same in training mode, and the same gradients."""
        self.bare.train()
        x = self.randn(6, self.size).requires_grad_()
        weight, bias = self.weights(spec)
        leaves = [x, *(t for t in (weight, bias) if t is not None and t.requires_grad)]
        dy = self.randn(6, self.size)
        with torch.enable_grad():
            y = self.run(x)
            if y is None or not self.agrees(spec, x.detach(), y.detach(), False):
                raise UnrecognisedNorm("computes something else in training mode")
            own_eps = vars(self.bare)[self.eps_name]
            eps = self.eps if own_eps is None else own_eps
            expected = apply_reference(spec, x, weight, bias, eps)
            if not y.requires_grad:
                raise UnrecognisedNorm("gives no gradient")
            found = torch.autograd.grad(y, leaves, dy, allow_unused=True)
            wanted = torch.autograd.grad(expected, leaves, dy)
        for one, other in zip(found, wanted, strict=True):
            if one is None or not torch.allclose(one, other, rtol=1e-3, atol=1e-4):
                raise UnrecognisedNorm("gives other gradients")
        self.bare.eval()

    def takes_any_size(self, spec: NormSpec) -> bool:
        if self.tensors:
            return False
        other = self.randn(4, self.size + 16)
        y = self.run(other)
        return y is not None and self.agrees(spec, other, y, False)


def _sizes(module: nn.Module) -> list[int]:
    """Row lengths to try: the vectors', or where there are none what the attributes suggest."""
    tensors = own_tensors(module)
    if tensors:
        return [next(iter(tensors.values())).shape[0]]
    sizes = []
    for value in own_attributes(module).values():
        if isinstance(value, tuple | list) and len(value) == 1:
            value = value[0]
        if type(value) is int and value > 1:
            sizes.append(value)
    return [*sizes, SPARE_SIZE]


def _claims(names: list[str], eps_name: str) -> Iterator[NormSpec]:
    if len(names) == 2:
        for first, second in (names, names[::-1]):
            yield NormSpec("layer", eps_name, weight=first, bias=second)
        return
    weight: str | None = names[0] if names else None
    yield NormSpec("layer", eps_name, weight=weight)
    yield NormSpec("rms", eps_name, weight=weight)
    if weight is not None:
        yield NormSpec("rms", eps_name, weight=weight, weight_offset=1.0)
        yield NormSpec("rms", eps_name, weight=weight, cast="input")
        yield NormSpec("rms", eps_name, weight=weight, weight_offset=1.0, cast="input")


def _prove(bare: nn.Module, eps_name: str, size: int) -> NormSpec | None:
    proof = _Proof(bare, eps_name, size)
    proven = proof.proven_dtypes(list(_claims(list(proof.tensors), eps_name)))
    fp32 = (torch.float32, torch.float32 if proof.tensors else None)
    standing = {spec: dtypes for spec, dtypes in proven.items() if fp32 in dtypes}
    if not standing:
        return None
    # Two specs that agree in the same dtypes are one function there, so the first will do.
    spec = max(standing, key=lambda spec: len(standing[spec]))
    proof.set_tensors(torch.float32)
    with _NativeCalls() as calls:
        bare(proof.randn(2, size))
    dtypes = frozenset(standing[spec])
    if calls.seen:  # on a GPU torch's own functions refuse or treat mixed dtypes otherwise
        dtypes = frozenset(pair for pair in dtypes if pair[1] in (None, pair[0]))
    proof.check_training(spec)
    # torch's rms_norm lays its result out by one rule on the CPU and by another on a GPU.
    layout = "unknown" if calls.seen and spec.kind == "rms" else proof.layout(spec)
    autocast = "none"
    if calls.seen:
        own_forward = type(bare).forward
        autocast = "torch" if own_forward in _TORCH_FORWARDS else "unknown"
    return replace(
        spec,
        size=None if proof.takes_any_size(spec) else size,
        ranks=proof.proven_ranks(spec),
        dtypes=dtypes,
        layout=layout,
        autocast=autocast,
        eps_may_be_none=type(bare) is nn.RMSNorm,
    )


def _is_eps(value: float | None) -> bool:
    return value is None or (math.isfinite(value) and value > 0)


def recognise(module: nn.Module, cls: type | None = None) -> NormSpec:
    """Find out which norm ``module`` computes, as an instance of ``cls`` (default: its own).

    Runs a bare copy of it on the CPU; ``module`` itself, its hooks and torch's random state are
    not touched. Raises `UnrecognisedNorm`, with the reason, where no norm of this library agrees.

    >>> recognise(torch.nn.LayerNorm(32)).describe()
    'layer_norm'
    """
    cls = cls or type(module)
    if isinstance(module, OwnRMSNorm | OwnLayerNorm):
        raise UnrecognisedNorm("runs fusedops' operators by itself")
    if module._modules:
        raise UnrecognisedNorm("has submodules or a parametrization")
    tensors = own_tensors(module)
    if len(tensors) > 2 or any(t.dim() != 1 or not t.is_floating_point() for t in tensors.values()):
        raise UnrecognisedNorm("its parameters are not a weight and a bias over one dimension")
    if len({t.shape for t in tensors.values()}) > 1:
        raise UnrecognisedNorm("weight and bias differ in length")
    if any(not t.numel() for t in tensors.values()):
        raise UnrecognisedNorm("its weight is empty (patch before a tool takes the weights away)")
    names = eps_names(module)
    if not names:
        raise UnrecognisedNorm("keeps no eps in an attribute")
    usable = [name for name in names if _is_eps(vars(module)[name])]
    if not usable:
        values = " and ".join(f"{name}={vars(module)[name]}" for name in names)
        raise UnrecognisedNorm(f"its eps is no finite number > 0 ({values})")
    with _quiet():
        for eps_name in usable:
            for size in _sizes(module):
                try:
                    bare = _bare_copy(module, cls)
                except UnrecognisedNorm:
                    raise
                except Exception as error:
                    raise UnrecognisedNorm(f"cannot be copied: {error}") from error
                spec = _prove(bare, eps_name, size)
                if spec is not None:
                    return spec
    raise UnrecognisedNorm("agrees with none of the norms on random inputs")
