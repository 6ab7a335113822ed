"""Comparisons of results: the difference of each cell, and how often as large a one comes about by chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookline.errors import how_many
from hookline.experiments.core.labels import number_text
from hookline.experiments.results.paired_tests import PairedTest
from hookline.pages.text_tables import html_table, table

if TYPE_CHECKING:
    from hookline.experiments.result import Result

_SHOWN = 5


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The difference of two results of the same prompts, and a paired test of it; prints the cells with the lowest p.

    comparison.p                           # a Result, with the axes of the two
    comparison.difference.interval()       # how large the difference may be
    comparison.to_dataframe()              # a column `p` beside value, std, sem, low and high
    """

    difference: Result
    """The first result minus the second."""
    p: Result
    """The probability of a mean difference at least as large if there is none; NaN with fewer than two examples."""
    test: PairedTest

    def to_dataframe(self) -> Any:
        """A pandas table with one row per cell: the difference, its spread and interval, and `p`."""
        cells = self.difference.to_dataframe()
        cells["p"] = self.p.values.flatten().numpy()
        return cells

    def _rows(self) -> list[list[str]]:
        low, high = self.difference.interval()
        order = [cell.labels for cell in self.p.top(_SHOWN, by="lowest")]
        rows = [[*map(str, labels.values())] for labels in order]
        for row, labels in zip(rows, order, strict=True):
            row += [number_text(x.sel(**labels).item()) for x in (self.difference, low, high, self.p)]
        return [[*self.p.axes, "difference", "low", "high", "p"], *rows]

    def _title(self) -> str:
        assert self.difference.by_example is not None
        examples = self.difference.by_example
        test = "paired t test" if self.test == "t" else "test of all sign flips"
        return f"{self.difference.name}, {test}, {how_many(examples.shape[-1], examples.axes[-1])}"

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(self._rows())}"

    def _repr_html_(self) -> str:
        return f"<p><b>{self._title()}</b></p>{html_table(self._rows())}"
