# SPDX-License-Identifier: Apache-2.0
"""What `patch` did, as data and as a table of plain text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fusedops.integrations.stream import BlockState

__all__ = ["FusedRow", "NormRow", "PatchReport", "plain_table"]


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lines of left-aligned columns, numbers to the right.

    >>> print(plain_table(["norm", "n"], [["LayerNorm", 25]]))
    norm        n
    LayerNorm  25
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    numeric = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        for i in range(len(headers))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [list(headers), *cells]
    )


@dataclass(frozen=True)
class NormRow:
    """The norms of one class that were treated alike.

    ``operator`` is the fusedops function that they call now, None where they were left alone for
    ``reason``. ``cast`` and ``weight_offset`` are what it is called with; ``dtypes`` the pairs of
    x's and the weight's dtype in which it was proven equal (other calls run the original).
    """

    norm_class: str
    count: int = 0
    operator: str | None = None
    cast: str | None = None
    weight_offset: float = 0.0
    dtypes: tuple[str, ...] = ()
    reason: str | None = None

    def describe(self) -> str:
        if self.operator is None:
            return f"left alone: {self.reason}"
        details = [f"cast={self.cast}"] if self.cast else []
        if self.weight_offset:
            details.append(f"weight_offset={self.weight_offset:g}")
        return f"{self.operator}({', '.join(details)})" if details else self.operator


@dataclass(frozen=True)
class FusedRow:
    """The residual adds that the blocks of one class have done since they were patched.

    ``inside`` were fused with a norm of the block itself, ``across`` with one after it (``missed``
    of these for a norm that then was not called with the sum), ``plain`` done by themselves, for
    the ``reasons`` counted. ``small`` forwards had hidden states too small for it to pay. ``note``
    says why blocks run without the stream.
    """

    block_class: str
    blocks: int
    forwards: int
    inside: int
    across: int
    missed: int
    plain: int
    small: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def why(self) -> str:
        """Note and reasons in one line."""
        reasons = [f"{reason} ({count})" for reason, count in self.reasons.items() if count]
        if self.small:
            reasons.append(f"too small for it to pay ({self.small} forwards)")
        return "; ".join([self.note, *reasons] if self.note else reasons)


@dataclass(frozen=True)
class PatchReport:
    """What `patch` found in a model. Printing it gives tables.

    ``model`` is the model's class; ``norms`` holds a row for each class of norm and treatment,
    those that were proven in other dtypes apart; the printed table puts them together.
    ``fused`` counts, at the time when it is read, the adds of each class of block.
    """

    model: str
    norms: tuple[NormRow, ...]
    blocks: tuple[BlockState, ...] = field(default=(), repr=False)
    counted: tuple[FusedRow, ...] = field(default=(), repr=False)
    """What ``fused`` is in a report that was read from JSON, which has no blocks to ask."""

    @property
    def fused(self) -> tuple[FusedRow, ...]:
        """A row for each class of block: adds fused inside, across, and done plainly."""
        if not self.blocks:
            return self.counted
        by_class: dict[type, list[BlockState]] = {}
        for state in self.blocks:
            by_class.setdefault(state.block_class, []).append(state)
        rows = []
        for block_class, states in by_class.items():
            reasons: Counter[str] = Counter()
            for state in states:
                reasons.update(state.plain)
            notes = {state.obstacle for state in states if state.obstacle is not None}
            rows.append(
                FusedRow(
                    block_class.__qualname__,
                    blocks=len(states),
                    forwards=sum(state.calls for state in states),
                    inside=sum(state.inside for state in states),
                    across=sum(state.across for state in states),
                    missed=sum(state.missed for state in states),
                    plain=reasons.total(),
                    small=sum(state.small for state in states),
                    reasons=dict(reasons),
                    note="; ".join(sorted(notes)),
                )
            )
        return tuple(rows)

    @property
    def patched(self) -> int:
        """How many norm modules call fusedops now."""
        return sum(row.count for row in self.norms if row.operator is not None)

    @property
    def left_alone(self) -> int:
        """How many modules that look like norms run their own code still."""
        return sum(row.count for row in self.norms if row.operator is None)

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return {
            "model": self.model,
            "patched": self.patched,
            "left_alone": self.left_alone,
            "norms": [asdict(row) | {"dtypes": list(row.dtypes)} for row in self.norms],
            "fused": [asdict(row) for row in self.fused],
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "PatchReport":
        """The inverse of `to_dict`, with the counts of that time."""
        return cls(
            found["model"],
            tuple(NormRow(**row | {"dtypes": tuple(row["dtypes"])}) for row in found["norms"]),
            counted=tuple(FusedRow(**row) for row in found["fused"]),
        )

    def __str__(self) -> str:
        counts: Counter[tuple[str, str]] = Counter()  # rows that differ in dtypes alone become one
        for row in self.norms:
            counts[row.norm_class, row.describe()] += row.count
        rows = [[norm_class, count, now] for (norm_class, now), count in counts.items()]
        title = f"{self.model}: {self.patched} norms patched, {self.left_alone} left alone"
        text = title + "\n" + plain_table(["norm class", "count", "now"], rows)
        if fused := self.fused:
            headers = ["block class", "blocks", "fused inside", "across", "plain", "why plain"]
            adds = [
                [row.block_class, row.blocks, row.inside, row.across, row.plain, row.why]
                for row in fused
            ]
            text += "\n\nresidual adds so far\n" + plain_table(headers, adds)
        return text
