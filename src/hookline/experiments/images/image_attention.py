"""Attention back to a picture: how much each head looks at each part of it, from the answer or another position."""

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
from hookline.experiments.images.attention_rows import asked, looks_of, tower_looks
from hookline.experiments.images.placed import Sight, sight, tower_sight
from hookline.experiments.result import Result, TopCells
from hookline.model import HookedModel
from hookline.vision.grid import Box
from hookline.vision.images import Picture


@dataclass(frozen=True, eq=False, repr=False)
class SeenAttention:
    """How much each head looks at each part of a picture: `values`, a Result over layer, head and patch.

        found = seen.attention(model, inputs, image)
        found.share                        # of each head's attention, how much goes to the picture: layer, head
        found.top(5)                       # the heads that look at it most
        found.top(5, box=(0, 0, 0.5, 0.5)) # … at its upper left quarter
        found.plot(2); found.plot(2, 5)    # over the picture: the heads of layer 2, or one of them

    A patch is called by its position. Of several new tokens there is an axis `step` before the others.
    """

    values: Result
    sight: Sight

    @property
    def share(self) -> Result:
        """How much of each head's attention goes to the picture, of 1; the rest goes elsewhere."""
        return self._sum(list(range(len(self.sight.grid))), "attention on the picture")

    def on(self, box: Box) -> Result:
        """How much of each head's attention goes to a part of the picture: left, top, right, bottom, as fractions."""
        inside = self.sight.grid.positions_in(box)
        if not inside:
            raise HooklineError(f"no position looks at {box}: the model sees {self.sight.grid.extent}")
        every = self.sight.grid.positions.tolist()
        return self._sum([every.index(each) for each in inside], f"attention on {tuple(box)}")

    def _sum(self, patches: list[int], name: str) -> Result:
        axes = self.values.axes[:-1]
        coords = {axis: self.values.coords[axis] for axis in axes}
        return Result(self.values.values[..., patches].sum(-1), axes, coords, name, self.values.info)

    def top(self, k: int = 10, box: Box | None = None) -> TopCells:
        """The `k` heads that look most at the picture, or at a part of it."""
        return (self.share if box is None else self.on(box)).top(k, by="value")

    def mean(self, *axes: str) -> SeenAttention:
        """The average over layers, heads or steps: `found.mean("head").plot()` has a panel for each layer."""
        if not axes or "patch" in axes:
            raise HooklineError('say what to average over, as in mean("head"): layer, head or step, but not patch')
        return SeenAttention(self.values.mean(*axes), self.sight)

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
        """Draw it over the picture: a panel for each of these layers and heads (and steps), all in one scale.

        Titles have the share of a head's attention that goes to the picture. With `smooth`, colors flow into each
        other; without, each part of the picture has its own. The scale goes to the largest value drawn, or to `vmax`,
        and has more room for small values. Gives the matplotlib Figure.
        """
        needed("matplotlib", "plot", "plot")
        from matplotlib.colors import PowerNorm

        from hookline.experiments.images import drawing

        chosen = self._chosen({"step": step, "layer": layer, "head": head})
        outer = chosen.axes[:-1]
        parts = list(product(*(chosen.coords[axis] for axis in outer)))
        rows = chosen.values.reshape(len(parts), -1)
        if vmax is not None and not vmax > 0:
            raise HooklineError(f"vmax is the attention with the strongest colour, above 0, not {vmax!r}")
        norm = PowerNorm(0.5, 0.0, (float(rows.max()) or 1.0) if vmax is None else vmax)
        columns = len(chosen.coords[outer[-1]]) if outer and len(chosen.coords[outer[-1]]) <= 8 else None
        figure, axes = drawing.panels(self.sight, len(parts), columns=columns, cmap=cmap, norm=norm, label="attention")
        for labels, row, ax in zip(parts, rows, axes, strict=True):
            where = _called(dict(zip(outer, labels, strict=True)))
            drawing.ground(ax, self.sight, is_shade=True, title=" · ".join([*where, f"{float(row.sum()):.0%} here"]))
            drawing.heat(ax, self.sight, row, norm=norm, cmap=cmap, alpha=alpha, smooth=smooth)
        return figure

    def _chosen(self, wanted: Mapping[str, Any]) -> Result:
        chosen = self.values
        for axis, label in wanted.items():
            if label is None:
                continue
            if axis not in chosen.axes:
                raise HooklineError(f"{axis}={label!r}, but there is no axis {axis!r} here: only {chosen.axes}")
            chosen = chosen.sel(**{axis: list(label) if isinstance(label, list | tuple | range) else [label]})
        return chosen

    def __repr__(self) -> str:
        sizes = " × ".join(f"{axis} {len(self.values.coords[axis])}" for axis in self.values.axes)
        lines = [f"SeenAttention [{sizes}]"]
        if self.values.axes[:-1]:
            top = (f"{' '.join(_called(cell.labels))} {number(cell.value)}" for cell in self.top(3))
            lines.append(f"most on the picture: {', '.join(top)}")
        return "\n  ".join(lines)


