"""ImageResult: a result over the rows and columns of images, which is drawn over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hookline.engine import HookPoint
from hookline.experiments.core.labels import Label, needed
from hookline.experiments.result import Result

_AXES = {
    1: ("batch",),
    2: ("batch", "feature"),
    3: ("batch", "pos", "feature"),
    4: ("batch", "channel", "height", "width"),
    5: ("batch", "channel", "depth", "height", "width"),
}
_LETTERS = {
    **{"b": "batch", "p": "pos", "k": "key", "h": "head", "g": "kv_head", "E": "expert", "K": "choice", "V": "token"},
    **{"d": "feature", "e": "feature", "m": "feature", "1": "scale"},
}
_COLORS = (1, 3)
"""Numbers of channels of images: gray, or red, green and blue."""


@dataclass(frozen=True, eq=False, repr=False)
class ImageResult(Result):
    """A `Result` of a network; if it has the axes height and width, `plot()` draws it over the images it is of."""

    images: Tensor | None = field(default=None, compare=False)
    """The images, as [batch, channel, height, width], with any scale of colors."""

    def _picked(self, places: dict[str, int | list[int]]) -> Result:
        picked = super()._picked(places)
        rows = places.get("row" if "row" in self.axes else "batch")
        if self.images is None or rows is None:
            return picked
        return replace(picked, images=self.images[[rows] if isinstance(rows, int) else rows])  # type: ignore[call-arg]

    def plot(self, ax: Any = None, **kwargs: Any) -> Any:
        """Draw the values over the images, one panel per row, blue above and red below 0; channels of images are added.

        Those of `top_inputs` are drawn as the images themselves. Options: `title`, `alpha`, `cmap`, `vmin` and `vmax`.
        Other results are drawn as `Result.plot` does. Returns the matplotlib Figure.
        """
        is_of_images = {"height", "width"} <= {*self.axes} or ("row" in self.axes and self.images is not None)
        if not is_of_images or ax is not None:
            return super().plot(ax, **kwargs)
        needed("matplotlib", "plot", "plot")
        from hookline.experiments.networks.image_plots import plot_images

        return plot_images(self, **kwargs)

    def panels(self) -> tuple[Tensor, list[str], list[int]]:
        """The maps to draw, their titles, and for each the row of its image."""
        values, axes = self.values, list(self.axes)
        if self.images is not None and "channel" in axes and len(self.coords["channel"]) in _COLORS:
            values = values.sum(axes.index("channel"))
            axes.remove("channel")
        order = [axis for axis in axes if axis not in ("height", "width")]
        values = values.permute([axes.index(axis) for axis in (*order, "height", "width")])
        labels = list(product(*(self.coords[axis] for axis in order)))
        titles = [", ".join(f"{axis} {label}" for axis, label in zip(order, row, strict=True)) for row in labels]
        rows = values.shape[0] if "batch" in order else 1
        return (
            values.flatten(0, -3) if order else values[None],
            titles,
            [at * rows // len(labels) for at in range(len(labels))],
        )


def network_result(
    values: Tensor, name: str, info: dict[str, Any], *, images: Tensor | None = None, axes: Sequence[str] | None = None
) -> ImageResult:
    """A result with a number for each index of each axis; the axes are named by how many there are."""
    values = values.detach().float() if values.dtype is not torch.float64 else values.detach()
    named = (
        tuple(axes)
        if axes is not None
        else _AXES.get(values.ndim) or ("batch", *map("axis{}".format, range(1, values.ndim)))
    )
    coords: dict[str, list[Label]] = {axis: list(range(size)) for axis, size in zip(named, values.shape, strict=True)}
    return ImageResult(values, named, coords, name, info, images=images)


def axes_of(point: HookPoint, x: Tensor) -> tuple[str, ...] | None:
    """The axes of an activation by those of its point, if they are known."""
    letters = point.axes.split()
    names = tuple(_LETTERS.get(letter, letter) for letter in letters)
    return names if len(letters) == x.ndim and len({*names}) == x.ndim else None


def image_among(values: Sequence[Any]) -> Tensor | None:
    """The first of some inputs that is a batch of images."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 4 and value.shape[1] in _COLORS:
            return value.detach().float().cpu()
    return None
