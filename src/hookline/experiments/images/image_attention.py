"""Attention to an image: the weight that each head gives each region, from the answer or another position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label, needed, number
from hookline.experiments.core.sweep import SweepPoints, sweep_points
from hookline.experiments.images.attention_rows import attention_rows, checked_position, tower_attention_rows
from hookline.experiments.images.placed import PlacedImage, place_image, place_image_in_tower
from hookline.experiments.result import Result, TopCells
from hookline.model import HookedModel
from hookline.vision.grid import Box
from hookline.vision.images import ImageLike


@dataclass(frozen=True, eq=False, repr=False)
class ImageAttention:
    """The attention of each head to each region of an image: `values`, a Result over layer, head and patch.

        found = images.attention(model, inputs, image)
        found.share                        # fraction of each head's attention on the image: layer, head
        found.top(5)                       # the heads with the most attention on it
        found.top(5, box=(0, 0, 0.5, 0.5)) # … on its upper left quarter
        found.plot(2); found.plot(2, 5)    # over the image: the heads of layer 2, or one of them

    A patch is labeled by its position. With several new tokens there is a leading axis `step`.
    """

    values: Result
    placed: PlacedImage

    @property
    def share(self) -> Result:
        """Fraction of each head's attention that goes to the image, from 0 to 1."""
        return self._sum(list(range(len(self.placed.grid))), "attention on the image")

    def on(self, box: Box) -> Result:
        """Fraction of each head's attention that goes to a box: left, top, right, bottom, as fractions of the image."""
        inside = self.placed.grid.positions_in(box)
        if not inside:
            raise HooklineError(f"no position covers {box}: the model receives {self.placed.grid.extent} of this image")
        every = self.placed.grid.positions.tolist()
        return self._sum([every.index(each) for each in inside], f"attention on {tuple(box)}")

    def _sum(self, patches: list[int], name: str) -> Result:
        axes = self.values.axes[:-1]
        coords = {axis: self.values.coords[axis] for axis in axes}
        return Result(self.values.values[..., patches].sum(-1), axes, coords, name, self.values.info)

    def top(self, k: int = 10, box: Box | None = None) -> TopCells:
        """The `k` heads with the most attention on the image, or on a box."""
        return (self.share if box is None else self.on(box)).top(k, by="value")

    def mean(self, *axes: str) -> ImageAttention:
        """The mean over layers, heads or steps: `found.mean("head").plot()` draws one panel per layer."""
        if not axes or "patch" in axes:
            raise HooklineError('name the axes to average over, as in mean("head"): layer, head or step, but not patch')
        return ImageAttention(self.values.mean(*axes), self.placed)

    def plot(
        self,
        layer: int | Sequence[int] | None = None,
        head: int | Sequence[int] | None = None,
        *,
        step: Any = None,
        smooth: bool = False,
        alpha: float = 1.0,
        cmap: str = "YlOrRd",
        vmax: float | None = None,
    ) -> Any:
        """Draw the attention over the image: one panel per layer and head (and step), all on one scale.

        Titles show the fraction of a head's attention that goes to the image. With `smooth`, colors are interpolated;
        otherwise each region has one color. The scale ends at the largest value drawn, or at `vmax`, and resolves
        small values better. Returns the matplotlib Figure.
        """
        needed("matplotlib", "plot", "plot")
        from matplotlib.colors import PowerNorm

        from hookline.experiments.images import drawing

        chosen = self._chosen({"step": step, "layer": layer, "head": head})
        outer = chosen.axes[:-1]
        parts = list(product(*(chosen.coords[axis] for axis in outer)))
        rows = chosen.values.reshape(len(parts), -1)
        if vmax is not None and not vmax > 0:
            raise HooklineError(
                f"vmax must be positive, not {vmax!r}: it is the attention drawn in the strongest color"
            )
        norm = PowerNorm(0.5, 0.0, (float(rows.max()) or 1.0) if vmax is None else vmax)
        columns = len(chosen.coords[outer[-1]]) if outer and len(chosen.coords[outer[-1]]) <= 8 else None
        figure, axes = drawing.panels(self.placed, len(parts), columns=columns, cmap=cmap, norm=norm, label="attention")
        for labels, row, ax in zip(parts, rows, axes, strict=True):
            where = _called(dict(zip(outer, labels, strict=True)))
            drawing.ground(ax, self.placed, is_shade=True, title=" · ".join([*where, f"{float(row.sum()):.0%} here"]))
            drawing.heat(ax, self.placed, row, norm=norm, cmap=cmap, alpha=alpha, smooth=smooth)
        return figure

    def _chosen(self, wanted: Mapping[str, Any]) -> Result:
        chosen = self.values
        for axis, label in wanted.items():
            if label is None:
                continue
            if axis not in chosen.axes:
                raise HooklineError(f"{axis}={label!r}, but the axes are {chosen.axes}")
            chosen = chosen.sel(**{axis: list(label) if isinstance(label, list | tuple | range) else [label]})
        return chosen

    def __repr__(self) -> str:
        sizes = " × ".join(f"{axis} {len(self.values.coords[axis])}" for axis in self.values.axes)
        lines = [f"ImageAttention [{sizes}]"]
        if self.values.axes[:-1]:
            top = (f"{' '.join(_called(cell.labels))} {number(cell.value)}" for cell in self.top(3))
            lines.append(f"most on the image: {', '.join(top)}")
        return "\n  ".join(lines)


