"""Result: the numbers of an experiment, with a name on every axis and a label on every cell."""

from __future__ import annotations

import json
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
from hookline.experiments.results import intervals, paired_tests
from hookline.experiments.results.comparisons import Comparison
from hookline.experiments.results.intervals import IntervalMethod
from hookline.experiments.results.top_cells import Cell, TopCells
from hookline.files.tensorfile import read_tensors, taking_apart, write_tensors
from hookline.pages.html_page import HtmlPage

__all__ = ["Cell", "Comparison", "Result", "TopCells"]

BASELINES = ("clean", "corrupted")
EXAMPLE_AXES = ("example", "sample")
"""Axes of repeated measurements: prompts, or samples of noise."""
_VERSION = "3"  # of the file format
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

    def _control_under(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        """The entries of `info` about the control, after a change of the values that keeps or reverses their order."""
        if not all(key in self.info for key in CONTROL):
            return {}
        low, high = change(self.control.low), change(self.control.high)
        if isinstance(low, Result):
            ends = torch.stack([low.values, high.values])
            low, high = replace(low, values=ends.amin(0)), replace(high, values=ends.amax(0))
        else:
            low, high = sorted((low, high))
        return {"control_low": low, "control_high": high, "control_draws": self.control.draws}

    def _combined_control(
        self, other: Result | float, combine: Callable[[Tensor, Tensor], Tensor], sign: str
    ) -> dict[str, Any]:
        """The entries of `info` about the control, combined with a number; none for a result, which differs by cell."""
        if isinstance(other, Result):
            return {}
        number = torch.tensor(other)
        return self._control_under(
            lambda end: (
                end._combined(other, combine, sign)
                if isinstance(end, Result)
                else float(combine(torch.tensor(end), number))
            )
        )

    def _without_control(self) -> Result:
        """The result, and that of its examples, without the range of a control."""
        inner = None if self.by_example is None else self.by_example._without_control()
        return replace(
            self, info={key: value for key, value in self.info.items() if key not in CONTROL}, by_example=inner
        )

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
            return (self.mean(*rest) if rest else self)._mean_of_examples()
        coords = {axis: labels for axis, labels in self.coords.items() if axis not in gone}
        values = self.values.mean([self.axes.index(axis) for axis in gone]) if gone else self.values
        info = self._info_along(gone, lambda value, shared: value.mean(*shared))
        inner = self.by_example.mean(*gone) if self.by_example is not None and gone else self.by_example
        return replace(self, values=values, axes=tuple(coords), coords=coords, info=info, by_example=inner)

    def _mean_of_examples(self) -> Result:
        """The mean over the last axis, with the examples beside it if there are several."""
        *axes, last = self.axes
        coords = {axis: self.coords[axis] for axis in axes}
        info = self._info_along([last], lambda value, shared: value.mean(*shared))
        inner = self if self.shape[-1] > 1 else None
        return replace(
            self, values=self.values.nanmean(-1), axes=tuple(axes), coords=coords, info=info, by_example=inner
        )

    def std(self) -> Result:
        """The standard deviation over examples (ddof 1) of each cell.

        The value of each example is kept beside the means, except for metrics that are one number for all prompts.
        """
        return self._of_cells(intervals.std(self._examples("std").values), "std")

    def sem(self) -> Result:
        """The standard error of the mean over examples: `std` divided by the root of their number."""
        return self._of_cells(intervals.sem(self._examples("sem").values), "sem")

    def interval(self, level: float = 0.95, method: IntervalMethod = "bootstrap") -> tuple[Result, Result]:
        """The lowest and the highest mean of each cell that its examples allow, in a share `level` of all cases.

        "bootstrap" draws the examples anew 2,000 times, the same for all cells and always the same ones, and widens the
        percentiles for few examples; with fewer than eight, the interval is Student's t. "normal" is `sem` times 1.96.
        A cell with an infinite example has NaN.
        """
        examples = self._examples("interval").values
        low, high = intervals.interval(examples, level, method)
        return self._of_cells(low, "low"), self._of_cells(high, "high")

    @property
    def effect(self) -> Result:
        """The values minus those of the run that was changed, example by example: see `top` for which run that is."""
        effect = self._minus_origin()
        return effect if self.by_example is None else replace(effect, by_example=self.by_example._minus_origin())

    def _minus_origin(self) -> Result:
        origin = self._origin()
        info = {key: value for key, value in self.info.items() if key not in BASELINES}
        zero = self._baseline(origin)
        info |= self._control_under(lambda end: self._rescaled(end, zero, torch.ones_like(zero)))
        return replace(self, values=self.values - zero, name=f"{self.name} − {origin}", info=info, by_example=None)

    def compare(self, other: Result | float, *, test: Literal["auto", "t", "sign-flip"] = "auto") -> Comparison:
        """Whether the mean differs from that of another result of the same prompts, or from a number, in each cell.

        The test is paired by example. With up to 12 examples, "auto" tries all ways to flip the signs of their
        differences, which assumes only that these are symmetric where there is no effect; with more, it is the t test.
        Each cell is tested by itself: of 100 cells without a difference, about 5 have p < 0.05.
        """
        ours = self._examples("compare")
        if isinstance(other, Result):
            theirs, name = other._examples("compare"), f" − {other.name}"
            ours._check_paired(theirs)
            differences = paired_tests.paired_differences(ours.values, ours._aligned(theirs, other.name))
        else:
            differences, name = ours.values - float(other), f" − {number_text(float(other))}" if other else ""
        chosen = paired_tests.test_for(differences.shape[-1], test)
        every = replace(ours, values=differences, name=f"{self.name}{name}", info=ours._info_of_cells())
        p = self._of_cells(paired_tests.p_values(differences, chosen), "p")
        return Comparison(every._mean_of_examples(), p, chosen)

    def _examples(self, method: str) -> Result:
        """The result with the value of each example, as its last axis."""
        examples = self if self.axes[-1:] and self.axes[-1] in EXAMPLE_AXES else self.by_example
        if examples is None or examples.shape[-1] < 2:
            raise HooklineError(
                f"{method} needs the values of two or more examples, and this result has none: pass several prompts to "
                f"the experiment, and a metric that is one number per prompt; if they were too many to keep, pass "
                f"per_example=True"
            )
        return examples

    def _of_cells(self, values: Tensor, name: str) -> Result:
        """A number for each cell, in the result's shape without its examples."""
        axes = tuple(axis for axis in self.axes if axis not in EXAMPLE_AXES)
        coords = {axis: self.coords[axis] for axis in axes}
        return Result(values, axes, coords, f"{name} of {self.name}", self._info_of_cells(), self.complete)

    def _info_of_cells(self) -> dict[str, Any]:
        """What is also true of a statistic of the values: all but baselines and other values of the metric."""
        return {key: value for key, value in self.info.items() if key in ("about", "model", "hooks", "prompts")}

    def _check_paired(self, other: Result) -> None:
        """Raise unless two results, each with an axis of examples, are of the same ones."""
        if not self._is_paired(other):
            counts = [how_many(result.shape[-1], result.axes[-1]) for result in (self, other)]
            raise HooklineError(
                f"a comparison is paired by example, but these results are not of the same prompts ({counts[0]} and "
                f"{counts[1]}): run both experiments with the same prompts, in the same order"
            )

    def _is_paired(self, other: Result) -> bool:
        axis = self.axes[-1]
        is_same = axis == other.axes[-1] and self.coords[axis] == other.coords[axis]
        return is_same and self.info.get("prompts") == other.info.get("prompts")

    def __sub__(self, other: Result | float) -> Result:
        """The difference from a number, or from a result with the same axes or some of them."""
        return self._combined(other, torch.sub, "−")

    def __add__(self, other: Result | float) -> Result:
        return self._combined(other, torch.add, "+")

    def __mul__(self, other: Result | float) -> Result:
        return self._combined(other, torch.mul, "×")

    def __truediv__(self, other: Result | float) -> Result:
        return self._combined(other, torch.div, "/")

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Result:
        return self * -1.0

    def __abs__(self) -> Result:
        absolute, name = (self * 1.0)._without_control(), f"|{self.name}|"
        inner = absolute.by_example
        if inner is not None:
            inner = replace(inner, values=inner.values * self.values.sign()[..., None], name=name)
        return replace(absolute, values=self.values.abs(), name=name, by_example=inner)

    def _combined(self, other: Result | float, combine: Callable[[Tensor, Tensor], Tensor], sign: str) -> Result:
        if not isinstance(other, Result | int | float):
            return NotImplemented
        info = {key: value for key, value in self.info.items() if key not in (*BASELINES, *CONTROL)}
        if isinstance(other, Result):
            info = {key: value for key, value in info.items() if value == other.info.get(key)}
            values, label, complete = self._aligned(other, other.name), other.name, other.complete
        else:
            values, label, complete = torch.tensor(other), number_text(other), True
        info |= self._combined_control(other, combine, sign)
        combined = replace(
            self,
            values=combine(self.values, values),
            name=f"{self.name} {sign} {label}",
            info=info,
            complete=self.complete and complete,
            by_example=None,
        )
        return replace(combined, by_example=self._combined_examples(other, combine, sign, combined))

    def _combined_examples(
        self, other: Result | float, combine: Callable[[Tensor, Tensor], Tensor], sign: str, combined: Result
    ) -> Result | None:
        """The examples of a combination; of products and quotients, to first order in their distance from the means."""
        ours, theirs = self.by_example, other.by_example if isinstance(other, Result) else None
        if ours is None or (theirs is not None and not ours._is_paired(theirs)):
            return None
        mean = self._aligned(other, other.name)[..., None] if isinstance(other, Result) else torch.tensor(other)
        values = combine(ours.values, mean)
        if theirs is not None:
            own_mean = self.values[..., None]
            one = torch.ones_like(own_mean)
            slope = {"−": -one, "+": one, "×": own_mean, "/": -own_mean / mean**2}[sign]
            values = values + slope * (ours._aligned(theirs, theirs.name) - mean)
        info = {key: value for key, value in ours.info.items() if key in combined.info and key not in CONTROL}
        info |= ours._combined_control(other, combine, sign)
        return replace(ours, values=values, name=combined.name, info=info, complete=combined.complete)

    @property
    def normalized(self) -> Result:
        """The values rescaled so that 0 is the value of the corrupted run and 1 that of the clean run."""
        if missing := [key for key in BASELINES if key not in self.info]:
            raise HooklineError(
                f"normalized needs the metric of a clean and of a corrupted run, but this result has no "
                f"{' and no '.join(missing)} run: use result.effect, or set result.info[{missing[0]!r}]"
            )
        clean, corrupted = (self._baseline(key) for key in BASELINES)
        span = clean - corrupted
        flat = ~(span.abs() > 1e-6 * torch.maximum(clean.abs(), corrupted.abs()))
        if bool(flat.any()):
            at = self._labels(int(flat.expand(self.values.shape).flatten().nonzero()[0]))
            where = {axis: label for axis, label in at.items() if flat.shape[self.axes.index(axis)] > 1}
            raise HooklineError(
                f"the clean and the corrupted run have the same {self.name}{f' at {where}' if where else ''} (or "
                f"NaN), so the effect cannot be normalized: use prompts or a metric for which they differ"
            )
        values = (self.values - corrupted) / span
        ends = self._control_under(lambda end: self._rescaled(end, corrupted, span))
        between = {"clean": 1.0, "corrupted": 0.0, "normalized": True}
        inner = self.by_example
        if inner is not None:  # to first order, as the quotient of two means
            clean_each, corrupted_each = (inner._baseline(key) for key in BASELINES)
            change = inner.values - corrupted_each - values[..., None] * (clean_each - corrupted_each)
            shares = values[..., None] + change / span[..., None]
            # Without a control: it would be another one for each cell.
            inner = replace(inner._without_control(), values=shares)
            inner = replace(inner, info={**inner.info, **between})
        return replace(self, values=values, info={**self.info, **ends, **between}, by_example=inner)

    def _rescaled(self, end: Result | float, zero: Tensor, span: Tensor) -> Result | float:
        """One end of the control's range, as the values are rescaled."""
        if not isinstance(end, Result):
            return float((end - zero) / span)
        gone = [dim for dim, axis in enumerate(self.axes) if axis not in end.axes]
        values = ((self._aligned(end, "control") - zero) / span).squeeze(gone)
        return replace(end, values=values)

    def top(self, k: int = 10, by: Literal["abs", "value", "lowest", "effect"] | None = None) -> TopCells:
        """The top `k` cells, in order, without missing cells.

        Sorted `by` "effect", the default if there is a baseline, they are those farthest from the value of the run that
        was changed (the corrupted run if `info` has direction "denoise", otherwise the clean run); by "abs" those with
        the largest absolute value, by "value" the largest, by "lowest" the lowest.
        """
        by = by if by is not None else "effect" if _is_measure(self.info.get(self._origin())) else "abs"
        orders = {"abs": self.values.abs(), "value": self.values, "lowest": -self.values}
        if by == "effect":
            orders["effect"] = (self.values - self._baseline(self._origin())).abs()
        if by not in orders:
            raise HooklineError(f'by must be "abs", "value", "lowest" or "effect", got {by!r}')
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise HooklineError(f"top(k) returns the first k cells: k must be a positive integer, got {k!r}")
        key = orders[by].flatten()
        order = key.argsort(descending=True, stable=True)
        done = order[~key[order].isnan()][:k].tolist()
        return TopCells(Cell(self._labels(at), float(self.values.flatten()[at])) for at in done)

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

    def plot_html(self, **options: Any) -> HtmlPage:
        """The same plot as an interactive page, which a notebook shows and `.save(path)` writes; needs no matplotlib.

        Options: `panels`, `title` and `center` as for `plot`, and `theme` ("light" or "dark").
        """
        from hookline.experiments.results import html_plots

        return html_plots.html_plot(self, **options)

    def save(self, path: str | Path) -> None:
        """Write the result, with labels and info, to a safetensors file."""
        tensors, head = self._content("")
        content = json.dumps(head, ensure_ascii=False)
        write_tensors(path, "result", tensors, {"version": _VERSION, "content": content})

    def _content(self, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of a file, whose names begin with a prefix, and everything else as JSON has it."""
        plain, inner = self._split_info()
        tensors = {f"{prefix}info.{key}": value.values for key, value in inner.items()}
        tensors[f"{prefix}values"] = self.values
        head = {**self._header(), "info": plain, "results": {key: value._header() for key, value in inner.items()}}
        if self.by_example is not None:
            of_examples, head["by_example"] = self.by_example._content(f"{prefix}by_example.")
            tensors |= of_examples
        return tensors, head

    @classmethod
    def _of_content(cls, tensors: dict[str, Tensor], head: dict[str, Any], prefix: str) -> Self:
        """The result of what `_content` returned."""
        info, headers = head.pop("info"), head.pop("results")
        info |= {key: Result(tensors[f"{prefix}info.{key}"], **header) for key, header in headers.items()}
        inner = head.pop("by_example", None)
        examples = None if inner is None else Result._of_content(tensors, inner, f"{prefix}by_example.")
        return cls(tensors[f"{prefix}values"], **head, info=info, by_example=examples)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote; a damaged file, or another kind of file, raises an error."""
        tensors, metadata = read_tensors(path, "result", called="a result", writer="Result.save")
        version, content = metadata.get("version"), metadata.get("content", "")
        if version not in ("1", "2", _VERSION):
            raise HooklineError(f"{path} has a newer result format: update hookline")
        if version == "1" and metadata.get("sum") != check.first_sum(content, tensors):
            raise HooklineError(f"{path} is damaged: its contents do not match their checksum")
        with taking_apart(str(path)):
            head: dict[str, Any] = json.loads(content)
            return cls._of_content(tensors, head, "")

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
        if all(key in self.info for key in CONTROL):
            lines.append(self._control_line())
        if isinstance(hooks := self.info.get("hooks"), list) and hooks:
            more = ", …" if len(hooks) > 3 else ""
            lines.append(f"with {how_many(len(hooks), 'hook')} on the model: {', '.join(map(str, hooks[:3]))}{more}")
        if self.axes and top and len(done):
            cells = [(", ".join(f"{axis} {x}" for axis, x in at.items()), value) for at, value in self.top(top)]
            lines.append("top  " + " · ".join(f"{labels} = {number_text(value)}" for labels, value in cells))
        if not self.complete:
            lines.append(f"incomplete: {len(done)} of {self.values.numel()} cells are done, the others are NaN")
        return lines

    def _control_line(self) -> str:
        low, high, draws, of = self.control
        if isinstance(low, Result) and isinstance(high, Result):
            low, high = float(low.values.min()), float(high.values.max())
        return f"control {number_text(low)} to {number_text(high)}: {draws} {of}"

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
