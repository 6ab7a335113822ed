"""Forward passes: which part of a text the forward pass going on is about.

A language model that generates runs once over the prompt, and then once for each new token, with the keys and values of
all tokens before it kept. So a hook may see the whole prompt, or one position only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hookline.engine.calls import running
from hookline.engine.passes import Stream, current
from hookline.errors import HooklineError
from hookline.text.generation import Generation, generation_of

tokenizers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""The tokenizer of each wrapped model that has one."""
processors: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""The processor of each wrapped model that takes images."""


class Earlier(NamedTuple):
    """Tokens of earlier passes: from position `start` on, in place of what stood there before."""

    before: Earlier | None
    start: int
    tokens: Tensor | None


@dataclass(frozen=True)
class Span:
    """The positions of a text that a pass covers, with what is known of the text."""

    positions: range
    rows: int
    tokens: Tensor | None
    mask: Tensor | None
    """1 for what is no padding, over all positions up to the last of these."""
    earlier: Earlier | None = None
    """The tokens before these positions; of a chunk of a prompt, those of the whole prompt."""
    length: int | None = None
    """How long the text is, where it goes on after these positions: a prompt that comes in chunks."""

    @property
    def width(self) -> int:
        """How long the text is so far."""
        return self.positions.stop if self.length is None else self.length

    def real(self) -> Bool[Tensor, "row pos"]:
        """Which of all positions so far are no padding."""
        if self.mask is None or self.mask.shape[1] < self.width:
            return torch.ones(self.rows, self.width, dtype=torch.bool)
        return self.mask[:, : self.width].cpu().bool()

    def text(self) -> Tensor | None:
        """The tokens of the text so far; None where some of them are not known."""
        start = self.positions.start
        if not start and self.length is None:
            return self.tokens
        before = _joined(self.earlier, self.rows)
        if self.length is not None:
            return before
        if before is None or self.tokens is None or before.shape[1] < start:
            return None
        return torch.cat([before[:, :start], self.tokens.to(before.device)], 1)


def _joined(earlier: Earlier | None, rows: int) -> Tensor | None:
    pieces = []
    while earlier is not None:
        pieces.append(earlier)
        earlier = earlier.before
    text: Tensor | None = None
    for piece in reversed(pieces):
        width = 0 if text is None else text.shape[1]
        if piece.tokens is None or piece.tokens.shape[0] != rows or piece.start > width:
            return None
        text = piece.tokens if text is None else torch.cat([text[:, : piece.start], piece.tokens], 1)
    return text


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass of a language model: its step in a generation, and the positions it covers."""

    step: int | None
    """0 for the prompt, k for the k-th new token; None for a pass about several new tokens, or an unknown number."""
    span: Span
    encoder: Span | None
    """What goes into the encoder, of a model that has one beside a decoder."""
    model: ref[nn.Module]
    is_only: bool
    """Whether the run is over with it, so that no later one can be meant."""
    prompt: int = 0
    """Where the new tokens begin."""
    generation: Generation | None = None
    number: int = 0
    """How many passes of the same generation came before."""
    refusal: str | None = None
    """Why positions in the text are not known in this pass."""

    def check(self, what: object) -> None:
        """Raise an error if positions in the text are not known in this pass."""
        if self.refusal is not None:
            raise HooklineError(f"{what} is not known in this forward pass: {self.refusal}")

    def known_step(self) -> int:
        """The number of the step, or the error that says why there is none."""
        self.check("the step")
        if self.step is None:
            start, stop = self.span.positions.start, self.span.positions.stop
            new = range(max(start, self.prompt), stop)
            raise HooklineError(
                f"this pass is not one step of a generation: it is about {'the prompt and ' * (start < self.prompt)}"
                f"the positions {new.start} to {new.stop - 1}, which an assistant or prompt lookup has guessed, or "
                f"which come a second time. Use hook.positions, or at(step(k), …) and at(new_tokens, …)"
            )
        return self.step

    def whole_step(self, what: object) -> int:
        """The number of the step, for what is made anew for each step as a whole."""
        parts = self.parts(self.span)
        if len(parts) > 1 or parts[0][1].length is not None:
            raise HooklineError(
                f"{what} is drawn for the prompt, and for each new token, as a whole; but this pass is about a part of "
                f"the prompt, or about several of these. Generate with a cache, without chunks, and without an "
                f"assistant or prompt lookup"
            )
        return self.known_step()

    def parts(self, span: Span) -> list[tuple[ForwardPass, Span]]:
        """The passes in which a generation with a cache would come by these positions.

        That is one for the prompt and one for each new token, so that positions mean the same in every generation.
        """
        start, stop = span.positions.start, span.positions.stop
        if span is self.encoder:
            return [(replace(self, step=0, prompt=span.positions.stop), span)]  # all of it is prompt
        if self.generation is None or (stop - start == 1 and start >= self.prompt):
            return [(self, span)]
        whole, parts = span.text(), []
        if start < self.prompt:
            of_prompt = range(start, min(stop, self.prompt))
            parts.append((replace(self, step=0), _cut(span, of_prompt, self.prompt, whole)))
        for place in range(max(start, self.prompt), stop):
            one = _cut(span, range(place, place + 1), place + 1, whole)
            parts.append((replace(self, step=place - self.prompt + 1), one))
        return parts

    def span_at(self, stream: Stream) -> Span:
        """What a point of that stream is about; nothing of the text, if it is about images."""
        if stream == "image":
            return Span(range(0), 0, None, None)
        return self.encoder if stream == "encoder" and self.encoder is not None else self.span

    def of_rows(self, which: Any) -> ForwardPass:
        """What is known of some rows of the batch."""
        kept = [which] if isinstance(which, int) else which

        def of(span: Span) -> Span:
            tokens, mask, text = (x[kept] if x is not None else None for x in (span.tokens, span.mask, span.text()))
            rows = len(torch.arange(span.rows)[kept])
            return replace(span, rows=rows, tokens=tokens, mask=mask, earlier=Earlier(None, 0, text))

        return replace(self, span=of(self.span), encoder=of(self.encoder) if self.encoder is not None else None)


