"""The top cells of a result, in order."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hookline.experiments.core.labels import Label, number_text
from hookline.pages.text_tables import html_table, table


class Cell(NamedTuple):
    """One number of a result, and its labels."""

    labels: dict[str, Label]
    value: float


class TopCells(list[Cell]):
    """The top cells of a result, in order; prints as a table."""

    info: Mapping[str, Any] = MappingProxyType({})
    """The `info` of the result that a ranking is of."""
    title: str = "value"
    """The title of the column of values."""

    def __getitem__(self, index: Any) -> Any:
        cells = super().__getitem__(index)
        if not isinstance(index, slice):
            return cells
        part = TopCells(cells)
        part.info, part.title = self.info, self.title
        return part

    def _rows(self) -> list[list[str]]:
        head = [*(self[0].labels if self else ()), self.title]
        return [head, *([*map(str, cell.labels.values()), number_text(cell.value)] for cell in self)]

    def __repr__(self) -> str:
        return table(self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows())
