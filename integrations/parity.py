# SPDX-License-Identifier: Apache-2.0
"""Proof that a patched model still computes what it computed before.

The model is run on the same inputs unpatched, patched, and unpatched in fp32, with the same
weights, in eval mode and from the same random state; `parity_report` holds the rules. The patched
model runs twice: a plain run, which is judged, and one with forward hooks on its blocks for the
drift by depth, because hooks keep adds from being fused across blocks.
"""

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedops import dispatch
from fusedops.environment import available_memory, one_line
from fusedops.integrations import patching
from fusedops.integrations.loading import SEED
from fusedops.integrations.parity_report import (
    BlockDrift,
    Continuation,
    Difference,
    GradientDrift,
    Histogram,
    OutputSpread,
    ParityReport,
    Scatter,
)
from fusedops.integrations.report import PatchReport

__all__ = ["check_parity", "main_output"]

_CHUNK = 2**22  # elements compared at a time: fp64 copies of whole logits would not fit
_HISTOGRAM_BINS, _SCATTER_BINS = 61, 48  # an odd number has zero in the middle of a bin
_LOSS_SCALE = 64.0  # keeps fp16 gradients out of the subnormal numbers
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Step = Callable[[str, int, int], None]


def check_parity(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    *,
    backward: bool = False,
    continuation: int = 16,
    on_step: Step | None = None,
) -> ParityReport:
    """Compare ``model`` patched with itself unpatched, and both with itself in fp32.

    ``inputs`` is what the model is called with: a mapping of keyword arguments (a tokenizer's
    result) or one tensor; tensors are moved to the model's device, and positions that
    ``attention_mask`` leaves out are left out. The ratio rule for models below fp32 needs at
    least 64 tokens. ``backward=True`` compares gradients, too: of the model's own loss if the
    inputs hold labels, of the next-token cross-entropy for a causal language model, else of a
    fixed random projection of the outputs. ``continuation`` is the number of greedy tokens (0:
    none). ``on_step(what, done, total)`` is called before each step.

    The model may come patched or not, on any device. It is left as it came, also when its forward
    raises: classes, training flags, ``.grad``, and the random state. fp32 weights are a copy,
    made only if it fits in the device's free memory; the report's notes say when it did not.

    Dropout is off, as in eval mode: masks that differ with the dtype would hide every difference.

    TypeError for inputs of another kind and for a model that returns no floating-point tensor;
    ValueError if there is nothing to patch, and for ``backward=True`` on a frozen model.

    >>> import torch
    >>> from fusedops.integrations.patching import force_operators
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    >>> with force_operators():  # so that the example runs on any machine
    ...     report = check_parity(model, torch.randn(64, 8))
    >>> report.outcome, report.fused_calls
    ('holds', 1)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(inputs, Tensor | Mapping):
        raise TypeError(
            f"inputs: expected a tensor or a mapping of arguments, got {type(inputs).__name__}"
        )
    if backward and not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "backward: expected a model with parameters that require a gradient, "
            f"got {type(model).__name__} with none"
        )
    if continuation < 0:
        raise ValueError(f"continuation: expected at least 0 tokens, got {continuation}")
    with _kept_state(model):
        return _compare(_Subject(model, inputs, backward), continuation, on_step or _no_step)


@dataclass
class _Run:
    """What one forward (and backward) of a model gave."""

    output: Tensor
    output_name: str
    hidden: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


class _Subject:
    """The model under test, how it is called, and which of its outputs count."""

    def __init__(
        self, model: nn.Module, inputs: Tensor | Mapping[str, Any], backward: bool
    ) -> None:
        parameters = list(model.parameters())
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs.values())
        # Offloaded weights lie on "meta"; their hooks move the inputs to where they compute.
        placed = [
            t
            for t in (*parameters, *model.buffers(), *given)
            if isinstance(t, Tensor) and not t.is_meta
        ]
        self.model = model
        self.inputs = inputs
        self.backward = backward
        self.device = placed[0].device if placed else torch.device("cpu")
        self.dtypes = {p.dtype for p in parameters if p.is_floating_point()}
        self.blocks = [name for name, _ in _blocks(model)]
        self.encodes_and_decodes = not isinstance(inputs, Tensor) and "decoder_input_ids" in inputs

    @property
    def full_precision(self) -> bool:
        """Whether the model itself computes in fp32 or fp64, so that there is no truer run."""
        whole = self.dtypes <= {torch.float32, torch.float64}
        return whole and not torch.is_autocast_enabled(self.device.type)

    @property
    def token_ids(self) -> Tensor | None:
        ids = self.inputs if isinstance(self.inputs, Tensor) else self.inputs.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            return ids.to(self.device)
        return None

    def kept(self, output: Tensor) -> Tensor | None:
        """The positions of ``output`` (B, T, ...) that the mask leaves in; None: all."""
        if isinstance(self.inputs, Tensor):
            return None
        name = "decoder_attention_mask" if self.encodes_and_decodes else "attention_mask"
        mask = self.inputs.get(name)
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape != output.shape[:2]:
            return None
        return mask.bool().to(output.device)

    def is_causal_lm(self, run: _Run) -> bool:
        ids = self.token_ids
        can_generate = getattr(self.model, "can_generate", None)
        return (
            ids is not None
            and run.output_name == "logits"
            and run.output.shape[:-1] == ids.shape
            and not self.encodes_and_decodes
            and callable(can_generate)
            and bool(can_generate())
        )

    def run(self, model: nn.Module, *, hooks: bool = False, backward: bool | None = None) -> _Run:
        """One forward of ``model`` on fresh copies of the inputs, from a fixed random state."""
        backward = self.backward if backward is None else backward
        torch.manual_seed(SEED)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(backward))
            hidden = stack.enter_context(_recorded(model, self.blocks if hooks else []))
            arguments = _fresh(self.inputs, self.device)
            raw = model(arguments) if isinstance(arguments, Tensor) else model(**arguments)
            name, output = main_output(raw)
            run = _Run(output.detach(), name, hidden)
            if backward:
                loss = self._loss(raw, output, run) * _LOSS_SCALE
                trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
                found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
                run.gradients = dict(zip(trained, found, strict=True))
        return run

    def _loss(self, raw: Any, output: Tensor, run: _Run) -> Tensor:
        own = getattr(raw, "loss", None)
        if isinstance(own, Tensor) and own.dim() == 0:
            return own.float()
        ids = self.token_ids
        if ids is not None and self.is_causal_lm(run) and ids.shape[1] > 1:
            losses = F.cross_entropy(
                output[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
            )
            kept = self.kept(output)
            return losses.mean() if kept is None else losses[kept[:, 1:].flatten()].mean()
        generator = torch.Generator().manual_seed(SEED)
        direction = torch.randn(output.shape, generator=generator).to(output.device)
        return (output.float() * direction).mean()


def _compare(
    subject: _Subject, continuation: int, on_step: Callable[[str, int, int], None]
) -> ParityReport:
    model = subject.model
    notes: list[str] = []
    total = 7
    with ExitStack() as stack:
        with patching.suspended(model) as came_patched:
            on_step("unpatched model", 0, total)
            unpatched = subject.run(model, hooks=True)
            on_step("greedy continuation", 1, total)
            tokens = _greedy(subject, unpatched, continuation, notes)
            unpatched_scores = _scores(subject, tokens)
            on_step("unpatched model in fp32", 2, total)
            truth = _fp32_run(subject, notes)
        patch_report = None
        if not came_patched:
            patch_report = stack.enter_context(
                patching.patched(model, fuse_residual="always")  # however few the tokens
            )
        # The judged run comes last: the residual stream learns in the first ones.
        on_step("patched model's scores of the continuation", 3, total)
        patched_scores = _scores(subject, tokens)
        on_step("patched model, block by block", 4, total)
        hidden = {}
        if subject.blocks:
            hidden = subject.run(model, hooks=True, backward=False).hidden
        else:
            notes.append("no drift by depth: the model has no repeated blocks")
        on_step("patched model", 5, total)
        if patch_report is not None:
            _reset_counts(patch_report)
        with dispatch.count_calls() as counted:
            patched = subject.run(model)
        patched.hidden = hidden
    on_step("comparison", 6, total)

    calls: dict[str, dict[str, int]] = {}
    for (operator, path), count in sorted(counted.items()):
        calls.setdefault(operator, {})[path] = count
    obstacle = dispatch.kernel_obstacle(unpatched.output) or _unproven(subject, patch_report)
    output, kept = unpatched.output, subject.kept(unpatched.output)
    is_logits = unpatched.output_name == "logits"
    rows = output.shape[:-1].numel() if kept is None else int(kept.sum())

    def against(a: _Run, b: _Run) -> Difference:
        return _difference(a.output, b.output, kept, distributions=is_logits)

    differences = {
        "patched": against(unpatched, patched),
        "unpatched_to_fp32": against(truth, unpatched) if truth else None,
        "patched_to_fp32": against(truth, patched) if truth else None,
    }
    report = ParityReport(
        model=type(model).__name__,
        dtype="+".join(sorted(str(d).removeprefix("torch.") for d in subject.dtypes)),
        device=str(subject.device),
        output=unpatched.output_name,
        tokens=rows,
        largest=_largest(output, kept),
        finite=not bool(output.isnan().any()),
        eps=_eps(subject, output),
        calls=calls,
        mismatch=_mismatch(output, patched.output),
        **differences,  # type: ignore[arg-type]
        blocks=_block_drift(subject, unpatched, patched, truth),
        continuation=_continuation(tokens, unpatched_scores, patched_scores),
        gradients=_gradient_drift(unpatched, patched, truth) if subject.backward else None,
        notes=notes,
        no_calls_reason=None if calls else obstacle,
        patch=patch_report,
        spread=_output_spread(unpatched, patched, truth, kept, differences),
    )
    on_step("done", total, total)
    return report


def _unproven(subject: _Subject, report: PatchReport | None) -> str:
    """Why no patched norm called an operator, where the kernels could have run."""
    dtypes = {str(dtype).removeprefix("torch.") for dtype in subject.dtypes}
    proven = {pair.split("/")[0] for row in report.norms for pair in row.dtypes} if report else None
    if proven is None or not dtypes.isdisjoint(proven):
        return "no patched norm called one"
    return (
        f"the norms are proven equal in {', '.join(sorted(proven))}, not in "
        f"{', '.join(sorted(dtypes))}, and run their own code"
    )


def _no_step(what: str, done: int, total: int) -> None:
    pass


def _reset_counts(report: PatchReport) -> None:
    """Let the report's counts of adds be those of the next forward alone."""
    for state in report.blocks:
        state.calls = state.inside = state.across = state.missed = 0
        state.plain.clear()