class Progress(NamedTuple):
    """How far the last pass came, and what it kept for the next."""

    step: int | None
    prompt: int
    stop: int
    kept: int
    text: Earlier
    number: int
    generation: ref[Any] | None


def begin_pass(model: nn.Module, inputs: Mapping[str, Any], *, is_only: bool = False) -> None:
    """Note what a forward pass of `model` that begins now is about; the inputs are a language model's, or whatever."""
    config = getattr(model, "config", None)
    has_encoder = bool(getattr(config, "is_encoder_decoder", False))
    prefix = "decoder_" if has_encoder else ""
    kept = _kept(inputs)
    before = _progress(model)
    start = _seen_before(kept, before)
    span = _span(inputs, prefix, start)
    encoder = (_span(inputs, "", 0) or _span_of_states(inputs)) if has_encoder else None
    if span is None:
        current.forward_pass = None if encoder is None else ForwardPass(0, encoder, encoder, ref(model), is_only)
        return
    if _is_noted(span, encoder):
        return
    try:
        generation, refusal = None if is_only else generation_of(model), _packed(inputs)
    except HooklineError as error:
        generation, refusal = None, str(error)
    passing = _in_loop(model, span, encoder, before, kept, is_only=is_only)
    if generation is not None:
        passing = _in_generation(passing, generation, before, kept)
    current.forward_pass = passing if refusal is None else replace(passing, refusal=refusal)
    if refusal is None:
        text = Earlier(passing.span.earlier, start, span.tokens)
        call = generation.settings if generation is not None else None
        progress = Progress(passing.step, passing.prompt, span.positions.stop, id(kept), text, passing.number, call)
        _latest.progress.setdefault(model, {})[running.hooks] = progress


