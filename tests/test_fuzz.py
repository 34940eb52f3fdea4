# SPDX-License-Identifier: Apache-2.0
"""Calls that nobody would think of, forward and backward, against a wider float.

``FUSEDOPS_FUZZ_EXAMPLES=20000 pytest tests/test_fuzz.py`` tries that many. The limits are bounds
of the rounding errors and not estimates, so that more examples need no wider ones.
"""

import math
import os

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

EXAMPLES = int(os.environ.get("FUSEDOPS_FUZZ_EXAMPLES", "400"))
PER_TEST = 400  # shards run side by side under pytest-xdist; each has a seed of its own
KINDS = 4 * 2  # operators, each with whole rows and with rows in chunks
SHARDS = math.ceil(EXAMPLES / KINDS / PER_TEST)

# Not every combination: on a GPU each compiles kernels of its own, in about a second.
MIXES = [  # x, residual, weight, bias
    (FP16, FP16, FP16, FP16),
    (BF16, BF16, BF16, BF16),
    (FP32, FP32, FP32, FP32),
    (FP64, FP64, FP64, FP64),
    (BF16, FP32, BF16, FP32),
    (FP32, FP16, FP16, BF16),
    (FP16, BF16, FP32, FP16),
    (BF16, BF16, FP64, FP32),
    (FP64, FP32, FP32, BF16),
]
LENGTHS = [1, 2, 7, 32, 100, 257]
CHUNKED_LENGTHS = [65, 257]
EPS = [1e-30, 1e-12, 1e-6, 1e-5, 0.1, 1.0]
MAGNITUDES = [1e-30, 1e-20, 1e-10, 1e-3, 1.0, 1.0, 1.0, 1e3, 1e10, 1e17, 1e20, 1e30]
ROWS = ["normal", "normal", "normal", "zero", "equal", "far", "spike", "nan", "inf", "infs"]
LAYOUTS = ["plain", "plain", "sliced", "stepped", "transposed", "offset", "expanded", "heads"]


@st.composite
def calls(draw, lengths):
    def tensor(rows):
        return {
            "layout": draw(st.sampled_from(LAYOUTS)),
            "magnitude": draw(st.sampled_from(MAGNITUDES)),
            "rows": draw(st.lists(st.sampled_from(rows), min_size=1, max_size=4)),
        }

    leading = draw(st.lists(st.sampled_from([1, 2, 3, 4, 0]), max_size=3))
    names = ("x", "residual", "weight", "bias")
    return {
        "shape": (*leading, draw(st.sampled_from(lengths))),
        "dtypes": dict(zip(names, draw(st.sampled_from(MIXES)), strict=True)),
        "x": tensor(ROWS),
        "residual": tensor(ROWS),
        "dy": {**tensor(["normal", "normal", "zero", "nan"]), "magnitude": 1.0},
        "dsummed": {**tensor(["normal", "zero"]), "magnitude": 1.0},
        "vector_layout": draw(st.sampled_from(["plain", "stepped", "offset", "expanded"])),
        "absent": {n for n in ("weight", "bias", "dy", "dsummed") if draw(st.integers(0, 3)) == 0},
        "needs": {n for n in names if draw(st.integers(0, 2))},
        "eps": draw(st.sampled_from(EPS)),
        "cast": draw(st.sampled_from(["fp32", "fp32", "input"])),
        "weight_offset": draw(st.sampled_from([0.0, 0.0, 1.0])),
        "out_dtype": draw(st.sampled_from([None, None, None, BF16, FP32])),
        "seed": draw(st.integers(0, 2**16)),
    }


# What a call is given ----------------------------------------------------------------------------


def laid_out(t, layout):
    """These values in other places; expanded, those of the first index of the first dimension."""
    if layout == "sliced":
        return torch.cat([t, t], -1)[..., : t.shape[-1]]
    if layout == "stepped":
        return torch.stack([t, t], -1).flatten(-2)[..., ::2]
    if layout == "transposed" and t.dim() > 1:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "offset":
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
    if layout == "expanded" and t.shape[0] > 0:
        return t[:1].expand(t.shape)
    if layout == "heads" and t.dim() > 2:
        return torch.cat([t, t], -2)[..., t.shape[-2] :, :]
    return t


