# SPDX-License-Identifier: Apache-2.0
"""The contestants of the benchmarks, behind one signature, and what they are measured by.

Each is reached through the function that its users call, and differentiated by autograd: a
captured graph holds the kernels alone, so what a wrapper costs the CPU does not count there, and
bench/launch.py measures just that.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

import fusedops
from fusedops import reference

OPERATORS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
DIRECTIONS = ("forward", "backward")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class NotOfferedError(Exception):
    """The library has no such operator."""


@dataclass(frozen=True)
class Case:
    """One operator, direction, shape and dtype: what all contestants are compared on."""

    operator: str
    direction: str
    rows: int
    width: int
    dtype: str = "bf16"

    @property
    def adds(self):
        return self.operator.startswith("add_")

    @property
    def centered(self):
        return self.operator.endswith("layer_norm")

    @property
    def eps(self):
        return 1e-5 if self.centered else 1e-6

    @property
    def bytes(self):
        """What has to be read and written once, whoever does it.

        Forward: x and y, and residual and sum. Backward: the normalised rows, dy and dx, and the
        gradient of the sum. And weight and bias or their gradients, but no statistics of rows:
        to keep or recompute them is the contestant's choice.
        """
        if self.direction == "forward":
            streams, vectors = 4 if self.adds else 2, 2 if self.centered else 1
        else:
            streams, vectors = 4 if self.adds else 3, 3 if self.centered else 2
        return (streams * self.rows + vectors) * self.width * DTYPES[self.dtype].itemsize


class Tensors(NamedTuple):
    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None
    dy: torch.Tensor
    dsum: torch.Tensor | None


def tensors(case, device):
    """Fresh random inputs; rows have a mean of their own, as activations do."""

    def rand(*shape):
        return torch.randn(*shape, device=device, dtype=DTYPES[case.dtype])

    shape = (case.rows, case.width)
    return Tensors(
        x=rand(*shape) + rand(case.rows, 1),
        residual=rand(*shape) if case.adds else None,
        weight=rand(case.width),
        bias=rand(case.width) if case.centered else None,
        dy=rand(*shape),
        dsum=rand(*shape) if case.adds else None,
    )


def bind(function, case, inputs):
    """A call of ``function`` without arguments: {name: tensor} of its results or gradients."""
    arguments = inputs[:4]
    if case.direction == "forward":
        names = ("y", "summed")

        def forward():
            with torch.no_grad():
                return named(names, function(*arguments))

        return forward
    leaves = [None if a is None else a.detach().requires_grad_() for a in arguments]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sent = [g for g in (inputs.dy, inputs.dsum) if g is not None]
    wanted = [leaf for leaf in leaves if leaf is not None]
    names = [n for n, a in zip(("dx", "dresidual", "dweight", "dbias"), leaves, strict=True)
             if a is not None]  # fmt: skip

    def backward():
        return named(names, torch.autograd.grad(outputs, wanted, sent, retain_graph=True))

    return backward


def named(names, results):
    results = results if isinstance(results, tuple) else (results,)
    return dict(zip(names, results, strict=False))


def truth(case, inputs):
    """What a call of `bind` should return, in float64; the sum is rounded before it is normed."""
    x, residual, weight, bias, dy, dsum = inputs
    s = x if residual is None else residual + x
    wide = [None if t is None else t.double() for t in (s, weight, bias, dy, dsum)]
    s, weight, bias, dy, dsum = wide
    if case.direction == "backward":
        dx, dweight, dbias = reference.norm_backward(
            dy, dsum, s, weight, case.eps, centered=case.centered
        )
        exact = {"dx": dx, "dresidual": dx, "dweight": dweight, "dbias": dbias}
        absent = {None if case.adds else "dresidual", None if case.centered else "dbias"}
        return {name: value for name, value in exact.items() if name not in absent}
    if case.centered:
        y = reference.layer_norm(s, weight, bias, case.eps)
    else:
        y = reference.rms_norm(s, weight, case.eps)
    return {"y": y, "summed": s} if case.adds else {"y": y}


def poison(case, device):
    """Fill the memory that the next results will get with NaN, so that nothing unwritten passes."""
    for shape in ((case.rows, case.width), (case.width,)):
        blocks = [torch.full(shape, torch.nan, device=device, dtype=DTYPES[case.dtype])
                  for _ in range(3)]  # fmt: skip
        del blocks


def errors(results, exact):
    """{name: largest absolute error}, infinite where a result is missing or not a number."""
    found = {}
    for name, value in exact.items():
        result = results.get(name)
        if result is None or result.shape != value.shape:
            found[name] = math.inf
            continue
        error = (result.double() - value).abs().max().item()
        found[name] = math.inf if math.isnan(error) else error
    return found


def wrong(found, torchs, exact, case):
    """What is off, or None. Allowed is four times torch's own error, or one unit of the largest
    value: contestants that round once more than torch, or not at a place where it does, pass."""
    unit = torch.finfo(DTYPES[case.dtype]).eps
    for name, error in found.items():
        allowed = max(4 * torchs.get(name, 0.0), unit * exact[name].abs().max().item())
        if error > allowed or error == math.inf:
            return f"{name} is off by {error:.3g}, allowed {allowed:.3g}"
    return None


# The contestants -------------------------------------------------------------------------------
# Each loader returns function(case), which returns function(x, residual, weight, bias) with the
# library's own result: y, or (y, summed). It raises ImportError where the library is missing.


def fusedops_functions():
    def function(case):
        call, eps = getattr(fusedops, case.operator), case.eps
        return {
            "rms_norm": lambda x, residual, weight, bias: call(x, weight, eps),
            "layer_norm": lambda x, residual, weight, bias: call(x, weight, bias, eps),
            "add_rms_norm": lambda x, residual, weight, bias: call(x, residual, weight, eps),
            "add_layer_norm": lambda x, residual, weight, bias: call(
                x, residual, weight, bias, eps
            ),
        }[case.operator]

    return function


def torch_functions():
    """torch's own norm, after an add of its own."""

    def function(case):
        shape, eps = (case.width,), case.eps

        def add_rms_norm(x, residual, weight, bias):
            summed = residual + x
            return F.rms_norm(summed, shape, weight, eps), summed

        def add_layer_norm(x, residual, weight, bias):
            summed = residual + x
            return F.layer_norm(summed, shape, weight, bias, eps), summed

        return {
            "rms_norm": lambda x, residual, weight, bias: F.rms_norm(x, shape, weight, eps),
            "layer_norm": lambda x, residual, weight, bias: F.layer_norm(
                x, shape, weight, bias, eps
            ),
            "add_rms_norm": add_rms_norm,
            "add_layer_norm": add_layer_norm,
        }[case.operator]

    return function


