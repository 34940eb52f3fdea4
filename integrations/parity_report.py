# SPDX-License-Identifier: Apache-2.0
"""What `check_parity` found, the rules that it is judged by, and how it is shown.

The rules, and why they are what they are:

- A run in which no fused operator was called says nothing: "not proven", whatever the numbers.
- Below fp32, rounding noise decides every bit, so the patched model is not asked to repeat the
  unpatched one's noise. It is asked to be no further from the same model in fp32: the ratio of
  the two root-mean-square distances is at most ``RATIO_LIMIT``. A few tokens are too small a
  sample for that: at least ``MIN_TOKENS``.
- A model that is fp32 itself has no truth to measure from. There the largest difference is at
  most ``FP32_MULTIPLE`` units of fp32's eps at the largest output.
- Gradients are judged likewise: all together by `total_gradient_ratio_limit` and each parameter's
  by `gradient_ratio_limit`, which allow for chance in small samples; or in fp32 each by
  ``FP32_GRADIENT_MULTIPLE``.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from fusedops.integrations.report import PatchReport, plain_table

__all__ = [
    "FP32_GRADIENT_MULTIPLE",
    "FP32_MULTIPLE",
    "MIN_TOKENS",
    "PARAMETER_RATIO_LIMIT",
    "RATIO_LIMIT",
    "BlockDrift",
    "Continuation",
    "Difference",
    "GradientDrift",
    "Histogram",
    "OutputSpread",
    "ParityReport",
    "Scatter",
    "image_format",
    "ratio",
    "total_gradient_ratio_limit",
    "write_atomically",
]

RATIO_LIMIT = 1.05
MIN_TOKENS = 64
FP32_MULTIPLE = 64
# Gradients are sums over tokens that cancel, so rounding weighs more: in an unpatched 30-layer
# fp32 model they lie up to 140 units from those of the same model in fp64, its logits 17.
FP32_GRADIENT_MULTIPLE = 1024
# One parameter's share of the noise varies with chance where all parameters' together does not.
PARAMETER_RATIO_LIMIT = 1.25

_SHOWN_ROWS = 12

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Difference:
    """How far one run's outputs lie from another's; the KL and top-1 only between logits.

    ``kl_*`` is the divergence, in nats, of the next-token distributions; ``top1`` the share of
    positions at which both put the same token first.
    """

    max: float
    mean: float
    rms: float
    bit_equal: float
    kl_mean: float | None = None
    kl_max: float | None = None
    top1: float | None = None


@dataclass(frozen=True)
class BlockDrift:
    """The hidden states that one call of one block returned; rms values relative to their size."""

    name: str
    bit_equal: float
    max: float
    patched_to_unpatched: float
    unpatched_to_fp32: float | None
    patched_to_fp32: float | None


@dataclass(frozen=True)
class Continuation:
    """The unpatched model's greedy continuation, scored by both models with the same context.

    ``unpatched`` and ``patched`` count the positions at which each puts that token first;
    ``agreed`` those at which both put the same token first.
    """

    tokens: list[int]
    unpatched: int
    patched: int
    agreed: int
    max_log_probability_difference: float


@dataclass(frozen=True)
class GradientDrift:
    """One parameter's gradient: ``max`` and ``bit_equal`` of patched against unpatched, the
    largest unpatched value, and the rms distances of both to the fp32 model's gradient."""

    name: str
    count: int
    max: float
    bit_equal: float
    largest: float
    unpatched_to_fp32: float | None
    patched_to_fp32: float | None

    @property
    def ratio(self) -> float | None:
        return ratio(self.patched_to_fp32, self.unpatched_to_fp32)


@dataclass(frozen=True)
class Histogram:
    """How many values are in each of equal bins from ``low`` to ``high``; the outermost two also
    hold those beyond."""

    low: float
    high: float
    counts: list[int]


@dataclass(frozen=True)
class Scatter:
    """How many outputs have which pair of values in the two models.

    ``cells`` holds [unpatched, patched, count]: the first two number the ``bins`` equal bins from
    ``low`` to ``high``. Cells that are not listed are empty.
    """

    low: float
    high: float
    bins: int
    cells: list[list[int]]


@dataclass(frozen=True)
class OutputSpread:
    """Where the outputs lie, and their differences: patched from unpatched, each from fp32.

    The differences share one scale; None where there was no fp32 run, and where all are zero.
    """

    scatter: Scatter
    patched: Histogram | None = None
    unpatched_to_fp32: Histogram | None = None
    patched_to_fp32: Histogram | None = None


@dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`.

    ``print(report)`` shows a table, ``report.ok`` is whether parity is proven, ``report.verdict``
    says so in a sentence; ``to_dict``, ``to_json`` and ``plot`` carry the rest.
    """

    model: str
    dtype: str
    device: str
    output: str
    tokens: int
    largest: float
    finite: bool
    eps: float | None
    """The model's own eps where it is judged as full precision, None where it is below fp32."""
    calls: dict[str, dict[str, int]]
    """operator -> path -> calls in one forward of the patched model"""
    mismatch: str | None
    """Where the two outputs differ in shape or dtype."""
    patched: Difference
    unpatched_to_fp32: Difference | None = None
    patched_to_fp32: Difference | None = None
    blocks: Sequence[BlockDrift] = ()
    continuation: Continuation | None = None
    gradients: Sequence[GradientDrift] | None = None
    notes: Sequence[str] = ()
    """What was left out, and why."""

    no_calls_reason: str | None = None
    patch: PatchReport | None = None
    """What was patched for the comparison, with the residual adds of one forward; None for a
    model that came patched."""
    spread: OutputSpread | None = None
    """Histograms of the outputs; None where shapes differ or no output is finite."""

    @property
    def fused_calls(self) -> int:
        """Operator calls in one forward of the patched model."""
        return sum(sum(paths.values()) for paths in self.calls.values())

    @property
    def path(self) -> str:
        """``"triton"``, ``"interpreter"``, ``"reference"``, several joined by +, or ``"none"``."""
        return "+".join(sorted({path for paths in self.calls.values() for path in paths})) or "none"

    @property
    def ratio(self) -> float | None:
        """Patched rms distance to fp32 over unpatched; None without an fp32 run."""
        if self.patched_to_fp32 is None or self.unpatched_to_fp32 is None:
            return None
        return ratio(self.patched_to_fp32.rms, self.unpatched_to_fp32.rms)

    @property
    def limit(self) -> float | None:
        """The largest allowed |difference| of a full-precision model, None for other models."""
        return None if self.eps is None else FP32_MULTIPLE * self.eps * self.largest

    @property
    def first_difference(self) -> str | None:
        """The first block whose output is not bit-equal to the unpatched model's."""
        return next((block.name for block in self.blocks if block.bit_equal < 1), None)

    @property
    def outcome(self) -> str:
        """``"holds"``, ``"fails"`` or ``"not proven"``."""
        if self._doubts():
            return "not proven"
        return "fails" if self._failures() else "holds"

    @property
    def ok(self) -> bool:
        return self.outcome == "holds"

    @property
    def verdict(self) -> str:
        """The outcome with its reasons, in one line."""
        return f"parity {self.outcome}: " + "; ".join(self.reasons)

    @property
    def reasons(self) -> list[str]:
        """Why the outcome is what it is: all doubts, or all failures, or what it holds by."""
        return self._doubts() or self._failures() or [self._reason()]

    def _doubts(self) -> list[str]:
        """Why the numbers prove nothing."""
        if not self.fused_calls:
            return [f"no fused operator ran ({self.no_calls_reason})"]
        if self.mismatch is not None:
            return []
        if not self.finite:
            return ["the unpatched model's own outputs hold NaN"]
        if self.eps is not None or self.patched.bit_equal == 1:
            return []
        if self.ratio is None:
            return ["the outputs are not bit-equal and there was no fp32 run to measure from"]
        if self.tokens < MIN_TOKENS:
            return [
                f"the outputs are not bit-equal and {self.tokens} tokens are too few for the "
                f"ratio, which needs {MIN_TOKENS}"
            ]
        return []

    def _failures(self) -> list[str]:
        if self.mismatch is not None:
            return [self.mismatch]
        failures = []
        limit, measured = self.limit, self.ratio
        if limit is not None:
            if not self.patched.max <= limit:
                failures.append(f"max |Δ| {self.patched.max:.3g} is above {limit:.3g}")
        elif measured is not None and not measured <= RATIO_LIMIT:
            failures.append(
                f"the patched model is {measured:.3f} times as far from fp32 as the unpatched "
                f"one, more than {RATIO_LIMIT}"
            )
        return failures + self._gradient_failures()

    def _reason(self) -> str:
        through = f"{self.fused_calls} fused calls through {self.path}, "
        if self.patched.bit_equal == 1:
            return through + f"all {self.output} bit-equal"
        if self.eps is not None:
            return through + f"max |Δ| {self.patched.max:.3g} of {self.limit:.3g}"
        return through + f"distance to fp32 {self.ratio:.3f} times the unpatched one's"

    @property
    def gradient_ratio(self) -> float | None:
        """`ratio` over the gradients of all parameters together."""
        if not self.gradients or self.gradients[0].ratio is None:
            return None
        return ratio(
            *(
                math.sqrt(sum(g.count * getattr(g, side) ** 2 for g in self.gradients))
                for side in ("patched_to_fp32", "unpatched_to_fp32")
            )
        )

    def worst_gradients(self, count: int) -> list[GradientDrift]:
        """The ``count`` gradients that are furthest off, by ratio, or by difference where there
        is none."""
        return sorted(self.gradients or (), key=_badness, reverse=True)[:count]

    def _gradient_failures(self) -> list[str]:
        gradients = self.gradients or ()
        failures = []
        if self.eps is not None:
            # Some gradients are zero but for rounding (a bias on attention's keys): they are
            # judged at the size that gradients have in this model.
            typical = median(g.largest for g in gradients) if gradients else 0.0
            for g in gradients:
                limit = FP32_GRADIENT_MULTIPLE * self.eps * max(g.largest, typical)
                if not g.max <= limit:
                    failures.append(f"gradient of {g.name}: max |Δ| {g.max:.3g} > {limit:.3g}")
        else:
            total = self.gradient_ratio
            limit = total_gradient_ratio_limit(self.tokens)
            if total is not None and not total <= limit:
                failures.append(
                    f"gradients are {total:.3f} times as far from fp32, more than {limit:.3f}"
                )
            for g in gradients:
                if g.ratio is not None and not g.ratio <= gradient_ratio_limit(g.count):
                    failures.append(f"the gradient of {g.name} is {g.ratio:.3f} times as far")
        left_out = len(failures) - _SHOWN_ROWS
        more = [f"and {left_out} more of the kind"] if left_out > 0 else []
        return failures[:_SHOWN_ROWS] + more

    # --- how it is shown -----------------------------------------------------------------------

    def __str__(self) -> str:
        parts = [self._title(), self._output_table()]
        if self.continuation is not None:
            parts.append(self._continuation_text())
        if self.blocks:
            parts.append(self._block_table())
        if self.gradients:
            parts.append(self._gradient_table())
        if self.notes:
            parts.append("\n".join(f"note: {note}" for note in self.notes))
        parts.append(self.verdict)
        return "\n\n".join(parts)

    def _title(self) -> str:
        calls = ", ".join(
            f"{operator} {count}" + (f" ({path})" if "+" in self.path else "")
            for operator, paths in self.calls.items()
            for path, count in paths.items()
        )
        return (
            f"{self.model} in {self.dtype} on {self.device}, {self.tokens} tokens\n"
            f"path: {self.path}, fused calls in a forward: {self.fused_calls}"
            + (f" ({calls})" if calls else "")
        )

    def _output_table(self) -> str:
        columns = [("patched - unpatched", self.patched)]
        if self.unpatched_to_fp32 is not None and self.patched_to_fp32 is not None:
            columns += [
                ("unpatched - fp32", self.unpatched_to_fp32),
                ("patched - fp32", self.patched_to_fp32),
            ]
        labels = [
            (f"max |Δ {self.output}|", "max", ".3g"),
            (f"mean |Δ {self.output}|", "mean", ".3g"),
            (f"rms Δ {self.output}", "rms", ".3g"),
            ("bit-equal", "bit_equal", ".2%"),
            ("KL, mean (nats)", "kl_mean", ".3g"),
            ("KL, max (nats)", "kl_max", ".3g"),
            ("top-1 agreement", "top1", ".2%"),
        ]
        rows = [
            [label, *(format(getattr(column, field), form) for _, column in columns)]
            for label, field, form in labels
            if getattr(self.patched, field) is not None
        ]
        table = plain_table(["", *(name for name, _ in columns)], rows)
        if self.ratio is not None:
            table += (
                f"\nrms distance to fp32, patched / unpatched: {self.ratio:.4f}"
                f" (at most {RATIO_LIMIT})"
            )
        if self.eps is not None:
            table += (
                f"\nlargest |{self.output}| {self.largest:.4g}; max |Δ| may be "
                f"{FP32_MULTIPLE} x eps x that: {self.limit:.3g}"
            )
        return table

    def _continuation_text(self) -> str:
        c = self.continuation
        assert c is not None
        total = len(c.tokens)
        return (
            f"greedy continuation of the first sequence, {total} tokens, teacher-forced: "
            f"unpatched puts {c.unpatched} first, patched {c.patched}; same choice at {c.agreed}; "
            f"max |Δ log p| {c.max_log_probability_difference:.3g}"
        )

    def _block_table(self) -> str:
        shown = _spread(self.blocks, _SHOWN_ROWS)
        with_fp32 = self.blocks[0].unpatched_to_fp32 is not None
        rows = [
            [
                block.name,
                f"{block.bit_equal:.2%}",
                f"{block.max:.3g}",
                f"{block.patched_to_unpatched:.2e}",
                *([f"{block.unpatched_to_fp32:.2e}"] if with_fp32 else []),
                *([f"{block.patched_to_fp32:.2e}"] if with_fp32 else []),
            ]
            for block in shown
        ]
        headers = ["after block", "bit-equal", "max |Δ|", "rms Δ / rms"]
        headers += ["unpatched - fp32", "patched - fp32"] if with_fp32 else []
        left_out = len(self.blocks) - len(shown)
        return (
            f"first block to differ: {self.first_difference or 'none'}\n"
            + plain_table(headers, rows)
            + (f"\n({left_out} blocks between are not shown)" if left_out else "")
        )

    def _gradient_table(self) -> str:
        gradients = self.gradients or ()
        worst = self.worst_gradients(_SHOWN_ROWS // 2)
        with_fp32 = gradients[0].ratio is not None
        rows = [
            [
                g.name,
                f"{g.bit_equal:.2%}",
                f"{g.max:.3g}",
                f"{g.largest:.3g}",
                *([f"{g.ratio:.4f}"] if with_fp32 else []),
            ]
            for g in worst
        ]
        headers = ["gradient of", "bit-equal", "max |Δ|", "max |g|"]
        headers += ["distance ratio"] if with_fp32 else []
        total, limit = self.gradient_ratio, total_gradient_ratio_limit(self.tokens)
        return (
            f"gradients of {len(gradients)} parameters"
            + (
                f", distance to fp32, patched / unpatched: {total:.4f} (at most {limit:.3f})"
                if total
                else ""
            )
            + f"; the {len(worst)} furthest apart:\n"
            + plain_table(headers, rows)
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report as plain JSON values; NaN and infinities as strings."""
        derived = {
            "ok": self.ok,
            "outcome": self.outcome,
            "verdict": self.verdict,
            "path": self.path,
            "fused_calls": self.fused_calls,
            "ratio": self.ratio,
            "ratio_limit": RATIO_LIMIT,
            "fp32_limit": self.limit,
            "first_difference": self.first_difference,
            "gradient_ratio": self.gradient_ratio,
            "gradient_ratio_limit": total_gradient_ratio_limit(self.tokens),
        }
        found = asdict(replace(self, patch=None))
        found["patch"] = None if self.patch is None else self.patch.to_dict()
        if self.gradients is not None:
            for entry, gradient in zip(found["gradients"], self.gradients, strict=True):
                entry["ratio"] = gradient.ratio
        plain: dict[str, Any] = _plain(derived | found)
        return plain

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "ParityReport":
        """The inverse of `to_dict`; what follows from the rest is worked out anew."""

        def one(kind: type[Any], name: str) -> Any:
            value = found.get(name)
            return None if value is None else _revived(kind, value)

        def several(kind: type[Any], name: str) -> Any:
            value = found.get(name)
            return None if value is None else [_revived(kind, item) for item in value]

        spread, patch = found.get("spread"), found.get("patch")
        if spread is not None:
            histograms = {
                name: _revived(Histogram, part)
                for name, part in spread.items()
                if name != "scatter" and part is not None
            }
            spread = OutputSpread(_revived(Scatter, spread["scatter"]), **histograms)
        made = {
            "patched": one(Difference, "patched"),
            "unpatched_to_fp32": one(Difference, "unpatched_to_fp32"),
            "patched_to_fp32": one(Difference, "patched_to_fp32"),
            "blocks": several(BlockDrift, "blocks"),
            "continuation": one(Continuation, "continuation"),
            "gradients": several(GradientDrift, "gradients"),
            "patch": None if patch is None else PatchReport.from_dict(patch),
            "spread": spread,
        }
        return _revived(cls, {**found, **made})

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` to ``path``; the file is replaced whole or not at all."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        write_atomically(path, lambda file: Path(file).write_text(text))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Save the drift by depth as an image; the suffix picks the format.

        Needs matplotlib (``fusedops[cli]``). ValueError for a report without blocks and for a
        suffix that matplotlib cannot write.
        """
        from matplotlib.figure import Figure

        if not self.blocks:
            raise ValueError("report: expected one with blocks to plot, this one has none")
        suffix = image_format(path)
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        depth = range(1, len(self.blocks) + 1)
        lines: list[tuple[str, list[float | None]]] = [
            ("patched - unpatched", [b.patched_to_unpatched for b in self.blocks]),
            ("unpatched - fp32", [b.unpatched_to_fp32 for b in self.blocks]),
            ("patched - fp32", [b.patched_to_fp32 for b in self.blocks]),
        ]
        drawn = [
            (label, [value for value in values if value is not None])
            for label, values in lines
            if None not in values
        ]
        for (label, values), style in zip(drawn, ("o-", "s-", "x--"), strict=False):
            axes.plot(depth, values, style, label=label, markersize=4)
        if any(value for _, values in drawn for value in values):
            smallest = min(v for _, values in drawn for v in values if v)
            # Zero, that is bit-equal, has its place below the smallest difference there is.
            axes.set_yscale("symlog", linthresh=smallest)
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("block")
        axes.set_ylabel("rms difference / rms of the hidden states")
        axes.set_title(f"{self.model}, {self.dtype}, {self.tokens} tokens, path: {self.path}")
        axes.legend()
        axes.grid(visible=True, alpha=0.3)
        write_atomically(path, lambda file: figure.savefig(file, format=suffix, dpi=150))


def ratio(patched: float | None, unpatched: float | None) -> float | None:
    """patched / unpatched; 1 where both are 0, None where either is unknown."""
    if patched is None or unpatched is None:
        return None
    if patched == unpatched:
        return 1.0
    return patched / unpatched if unpatched else math.inf


def gradient_ratio_limit(count: int) -> float:
    """The largest distance ratio of one parameter's gradient of ``count`` elements.

    Two rms values of ``count`` independent errors each differ by chance, by about
    ``1 / sqrt(count)`` of their size; a small vector is allowed four times that on top.
    """
    return PARAMETER_RATIO_LIMIT + 4 / math.sqrt(max(count, 1))


def total_gradient_ratio_limit(tokens: int) -> float:
    """The largest distance ratio of all gradients together, for a loss over ``tokens`` tokens.

    The elements of a gradient are no independent samples of the noise: each is a sum over the same
    tokens, and the rounding of one token's activations moves all of them at once. Tokens are
    independent, so the ratio of two rms values differs from its mean by at most about
    ``1 / sqrt(tokens)`` of itself, as of that many samples each. (Three-layer random models of 64
    tokens have a standard deviation of 0.6 of that, wider ones less.) ``RATIO_LIMIT`` holds for
    many tokens; few are allowed one and a half times the deviation on top.
    """
    return RATIO_LIMIT + 1.5 / math.sqrt(max(tokens, 1))


def image_format(path: str | os.PathLike[str]) -> str:
    """The format that ``path``'s suffix names; ValueError if matplotlib cannot write it."""
    from matplotlib.backend_bases import FigureCanvasBase

    suffix = Path(path).suffix.lower().lstrip(".")
    supported = FigureCanvasBase.get_supported_filetypes()
    if suffix not in supported:
        raise ValueError(
            f"path: expected a name that ends in one of {', '.join(sorted(supported))}, got {path}"
        )
    return suffix


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[str], object] | None = None
) -> None:
    """Have ``write`` fill a new file and put it in ``path``'s place; no half-written file stays.

    Without ``write`` nothing is written, and OSError tells that nothing could be.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder, expected a file to write")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no folder, so {target.name} cannot be in it")
    if target.exists() and not target.is_file():  # a device or a pipe must not be replaced
        if write is not None:
            write(str(target))
        return
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        if write is not None:
            write(temporary)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _badness(gradient: GradientDrift) -> float:
    if gradient.ratio is not None:
        return gradient.ratio
    return gradient.max / gradient.largest if gradient.largest else gradient.max


def _spread(rows: Sequence[BlockDrift], count: int) -> list[BlockDrift]:
    """At most ``count`` of them, the first and the last included, evenly apart."""
    if len(rows) <= count:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def _revived(kind: type[_Made], found: Mapping[str, Any]) -> _Made:
    """The dataclass that ``found`` describes, with numbers where `_plain` made them strings."""
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in found:
            value = found[field.name]
            is_number = field.type in (float, float | None) and value is not None
            values[field.name] = float(value) if is_number else value
    return kind(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