def made(shape, dtype, how, generator, device):
    """Rows of the kinds that ``how`` lists, over and over."""
    values = torch.randn(shape, generator=generator, dtype=FP64)
    rows = values.view(-1, shape[-1])
    for index, row in enumerate(rows):
        kind = how["rows"][index % len(how["rows"])]
        if kind == "zero":
            row.zero_()
        elif kind == "equal":
            row.fill_(row[0].item())
        elif kind == "far":
            row.add_(1e3)
        elif kind == "spike":
            row[-1] *= 1e6
    # A magnitude beyond the dtype's range gives rows of its largest number.
    largest = torch.finfo(dtype).max
    values.mul_(how["magnitude"]).clamp_(-largest, largest)
    for index, row in enumerate(rows):
        kind = how["rows"][index % len(how["rows"])]
        if kind == "nan":
            row[index % len(row)] = float("nan")
        elif kind in ("inf", "infs"):
            row[index % len(row)] = float("inf")
            if kind == "infs":
                row[0] = -float("inf")
    return laid_out(values.to(device, dtype), how["layout"])


def inputs_of(op, call, device):
    generator = torch.Generator().manual_seed(call["seed"])
    shape, dtypes = call["shape"], call["dtypes"]
    inputs = {}
    for name in op.argument_names:
        if name in call["absent"]:
            inputs[name] = None
        elif name in ("x", "residual"):
            inputs[name] = made(shape, dtypes[name], call[name], generator, device)
        else:
            vector = torch.randn(shape[-1], generator=generator).to(device, dtypes[name])
            inputs[name] = laid_out(vector, call["vector_layout"])
    return inputs


def run(op, call, inputs, options):
    """(outputs, the gradients sent to them, gradients by name)."""
    leaves = {
        n: None if t is None else t.detach().requires_grad_(n in call["needs"])
        for n, t in inputs.items()
    }
    outputs = dict(zip(("y", "summed"), op.call(leaves, **options), strict=True))
    generator = torch.Generator().manual_seed(call["seed"] + 1)
    sent = {}
    for name, out in outputs.items():
        grad_name = f"d{name}"
        if out is not None and out.requires_grad and grad_name not in call["absent"]:
            how = call[grad_name]
            sent[name] = made(call["shape"], out.dtype, how, generator, out.device)
    if sent:
        torch.autograd.backward([outputs[n] for n in sent], list(sent.values()))
    grads = {n: t.grad for n, t in leaves.items() if t is not None}
    return outputs, sent, grads


# What must come of it ----------------------------------------------------------------------------


def wide(t):
    return t.detach().double().cpu().numpy().astype(np.longdouble)


def check(name, ours, truth, limit, roundings, or_nan=False):
    """``ours`` is ``truth`` up to ``limit`` and one rounding to each of the dtypes.

    NaN where that is NaN, or may be where ``or_nan``; infinite where that is, or too large for the
    dtype.
    """
    numbers = wide(ours)
    assert numbers.shape == truth.shape, name
    limit = limit + np.zeros_like(truth)
    for dtype in roundings:
        info = torch.finfo(dtype)
        limit += np.abs(truth) * info.eps + info.smallest_normal * info.eps
    largest = torch.finfo(ours.dtype).max
    beyond = np.isinf(numbers) & (np.sign(numbers) * truth + limit >= largest)
    right = (np.abs(numbers - truth) <= limit) | beyond
    right = np.where(np.isnan(truth), np.isnan(numbers), right | (np.isnan(numbers) & or_nan))
    if not right.all():
        worst = tuple(np.argwhere(~right)[0])
        raise AssertionError(
            f"{name}{list(map(int, worst))}: {numbers[worst]} for {truth[worst]}, "
            f"allowed error {limit[worst]} ({int((~right).sum())} of {right.size} are off)"
        )


def same_bits(a, b):
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


