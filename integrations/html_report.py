# SPDX-License-Identifier: Apache-2.0
"""What `fusedops compare --html` writes: the whole comparison as one page that loads nothing.

The page is made of what ``--json`` holds, and of nothing else. This module rounds figures and
places bars, lines and squares; `html_report.jinja` and `html_report.css` beside it say what they
look like. Names and reasons come from models and are escaped.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from fusedops.integrations.parity_report import (
    FP32_GRADIENT_MULTIPLE,
    FP32_MULTIPLE,
    MIN_TOKENS,
    RATIO_LIMIT,
    Histogram,
    ParityReport,
    Scatter,
    total_gradient_ratio_limit,
)
from fusedops.integrations.timing import COPIES, OTHER
from fusedops.integrations.timing_report import LABELS, KernelTime, TimingReport, TimingRow

__all__ = ["render"]

_WIDTH, _HEIGHT = 1000.0, 500.0  # of a chart, in the units of its paths; CSS stretches it
_HALVES = ("train forward", "train backward")
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SHOWN_GRADIENTS = 12
# Kinds of kernels as they are shown: what patching leaves as it is comes first.
_SHOWN_KINDS = ("matmul", "attention", "norm", "add", "elementwise", COPIES, OTHER)


def render(found: Mapping[str, Any]) -> str:
    """The page, as the text of an HTML file.

    ``found`` is what `fusedops compare --json` writes: `ParityReport.to_dict`, with "source",
    "batch", "sequence_length", "seed", "date", "command", "continuation_text" and "environment"
    beside it and, where models were timed, `TimingReport.to_dict` as "timing".
    """
    report = ParityReport.from_dict(found)
    timing = TimingReport.from_dict(found["timing"]) if found.get("timing") else None
    page = _template().render(
        found=found,
        date=datetime.fromisoformat(found["date"]),
        report=report,
        timing=timing,
        limits={
            "ratio": RATIO_LIMIT,
            "tokens": MIN_TOKENS,
            "fp32": FP32_MULTIPLE,
            "gradients": total_gradient_ratio_limit(report.tokens),
            "fp32_gradients": FP32_GRADIENT_MULTIPLE,
        },
        headline=_headline(timing),
        cases=_cases(timing),
        elsewhere=[] if timing is None else [row for row in timing.rows if row.own_process],
        distances=_distances(report),
        drift=_drift(report),
        scatter=None if report.spread is None else _scatter(report.spread.scatter),
        histograms=_histograms(report),
        gradients=report.worst_gradients(_SHOWN_GRADIENTS),
        norms=_norms(report),
        adds=_adds(report),
        profiles=_profiles(timing),
        kinds=_SHOWN_KINDS,
        facts=_facts(found, report),
        versions={k: v for k, v in found["environment"]["packages"].items() if v},
    )
    return page.lstrip()


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ms": _ms,
        "times": _times,
        "number": _number,
        "share": _share,
        "gib": _gib,
    }
    environment.globals["label"] = lambda name: LABELS.get(name, name)
    return environment.get_template("html_report.jinja")


# --- figures -----------------------------------------------------------------------------------


def _ms(value: float) -> str:
    """Four digits, never an exponent.

    >>> [_ms(value) for value in (0.05, 12.3456, 12345.6)]
    ['0.0500', '12.35', '12,346']
    """
    digits = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{min(max(digits, 0), 4)}f}"


def _number(value: float | None) -> str:
    """Three digits; very large and very small ones with a power of ten.

    >>> [_number(value) for value in (0.032, -123.4, 2.5e-07, 0.0, None)]
    ['0.0320', '−123', '2.50 × 10⁻⁷', '0', '–']
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'−' if value < 0 else ''}∞"
    if value == 0:
        return "0"
    sign, value = "−" if value < 0 else "", abs(value)
    if 1e-3 <= value < 1e6:
        return sign + (f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}")
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{sign}{mantissa} × 10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def _share(value: float | None) -> str:
    """Per cent; nothing but all of them is 100, and nothing but none of them 0.

    >>> [_share(value) for value in (1.0, 0.999999, 0.25, 1e-9)]
    ['100 %', '> 99.99 %', '25.00 %', '< 0.01 %']
    """
    if value is None:
        return "–"
    if value in (0.0, 1.0):
        return f"{100 * value:.0f} %"
    if 0 < value < 1:
        if value > 0.9999:
            return "> 99.99 %"
        if value < 0.0001:
            return "< 0.01 %"
    return f"{100 * value:.2f} %"


