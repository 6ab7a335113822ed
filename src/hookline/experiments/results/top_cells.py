"""The top cells of a result, in order."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label, number_text
from hookline.pages.text_tables import html_table, table

if TYPE_CHECKING:
    from hookline.experiments.result import Result

Order: TypeAlias = Literal["abs", "value", "lowest", "effect"]


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


def top_of_cells(result: Result, k: int, by: Order | None) -> TopCells:
    """The top `k` cells, without missing ones; by default those with the largest effect if there is a baseline."""
    by = by if by is not None else "effect" if result._has_origin() else "abs"
    orders = {"abs": result.values.abs(), "value": result.values, "lowest": -result.values}
    if by == "effect":
        orders["effect"] = (result.values - result._baseline(result._origin())).abs()
    if by not in orders:
        raise HooklineError(f'by must be "abs", "value", "lowest" or "effect", got {by!r}')
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise HooklineError(f"top(k) returns the first k cells: k must be a positive integer, got {k!r}")
    key = orders[by].flatten()
    order = key.argsort(descending=True, stable=True)
    done = order[~key[order].isnan()][:k].tolist()
    return TopCells(Cell(result._labels(at), float(result.values.flatten()[at])) for at in done)
