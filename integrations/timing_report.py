# SPDX-License-Identifier: Apache-2.0
"""What `fusedops.integrations.timing` measured, as rows, as a table and as JSON values."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from fusedops.integrations.report import plain_table

__all__ = ["LABELS", "Case", "KernelTime", "TimingReport", "TimingRow"]

LABELS = {
    "unpatched": "unpatched",
    "norms": "norms only",
    "fused": "full fusion",
    "compile": "torch.compile",
    "liger": "Liger's norms",
}


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    ``measure`` is "decode" (one step with a cache), "prefill" (one forward without gradients),
    "train" (a forward and its backward), "train forward" or "train backward" (the halves by
    themselves); ``sequences`` x ``tokens`` is what one call of the model is given.
    """

    measure: str
    sequences: int
    tokens: int

    @property
    def title(self) -> str:
        shape = f"{self.sequences} x {self.tokens}"
        return f"{self.measure}, {shape} token{'s' if self.tokens > 1 else ''}"

    @property
    def trains(self) -> bool:
        """Whether gradients are recorded, in training mode."""
        return self.measure.startswith("train")


@dataclass(frozen=True)
class TimingRow(Case):
    """One contestant in one case. Times are wall times up to a synchronise, in milliseconds.

    ``ratio`` is the median, over ``rounds``, of the unpatched model's time divided by this one's
    in the same round; ``best_ratio`` that of the smallest times. Both compare within one process:
    ``unpatched_ms`` is the unpatched model's median in it, and ``own_process`` says that it was
    another than the other rows'. ``kernels`` counts the GPU kernels of one call and ``peak_memory``
    is in bytes, both None where they were not measured. ``fused_calls`` counts fusedops' operators
    in one call, ``path`` is the way that they took.
    """

    contestant: str
    median_ms: float
    min_ms: float
    unpatched_ms: float
    ratio: float
    best_ratio: float
    rounds: int
    kernels: int | None = None
    peak_memory: int | None = None
    fused_calls: int = 0
    path: str = "none"
    own_process: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences together, by the median time."""
        return self.sequences * self.tokens / self.median_ms * 1e3


@dataclass(frozen=True)
class KernelTime(Case):
    """The GPU kernels of one kind in one call of one contestant: how many, and their time together.

    The kinds are those of `fusedops.integrations.timing.KINDS`. Where kernels overlap, the time
    counts once, for the one that began first.
    """

    contestant: str
    kind: str
    kernels: int
    gpu_ms: float


_COLUMNS: tuple[tuple[str, Callable[[TimingRow], str | None]], ...] = (
    ("ms", lambda row: f"{row.median_ms:.3f}"),
    ("min ms", lambda row: f"{row.min_ms:.3f}"),
    ("tokens/s", lambda row: f"{row.tokens_per_second:,.0f}"),
    ("speed", lambda row: f"x{row.ratio:.3f}"),
    ("by min", lambda row: f"x{row.best_ratio:.3f}"),
    ("fused", lambda row: str(row.fused_calls)),
    ("kernels", lambda row: None if row.kernels is None else str(row.kernels)),
    ("GiB", lambda row: None if row.peak_memory is None else f"{row.peak_memory / 2**30:.2f}"),
)
_LEGEND = (
    "ms: the median; speed: the unpatched model's time over this one's in the same round, the "
    "median of all rounds; by min: that of the smallest times; fused: calls of fusedops' operators"
)
_GPU_LEGEND = "kernels: on the GPU, in one call; GiB: the most memory allocated during one"


@dataclass
class TimingReport:
    """The rows of a timing, filled as they are measured. Printing it gives a table.

    ``profile`` is what torch's profiler saw of one call of each contestant, on CUDA only. ``notes``
    say what was left out and why; ``interrupted`` that it was ended early.
    """

    model: str
    dtype: str
    device: str
    seconds: float
    rows: list[TimingRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    profile: list[KernelTime] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def profile_of(self, row: TimingRow) -> list[KernelTime]:
        """What of ``profile`` is of the contestant and the case of ``row``."""
        key = (row.measure, row.sequences, row.tokens, row.contestant)
        return [
            part
            for part in self.profile
            if (part.measure, part.sequences, part.tokens, part.contestant) == key
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, tokens a second included."""
        rows = [asdict(row) | {"tokens_per_second": row.tokens_per_second} for row in self.rows]
        return asdict(self) | {"rows": rows}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "TimingReport":
        """The inverse of `to_dict`."""
        rows = [
            TimingRow(**{key: value for key, value in row.items() if key != "tokens_per_second"})
            for row in found["rows"]
        ]
        profile = [KernelTime(**row) for row in found["profile"]]
        return cls(**found | {"rows": rows, "profile": profile})

    def __str__(self) -> str:
        table = plain_table(*self._table()) if self.rows else "nothing was measured"
        return "\n".join([self._title(), table, *self._remarks()])

    def __rich__(self) -> Any:
        """The same for a rich console; 80 columns are enough."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        if not self.rows:
            return Text(str(self))
        headers, rows = self._table()
        table = Table(box=SIMPLE_HEAD, padding=0)
        for place, header in enumerate(headers):
            table.add_column(header.strip(), justify="right" if place else "left")
        for first, *cells in rows:
            style = "" if any(cells) else "bold"
            # Text, since square brackets are no markup here.
            table.add_row(Text(first.replace(", ", ",\n")), *map(Text, cells), style=style)
        return Group(Text(self._title()), table, *map(Text, self._remarks()))

    def _title(self) -> str:
        return f"speed of {self.model} in {self.dtype} on {self.device}"

    def _remarks(self) -> list[str]:
        remarks = [_LEGEND] if self.rows else []
        if any(row.kernels is not None for row in self.rows):
            remarks.append(_GPU_LEGEND)
        for row in self.rows:
            if row.own_process:
                remarks.append(
                    f"{row.title}: {LABELS[row.contestant]} ran in a process of its own, where "
                    f"the unpatched model took {row.unpatched_ms:.3f} ms; speed is against that"
                )
        remarks += [f"note: {note}" for note in self.notes]
        if self.interrupted:
            remarks.append("interrupted: this is what was done until then")
        return remarks

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows of cells: under the title of each case its contestants."""
        groups: dict[str, list[TimingRow]] = {}
        for row in self.rows:
            groups.setdefault(row.title, []).append(row)
        first: list[str] = []
        lines: list[TimingRow | None] = []
        for title, group in groups.items():
            first += [title, *(f"  {LABELS.get(r.contestant, r.contestant)}" for r in group)]
            lines += [None, *group]
        columns = {"": first}
        for header, cell in _COLUMNS:
            found = [None if row is None else cell(row) for row in lines]
            if any(text is not None for text in found):
                texts = [
                    "" if row is None else text or "-"
                    for row, text in zip(lines, found, strict=True)
                ]
                width = max(map(len, [header, *texts]))
                columns[header.rjust(width)] = [text.rjust(width) if text else "" for text in texts]
        return list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)]