def _times(title: str) -> str:
    """A case's title with the sign of multiplication between its two sizes."""
    return title.replace(" x ", " × ")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


# --- bars --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """``width`` and ``mark``, a tick on the bar, in per cent; ``kind`` names the colour."""

    label: str
    kind: str
    width: float
    text: str
    aside: str = ""
    small: str = ""
    mark: float | None = None


@dataclass(frozen=True)
class Group:
    """Bars of one scale under a title."""

    title: str
    bars: Sequence[Bar]
    rows: Sequence[Any] = field(default=())


def _per_cent(part: float, whole: float) -> float:
    if not (math.isfinite(part) and math.isfinite(whole) and whole > 0):
        return 0.0
    return round(100 * part / whole, 2)


def _grouped(rows: Iterable[Any]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row.title, []).append(row)
    return groups


def _headline(timing: TimingReport | None) -> list[TimingRow]:
    """The full fusion's rows that say something of a GPU, without the halves of training steps."""
    rows = [] if timing is None else timing.rows
    return [
        row
        for row in rows
        if row.contestant == "fused" and row.path == "triton" and row.measure not in _HALVES
    ]


def _cases(timing: TimingReport | None) -> list[Group]:
    groups = []
    for title, rows in _grouped([] if timing is None else timing.rows).items():
        scaled = [(row, _scale(row, rows)) for row in rows]
        slowest = max(row.median_ms * scale for row, scale in scaled)
        bars = [_speed_bar(row, slowest / scale) for row, scale in scaled]
        groups.append(Group(_times(title), bars, rows))
    return groups


def _scale(row: TimingRow, rows: Sequence[TimingRow]) -> float:
    """What a time of another process is multiplied by to lie beside those of this one.

    Machines drift between processes: there, too, the unpatched model was timed.
    """
    here = [other.median_ms for other in rows if other.contestant == "unpatched"]
    return here[0] / row.unpatched_ms if row.own_process and here else 1.0


def _speed_bar(row: TimingRow, slowest: float) -> Bar:
    """``slowest``: the milliseconds that fill the track."""
    small = [f"{row.tokens_per_second:,.0f} tokens/s", f"min {_ms(row.min_ms)} ms"]
    if row.kernels is not None:
        small.append(f"{row.kernels:,} kernels")
    if row.peak_memory is not None:
        small.append(f"{_gib(row.peak_memory)} peak")
    return Bar(
        LABELS.get(row.contestant, row.contestant),
        row.contestant if row.contestant in LABELS else "other",
        _per_cent(row.median_ms, slowest),
        f"{_ms(row.median_ms)} ms",
        "" if row.contestant == "unpatched" else f"×{row.ratio:.3f}",
        " · ".join(small),
        _per_cent(row.min_ms, slowest),
    )


def _distances(report: ParityReport) -> list[Group]:
    """Distance to fp32, unpatched beside patched, by three ways of measuring it."""
    pair = {"unpatched": report.unpatched_to_fp32, "fused": report.patched_to_fp32}
    groups = []
    for name, title in (("rms", "root mean square"), ("mean", "mean"), ("max", "largest")):
        values = {kind: getattr(found, name) for kind, found in pair.items() if found is not None}
        if len(values) == 2:
            most = max(values.values())
            bars = [
                Bar(label, kind, _per_cent(values[kind], most), _number(values[kind]))
                for kind, label in (("unpatched", "unpatched"), ("fused", "patched"))
            ]
            groups.append(Group(title, bars))
    return groups


# --- charts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """A label at ``place`` per cent from the left or from the bottom."""

    place: float
    label: str


@dataclass(frozen=True)
class Line:
    """One series: ``path`` through its points, and ``dots`` on them."""

    label: str
    kind: str
    path: str
    dots: str = ""


@dataclass(frozen=True)
class Chart:
    lines: Sequence[Line]
    across: Sequence[Tick]
    up: Sequence[Tick]