def begin_encoder(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Note what the encoder of `model` runs on, before the model itself does: in `generate` it runs by itself."""
    span = _span(inputs, "", 0)
    current.forward_pass = ForwardPass(0, span, span, ref(model), False) if span is not None else None


def _is_noted(span: Span, encoder: Span | None) -> bool:
    """Whether this pass was noted already, by the verb that runs it; two passes may be on the same tokens."""
    before: ForwardPass | None = current.forward_pass
    if before is None or span.tokens is None or before.refusal is not None or before.generation is not None:
        return False
    is_same_encoder = (before.encoder is None) == (encoder is None) and (
        encoder is None or before.encoder is None or before.encoder.tokens is encoder.tokens
    )
    same = before.span.tokens is span.tokens and before.span.mask is span.mask
    return same and is_same_encoder and before.span.positions.start == span.positions.start


def _in_loop(
    model: nn.Module, span: Span, encoder: Span | None, before: Progress | None, kept: Any, *, is_only: bool
) -> ForwardPass:
    """A pass outside `generate`: a step is a pass that goes on where the one before ended."""
    start = span.positions.start
    if not start:
        return ForwardPass(0, span, encoder, ref(model), is_only, prompt=span.positions.stop)
    if before is None or (before.stop != start and before.kept != id(kept)):
        return ForwardPass(1, span, encoder, ref(model), is_only, prompt=start)
    is_next = before.stop == start and before.step is not None
    span = replace(span, earlier=before.text)
    step = before.step + 1 if is_next and before.step is not None else None
    return ForwardPass(step, span, encoder, ref(model), is_only, prompt=before.prompt, number=before.number + 1)


def _in_generation(passing: ForwardPass, generation: Generation, before: Progress | None, kept: Any) -> ForwardPass:
    """A pass of `generate`, which says where the prompt ends."""
    span, prompt = passing.span, generation.prompt
    start, stop = span.positions.start, span.positions.stop
    is_first = before is None or before.generation is None or before.generation() is not generation.settings()
    is_first = is_first or before is None or before.prompt != prompt
    earlier = None if is_first or before is None or not generation.keeps_rows or start <= prompt else before.text
    if earlier is None:
        earlier = Earlier(None, 0, generation.tokens)
    mask = span.mask
    if generation.mask is not None and (mask is None or mask.shape[1] < max(stop, prompt)):
        mask = torch.nn.functional.pad(generation.mask, (0, max(0, stop - prompt)), value=1)
    is_one_step = stop <= prompt or (start >= prompt and stop - start == 1)
    step = max(0, stop - prompt) if is_one_step or kept is None else None
    span = replace(span, earlier=earlier, mask=mask, length=prompt if stop < prompt else None)
    number = 0 if is_first or before is None else before.number + 1
    return replace(passing, step=step, span=span, prompt=prompt, generation=generation, number=number)


def _cut(span: Span, positions: range, width: int, whole: Tensor | None) -> Span:
    """Some of the positions of a span, as a pass of their own in a text of that width."""
    first = positions.start - span.positions.start
    tokens = span.tokens[:, first : first + len(positions)] if span.tokens is not None else None
    earlier = Earlier(None, 0, whole[:, :width]) if whole is not None else None
    return replace(
        span, positions=positions, tokens=tokens, earlier=earlier, length=width if positions.stop < width else None
    )


def _packed(inputs: Mapping[str, Any]) -> str | None:
    """Whether several texts are packed into one row, as continuous batching does."""
    is_packed = any(inputs.get(name) is not None for name in ("cu_seq_lens_q", "block_table", "read_index"))
    return "continuous batching packs several texts into one row" if is_packed else None


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


def _seen_before(kept: Any, before: Progress | None) -> int:
    """How many positions are kept from passes before this one."""
    if kept is None:
        return 0
    try:
        return int(kept.get_seq_length())
    except (AttributeError, NotImplementedError, ValueError, TypeError):  # a cache of states, that counts nothing
        return before.stop if before is not None and before.kept == id(kept) else 0


class _Latest(threading.local):
    """How far the last pass of each model got in this thread, by the number of hooks that it ran in."""

    def __init__(self) -> None:
        self.progress: WeakKeyDictionary[nn.Module, dict[int, Progress]] = WeakKeyDictionary()


_latest = _Latest()


def _progress(model: nn.Module) -> Progress | None:
    """The last pass of this model, made by hooks that are as deep in other hooks."""
    known: dict[int, Progress] = _latest.progress.get(model, {})
    return known.get(running.hooks)