def attention(
    model: HookedModel,
    inputs: Mapping[str, Any],
    image: ImageLike | None = None,
    *,
    which: int = 0,
    layers: int | Sequence[int] | None = None,
    head: int | Sequence[int] | None = None,
    pos: int = -1,
    new_tokens: int = 0,
) -> ImageAttention:
    """The attention of each head from a position of the prompt to each region of an image.

        inputs = model.to_inputs("<image> What colour is the circle?", images=[image])
        found = images.attention(model, inputs, image)      # from the last position, which predicts the answer
        found.plot(1)

    `pos` selects another query position. With `new_tokens` the model generates that many tokens greedily, and the
    result has an axis `step`, labeled by those tokens, with the attention from the position that predicts each of
    them. `layers` and `head` select layers and heads.
    """
    placed = place_image(model, inputs, image, which=which)
    if "input_ids" not in inputs:
        raise HooklineError("this model takes no text that could attend to an image: use images.tower_attention")
    where = sweep_points(model, "pattern", ("layer", "head"), _layers(layers))
    found, steps = attention_rows(model, inputs, where, checked_position(inputs, pos, new_tokens), new_tokens)
    info = {"from": pos} if not new_tokens else {"new_tokens": new_tokens}
    return _image_attention(placed, found[..., placed.grid.positions], where, head, steps, info)


def tower_attention(
    model: HookedModel,
    inputs: Mapping[str, Any],
    image: ImageLike | None = None,
    *,
    which: int = 0,
    layers: int | Sequence[int] | None = None,
    head: int | Sequence[int] | None = None,
    at: tuple[float, float] | None = None,
) -> ImageAttention:
    """The attention of each head of the vision tower to each region of the image, from the class token or a patch.

        images.tower_attention(model, inputs, image).plot()                 # from the class token
        images.tower_attention(model, inputs, image, at=(0.2, 0.7)).plot()  # from the patch at that point

    For models that do not tile images: LLaVA, PaliGemma, Gemma 3, and ViT, CLIP, SigLIP, DINOv2 by themselves.
    """
    where = sweep_points(model, "vision.attn.pattern", ("layer", "head"), _layers(layers))
    placed = place_image_in_tower(model, inputs, image, which=which)
    if at is None and int(placed.grid.positions[0]) == 0:
        raise HooklineError("this vision tower has no class token: choose a patch with at=(x, y)")
    pos = 0 if at is None else placed.grid.position(*at)
    found = tower_attention_rows(model, inputs, where, which, pos)
    if found.shape[-1] != int(placed.grid.positions[-1]) + 1:
        raise HooklineError(f"the vision tower has {found.shape[-1]} positions, which do not match {placed.grid!r}")
    info = {"from": "class token" if at is None else list(at)}
    return _image_attention(placed, found[..., placed.grid.positions], where, head, None, info)


def _image_attention(
    placed: PlacedImage,
    values: Float[Tensor, "*step layer head patch"],
    where: SweepPoints,
    head: int | Sequence[int] | None,
    steps: list[Label] | None,
    info: dict[str, Any],
) -> ImageAttention:
    coords: dict[str, list[Label]] = {} if steps is None else {"step": steps}
    coords |= {"layer": where.coords["layer"], "head": list(range(values.shape[-2]))}
    coords["patch"] = placed.grid.positions.tolist()
    result = Result(values, tuple(coords), coords, "attention", info)
    if head is not None:
        result = result.sel(head=[head] if isinstance(head, int) else list(head))
    return ImageAttention(result, placed)


def _layers(layers: int | Sequence[int] | None) -> list[int] | None:
    return [layers] if isinstance(layers, int) else None if layers is None else list(layers)


def _called(labels: Mapping[str, Label]) -> list[str]:
    """The title of a panel: "L3H4", or "layer 3", after the token of the step."""
    rest = dict(labels)
    step = [str(rest.pop("step"))] if "step" in rest else []
    if {"layer", "head"} <= rest.keys():
        return [*step, f"L{rest['layer']}H{rest['head']}"]
    return [*step, *(f"{axis} {label}" for axis, label in rest.items())]