def _drift(report: ParityReport) -> Chart | None:
    """Relative differences of the hidden states over depth, on a logarithmic scale.

    A line of its own below the smallest power of ten is for zero, that is for bit-equal states.
    """
    blocks = report.blocks
    series: list[tuple[str, str, list[float | None]]] = [
        ("unpatched to fp32", "unpatched", [b.unpatched_to_fp32 for b in blocks]),
        ("patched to fp32", "fused", [b.patched_to_fp32 for b in blocks]),
        ("patched to unpatched", "between", [b.patched_to_unpatched for b in blocks]),
    ]
    values = [v for _, _, vs in series for v in vs if v is not None and math.isfinite(v)]
    if not values:
        return None
    above = [math.log10(value) for value in values if value > 0]
    low = math.floor(min(above, default=0.0))
    high = max(math.ceil(max(above, default=0.0)), low + 1)
    bottom = low - (high - low) * 0.15 if 0.0 in values else float(low)

    def up(value: float) -> float:
        place = bottom if value == 0 else math.log10(value)
        return 100 * (place - bottom) / (high - bottom)

    def across(index: int) -> float:
        return 50.0 if len(blocks) == 1 else 100 * index / (len(blocks) - 1)

    lines = []
    for label, kind, numbers in series:
        points = [
            (across(index), up(value)) if value is not None and math.isfinite(value) else None
            for index, value in enumerate(numbers)
        ]
        if any(points):
            lines.append(Line(label, kind, _path(points), _dots(points)))
    step = max(1, math.ceil((high - low) / 5))
    ticks = [Tick(up(10.0**e), f"10{str(e).translate(_SUPERSCRIPTS)}" if e else "1")
             for e in range(low, high + 1, step)]  # fmt: skip
    if 0.0 in values:
        ticks.insert(0, Tick(0.0, "0"))
    shown = sorted({round(i * (len(blocks) - 1) / 7) for i in range(8)})
    return Chart(lines, [Tick(across(i), str(i + 1)) for i in shown], ticks)


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """Lines between neighbouring points that both exist."""
    parts, connected = [], False
    for point in points:
        if point is not None:
            parts.append(("L" if connected else "M") + _place(point))
        connected = point is not None
    return " ".join(parts)


def _dots(points: Iterable[tuple[float, float] | None]) -> str:
    """Lines without length, which a round cap makes dots however the chart is stretched."""
    return " ".join(f"M{_place(point)} h0.01" for point in points if point is not None)


def _place(point: tuple[float, float]) -> str:
    """A point in per cent from the left and from the bottom, in the units of paths."""
    return f"{point[0] * _WIDTH / 100:.1f} {(100 - point[1]) * _HEIGHT / 100:.1f}"


def _histograms(report: ParityReport) -> list[tuple[str, Chart]]:
    """Differences of the outputs: both models from fp32, and one from the other."""
    spread = report.spread
    if spread is None:
        return []
    wanted = (
        (
            "from fp32",
            (
                ("unpatched − fp32", "unpatched", spread.unpatched_to_fp32),
                ("patched − fp32", "fused", spread.patched_to_fp32),
            ),
        ),
        ("from each other", (("patched − unpatched", "between", spread.patched),)),
    )
    charts = []
    for title, series in wanted:
        present = [(label, kind, found) for label, kind, found in series if found is not None]
        if present:
            most = max(max(found.counts) for _, _, found in present) or 1
            total = sum(present[0][2].counts) or 1
            lines = [Line(label, kind, _steps(found, most)) for label, kind, found in present]
            first = present[0][2]
            ticks = [
                Tick(0.0, _number(first.low)),
                Tick(50.0, "0"),
                Tick(100.0, _number(first.high)),
            ]
            charts.append((title, Chart(lines, ticks, [Tick(100.0, _share(most / total))])))
    return charts


def _steps(histogram: Histogram, most: int) -> str:
    """The outline of the bins, closed along the bottom."""
    width = 100 / len(histogram.counts)
    points = [(0.0, 0.0)]
    for index, count in enumerate(histogram.counts):
        height = 100 * count / most
        points += [(index * width, height), ((index + 1) * width, height)]
    return _path([*points, (100.0, 0.0)]) + " Z"


def _scatter(scatter: Scatter) -> dict[str, Any]:
    """Squares with an opacity by the logarithm of their count, numbered from the top left."""
    most = max(count for _, _, count in scatter.cells)
    squares = [
        {
            "x": column,
            "y": scatter.bins - 1 - row,
            "opacity": round(0.25 + 0.75 * math.log1p(count) / math.log1p(most), 3),
        }
        for column, row, count in scatter.cells
    ]
    total = sum(count for _, _, count in scatter.cells)
    equal = sum(count for column, row, count in scatter.cells if column == row)
    return {
        "bins": scatter.bins,
        "squares": squares,
        "low": _number(scatter.low),
        "high": _number(scatter.high),
        "total": total,
        "diagonal": equal / total,
    }