# --- leaving everything as it was --------------------------------------------------------------


@contextmanager
def _kept_state(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; training flags and random states as they were afterwards."""
    training = [(module, module.training) for module in model.modules()]
    python_state = random.getstate()
    cuda_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if cuda_in_use else []
    with torch.inference_mode(False), torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            yield
        finally:
            random.setstate(python_state)
            for module, flag in training:
                module.training = flag


def _fresh(value: Any, device: torch.device) -> Any:
    """Inputs that a forward may write to: tensors cloned, mappings as dicts, the rest copied."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, Mapping):
        return {key: _fresh(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fresh(item, device) for item in value)
    return copy.deepcopy(value)


# --- the runs ----------------------------------------------------------------------------------


def main_output(raw: Any) -> tuple[str, Tensor]:
    """The tensor that is compared: logits, else the last hidden state, else the first tensor."""
    for name in ("logits", "last_hidden_state"):
        found = raw.get(name) if isinstance(raw, Mapping) else getattr(raw, name, None)
        if isinstance(found, Tensor) and found.is_floating_point():
            return ("logits" if name == "logits" else "outputs"), found
    found = _first_tensor(raw)
    if found is None:
        raise TypeError(
            f"model: expected one that returns a floating-point tensor, got {type(raw).__name__}"
        )
    return "outputs", found


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.dim() else None
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return None
    return next((t for t in map(_first_tensor, value) if t is not None), None)


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of the outermost containers that repeat one kind of composite module."""
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        children = list(module.named_children())
        composite = [child for _, child in children if any(True for _ in child.children())]
        repeats = len({type(child) for child in composite}) < len(composite)
        single = isinstance(module, nn.ModuleList) and len(composite) == 1
        is_container = isinstance(module, nn.ModuleList | nn.Sequential)
        if is_container and (repeats or single):
            found.extend(
                (f"{name}.{key}".lstrip("."), child)
                for key, child in children
                if child in composite
            )
            return
        for key, child in children:
            visit(f"{name}.{key}".lstrip("."), child)

    visit("", model)
    return found


@contextmanager
def _recorded(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """A dict that fills with the first tensor that each call of each named module returns."""
    hidden: dict[str, Tensor] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                call = 1
                label = name
                while label in hidden:  # a block that is shared by several depths
                    call += 1
                    label = f"{name}, call {call}"
                hidden[label] = tensor.detach().clone()

        return hook

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(hook_for(name)) for name in names]
    try:
        yield hidden
    finally:
        for handle in handles:
            handle.remove()


def _fp32_run(subject: _Subject, notes: list[str]) -> _Run | None:
    """The unpatched model in fp32, or None with a note of why not."""
    if subject.full_precision:
        return None
    model = subject.model
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_meta for t in tensors):
        notes.append("no fp32 run: weights are offloaded")
        return None
    # nn.Module.float on the copy holds one tensor in both dtypes at a time.
    needed = sum(4 * t.numel() for t in tensors if t.is_floating_point())
    needed += max((t.numel() * t.element_size() for t in tensors), default=0)
    if subject.backward:
        needed += sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    available = available_memory(subject.device)
    if available is not None and needed > available:
        notes.append(
            f"no fp32 run: its weights need {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are free on {subject.device}"
        )
        return None
    try:
        # not the model's own .float(), which some classes refuse
        fp32 = nn.Module.float(copy.deepcopy(model))
        with torch.autocast(subject.device.type, enabled=False):
            return subject.run(fp32, hooks=True)
    except torch.OutOfMemoryError:
        notes.append(f"no fp32 run: out of memory on {subject.device}")
    except Exception as error:  # a model that cannot be copied or cast is still worth the rest
        notes.append(f"no fp32 run: {type(error).__name__}: {one_line(error)}")
    return None


def _greedy(
    subject: _Subject, unpatched: _Run, count: int, notes: list[str]
) -> tuple[Tensor, int] | None:
    """The first sequence without its masked positions, continued: (ids, where that starts)."""
    ids = subject.token_ids
    if not count:
        return None
    if ids is None or not subject.is_causal_lm(unpatched):
        notes.append("no greedy continuation: not a causal language model on token ids")
        return None
    if not isinstance(subject.inputs, Tensor):
        further = set(subject.inputs) - {"input_ids", "attention_mask", "labels", "use_cache"}
        if further:
            notes.append(f"no greedy continuation: inputs also hold {', '.join(sorted(further))}")
            return None
    kept = subject.kept(unpatched.output)
    row = ids[:1] if kept is None else ids[:1, kept[0]]
    start = row.shape[1]
    positions = getattr(getattr(subject.model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and start + count > positions:
        notes.append(f"no greedy continuation: the inputs fill the model's {positions} positions")
        return None
    # None for settings of the checkpoint's that belong to sampling, which would be warned of.
    options = {
        "do_sample": False,
        "num_beams": 1,
        "temperature": None,
        "top_p": None,
        "top_k": None,
    }
    try:
        with torch.no_grad():
            row = subject.model.generate(  # type: ignore[operator]
                row,
                attention_mask=torch.ones_like(row),
                max_new_tokens=count,
                pad_token_id=0,
                **options,
            )
    except Exception as error:  # generate has demands of its own; the comparison does without
        notes.append(f"no greedy continuation: {type(error).__name__}: {one_line(error)}")
        return None
    return row, start


def _scores(subject: _Subject, tokens: tuple[Tensor, int] | None) -> Tensor | None:
    """Log-probabilities (count, vocabulary) at each token of the continuation."""
    if tokens is None:
        return None
    row, start = tokens
    with torch.no_grad():
        logits = subject.model(row).logits[0, start - 1 : -1]
    return F.log_softmax(logits.float(), dim=-1)


# --- comparing ---------------------------------------------------------------------------------


def _wide(tensor: Tensor) -> Tensor:
    """fp64, on the CPU where the device has no such numbers."""
    return tensor.to("cpu" if tensor.device.type == "mps" else tensor.device, torch.float64)


def _mismatch(unpatched: Tensor, patched: Tensor) -> str | None:
    ours, theirs = (f"{tuple(t.shape)} {t.dtype}" for t in (patched, unpatched))
    return None if ours == theirs else f"patched gives {ours}, unpatched {theirs}"


def _equal_bits(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != b.dtype:
        return torch.zeros(a.shape, dtype=torch.bool, device=a.device)
    bits = _BITS[a.element_size()]
    return a.contiguous().view(bits) == b.contiguous().view(bits)


def _parts(tensors: Sequence[Tensor], kept: Tensor | None) -> Iterator[list[Tensor]]:
    """The kept rows of tensors of one shape, some at a time, on the device of the first."""
    flat = [t.reshape(-1, t.shape[-1]) for t in tensors]
    if kept is not None:
        flat = [t[kept.flatten()] for t in flat]
    rows, columns = flat[0].shape
    for start in range(0, rows, step := max(1, _CHUNK // max(columns, 1))):
        yield [t[start : start + step].to(flat[0].device) for t in flat]


def _difference(
    reference: Tensor, other: Tensor, kept: Tensor | None, *, distributions: bool = False
) -> Difference:
    """How far ``other`` lies from ``reference`` over the kept rows."""
    nan = float("nan")
    if reference.shape != other.shape:
        return Difference(nan, nan, nan, 0.0)
    largest = torch.zeros((), dtype=torch.float64)
    absolute = squares = equal = divergence = worst = first = 0.0
    rows = 0
    for a, b in _parts([reference, other], kept):
        rows += len(a)
        equal += int(_equal_bits(a, b).sum())
        a, b = _wide(a), _wide(b)
        # equal infinities differ by nothing, not by NaN
        delta = torch.where(a == b, 0.0, b - a).abs()
        largest = torch.maximum(largest, delta.max().cpu())  # which keeps NaN, as max() does not
        absolute += float(delta.sum())
        squares += float(delta.square().sum())
        if distributions:
            p, q = F.log_softmax(a, -1), F.log_softmax(b, -1)
            terms = torch.where(p.isinf(), 0.0, p.exp() * (p - q))
            kl = terms.sum(-1).clamp_min(0.0)  # below zero by rounding only
            divergence += float(kl.sum())
            worst = max(worst, float(kl.max()))
            first += int((a.argmax(-1) == b.argmax(-1)).sum())
    count = max(rows * reference.shape[-1], 1)
    return Difference(
        max=float(largest),
        mean=absolute / count,
        rms=(squares / count) ** 0.5,
        bit_equal=equal / count,
        kl_mean=divergence / max(rows, 1) if distributions else None,
        kl_max=worst if distributions else None,
        top1=first / max(rows, 1) if distributions else None,
    )


def _output_spread(
    unpatched: _Run,
    patched: _Run,
    truth: _Run | None,
    kept: Tensor | None,
    differences: Mapping[str, Difference | None],
) -> OutputSpread | None:
    """The histograms of the outputs, or None if there are none that can be binned."""
    if unpatched.output.shape != patched.output.shape:
        return None
    scatter = _scatter(unpatched.output, patched.output, kept)
    if scatter is None:
        return None
    sizes = [difference.rms for difference in differences.values() if difference is not None]
    reach = 4 * max(sizes)
    pairs = {"patched": (unpatched, patched)}
    if truth is not None:
        pairs |= {"unpatched_to_fp32": (truth, unpatched), "patched_to_fp32": (truth, patched)}
    if not (reach > 0 and all(map(math.isfinite, sizes))):
        return OutputSpread(scatter)
    return OutputSpread(
        scatter,
        **{name: _histogram(a.output, b.output, kept, reach) for name, (a, b) in pairs.items()},
    )


def _scatter(unpatched: Tensor, patched: Tensor, kept: Tensor | None) -> Scatter | None:
    low, high = math.inf, -math.inf
    for part in _parts([unpatched, patched], kept):
        for values in _ordinary(*part):
            if values.numel():
                low, high = min(low, float(values.min())), max(high, float(values.max()))
    if not math.isfinite(low):
        return None
    if low == high:
        low, high = low - 1 - abs(low), high + 1 + abs(high)
    bins = _SCATTER_BINS
    counts = torch.zeros(bins * bins, dtype=torch.int64)
    for part in _parts([unpatched, patched], kept):
        columns, rows = (_bin(values, low, high, bins) for values in _ordinary(*part))
        counts += torch.bincount(columns * bins + rows, minlength=bins * bins).cpu()
    cells = [
        [cell // bins, cell % bins, int(counts[cell])] for cell in counts.nonzero()[:, 0].tolist()
    ]
    return Scatter(low, high, bins, cells)


def _histogram(reference: Tensor, other: Tensor, kept: Tensor | None, reach: float) -> Histogram:
    counts = torch.zeros(_HISTOGRAM_BINS, dtype=torch.int64)
    for part in _parts([reference, other], kept):
        a, b = _ordinary(*part)
        index = _bin(b - a, -reach, reach, _HISTOGRAM_BINS)
        counts += torch.bincount(index, minlength=_HISTOGRAM_BINS).cpu()
    return Histogram(-reach, reach, counts.tolist())


def _ordinary(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """In fp64 the pairs of values that are finite in both and mask no token out."""
    used = (a.abs() <= _mask_limit(a.dtype)) & (b.abs() <= _mask_limit(b.dtype))
    return _wide(a[used]), _wide(b[used])


def _bin(values: Tensor, low: float, high: float, bins: int) -> Tensor:
    place = (values - low) * (bins / (high - low))
    return place.floor().clamp(0, bins - 1).long()


def _mask_limit(dtype: torch.dtype) -> float:
    """Values beyond it, near the dtype's own limit, are there to mask tokens out."""
    return torch.finfo(dtype).max / 2


def _largest(output: Tensor, kept: Tensor | None) -> float:
    """The largest |output| of those that mask no token out."""
    values = output if kept is None else output[kept]
    masked = values.abs() > _mask_limit(values.dtype)
    values = values.masked_fill(masked | values.isnan(), 0.0)
    return float(values.abs().max()) if values.numel() else 0.0


def _eps(subject: _Subject, output: Tensor) -> float | None:
    if not subject.full_precision:
        return None
    return max(torch.finfo(dtype).eps for dtype in subject.dtypes or {output.dtype})


def _rms(tensor: Tensor, kept: Tensor | None) -> float:
    tensor = tensor if kept is None else tensor[kept]
    return float(tensor.float().square().mean().sqrt()) if tensor.numel() else 0.0


def _block_drift(
    subject: _Subject, unpatched: _Run, patched: _Run, truth: _Run | None
) -> list[BlockDrift]:
    drift = []
    for name, hidden in unpatched.hidden.items():
        if name not in patched.hidden or not hidden.dim():
            continue
        kept = None if subject.encodes_and_decodes else subject.kept(hidden)
        size = _rms(hidden, kept) or 1.0
        difference = _difference(hidden, patched.hidden[name], kept)
        to_fp32: list[float | None] = [None, None]
        if truth is not None and name in truth.hidden:
            to_fp32 = [
                _difference(truth.hidden[name], run.hidden[name], kept).rms / size
                for run in (unpatched, patched)
            ]
        drift.append(
            BlockDrift(
                name=name,
                bit_equal=difference.bit_equal,
                max=difference.max,
                patched_to_unpatched=difference.rms / size,
                unpatched_to_fp32=to_fp32[0],
                patched_to_fp32=to_fp32[1],
            )
        )
    return drift


def _continuation(
    tokens: tuple[Tensor, int] | None, unpatched: Tensor | None, patched: Tensor | None
) -> Continuation | None:
    if tokens is None or unpatched is None or patched is None:
        return None
    row, start = tokens
    chosen = row[0, start:].to(unpatched.device)
    ours, theirs = patched.argmax(-1), unpatched.argmax(-1)
    at_chosen = [scores.gather(-1, chosen[:, None]) for scores in (unpatched, patched)]
    return Continuation(
        tokens=chosen.tolist(),
        unpatched=int((theirs == chosen).sum()),
        patched=int((ours == chosen).sum()),
        agreed=int((ours == theirs).sum()),
        max_log_probability_difference=float((at_chosen[0] - at_chosen[1]).abs().max()),
    )


def _gradient_drift(unpatched: _Run, patched: _Run, truth: _Run | None) -> list[GradientDrift]:
    drift = []
    for name, gradient in unpatched.gradients.items():
        ours = patched.gradients[name]
        if gradient is None and ours is None:
            continue
        # A gradient that only one of the two has is one that the other lost.
        theirs = torch.zeros_like(ours) if gradient is None else gradient  # type: ignore[arg-type]
        ours = torch.zeros_like(theirs) if ours is None else ours
        exact = None if truth is None else truth.gradients[name]
        if exact is None and truth is not None:
            exact = torch.zeros_like(theirs)
        flat = [None if t is None else t.reshape(1, -1) for t in (theirs, ours, exact)]
        difference = _difference(flat[0], flat[1], None)  # type: ignore[arg-type]
        to_fp32 = [
            None if flat[2] is None else _difference(flat[2], g, None).rms  # type: ignore[arg-type]
            for g in flat[:2]
        ]
        drift.append(
            GradientDrift(
                name=name,
                count=theirs.numel(),
                max=difference.max,
                bit_equal=difference.bit_equal,
                largest=float(theirs.abs().max()) if theirs.numel() else 0.0,
                unpatched_to_fp32=to_fp32[0],
                patched_to_fp32=to_fp32[1],
            )
        )
    return drift
