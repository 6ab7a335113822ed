"""Attention to an image: the weight that each head gives each region, from the answer or another position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label, needed, number_text, token_labels
from hookline.experiments.core.patterns import read_patterns
from hookline.experiments.core.prompts import prompts_of
from hookline.experiments.core.sweep import SweepPoints, sweep_points
from hookline.experiments.images.placed import PlacedImage, place_image, place_image_in_tower
from hookline.experiments.result import Result, TopCells
from hookline.model import HookedModel
from hookline.vision.grid import Box
from hookline.vision.images import ImageLike

Some = int | Sequence[int] | None
"""A layer or head, several, or all."""


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
        inside, every = self.placed.positions_in(box), self.placed.grid.positions.tolist()
        return self._sum([every.index(position) for position in inside], f"attention on {tuple(box)}")

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
        layer: Some = None,
        head: Some = None,
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

        chosen = self.values
        for axis, label in {"step": step, "layer": layer, "head": head}.items():
            if label is not None:
                chosen = chosen.sel(**{axis: list(label) if isinstance(label, list | tuple | range) else [label]})
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

    def __repr__(self) -> str:
        sizes = " × ".join(f"{axis} {len(self.values.coords[axis])}" for axis in self.values.axes)
        lines = [f"ImageAttention [{sizes}]"]
        if self.values.axes[:-1]:
            top = (f"{' '.join(_called(cell.labels))} {number_text(cell.value)}" for cell in self.top(3))
            lines.append(f"most on the image: {', '.join(top)}")
        return "\n  ".join(lines)


def attention(
    model: HookedModel,
    inputs: Mapping[str, Any],
    image: ImageLike | None = None,
    *,
    which: int = 0,
    layers: Some = None,
    head: Some = None,
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
    length = inputs["input_ids"].shape[1]
    query = _checked_position(length, pos, new_tokens)
    call, ids = prompts_of(model, inputs).call(model), []

    def read(pattern: Tensor, step: int) -> Tensor:
        """The row of the query in the pass over the prompt, then the only row of each decoding step."""
        return _of_prompt(pattern[0][:, query if step == 0 else -1], length + step, length)

    def run() -> None:
        if new_tokens:
            ids.append(model.generate(**call, max_new_tokens=new_tokens, do_sample=False))
        else:
            model(**call, return_type=None)

    weights = read_patterns(model, where, read, run)[..., placed.grid.positions]
    if not new_tokens:
        return _image_attention(placed, weights[0], where, head, {"from": pos})
    said = ids[0][0, -len(weights) :].tolist()
    texts = [str(token) if model.tokenizer is None else model.to_string([token]) for token in said]
    return _image_attention(placed, weights, where, head, {"new_tokens": new_tokens}, token_labels(texts))


def tower_attention(
    model: HookedModel,
    inputs: Mapping[str, Any],
    image: ImageLike | None = None,
    *,
    which: int = 0,
    layers: Some = None,
    head: Some = None,
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
    run = partial(model, **inputs, return_type=None)
    (weights,) = read_patterns(model, where, lambda pattern, _: pattern[which, :, pos], run)
    if weights.shape[-1] != int(placed.grid.positions[-1]) + 1:
        raise HooklineError(f"the vision tower has {weights.shape[-1]} positions, which do not match {placed.grid!r}")
    info = {"from": "class token" if at is None else list(at)}
    return _image_attention(placed, weights[..., placed.grid.positions], where, head, info)


def _image_attention(
    placed: PlacedImage,
    values: Float[Tensor, "*step layer head patch"],
    where: SweepPoints,
    head: Some,
    info: dict[str, Any],
    steps: Sequence[Label] | None = None,
) -> ImageAttention:
    coords: dict[str, list[Label]] = {} if steps is None else {"step": list(steps)}
    coords |= {"layer": where.coords["layer"], "head": list(range(values.shape[-2]))}
    coords["patch"] = placed.grid.positions.tolist()
    result = Result(values, tuple(coords), coords, "attention", info)
    if head is not None:
        result = result.sel(head=[head] if isinstance(head, int) else list(head))
    return ImageAttention(result, placed)


def _checked_position(length: int, pos: int, new_tokens: int) -> int:
    """The query position, counted from the start of the prompt."""
    if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 0:
        raise HooklineError(f"new_tokens must be the number of tokens to generate, 0 or more, not {new_tokens!r}")
    if new_tokens and pos != -1:
        raise HooklineError(f"new tokens are generated at the end of the prompt: omit pos={pos!r} or new_tokens")
    if isinstance(pos, bool) or not isinstance(pos, int) or pos not in range(-length, length):
        raise HooklineError(f"position {pos!r} is out of range: the prompt has {length} tokens")
    return pos % length


def _of_prompt(row: Float[Tensor, "head key"], total: int, length: int) -> Float[Tensor, "head pos"]:
    """The attention to positions of the prompt; a sliding window of keys lacks the oldest, which are padded with 0."""
    keys = row.shape[1]
    if keys > total:
        raise HooklineError(
            f"the pattern has {keys} keys, but there are {total} tokens: static caches are not supported"
        )
    return pad(row, (total - keys, 0))[:, :length]


def _layers(layers: Some) -> list[int] | None:
    return [layers] if isinstance(layers, int) else None if layers is None else list(layers)


def _called(labels: Mapping[str, Label]) -> list[str]:
    """The title of a panel: "L3H4", or "layer 3", after the token of the step."""
    rest = dict(labels)
    step = [str(rest.pop("step"))] if "step" in rest else []
    if {"layer", "head"} <= rest.keys():
        return [*step, f"L{rest['layer']}H{rest['head']}"]
    return [*step, *(f"{axis} {label}" for axis, label in rest.items())]
