"""Strategies: how variants of a run are computed, and which strategies are correct for a model.

This is not decided by architecture: each strategy is tested on a short text, against full runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.rerun.changes import Change, Variant
from hookline.transformer.architectures import chooses_keys
from hookline.transformer.memory.halving import is_out_of_memory

if TYPE_CHECKING:
    from hookline.rerun.baseline import Baseline
    from hookline.transformer.index import ModelPoints
    from hookline.transformer.wrapped import WrappedTransformer


class Strategy(Enum):
    """How variants of a run are computed."""

    FULL = "full"
    """Full runs, as a batch."""
    FROM_LAYER = "from_layer"
    """From the first layer where they differ."""
    FROM_POSITION = "from_position"
    """From the first layer and the first position where they differ."""


def stream_names(points: ModelPoints) -> list[str]:
    """The points where the stream enters each layer, and where it leaves the last layer."""
    n_layers = len(points.anatomy.blocks)
    names = [f"{points.layer(layer)}.hook_resid_pre" for layer in range(n_layers)]
    return [*names, f"{points.layer(n_layers - 1)}.hook_resid_post"]


def fastest_strategy(
    model: WrappedTransformer, run: Callable[..., Baseline], tokens: Tensor, inputs: Mapping[str, Any] | None = None
) -> Strategy:
    """The fastest strategy that agrees with full runs on these tokens; `run` creates a baseline."""
    points, names = model.index, stream_names(model.index)
    has_streams = all(name in points.hook_dict for name in names)
    passes_more = points.anatomy.architecture.more_than_stream or chooses_keys(points.anatomy.config)
    if tokens.shape[1] < _LEAST or passes_more or not has_streams:
        return Strategy.FULL
    variants: list[list[Change]] = []

    def logits_by(strategy: Strategy) -> Tensor | None:
        is_full = strategy == Strategy.FULL
        try:
            base = run(model, tokens, inputs=inputs, strategy=strategy, keep=names if is_full else ())
            if is_full:
                variants.extend(_trial_variants(base))
            can_be = strategy != Strategy.FROM_POSITION or (base.is_causal and base._pairs is not None)
            return _trial(base, variants) if can_be else None
        except Exception as error:  # the model's code does not support it: that is what is tested
            if is_out_of_memory(error):
                raise
            return None

    expected = logits_by(Strategy.FULL)
    for strategy in (Strategy.FROM_POSITION, Strategy.FROM_LAYER) if expected is not None else ():
        logits = logits_by(strategy)
        if logits is not None and expected is not None and is_close(logits, expected):
            return strategy
    return Strategy.FULL


def _trial_variants(base: Baseline) -> list[list[Change]]:
    """A few variants: of the stream at the first, a middle and the last layer, and of what attention adds."""
    points, n_layers = base.model.index, base._n_layers
    streams = [base.kept[name] for name in stream_names(points)]
    at = _places(base)
    layers = (0, n_layers // 2, n_layers)
    places = [(stream_names(points)[layer], layer, at[pos]) for layer, pos in zip(layers, (3, 5, 6), strict=True)]
    if base.images:  # images may affect earlier positions
        places += [(stream_names(points)[layer], layer, at[pos]) for layer in (0, n_layers // 2) for pos in (0, 1, 2)]
    attention_layers = {0, n_layers // 3, 2 * n_layers // 3, n_layers - 1}
    places += [(f"{points.layer(layer)}.hook_attn_out", layer, at[4]) for layer in sorted(attention_layers)]
    return [
        [base.change(name, streams[layer][pos].roll(layer + 1) * 1.5 + 0.1, pos=pos)]
        for name, layer, pos in places
        if name in points.hook_dict
    ]


def _trial(base: Baseline, variants: list[list[Change]]) -> Tensor:
    """The logits of the variants, at all positions and at some."""
    every, at = range(base.tokens.shape[1]), _places(base)
    return torch.cat([_logits(base, variants, positions) for positions in (every, [at[2], -1], [at[2], at[4]])], 1)


_LEAST = 7
"""The minimum number of tokens for a test."""


def _places(base: Baseline) -> list[int]:
    """Seven positions from the first to the last."""
    return [place * (base.tokens.shape[1] - 1) // (_LEAST - 1) for place in range(_LEAST)]


def _logits(base: Baseline, variants: Sequence[Variant], positions: Sequence[int]) -> Tensor:
    logits_by_number: dict[int, Tensor] = {}
    for numbers, logits in base.rerun(variants, positions=positions):
        logits_by_number |= dict(zip(numbers, logits, strict=True))
    return torch.stack([logits_by_number[number] for number in range(len(variants))])


def is_close(logits: Tensor, plain: Tensor) -> bool:
    """Whether logits agree within rounding."""
    if logits.shape != plain.shape or not bool(logits.isfinite().all()):
        return False
    tolerance = 1e-4 if plain.dtype in (torch.float32, torch.float64) else 5e-2
    difference = (logits.float() - plain.float()).flatten(1).norm(dim=1)
    return bool((difference <= tolerance * plain.float().flatten(1).norm(dim=1)).all())
