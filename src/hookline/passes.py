"""Passes: which part of a text the forward pass going on is about.

A language model that generates runs once over the prompt, and then once for each new token, with the keys and values of
all tokens before it kept. So a hook may see the whole prompt, or one position only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hookline.taps import now

tokenizers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Of the models that were wrapped with one."""
processors: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Likewise of models that take pictures."""


@dataclass(frozen=True)
class Span:
    """The positions of a text that a pass is about, with what is known of the text."""

    positions: range
    rows: int
    tokens: Tensor | None
    mask: Tensor | None
    """1 for what is no padding, over all positions up to the last of these."""

    def real(self) -> Bool[Tensor, "row pos"]:
        """Which of all positions so far are no padding."""
        width = self.positions.stop
        if self.mask is None or self.mask.shape[1] < width:
            return torch.ones(self.rows, width, dtype=torch.bool)
        return self.mask[:, :width].cpu().bool()


@dataclass(frozen=True)
class Pass:
    """One forward pass of a language model: its number in a generation, and the positions it is about."""

    step: int
    span: Span
    encoder: Span | None
    """What goes into the encoder, of a model that has one beside a decoder."""
    model: ref[nn.Module]
    is_only: bool
    """Whether the run is over with it, so that no later one can be meant."""

    def span_at(self, point: str) -> Span:
        """What a point with that name is about; nothing of the text, if it is about pictures."""
        if is_of_pictures(point):
            return Span(range(0), 0, None, None)
        is_encoders = point.startswith("encoder.") or point.endswith(_OF_THE_ENCODER)
        return self.encoder if is_encoders and self.encoder is not None else self.span


_TOWERS = {"vision", "visual", "vision_tower", "vision_model", "projector", "multi_modal_projector", "connector"}


def is_of_pictures(point: str) -> bool:
    """Whether a point with that name is in the part of a model that looks at pictures, before they are tokens."""
    is_attended_to = point.startswith("blocks.") and point.endswith(_OF_THE_ENCODER)  # by text that looks at pictures
    return is_attended_to or not _TOWERS.isdisjoint(point.split("."))


_OF_THE_ENCODER = ("cross_attn.hook_k", "cross_attn.hook_v", "cross_attn.hook_rot_k")


class Progress(NamedTuple):
    """How far the last pass came, and what it kept for the next."""

    model: ref[nn.Module]
    step: int
    stop: int
    kept: int


def begin_pass(model: nn.Module, inputs: Mapping[str, Any], *, is_only: bool = False) -> None:
    """Note what a forward pass of `model` that begins now is about; the inputs are a language model's, or whatever."""
    config = getattr(model, "config", None)
    has_encoder = bool(getattr(config, "is_encoder_decoder", False))
    prefix = "decoder_" if has_encoder else ""
    kept = _kept(inputs)
    start = _seen_before(kept)
    span = _span(inputs, prefix, start)
    encoder = (_span(inputs, "", 0) or _span_of_states(inputs)) if has_encoder else None
    if span is None:
        now.passing = None if encoder is None else Pass(0, encoder, encoder, ref(model), is_only)
        return
    before: Pass | None = now.passing
    if before is not None and before.span.tokens is span.tokens is not None and before.span.positions.start == start:
        return  # noted already
    step = _step(model, start)
    now.progress = Progress(ref(model), step, span.positions.stop, id(kept))
    now.passing = Pass(step, span, encoder, ref(model), is_only)


def _span(inputs: Mapping[str, Any], prefix: str, start: int) -> Span | None:
    tokens, given = inputs.get(f"{prefix}input_ids"), inputs.get(f"{prefix}inputs_embeds")
    shaped = tokens if isinstance(tokens, Tensor) else given
    if not isinstance(shaped, Tensor) or shaped.ndim < 2:
        return None
    mask = inputs.get(f"{prefix}attention_mask")
    return Span(
        range(start, start + shaped.shape[1]),
        shaped.shape[0],
        tokens if isinstance(tokens, Tensor) else None,
        mask if isinstance(mask, Tensor) and mask.ndim == 2 else None,
    )


def _span_of_states(inputs: Mapping[str, Any]) -> Span | None:
    """What went into the encoder, where only what came out of it is given."""
    states = inputs.get("encoder_outputs")
    states = states[0] if states is not None else None
    return _span({"inputs_embeds": states, "attention_mask": inputs.get("attention_mask")}, "", 0)


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