def compiled_functions():
    """The same, compiled for the one shape; forward and backward of training are made jointly."""
    import torch._functorch.config
    import torch._inductor.config

    # A backward that is run again may not eat what the forward saved.
    torch._functorch.config.donated_buffer = False
    # Worker processes fill the caches while they share the GPU: what they time must not be kept.
    torch._inductor.config.autotune_local_cache = False
    torch._inductor.config.compile_threads = 1
    eager = torch_functions()

    def function(case):
        torch._dynamo.reset()  # else the eighth shape is left uncompiled
        return torch.compile(eager(case), fullgraph=True, dynamic=False)

    return function


def liger_functions():
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def function(case):
        eps = case.eps
        # in_place, where it is the default, would overwrite dy, which others still need.
        calls = {
            "rms_norm": lambda x, residual, weight, bias: LigerRMSNormFunction.apply(
                x, weight, eps, 0.0, "llama", False, None
            ),
            "layer_norm": lambda x, residual, weight, bias: LigerLayerNormFunction.apply(
                x, weight, bias, eps
            ),
            "add_rms_norm": lambda x, residual, weight, bias: LigerFusedAddRMSNormFunction.apply(
                x, residual, weight, eps, 0.0, "llama", False
            ),
        }
        if case.operator not in calls:
            raise NotOfferedError(f"Liger has no {case.operator}")
        return calls[case.operator]

    return function


def quack_functions():
    from quack.rmsnorm import _rmsnorm_bwd, _rmsnorm_fwd, get_sm_count, rmsnorm

    class LayerNorm(torch.autograd.Function):
        """QuACK differentiates only RMSNorm: this is its layernorm_fwd and layernorm_bwd.

        Unlike those it hands on the residual, which the kernels below them take.
        """

        @staticmethod
        def forward(ctx, x, residual, weight, bias, eps):
            saves = any(ctx.needs_input_grad)
            y = torch.empty_like(x)
            summed = None if residual is None else torch.empty_like(x)
            rstd, mean = (
                x.new_empty(len(x), dtype=torch.float32) if saves else None for _ in range(2)
            )
            _rmsnorm_fwd(x, weight, y, bias, rstd, mean, residual, summed, eps, True)
            ctx.save_for_backward(x if summed is None else summed, weight, rstd, mean)
            return y if summed is None else (y, summed)

        @staticmethod
        def backward(ctx, dy, dsum=None):
            s, weight, rstd, mean = ctx.saved_tensors
            ds = torch.empty_like(s)
            count = get_sm_count(s.shape[1], s.device)
            partials = [s.new_empty(count, s.shape[1], dtype=torch.float32) for _ in range(2)]
            _rmsnorm_bwd(s, weight, dy, rstd, ds, *partials, dsum, None, count, mean, True)
            dweight, dbias = (partial.sum(0).to(weight.dtype) for partial in partials)
            return ds, None if dsum is None else ds, dweight, dbias, None

    def function(case):
        eps = case.eps
        if case.centered:

            def layer_norm(x, residual, weight, bias):
                return LayerNorm.apply(x, residual, weight, bias, eps)

            return layer_norm
        return {
            "rms_norm": lambda x, residual, weight, bias: rmsnorm(x, weight, eps=eps),
            "add_rms_norm": lambda x, residual, weight, bias: rmsnorm(
                x, weight, residual=residual, eps=eps, prenorm=True
            ),
        }[case.operator]

    return function


def flash_functions():
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    def function(case):
        options = {"eps": case.eps, "prenorm": case.adds, "is_rms_norm": not case.centered}
        return lambda x, residual, weight, bias: layer_norm_fn(x, weight, bias, residual, **options)

    return function


LOADERS = {
    "fusedops": fusedops_functions,
    "torch": torch_functions,
    "compile": compiled_functions,
    "liger": liger_functions,
    "quack": quack_functions,
    "flash": flash_functions,
}


def load(names):
    """({name: function of a case}, {name: why it is missing})."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = LOADERS[name]()
        except Exception as error:  # a library may fail on import in ways of its own
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, missing