# --- what was patched --------------------------------------------------------------------------


def _norms(report: ParityReport) -> list[tuple[str, int, str]]:
    """Class, number and treatment; those that differ in proven dtypes alone become one."""
    counts: dict[tuple[str, str], int] = {}
    for row in () if report.patch is None else report.patch.norms:
        key = row.norm_class, row.describe()
        counts[key] = counts.get(key, 0) + row.count
    return [(norm_class, count, now) for (norm_class, now), count in counts.items()]


def _adds(report: ParityReport) -> list[dict[str, Any]]:
    """For each class of block the adds, and the parts of its bar in per cent."""
    found = []
    for row in () if report.patch is None else report.patch.fused:
        total = row.inside + row.across + row.plain
        parts = [
            {"kind": kind, "count": count, "width": _per_cent(count, total)}
            for kind, count in (
                ("inside", row.inside), ("across", row.across), ("plain", row.plain),
            )
        ]  # fmt: skip
        found.append({"row": row, "parts": parts, "total": total})
    return found


# --- GPU time by kind --------------------------------------------------------------------------


def _profiles(timing: TimingReport | None) -> list[dict[str, Any]]:
    """For each case and kind what the unpatched and the fused model spend, and stacked bars."""
    found = []
    parts: Iterable[KernelTime] = [] if timing is None else timing.profile
    for title, rows in _grouped(parts).items():
        by_side = {
            side: {row.kind: row for row in rows if row.contestant == side}
            for side in ("unpatched", "fused")
        }
        if not all(by_side.values()):
            continue
        totals = {
            side: (sum(row.kernels for row in kinds.values()),
                   sum(row.gpu_ms for row in kinds.values()))
            for side, kinds in by_side.items()
        }  # fmt: skip
        most = max(spent for _, spent in totals.values())
        kinds = [kind for kind in _SHOWN_KINDS if any(kind in seen for seen in by_side.values())]
        lines = []
        for kind in kinds:
            cells = []
            for seen in by_side.values():
                row = seen.get(kind)
                cells += [row.kernels, row.gpu_ms] if row else [0, 0.0]
            lines.append((kind, *cells))
        bars = [
            {
                "label": label,
                "kernels": totals[side][0],
                "total": totals[side][1],
                "parts": [
                    {"kind": kind, "width": _per_cent(by_side[side][kind].gpu_ms, most)}
                    for kind in kinds
                    if kind in by_side[side]
                ],
            }
            for side, label in (("unpatched", "unpatched"), ("fused", "full fusion"))
        ]
        total = ("all", *totals["unpatched"], *totals["fused"])
        found.append(
            {"title": _times(title), "kinds": kinds, "lines": [*lines, total], "bars": bars}
        )
    return found


# --- where and how -----------------------------------------------------------------------------


def _facts(found: Mapping[str, Any], report: ParityReport) -> list[tuple[str, str]]:
    """What a reader needs in order to repeat it."""
    environment = found["environment"]
    gpus = [
        f"{gpu['name']}, {gpu['memory'] / 2**30:.0f} GiB, compute capability {gpu['capability']}"
        for gpu in environment["gpus"]
    ]
    facts: list[tuple[str, str | None]] = [
        ("Model", found["source"]),
        ("Dtype and device", f"{report.dtype} on {report.device}"),
        ("Compared on", f"{found['batch']} × {found['sequence_length']} tokens"),
        ("Seed", f"{found['seed']}, of every run, of random weights and of timed token ids"),
        *(("GPU", gpu) for gpu in gpus),
        ("GPU", None if gpus else f"none usable: {environment['no_gpu']}"),
        ("Driver", environment["driver"]),
        ("CUDA", environment["cuda"]),
        ("HIP", environment["hip"]),
        ("fusedops", environment["fusedops"]),
        ("Commit", environment["commit"]),
        ("Python", f"{environment['python']} on {environment['platform']}"),
        *((f"{name}", value) for name, value in environment["switches"].items()),
        ("Command", found["command"]),
    ]
    return [(name, value) for name, value in facts if value]