class Rows:
    """The normalised rows, how exact they can be, and which of them have no exact value.

    A sum of n terms, in whatever order, is off by n - 1 units of its terms' magnitudes at most.

    overflow: (..., 1), finite rows whose squares leave the range. Their rstd is 0, as of the same
    formula in torch; torch's own LayerNorm has NaN from some size on, so that may come too.
    unsure: those whose squares come near its end, of which nothing is asked.
    """

    def __init__(self, s, eps, *, centers, exact_constants):
        double = s.dtype == FP64
        self.unit = torch.finfo(FP64 if double else FP32).eps / 2
        numbers = wide(s)
        size = np.abs(numbers).max(-1, keepdims=True)
        finite = np.isfinite(size)
        row = numbers - numbers.mean(-1, keepdims=True) if centers else numbers
        squares = (row * row).sum(-1, keepdims=True)
        near, end = ("1e307", "2e308") if double else ("1e38", "4e38")
        self.overflow = finite & (squares > np.longdouble(end))
        self.unsure = finite & (squares > np.longdouble(near)) & ~self.overflow
        self.rstd = 1 / np.sqrt((row * row).mean(-1, keepdims=True) + np.longdouble(eps))
        self.rstd = np.where(self.overflow, 0, self.rstd)
        self.x_hat = row * self.rstd
        # The mean is a number of the row's size, and so is the error of subtracting it.
        condition = size * self.rstd if centers else np.zeros_like(self.rstd)
        if centers and exact_constants:
            condition = np.where((numbers == numbers[..., :1]).all(-1, keepdims=True), 0, condition)
        self.condition = np.where(finite, condition, 0)
        self.steps = (s.shape[-1] + 16) * self.unit
        self.limit = np.abs(self.x_hat) * self.steps
        self.limit = self.limit + 4 * self.unit * self.condition * (1 + np.abs(self.x_hat))
        self.limit = np.where(self.unsure, np.inf, self.limit)


def check_results(op, call, inputs, options, results, path):
    outputs, sent, grads = results
    y, summed = outputs["y"], outputs["summed"]
    weight, bias = inputs["weight"], inputs.get("bias")
    needs = call["needs"] & {n for n, t in inputs.items() if t is not None}
    s = inputs["x"]
    if op.adds:
        s = inputs["residual"] + s
        assert same_bits(summed, s), "summed is not residual + x"
        assert (summed.dtype, summed.stride()) == (s.dtype, s.stride())
        assert summed.requires_grad == bool(needs & {"x", "residual"})
    casts = options.get("cast") == "input" and weight is not None
    dtype = torch.promote_types(s.dtype, weight.dtype) if casts else s.dtype
    assert y.dtype == (options["out_dtype"] or dtype)
    assert y.requires_grad == bool(needs)

    rows = Rows(s, call["eps"], centers=op.centers, exact_constants=path != "reference")
    x_hat, unit = rows.x_hat, rows.unit
    rounding = torch.finfo(s.dtype).eps if casts else 0.0
    scale = np.longdouble(1)
    if weight is not None:
        scale = wide(weight) + np.longdouble(options.get("weight_offset", 0.0))
    shift = np.longdouble(0) if bias is None else wide(bias)
    x_hat_limit = rows.limit + np.abs(x_hat) * rounding
    limit = x_hat_limit * np.abs(scale) + 4 * unit * (np.abs(x_hat * scale) + np.abs(shift))
    y_dtypes = [s.dtype, y.dtype] if casts else [y.dtype]
    maybe_nan = (rows.overflow & op.centers) | rows.unsure
    check("y", y, x_hat * scale + shift, limit, y_dtypes, maybe_nan)

    for name in grads:
        assert name in needs or grads[name] is None
    dsummed = wide(sent["summed"]) if "summed" in sent else np.zeros_like(x_hat)
    ds, ds_limit, or_nan = dsummed, 0, False
    if "y" in sent:
        dy = wide(sent["y"])
        terms = (dy[..., 0].size + 16) * unit
        leading = tuple(range(dy.ndim - 1))
        if "weight" in needs:
            limit = np.abs(dy) * x_hat_limit + np.abs(dy * x_hat) * terms
            truth = (dy * x_hat).sum(leading)
            dtypes = [weight.dtype]
            limit = np.where(rows.unsure, np.inf, limit)
            maybe_nan = (rows.overflow | rows.unsure).any()
            check("dweight", grads["weight"], truth, limit.sum(leading), dtypes, maybe_nan)
        if "bias" in needs:
            limit = np.abs(dy).sum(leading) * terms
            check("dbias", grads["bias"], dy.sum(leading), limit, [bias.dtype])
        g = dy * scale
        norm = g - x_hat * (g * x_hat).mean(-1, keepdims=True)
        if op.centers:
            norm = norm - g.mean(-1, keepdims=True)
        size = np.abs(g).max(-1, keepdims=True) * (1 + np.abs(x_hat).max(-1, keepdims=True)) ** 2
        ds_limit = size * rows.rstd * (rows.steps + rounding + 4 * unit * rows.condition)
        norm = norm * rows.rstd
        # torch's operations round both parts before they add them.
        ds_limit = ds_limit + (np.abs(norm) + np.abs(dsummed)) * torch.finfo(s.dtype).eps
        ds_limit = np.where(rows.unsure, np.inf, ds_limit)
        ds = norm + dsummed
        or_nan = rows.overflow | rows.unsure
    for name in needs & {"x", "residual"}:
        if grads[name] is not None:
            check(f"d{name}", grads[name], ds, ds_limit, [s.dtype, inputs[name].dtype], or_nan)
        else:
            assert not sent


