# SPDX-License-Identifier: Apache-2.0
"""What `patch` did, as data and as a table of plain text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["NormRow", "PatchReport", "plain_table"]


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
class PatchReport:
    """What `patch` found in a model. Printing it gives a table.

    ``model`` is the model's class; ``norms`` holds a row for each class of norm and treatment.
    """

    model: str
    norms: tuple[NormRow, ...]

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
        }

    def __str__(self) -> str:
        rows = [[row.norm_class, row.count, row.describe()] for row in self.norms]
        title = f"{self.model}: {self.patched} norms patched, {self.left_alone} left alone"
        return title + "\n" + plain_table(["norm class", "count", "now"], rows)
