"""Result: the numbers of an experiment, with a name on every axis and a label on every cell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError, how_many
from hookline.experiments.core import labels as check
from hookline.experiments.core.labels import Label, find_label, indices, listed, needed, number_text
from hookline.experiments.core.random_changes import CONTROL, Control
from hookline.experiments.results import arithmetic, control_ranges, result_files, statistics, top_cells
from hookline.experiments.results.comparisons import Comparison
from hookline.experiments.results.intervals import IntervalMethod
from hookline.experiments.results.statistics import EXAMPLE_AXES
from hookline.experiments.results.top_cells import Cell, Order, TopCells
from hookline.pages.html_page import HtmlPage

__all__ = ["Cell", "Comparison", "Result", "TopCells"]

_HEAD = re.compile(r"L(\d+)H(\d+)")


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What an experiment measured: one number per cell, on axes with names and labels.

        result.sel(layer=3)                    # by label: one row, a Result with one axis fewer
        result.sel(layer=[3, 4], pos="Mary")   # a list or a slice of labels keeps the axis; slices include their end
        result[3, -1], result.isel(pos=-1)     # by index, as in a tensor
        result.top(5)                          # the five cells with the largest effect
        result.interval()                      # the lowest and highest mean that the examples allow, at 95 %
        result.plot(); result.to_dataframe(); result.save("sweep.safetensors")

    `info` has plain values about the experiment, among them the baselines `clean` and `corrupted` if there are any. A
    value in it may be a Result on some of the axes (one baseline per metric), and is selected along with the values.
    Several metrics are an axis `metric`. After an interrupted run, `complete` is False and missing cells are NaN.
    """

    values: Float[Tensor, "..."]
    axes: tuple[str, ...]
    coords: dict[str, list[Label]]
    name: str = "value"
    info: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    by_example: Result | None = None
    """The same result with an axis of examples, whose means are these values; None if the examples were not kept."""

    def __post_init__(self) -> None:
        put = object.__setattr__  # the dataclass is frozen
        put(self, "values", check.floats(self.values))
        if not isinstance(self.name, str) or not isinstance(self.complete, bool):
            raise HooklineError(f"name must be a string and complete a bool, got {self.name!r} and {self.complete!r}")
        put(self, "axes", check.checked_axes(self.axes, self.values))
        put(self, "coords", check.checked_coords(self.coords, self.axes, self.values))
        put(self, "info", {key: self._checked_info(value, key) for key, value in self.info.items()})
        if self.by_example is not None and self.by_example.axes[:-1] != self.axes:
            raise HooklineError(f"by_example must have the axes {listed(self.axes)}, and one of examples after them")

    def _checked_info(self, value: Any, key: str) -> Any:
        if not isinstance(value, Result):
            return check.plain_label(value, key)
        self._aligned(value, f"info[{key!r}]")
        return replace(value, info={}, by_example=None)  # the outer info has it

    @property
    def control(self) -> Control:
        """The range that random changes of equal norm give, in the unit of the values: `low`, `high` and `draws`."""
        if missing := [key for key in CONTROL if key not in self.info]:
            raise HooklineError(f"this result has no control: its info has no {listed(missing)}")
        return Control(*(self.info[key] for key in CONTROL))

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of labels of each axis."""
        return tuple(self.values.shape)

    def sel(self, **labels: Any) -> Result:
        """Select by label: one label drops the axis; a list or a slice (end included) keeps it.

        A position labeled "3: Mary" is also found by 3 and by "Mary", and `head="L3H4"` selects one head of one layer.
        """
        selection = self._with_layer(labels)
        return self._picked({self._axis(axis): self._indices(axis, want) for axis, want in selection.items()})

    def isel(self, **places: Any) -> Result:
        """Select by index along each axis: an index, a list of indices, or a slice."""
        return self._picked({self._axis(axis): indices(axis, self.coords[axis], at) for axis, at in places.items()})

    def __getitem__(self, key: Any) -> Result:
        keys = list(key) if isinstance(key, tuple) else [key]
        dots = [at for at, part in enumerate(keys) if part is Ellipsis]
        if len(keys) - len(dots) > len(self.axes) or len(dots) > 1:
            raise HooklineError(f"too many indices, {key!r}, for a result with the axes {listed(self.axes)}")
        if dots:
            keys[dots[0] : dots[0] + 1] = [slice(None)] * (len(self.axes) - len(keys) + 1)
        return self.isel(**dict(zip(self.axes, keys, strict=False)))

    def __iter__(self) -> Iterator[Result]:
        if not self.axes:
            raise HooklineError("this result is one number and cannot be iterated over: use float(result)")
        return (self[at] for at in range(self.shape[0]))

    def mean(self, *axes: str) -> Result:
        """The mean over these axes, or over all; NaN where a cell is missing, except in some of the examples."""
        gone = list(dict.fromkeys(map(self._axis, axes or self.axes)))
        if (last := self.axes[-1:]) and last[0] in EXAMPLE_AXES and last[0] in gone:
            rest = [axis for axis in gone if axis not in last]
            return statistics.mean_of_examples(self.mean(*rest) if rest else self)
        coords = {axis: labels for axis, labels in self.coords.items() if axis not in gone}
        values = self.values.mean([self.axes.index(axis) for axis in gone]) if gone else self.values
        info = self._info_along(gone, lambda value, shared: value.mean(*shared))
        inner = self.by_example.mean(*gone) if self.by_example is not None and gone else self.by_example
        return replace(self, values=values, axes=tuple(coords), coords=coords, info=info, by_example=inner)

    def std(self) -> Result:
        """The standard deviation over examples (ddof 1) of each cell.

        The value of each example is kept beside the means, except for metrics that are one number for all prompts.
        """
        return statistics.std_of_cells(self)

    def sem(self) -> Result:
        """The standard error of the mean over examples: `std` divided by the root of their number."""
        return statistics.sem_of_cells(self)

    def interval(self, level: float = 0.95, method: IntervalMethod = "bootstrap") -> tuple[Result, Result]:
        """The lowest and the highest mean of each cell that its examples allow, in a share `level` of all cases.

        "bootstrap" draws the examples anew 2,000 times, the same for all cells and always the same ones, and widens the
        percentiles for few examples; with fewer than eight, the interval is Student's t. "normal" is `sem` times 1.96.
        A cell with an infinite example has NaN.
        """
        return statistics.interval_of_cells(self, level, method)

    @property
    def effect(self) -> Result:
        """The values minus those of the run that was changed, example by example: see `top` for which run that is."""
        return statistics.effect_of_cells(self)

    def compare(self, other: Result | float, *, test: Literal["auto", "t", "sign-flip"] = "auto") -> Comparison:
        """Whether the mean differs from that of another result of the same prompts, or from a number, in each cell.

        The test is paired by example. With up to 12 examples, "auto" tries all ways to flip the signs of their
        differences, which assumes only that these are symmetric where there is no effect; with more, it is the t test.
        Each cell is tested by itself: of 100 cells without a difference, about 5 have p < 0.05.
        """
        return statistics.compared(self, other if isinstance(other, Result) else float(other), test)

    def __sub__(self, other: Result | float) -> Result:
        """The difference from a number, or from a result with the same axes or some of them."""
        return self._combined(other, "−")

    def __add__(self, other: Result | float) -> Result:
        return self._combined(other, "+")

    def __mul__(self, other: Result | float) -> Result:
        return self._combined(other, "×")

    def __truediv__(self, other: Result | float) -> Result:
        return self._combined(other, "/")

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Result:
        return self * -1.0

    def __abs__(self) -> Result:
        return arithmetic.absolute_cells(self)

    def _combined(self, other: Result | float, operation: arithmetic.Operation) -> Result:
        if not isinstance(other, Result | int | float):
            return NotImplemented
        return arithmetic.combined_cells(self, other, operation)

    @property
    def normalized(self) -> Result:
        """The values rescaled so that 0 is the value of the corrupted run and 1 that of the clean run."""
        return arithmetic.normalized_cells(self)

    def top(self, k: int = 10, by: Order | None = None) -> TopCells:
        """The top `k` cells, in order, without missing cells.

        Sorted `by` "effect", the default if there is a baseline, they are those farthest from the value of the run that
        was changed (the corrupted run if `info` has direction "denoise", otherwise the clean run); by "abs" those with
        the largest absolute value, by "value" the largest, by "lowest" the lowest.
        """
        return top_cells.top_of_cells(self, k, by)

    def item(self) -> float:
        """The value of a result with a single number."""
        if self.values.numel() != 1:
            raise HooklineError(f"{self._title()} has {self.values.numel()} numbers: select one with sel or isel")
        return float(self.values)

    __float__ = item

    def numpy(self) -> np.ndarray:
        """The values as a new NumPy array."""
        return self.values.numpy().copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **kwargs: Any) -> Any:  # for torch.as_tensor
        return self.values.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()

    def to_dict(self) -> dict[str, Any]:
        """The result as plain lists, numbers and strings."""
        info = {key: value.to_dict() if isinstance(value, Result) else value for key, value in self.info.items()}
        return {**self._header(), "values": self.values.tolist(), "info": info}

    def to_dataframe(self) -> Any:
        """A pandas table with one row per cell: a column for each axis, and `value`.

        If the values are means over examples, there are also `std`, `sem`, and the bounds `low` and `high` of
        `interval()`.
        """
        pandas = needed("pandas", "to_dataframe", "data")
        cells = pandas.DataFrame(list(product(*self.coords.values())), columns=list(self.axes))
        cells["value"] = self.values.flatten().numpy()
        if self.by_example is not None:
            low, high = self.interval()
            for name, result in (("std", self.std()), ("sem", self.sem()), ("low", low), ("high", high)):
                cells[name] = result.values.flatten().numpy()
        return cells

    def to_xarray(self) -> Any:
        """An xarray.DataArray with the same name, axes and labels; plain values of `info` are in `attrs`."""
        xarray = needed("xarray", "to_xarray", "data")
        attrs = {**self._split_info()[0], "complete": self.complete}
        return xarray.DataArray(self.numpy(), coords=self.coords, dims=self.axes, name=self.name, attrs=attrs)

    def plot(self, ax: Any = None, **kwargs: Any) -> Any:
        """Plot: a line for one axis, a heat map for two, panels for three or for several metrics.

        Returns the matplotlib Axes, or the Figure if there are panels. For the options see `core.plotting.plot`.
        """
        needed("matplotlib", "plot", "plot")
        from hookline.experiments.results import plotting

        return plotting.plot(self, ax, **kwargs)

    def plot_html(
        self,
        *,
        panels: str | None = None,
        title: str | None = None,
        center: float | None = None,
        theme: Literal["light", "dark"] | None = None,
    ) -> HtmlPage:
        """The same plot as an interactive page, which a notebook shows and `.save(path)` writes; needs no matplotlib.

        Options: `panels`, `title` and `center` as for `plot`, and `theme` ("light" or "dark").
        """
        from hookline.experiments.results import html_plots

        return html_plots.html_plot(self, panels=panels, title=title, center=center, theme=theme)

    def save(self, path: str | Path) -> None:
        """Write the result, with labels and info, to a safetensors file."""
        result_files.save_result(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote; a damaged file, or another kind of file, raises an error."""
        return result_files.load_result(cls, path)

    def __repr__(self) -> str:
        return "\n  ".join(self._lines(top=3))

    def _repr_html_(self) -> str:
        title, *rest = map(escape, self._lines(top=0))
        cells = self.top(5)._repr_html_() if self.axes else ""
        return f"<p><b>{title}</b>{''.join(f'<br>{line}' for line in rest)}</p>{cells}"

    def _lines(self, top: int) -> list[str]:
        """A summary in a few lines: size, range, plain values of `info`, and the `top` cells."""
        done = self.values[~self.values.isnan()]
        reach = (
            f", {number_text(float(done.min()))} to {number_text(float(done.max()))}" if len(done) else ", no cell done"
        )
        lines = [self._title() + (reach if self.axes else f" = {number_text(float(self.values))}")]
        info = {key: value for key, value in self.info.items() if isinstance(value, bool | int | float | str)}
        info = {key: value for key, value in info.items() if key not in CONTROL}
        if info:
            lines.append(", ".join(f"{key} {number_text(value)}" for key, value in info.items() if key != "experiment"))
        if control_ranges.has_control(self):
            lines.append(control_ranges.control_line(self))
        if isinstance(hooks := self.info.get("hooks"), list) and hooks:
            more = ", …" if len(hooks) > 3 else ""
            lines.append(f"with {how_many(len(hooks), 'hook')} on the model: {', '.join(map(str, hooks[:3]))}{more}")
        if self.axes and top and len(done):
            cells = [(", ".join(f"{axis} {x}" for axis, x in at.items()), value) for at, value in self.top(top)]
            lines.append("top  " + " · ".join(f"{labels} = {number_text(value)}" for labels, value in cells))
        if not self.complete:
            lines.append(f"incomplete: {len(done)} of {self.values.numel()} cells are done, the others are NaN")
        return lines

    def _title(self) -> str:
        sizes = " × ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.shape, strict=True))
        return f"Result {self.name}" + (f" [{sizes}]" if sizes else "")

    def _header(self) -> dict[str, Any]:
        return {"axes": list(self.axes), "coords": self.coords, "name": self.name, "complete": self.complete}

    def _split_info(self) -> tuple[dict[str, Any], dict[str, Result]]:
        """The plain values of `info`, and the results in it."""
        inner = {key: value for key, value in self.info.items() if isinstance(value, Result)}
        return {key: value for key, value in self.info.items() if key not in inner}, inner

    def _axis(self, axis: str) -> str:
        if axis not in self.axes:
            raise HooklineError(f"this result has no axis {axis!r}: it has {listed(self.axes)}")
        return axis

    def _with_layer(self, labels: dict[str, Any]) -> dict[str, Any]:
        """The labels with a head given as "L3H4" split into layer and head, where both are axes of numbers."""
        head = _HEAD.fullmatch(labels["head"]) if isinstance(labels.get("head"), str) else None
        if head is None or not {"layer", "head"} <= set(self.axes) or labels["head"] in self.coords["head"]:
            return labels
        layer, number = map(int, head.groups())
        if labels.get("layer", layer) != layer:
            raise HooklineError(f"head {labels['head']!r} is not in layer {labels['layer']!r}: remove one of the two")
        return {**labels, "layer": layer, "head": number}

    def _indices(self, axis: str, want: Any) -> int | list[int]:
        """The indices of one label, a list of labels, or a slice of labels with its end."""
        labels = self.coords[axis]
        find = partial(find_label, axis, labels, has_isel=True)
        if isinstance(want, slice):
            start = None if want.start is None else find(want.start)
            stop = None if want.stop is None else find(want.stop) + 1
            return indices(axis, labels, slice(start, stop, want.step))
        return indices(axis, labels, list(map(find, want))) if isinstance(want, list | tuple | range) else find(want)

    def _picked(self, places: dict[str, int | list[int]]) -> Result:
        values, coords = self.values, dict(self.coords)
        for dim, axis in reversed(list(enumerate(self.axes))):
            at = places.get(axis, slice(None))
            values = values[(slice(None),) * dim + (at,)]
            if isinstance(at, int):
                del coords[axis]
            elif isinstance(at, list):
                coords[axis] = [coords[axis][place] for place in at]
        info = self._info_along(places, lambda value, shared: value._picked({axis: places[axis] for axis in shared}))
        inner = None if self.by_example is None else self.by_example._picked(places)
        return replace(self, values=values, axes=tuple(coords), coords=coords, info=info, by_example=inner)

    def _info_along(self, axes: Iterable[str], change: Callable[[Result, list[str]], Result]) -> dict[str, Any]:
        """The info, in which results that have some of these axes are changed as well; one number becomes a float."""
        info = dict(self.info)
        for key, value in self._split_info()[1].items():
            if shared := [axis for axis in axes if axis in value.axes]:
                new = change(value, shared)
                info[key] = new if new.axes else new.item()
        return info

    def _labels(self, flat: int) -> dict[str, Label]:
        """The labels of a cell, given by its index in the flattened values."""
        at = np.unravel_index(flat, self.shape) if self.axes else ()
        return {axis: self.coords[axis][int(place)] for axis, place in zip(self.axes, at, strict=True)}

    def _aligned(self, other: Result, what: str) -> Tensor:
        """The values of a result on some of these axes, in a shape that broadcasts to all of them."""
        for axis in other.axes:
            if axis not in self.axes or other.coords[axis] != self.coords[axis]:
                why = "has other labels here" if axis in self.axes else f"is not among {listed(self.axes)}"
                raise HooklineError(f"{what} does not fit this result: its axis {axis!r} {why}")
        order = [other.axes.index(axis) for axis in self.axes if axis in other.axes]
        sizes = [len(self.coords[axis]) if axis in other.axes else 1 for axis in self.axes]
        return other.values.permute(order).reshape(sizes)

    @property
    def origin(self) -> float:
        """The value of the run that the cells are changes of; 0 if there is none, or one per metric."""
        value = self.info.get(self._origin())
        return float(value) if isinstance(value, int | float) else 0.0

    def _origin(self) -> str:
        """The baseline that the cells are changes of."""
        return "corrupted" if self.info.get("direction") == "denoise" else "clean"

    def _has_origin(self) -> bool:
        return _is_measure(self.info.get(self._origin()))

    def _baseline(self, key: str) -> Tensor:
        if key not in self.info:
            raise HooklineError(f"info has no baseline {key!r}, only {listed(self.info)}")
        value = self.info[key]
        if not _is_measure(value):
            raise HooklineError(f"info[{key!r}] must be a number or a Result to measure from, not {value!r}")
        if isinstance(value, Result):
            return self._aligned(value, f"info[{key!r}]")
        return torch.full([1] * len(self.axes), float(value))


def _is_measure(value: Any) -> bool:
    return isinstance(value, Result | int | float) and not isinstance(value, bool)
