"""Ways: how variants of a run are run, and which of them hold for a model.

None of that is known by architecture: each way is tried on a short text, against running everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.engine.halving import is_out_of_memory
from hookline.rerun.changes import Change, Variant
from hookline.transformer.architectures import architecture, chooses_keys

if TYPE_CHECKING:
    from hookline.rerun.baseline import Baseline
    from hookline.transformer.index import ModelPoints
    from hookline.transformer.wrapped import WrappedTransformer


class Way(Enum):
    """How variants of a run are run."""

    PLAIN = "plain"
    """From the beginning, as a batch."""
    JOINED = "joined"
    """From the layer where they differ."""
    RESUMED = "resumed"
    """From the layer, and the position, where they differ."""


def stream_names(points: ModelPoints) -> list[str]:
    """The points where the stream enters each layer, and where it leaves the last."""
    n_layers = len(points.anatomy.blocks)
    names = [f"{points.layer(layer)}.hook_resid_pre" for layer in range(n_layers)]
    return [*names, f"{points.layer(n_layers - 1)}.hook_resid_post"]


def proved_way(
    model: WrappedTransformer, run: Callable[..., Baseline], tokens: Tensor, inputs: Mapping[str, Any] | None = None
) -> Way:
    """The fastest way that gives, on these tokens, what the plain way gives; `run` makes a baseline."""
    points = model._points
    if tokens.shape[1] < _LEAST:
        return Way.PLAIN
    names = stream_names(points)
    if architecture(points.anatomy.kind).more_than_stream or chooses_keys(points.anatomy.config):
        return Way.PLAIN
    if not all(name in points.hook_dict for name in names):
        return Way.PLAIN
    try:
        plain = run(model, tokens, inputs=inputs, way=Way.PLAIN, keep=names)
        variants = _trial_variants(plain)
        expected = _trial(plain, variants)
    except Exception as error:  # it cannot be run by tokens alone: nothing is known of it
        if is_out_of_memory(error):
            raise
        return Way.PLAIN
    for way in (Way.RESUMED, Way.JOINED):
        try:
            base = run(model, tokens, inputs=inputs, way=way)
            can_be = way == Way.JOINED or (base.is_causal and base._pairs is not None)
            found = _trial(base, variants) if can_be else None
        except Exception as error:  # the model's own code does not go along with it: that is what is being tried
            if is_out_of_memory(error):
                raise
            found = None
        if found is not None and is_alike(found, expected):
            return way
    return Way.PLAIN


def _trial_variants(base: Baseline) -> list[list[Change]]:
    """A few: of the stream at the first, a middle and the last layer and after it, and of what attention adds."""
    points, n_layers = base._points, base._n_layers
    streams = [base.kept[name] for name in stream_names(points)]
    at = _places(base)
    layers = (0, n_layers // 2, n_layers)
    places = [(stream_names(points)[layer], layer, at[pos]) for layer, pos in zip(layers, (3, 5, 6), strict=True)]
    if base.image_inputs is not None:  # what they bring in may reach back: from the first position on, and among them
        places += [(stream_names(points)[layer], layer, at[pos]) for layer in (0, n_layers // 2) for pos in (0, 1, 2)]
    some = {0, n_layers // 3, 2 * n_layers // 3, n_layers - 1}
    places += [(f"{points.layer(layer)}.hook_attn_out", layer, at[4]) for layer in sorted(some)]
    return [
        [base.change(name, streams[layer][pos].roll(layer + 1) * 1.5 + 0.1, pos=pos)]
        for name, layer, pos in places
        if name in points.hook_dict
    ]


def _trial(base: Baseline, variants: list[list[Change]]) -> Tensor:
    """Their logits, all of them and some."""
    every, at = range(base.tokens.shape[1]), _places(base)
    return torch.cat([_logits(base, variants, positions) for positions in (every, [at[2], -1], [at[2], at[4]])], 1)


_LEAST = 7
"""How many tokens a trial needs."""


def _places(base: Baseline) -> list[int]:
    """Seven positions from the first to the last."""
    return [place * (base.tokens.shape[1] - 1) // (_LEAST - 1) for place in range(_LEAST)]


def _logits(base: Baseline, variants: Sequence[Variant], positions: Sequence[int]) -> Tensor:
    found: dict[int, Tensor] = {}
    for numbers, logits in base.rerun(variants, positions=positions):
        found |= dict(zip(numbers, logits, strict=True))
    return torch.stack([found[number] for number in range(len(variants))])


def is_alike(found: Tensor, plain: Tensor) -> bool:
    """But for rounding."""
    if found.shape != plain.shape or not bool(found.isfinite().all()):
        return False
    tolerance = 1e-4 if plain.dtype in (torch.float32, torch.float64) else 5e-2
    difference = (found.float() - plain.float()).flatten(1).norm(dim=1)
    return bool((difference <= tolerance * plain.float().flatten(1).norm(dim=1)).all())
