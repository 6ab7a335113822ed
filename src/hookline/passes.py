"""Passes: which part of a text the forward pass going on is about.

A language model that generates runs once over the prompt, and then once for each new token, with the keys and values of
all tokens before it kept. So a hook may see the whole prompt, or one position only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from hookline.taps import now

tokenizers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Of the models that were wrapped with one."""


@dataclass(frozen=True)
class Pass:
    """One forward pass of a language model: its number in a generation, and the positions it is about."""

    step: int
    positions: range
    tokens: Tensor | None
    mask: Tensor | None
    model: ref[nn.Module]


class Progress(NamedTuple):
    """How far the last pass came, and what it kept for the next."""

    model: ref[nn.Module]
    step: int
    stop: int
    kept: int


def begin_pass(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Note what a forward pass of `model` that begins now is about; the inputs are a language model's, or whatever."""
    tokens, given = inputs.get("input_ids"), inputs.get("inputs_embeds")
    shaped = tokens if isinstance(tokens, Tensor) else given
    if not isinstance(shaped, Tensor) or shaped.ndim < 2:
        now.passing = None
        return
    before: Pass | None = now.passing
    start = _seen_before(kept := _kept(inputs))
    if before is not None and before.tokens is tokens is not None and before.positions.start == start:
        return  # noted already
    step = _step(model, start)
    now.progress = Progress(ref(model), step, start + shaped.shape[1], id(kept))
    mask = inputs.get("attention_mask")
    now.passing = Pass(
        step,
        range(start, start + shaped.shape[1]),
        tokens if isinstance(tokens, Tensor) else None,
        mask if isinstance(mask, Tensor) and mask.ndim == 2 else None,
        ref(model),
    )


def _kept(inputs: Mapping[str, Any]) -> Any:
    kept = inputs.get("past_key_values")
    return inputs.get("cache_params") if kept is None else kept


def _seen_before(kept: Any) -> int:
    """How many positions are kept from passes before this one."""
    if kept is None:
        return 0
    try:
        return int(kept.get_seq_length())
    except (AttributeError, NotImplementedError, ValueError, TypeError):  # a cache of states, that counts nothing
        before: Progress | None = now.progress
        return before.stop if before is not None and before.kept == id(kept) else 0


def _step(model: nn.Module, start: int) -> int:
    """One more than the pass before, if this one goes on where that one ended."""
    if not start:
        return 0
    before: Progress | None = now.progress
    return before.step + 1 if before is not None and before.model() is model and before.stop == start else 1