def attention(
    model: HookedModel,
    inputs: Mapping[str, Any],
    picture: Picture | None = None,
    *,
    which: int = 0,
    layer: int | Sequence[int] | None = None,
    head: int | Sequence[int] | None = None,
    pos: int = -1,
    new_tokens: int = 0,
) -> SeenAttention:
    """How much each head looks, from a position of the prompt, at each part of a picture.

        inputs = model.to_inputs("<image> What colour is the circle?", images=[image])
        found = seen.attention(model, inputs, image)      # from the last position, where the answer is made
        found.plot(1)

    `pos` is another position. With `new_tokens` the model goes on, without chance, for so many tokens: then it is from
    the positions where these are made, an axis `step` with the tokens for labels. `layer` and `head` keep some only.
    """
    seen = sight(model, inputs, picture, which=which)
    if "input_ids" not in inputs:
        raise HooklineError("this model reads no text that could look back at a picture: use seen.tower_attention")
    where = sweep_points(model, "pattern", ("layer", "head"), _layers(layer))
    found, steps = looks_of(model, inputs, where, asked(inputs, pos, new_tokens), new_tokens)
    info = {"from": pos} if not new_tokens else {"new_tokens": new_tokens}
    return _seen(seen, found[..., seen.grid.positions], where, head, steps, info)


def tower_attention(
    model: HookedModel,
    inputs: Mapping[str, Any],
    picture: Picture | None = None,
    *,
    which: int = 0,
    layer: int | Sequence[int] | None = None,
    head: int | Sequence[int] | None = None,
    at: tuple[float, float] | None = None,
) -> SeenAttention:
    """How much each head of the part that sees looks at each part of the picture, from its class token or a place.

        seen.tower_attention(model, inputs, image).plot()                 # from the class token
        seen.tower_attention(model, inputs, image, at=(0.2, 0.7)).plot()  # from the patch at that place

    For models that take a picture in one piece: LLaVA, PaliGemma, Gemma 3, and ViT, CLIP, SigLIP, DINOv2 by themselves.
    """
    where = sweep_points(model, "vision.attn.pattern", ("layer", "head"), _layers(layer))
    seen = tower_sight(model, inputs, picture, which=which)
    if at is None and int(seen.grid.positions[0]) == 0:
        raise HooklineError("this tower has no class token: say from where in the picture, at=(x, y)")
    pos = 0 if at is None else seen.grid.position(*at)
    found = tower_looks(model, inputs, where, which, pos)
    if found.shape[-1] != int(seen.grid.positions[-1]) + 1:
        raise HooklineError(f"the tower has {found.shape[-1]} positions, and not as many as {seen.grid!r}")
    info = {"from": "class token" if at is None else list(at)}
    return _seen(seen, found[..., seen.grid.positions], where, head, None, info)


def _seen(
    seen: Sight,
    values: Float[Tensor, "*step layer head patch"],
    where: SweepPoints,
    head: int | Sequence[int] | None,
    steps: list[Label] | None,
    info: dict[str, Any],
) -> SeenAttention:
    coords: dict[str, list[Label]] = {} if steps is None else {"step": steps}
    coords |= {"layer": where.coords["layer"], "head": list(range(values.shape[-2]))}
    coords["patch"] = seen.grid.positions.tolist()
    result = Result(values, tuple(coords), coords, "attention", info)
    if head is not None:
        result = result.sel(head=[head] if isinstance(head, int) else list(head))
    return SeenAttention(result, seen)


def _layers(layer: int | Sequence[int] | None) -> list[int] | None:
    return [layer] if isinstance(layer, int) else None if layer is None else list(layer)


def _called(labels: Mapping[str, Label]) -> list[str]:
    """What a panel is called: "L3H4", or "layer 3", with the step's token before it."""
    rest = dict(labels)
    step = [str(rest.pop("step"))] if "step" in rest else []
    if {"layer", "head"} <= rest.keys():
        return [*step, f"L{rest['layer']}H{rest['head']}"]
    return [*step, *(f"{axis} {label}" for axis, label in rest.items())]