def without_strange_rows(inputs):
    """The same, laid out the same way, with zeros for rows that are not finite.

    Where one is, tensors whose rows share their memory have no others.
    """
    clean = dict(inputs)
    for name in ("x", "residual"):
        if clean.get(name) is not None:
            t = clean[name]
            memory = t.untyped_storage().clone()
            clean[name] = t.new_empty(0).set_(memory, t.storage_offset(), t.shape, t.stride())
            own = clean[name][:1] if t.stride(0) == 0 else clean[name]
            own.masked_fill_(~own.isfinite().all(-1, keepdim=True), 0.0)
    return clean


@pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|divide by zero|underflow) encountered:RuntimeWarning"
)
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("blocks", ["whole", "chunks"])
def test_any_call(op, blocks, shard, device, path, request):
    if blocks == "chunks":
        request.getfixturevalue("small_blocks" if path != "reference" else "path")

    @hypothesis.seed(shard)
    @hypothesis.settings(
        max_examples=math.ceil(EXAMPLES / KINDS / SHARDS),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(call=calls(LENGTHS if blocks == "whole" else CHUNKED_LENGTHS))
    def try_call(call):
        if path == "reference":
            # The derivative of torch's rsqrt is a third power: NaN for zeros and smaller eps.
            call["eps"] = max(call["eps"], 1e-12)
        inputs = inputs_of(op, call, device)
        before = {n: None if t is None else t.clone() for n, t in inputs.items()}
        options = {n: call[n] for n in ("eps", "out_dtype")}
        if not op.centers:
            options |= {n: call[n] for n in ("cast", "weight_offset")}
        results = run(op, call, inputs, options)
        with np.errstate(all="ignore"):
            check_results(op, call, inputs, options, results, path)
        for name, tensor in inputs.items():
            assert tensor is None or same_bits(tensor, before[name]), f"{name} was written"

        outputs, _, grads = results
        strange = ~inputs["x"].isfinite().all(-1, keepdim=True)
        if op.adds:
            strange |= ~inputs["residual"].isfinite().all(-1, keepdim=True)
        if path == "reference" or not strange.any():
            return
        # Rows with NaN and infinity leave the others' bits alone.
        others = ~strange.squeeze(-1)
        clean, _, clean_grads = run(op, call, without_strange_rows(inputs), options)
        for ours, theirs in ((outputs, clean), (grads, clean_grads)):
            for name in ("y", "summed", "x", "residual"):
                if ours.get(name) is not None:
                    assert same_bits(ours[name][others], theirs[name][others]), name

    try_call()
