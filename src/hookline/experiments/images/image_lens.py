"""The logit lens over an image: the token predicted at each image position, after each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.errors import HooklineError
from hookline.experiments.core.answers import layer_labels
from hookline.experiments.core.labels import Label, find_label, needed
from hookline.experiments.core.prompts import prompts_of
from hookline.experiments.images.placed import PlacedImage, place_image
from hookline.experiments.logit_lens import lens_cache, lens_logits, top_tokens
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.vision.images import ImageLike

Layers = int | str | Sequence[int | str]


@dataclass(frozen=True, eq=False, repr=False)
class ImageLens:
    """The likeliest tokens at each position of an image after each layer.

        found = images.lens(model, inputs, image)
        found.at(3, 0.2, 0.7)                  # after layer 3, at that point of the image: [(" red", 0.98)]
        found.plot(); found.plot([1, 3])       # the image, with a token in each region

    `tokens[layer][patch]` lists the likeliest tokens in order, `probs` their probabilities: a Result over layer, patch
    and rank. A patch is labeled by its position in the prompt.
    """

    tokens: list[list[list[str]]]
    probs: Result
    placed: PlacedImage

    @property
    def layers(self) -> list[Label]:
        """The layers after which the stream is read; "embed" is before the first."""
        return self.probs.coords["layer"]

    def at(self, layer: int | str, x: float, y: float) -> list[tuple[str, float]]:
        """The likeliest tokens and their probabilities after a layer, at a point of the image."""
        place = self.placed.grid.positions.tolist().index(self.placed.grid.position(x, y))
        row = find_label("layer", self.layers, layer)
        return list(zip(self.tokens[row][place], self.probs.values[row, place].tolist(), strict=True))

    def plot(self, layer: Layers | None = None, *, alpha: float = 0.9, cmap: str = "YlGnBu") -> Any:
        """Draw the image with the likeliest token in each region, colored by its probability: one panel per layer.

        Returns the matplotlib Figure. If the model receives an image twice, it shows the finer grid.
        """
        needed("matplotlib", "plot", "plot")
        from matplotlib import colormaps
        from matplotlib.colors import Normalize

        from hookline.experiments.images import drawing

        requested = self.layers if layer is None else _listed(layer)
        rows = [find_label("layer", self.layers, label) for label in requested]
        norm = Normalize(0.0, 1.0)
        figure, axes = drawing.panels(
            self.placed, len(rows), width=drawing.room_for_words(self.placed), cmap=cmap, norm=norm, label="probability"
        )
        for row, ax in zip(rows, axes, strict=True):
            label = self.layers[row]
            drawing.ground(ax, self.placed, title=label if isinstance(label, str) else f"after layer {label}")
        wide = drawing.width_of(axes[0])
        for row, ax in zip(rows, axes, strict=True):
            texts = [candidates[0] for candidates in self.tokens[row]]
            fills = colormaps[cmap](norm(self.probs.values[row, :, 0].numpy()))
            drawing.words(ax, self.placed, texts, fills, alpha=alpha, wide=wide)
        return figure

    def __repr__(self) -> str:
        lines = [f"ImageLens [layer {len(self.layers)} × patch {len(self.placed.grid)}]"]
        for layer, tokens in zip(self.layers, self.tokens, strict=True):
            counts = Counter(candidates[0] for candidates in tokens)
            shown = ", ".join(f"{token!r} ×{n}" for token, n in counts.most_common(5))
            lines.append(f"{layer}: {shown}{' …' if len(counts) > 5 else ''}")
        return "\n  ".join(lines)


def lens(
    model: HookedModel,
    inputs: Mapping[str, Any],
    image: ImageLike | None = None,
    *,
    which: int = 0,
    layers: Layers | None = None,
    top: int = 1,
) -> ImageLens:
    """Apply the logit lens at each position of an image after each layer: the likeliest tokens and probabilities.

        inputs = model.to_inputs("<image> What colour is the circle?", images=[image])
        images.lens(model, inputs, image).plot()

    The residual stream at the image's positions goes through the final norm and the unembedding, after each layer or
    after those in `layers` ("embed" is before the first), and the `top` likeliest tokens are kept. `image` is the
    image to draw on; `which` is its index in the prompt.
    """
    placed = place_image(model, inputs, image, which=which)
    if "input_ids" not in inputs:
        raise HooklineError("the logit lens needs a language model: this model takes no text")
    labels, where = layer_labels(len(model.blocks))["layer"], placed.grid.positions.tolist()
    rows = _rows(labels, layers)
    logits = lens_logits(lens_cache(model, prompts_of(model, inputs)), where)
    tokens, values = top_tokens(model, logits, top, rows)
    coords: dict[str, list[Label]] = {"layer": [labels[row] for row in rows], "patch": where, "rank": list(range(top))}
    return ImageLens(tokens, Result(values, tuple(coords), coords, "prob"), placed)


def _rows(labels: list[Label], layers: Layers | None) -> list[int]:
    """The indices of these layers among the labels; negative numbers count from the last layer."""
    if layers is None:
        return list(range(len(labels)))
    requested, n = _listed(layers), len(labels) - 1
    resolved_layers = [layer % n if isinstance(layer, int) and -n <= layer < 0 else layer for layer in requested]
    rows = [find_label("layer", labels, layer) for layer in resolved_layers]
    if not rows or len(set(rows)) != len(rows):
        raise HooklineError(f"layers must be distinct and not empty, as in [0, 3], not {layers!r}")
    return rows


def _listed(layers: Layers) -> list[int | str]:
    return [layers] if isinstance(layers, int | str) else list(layers)
