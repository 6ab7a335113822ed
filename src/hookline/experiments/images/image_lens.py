"""The logit lens over a picture: which token the model would say at each part of it, after each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.answers import layer_labels
from hookline.experiments.core.labels import Label, needed
from hookline.experiments.core.prompts import Prompts, prompts_of
from hookline.experiments.images.placed import Sight, sight
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.residual import ModelCache
from hookline.vision.images import Picture

Layers = int | str | Sequence[int | str]

_ROOM = 2**28
"""Bytes of logits that are there at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class SeenLens:
    """The likeliest tokens at each position of a picture after each layer.

        found = seen.lens(model, inputs, image)
        found.at(3, 0.2, 0.7)                  # after layer 3, at that place in the picture: [(" red", 0.98)]
        found.plot(); found.plot([1, 3])       # the picture, with a token in each of its parts

    `tokens[layer][patch]` has the likeliest few in order, `probs` how likely they are: a Result over layer, patch and
    rank, in which a patch is called by its position in the prompt.
    """

    tokens: list[list[list[str]]]
    probs: Result
    sight: Sight

    @property
    def layers(self) -> list[Label]:
        """The layers after which the stream is read; "embed" is before the first."""
        return self.probs.coords["layer"]

    def at(self, layer: int | str, x: float, y: float) -> list[tuple[str, float]]:
        """What is read after a layer at a place in the picture: tokens, and how likely they are."""
        place = self.sight.grid.positions.tolist().index(self.sight.grid.position(x, y))
        probs = self.probs.sel(layer=layer).values[place].tolist()
        return list(zip(self.tokens[self._row(layer)][place], probs, strict=True))

    def plot(self, layer: Layers | None = None, *, alpha: float = 0.9, cmap: str = "YlGnBu") -> Any:
        """Draw the picture with the likeliest token in each part, coloured by its probability: a panel for each layer.

        Gives the matplotlib Figure. Of a model that looks twice, it is the finer look.
        """
        needed("matplotlib", "plot", "plot")
        from matplotlib import colormaps
        from matplotlib.colors import Normalize

        from hookline.experiments.images import drawing

        rows = range(len(self.layers)) if layer is None else [self._row(each) for each in _listed(layer)]
        norm = Normalize(0.0, 1.0)
        figure, axes = drawing.panels(
            self.sight, len(rows), width=drawing.room_for_words(self.sight), cmap=cmap, norm=norm, label="probability"
        )
        for row, ax in zip(rows, axes, strict=True):
            label = self.layers[row]
            drawing.ground(ax, self.sight, title=label if isinstance(label, str) else f"after layer {label}")
        wide = drawing.width_of(axes[0])
        for row, ax in zip(rows, axes, strict=True):
            texts = [each[0] for each in self.tokens[row]]
            fills = colormaps[cmap](norm(self.probs.values[row, :, 0].numpy()))
            drawing.words(ax, self.sight, texts, fills, alpha=alpha, wide=wide)
        return figure

    def _row(self, layer: int | str) -> int:
        return self.layers.index(self.probs.sel(layer=[layer]).coords["layer"][0])

    def __repr__(self) -> str:
        lines = [f"SeenLens [layer {len(self.layers)} × patch {len(self.sight.grid)}]"]
        for layer, tokens in zip(self.layers, self.tokens, strict=True):
            most = sorted({*(each[0] for each in tokens)}, key=lambda x: -sum(x == each[0] for each in tokens))
            shown = (f"{token!r} ×{sum(token == each[0] for each in tokens)}" for token in most[:5])
            lines.append(f"{layer}: {', '.join(shown)}{' …' if len(most) > 5 else ''}")
        return "\n  ".join(lines)


def lens(
    model: HookedModel,
    inputs: Mapping[str, Any],
    picture: Picture | None = None,
    *,
    which: int = 0,
    layer: Layers | None = None,
    top: int = 1,
) -> SeenLens:
    """What the logit lens reads at each position of a picture after each layer: tokens, and their probabilities.

        inputs = model.to_inputs("<image> What colour is the circle?", images=[image])
        seen.lens(model, inputs, image).plot()

    The stream at the picture's positions goes through the final norm and the unembedding, after each layer or after
    those of `layer` ("embed" is before the first), and the `top` likeliest tokens are kept. `picture` is what to draw
    on; `which` says which of the prompt's pictures it is.
    """
    seen = sight(model, inputs, picture, which=which)
    if "input_ids" not in inputs:
        raise HooklineError("this model has no words that could be read at a picture's positions: it takes no text")
    prompts = prompts_of(model, inputs)
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= model.cfg.d_vocab:
        raise HooklineError(f"top is how many tokens to keep, from 1 to {model.cfg.d_vocab}, not {top!r}")
    labels = layer_labels(len(model.blocks))["layer"]
    rows = _rows(labels, layer)
    found = [logits[rows, 0].softmax(-1).topk(top) for logits in _logits(model, prompts, seen)]
    ids = torch.cat([each.indices for each in found], 1).tolist()
    tokens = [[[_shown(model, token) for token in here] for here in each] for each in ids]
    coords: dict[str, list[Label]] = {"layer": [labels[row] for row in rows], "patch": seen.grid.positions.tolist()}
    coords["rank"] = list(range(top))
    probs = Result(torch.cat([each.values for each in found], 1), tuple(coords), coords, "prob")
    return SeenLens(tokens, probs, seen)


@torch.no_grad()
def _logits(model: HookedModel, prompts: Prompts, seen: Sight) -> Iterator[Float[Tensor, "layer 1 patch vocab"]]:
    """What is read after every layer, of some of the picture's positions at a time."""
    n = len(model.blocks)
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(n)]
    names += [f"blocks.{n - 1}.hook_resid_post", "unembed.hook_in", "unembed.hook_out"]
    cache: ModelCache = model.run_with_cache(**prompts.call(model), names_filter=names)[1]
    step = max(1, _ROOM // (4 * model.cfg.d_vocab * (n + 1)))
    every = seen.grid.positions.tolist()
    for start in range(0, len(every), step):
        yield cache.logit_lens(pos_slice=every[start : start + step]).float()


def _rows(labels: list[Label], layer: Layers | None) -> list[int]:
    if layer is None:
        return list(range(len(labels)))
    wanted = [
        each % (len(labels) - 1) if isinstance(each, int) and -len(labels) < each < 0 else each
        for each in _listed(layer)
    ]
    for each in wanted:
        if isinstance(each, bool) or each not in labels:
            raise HooklineError(f'layer {each!r}, but there are 0 to {labels[-1]}, and "embed" before them')
    if not wanted or len(set(wanted)) != len(wanted):
        raise HooklineError(f"layers are one or several different ones, as in [0, 3], not {layer!r}")
    return [labels.index(each) for each in wanted]


def _listed(layer: Layers) -> list[int | str]:
    return [layer] if isinstance(layer, int | str) else list(layer)


def _shown(model: HookedModel, token: int) -> str:
    return str(token) if model.tokenizer is None else model.to_string([token])
