"""Forward passes: which part of a text the current forward pass covers.

In a generation, a language model runs once over the prompt, and then once for each new token, with the keys and values
of all earlier tokens in a cache. So a hook may see the whole prompt, or one position only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hookline.engine import pass_state
from hookline.errors import HooklineError
from hookline.text.generate_calls import Generation, generation_of
from hookline.types import Stream

tokenizers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""The tokenizer of each wrapped model that has one."""
processors: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""The processor of each wrapped model that takes images."""


Pieces: TypeAlias = tuple[tuple[int, Tensor | None], ...]
"""Tokens of earlier passes: each piece begins at a position, and replaces what was there and after it."""


@dataclass(frozen=True)
class Span:
    """The positions of a text that a pass covers, and what is known about the text."""

    positions: range
    rows: int
    tokens: Tensor | None
    mask: Tensor | None
    """0 for padding, over all positions up to the last of these."""
    earlier: Pieces = ()
    """The tokens before these positions; for a chunk of a prompt, those of the whole prompt."""
    length: int | None = None
    """The length of the text, if it continues after these positions: a prompt that is processed in chunks."""

    @property
    def width(self) -> int:
        """The length of the text so far."""
        return self.positions.stop if self.length is None else self.length

    def real(self) -> Bool[Tensor, "row pos"]:
        """True for all positions so far that are not padding."""
        if self.mask is None or self.mask.shape[1] < self.width:
            return torch.ones(self.rows, self.width, dtype=torch.bool)
        return self.mask[:, : self.width].cpu().bool()

    def padding(self) -> Bool[Tensor, "row pos"] | None:
        """True for these positions that are padding; None if no position is known to be."""
        if self.mask is None or self.mask.shape[1] < self.positions.stop:
            return None
        return self.mask[:, self.positions.start : self.positions.stop] == 0

    def text(self) -> Tensor | None:
        """The tokens of the text so far; None if some of them are unknown."""
        start = self.positions.start
        if not start and self.length is None:
            return self.tokens
        before: Tensor | None = None
        for first, tokens in self.earlier:
            width = 0 if before is None else before.shape[1]
            if tokens is None or tokens.shape[0] != self.rows or first > width:
                return None
            before = tokens if before is None else torch.cat([before[:, :first], tokens], 1)
        if self.length is not None:
            return before
        if before is None or self.tokens is None or before.shape[1] < start:
            return None
        return torch.cat([before[:, :start], self.tokens.to(before.device)], 1)


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass of a language model: its step in a generation, and the positions it covers."""

    step: int | None
    """0 for the prompt, k for the k-th new token; None for a pass over several new tokens, or an unknown number."""
    span: Span
    encoder: Span | None
    """The input of the encoder, in an encoder-decoder model."""
    model: ref[nn.Module]
    is_only: bool
    """Whether the run consists of this pass, so that no later pass can have the requested positions."""
    prompt: int = 0
    """Where the new tokens begin."""
    generation: Generation | None = None
    number: int = 0
    """The number of earlier passes in the same generation."""
    refusal: str | None = None
    """Why positions in the text are unknown in this pass."""

    def is_again(self, inputs: Mapping[str, Any]) -> bool:
        """Whether this was the only pass of its run, and a new one on these inputs, which are tokens, is the same."""
        span, tokens = self.span, inputs.get("input_ids")
        if span.tokens is None or tokens is not span.tokens or span.mask is not None or len(inputs) > 1:
            return False
        is_whole = not span.positions.start and tokens.shape == (span.rows, span.positions.stop)
        return self.is_only and self.encoder is None and is_whole

    def check(self, what: object) -> None:
        """Raise an error if positions in the text are unknown in this pass."""
        if self.refusal is not None:
            raise HooklineError(f"{what} is unknown in this forward pass: {self.refusal}")

    def known_step(self) -> int:
        """The number of the step, or an error if the pass is not one step."""
        self.check("the step")
        if self.step is None:
            start, stop = self.span.positions.start, self.span.positions.stop
            new, prompt = max(start, self.prompt), "the prompt and " if start < self.prompt else ""
            raise HooklineError(
                f"this pass is not one step of a generation: it covers {prompt}the positions {new} to {stop - 1}, "
                f"guessed by an assistant or prompt lookup, or run a second time. Use hook.positions, or "
                f"at(step(k), …) and at(new_tokens, …)"
            )
        return self.step

    def whole_step(self, what: object) -> int:
        """The number of the step, for values that are drawn once per step."""
        if len(set(self.ends(self.span))) > 1 or self.span.length is not None:
            raise HooklineError(
                f"{what} is drawn once for the prompt and once for each new token, but this pass covers a part of the "
                f"prompt, or several of these. Generate with a cache, without chunks, and without an assistant or "
                f"prompt lookup"
            )
        return self.known_step()

    def ends(self, span: Span) -> list[int]:
        """For each position of the span, the length of the text when a generation with a cache processes it.

        A cached generation has one pass for the prompt and one for each new token. Other passes cover more, but
        positions mean the same in them.
        """
        if self.generation is None or span is self.encoder:
            return [span.width] * len(span.positions)
        return [max(position + 1, self.prompt) for position in span.positions]

    def is_new(self, span: Span) -> list[bool]:
        """For each position of the span, whether it is after the prompt."""
        if span is self.encoder:
            return [False] * len(span.positions)
        start = span.positions.start
        return [(start if self.generation is None else position) >= self.prompt for position in span.positions]

    def steps(self, span: Span) -> list[int]:
        """For each position of the span, the step of a generation that processes it."""
        if span is self.encoder:
            return [0] * len(span.positions)
        if self.generation is None:
            return [self.known_step()] * len(span.positions)
        return [max(0, position - self.prompt + 1) for position in span.positions]

    def span_at(self, stream: Stream) -> Span:
        """The positions that points of a stream have; an empty span for images, which are not text."""
        if stream == "image":
            return Span(range(0), 0, None, None)
        return self.encoder if stream == "encoder" and self.encoder is not None else self.span

    @property
    def is_padded(self) -> bool:
        """Whether positions of the text, or of what the encoder reads, may be padding."""
        has_mask = self.span.mask is not None or (self.encoder is not None and self.encoder.mask is not None)
        return has_mask and self.refusal is None

    def reshaped(self, point: Any, before: Tensor, after: Tensor) -> ForwardPass:
        """The same pass; one without positions if a hook at a point of the text added or removed rows or positions.

        In four axes (masks, heads) the positions are the third, and masks broadcast over rows and heads.
        """
        axes = (2,) if before.ndim == 4 else (0, 1)
        if point.stream == "image" or [*before.shape[axes[0] : axes[-1] + 1]] == [*after.shape[axes[0] : axes[-1] + 1]]:
            return self
        shapes = f"{list(before.shape)} to {list(after.shape)}"
        return replace(self, refusal=f"a hook at {point.name!r} changed the shape from {shapes}")

    def of_rows(self, which: Any) -> ForwardPass:
        """The same pass with some rows of the batch."""
        row_index = [which] if isinstance(which, int) else which

        def of(span: Span) -> Span:
            tokens, mask, text = (
                x[row_index] if x is not None else None for x in (span.tokens, span.mask, span.text())
            )
            rows = len(torch.arange(span.rows)[row_index])
            return replace(span, rows=rows, tokens=tokens, mask=mask, earlier=((0, text),))

        return replace(self, span=of(self.span), encoder=of(self.encoder) if self.encoder is not None else None)


class PassProgress(NamedTuple):
    """The last pass of a model, for the pass that continues it."""

    last: ForwardPass
    kept: Callable[[], Any] | None
    """A weak reference to the key-value cache that it left; None if it left none."""
    text: Pieces

    def left(self, cache: Any) -> bool:
        """Whether it left this cache. The id alone would not do: a new cache may get that of one that is gone."""
        return self.kept is None if cache is None else self.kept is not None and self.kept() is cache

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.last.span.positions.stop


class _Latest(threading.local):
    """The last pass of each model in this thread, by the number of hooks that it ran in."""

    def __init__(self) -> None:
        self.progress: WeakKeyDictionary[nn.Module, dict[int, PassProgress]] = WeakKeyDictionary()


_latest = _Latest()


def begin_pass(model: nn.Module, inputs: Mapping[str, Any], *, is_only: bool = False) -> None:
    """Note what the forward pass of `model` that begins now covers, from its keyword inputs."""
    before: PassProgress | None = _latest.progress.get(model, {}).get(pass_state.hooks)
    if is_only and before is not None and before.last.is_again(inputs):
        pass_state.forward_pass = before.last
        return
    has_encoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    cache = inputs.get("past_key_values")
    cache = inputs.get("cache_params") if cache is None else cache
    span = _span(inputs, "decoder_" if has_encoder else "", _seen_before(cache, before))
    encoder = (_span(inputs, "", 0) or _span_of_states(inputs)) if has_encoder else None
    if span is None:
        pass_state.forward_pass = None if encoder is None else ForwardPass(0, encoder, encoder, ref(model), is_only)
        return
    if _is_noted(span, encoder):
        return
    try:
        generation, refusal = None if is_only else generation_of(model), _packed(inputs)
    except HooklineError as error:
        generation, refusal = None, str(error)
    start, stop = span.positions.start, span.positions.stop
    is_prompt = generation is None and not start  # outside `generate`, and nothing ran before it
    step, prompt = (0, stop) if is_prompt else (None, 0)
    passing = ForwardPass(step, span, encoder, ref(model), is_only, prompt, generation, refusal=refusal)
    if generation is not None:
        passing = _in_generation(passing, generation, before, cache)
    elif start:
        passing = _in_loop(passing, before, cache)
    pass_state.forward_pass = passing
    if refusal is None:
        # A loop may write its next token to the same tensor.
        text = (*passing.span.earlier, (start, None if span.tokens is None else span.tokens.clone()))
        _latest.progress.setdefault(model, {})[pass_state.hooks] = PassProgress(passing, _reference(cache), text)


def whole_text(model: nn.Module, tokens: Tensor, mask: Tensor | None) -> ForwardPass:
    """The pass over a whole text, for activations that were collected in several passes."""
    span = Span(range(tokens.shape[1]), tokens.shape[0], tokens, mask)
    return ForwardPass(0, span, None, ref(model), False, prompt=tokens.shape[1])


def begin_encoder(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Note the input of the encoder of `model`, when `generate` runs it before the model itself."""
    span = _span(inputs, "", 0)
    pass_state.forward_pass = ForwardPass(0, span, span, ref(model), False) if span is not None else None


def _is_noted(span: Span, encoder: Span | None) -> bool:
    """Whether this pass was noted already, by the verb that runs it; two passes may be on the same tokens."""
    before: ForwardPass | None = pass_state.forward_pass
    if before is None or span.tokens is None or before.refusal is not None or before.generation is not None:
        return False
    if before.encoder is None or encoder is None:
        is_same_encoder = before.encoder is encoder
    else:
        is_same_encoder = before.encoder.tokens is encoder.tokens
    is_same = before.span.tokens is span.tokens and before.span.mask is span.mask
    return is_same and is_same_encoder and before.span.positions.start == span.positions.start


def _in_loop(passing: ForwardPass, before: PassProgress | None, cache: Any) -> ForwardPass:
    """A pass outside `generate` after others: it is the next step if it starts where the last pass ended."""
    start = passing.span.positions.start
    if before is None or (before.stop != start and not before.left(cache)):
        return replace(passing, step=1, prompt=start)
    last = before.last
    step = last.step + 1 if before.stop == start and last.step is not None else None
    span = replace(passing.span, earlier=before.text)
    return replace(passing, step=step, span=span, prompt=last.prompt, number=last.number + 1)


def _in_generation(
    passing: ForwardPass, generation: Generation, before: PassProgress | None, cache: Any
) -> ForwardPass:
    """A pass of `generate`, which knows where the prompt ends."""
    span, prompt = passing.span, generation.prompt
    start, stop = span.positions.start, span.positions.stop
    was = before.last.generation if before is not None else None
    if was is None or was.settings() is not generation.settings() or was.prompt != prompt:
        before = None  # the first pass of this generation
    continues = generation.keeps_rows and start > prompt
    earlier = before.text if before is not None and continues else ((0, generation.tokens),)
    mask = span.mask
    if generation.mask is not None and (mask is None or mask.shape[1] < max(stop, prompt)):
        mask = torch.nn.functional.pad(generation.mask, (0, max(0, stop - prompt)), value=1)
    is_one_step = stop <= prompt or (start >= prompt and stop - start == 1)
    return replace(
        passing,
        step=max(0, stop - prompt) if is_one_step or cache is None else None,
        span=replace(span, earlier=earlier, mask=mask, length=prompt if stop < prompt else None),
        prompt=prompt,
        number=0 if before is None else before.last.number + 1,
    )


def _packed(inputs: Mapping[str, Any]) -> str | None:
    """Why positions are unknown if several texts are packed into one row, as continuous batching does."""
    for name in ("cu_seq_lens_q", "block_table", "read_index"):
        if inputs.get(name) is not None:
            return "continuous batching packs several texts into one row"
    return None


def _span(inputs: Mapping[str, Any], prefix: str, start: int) -> Span | None:
    tokens, embeddings = inputs.get(f"{prefix}input_ids"), inputs.get(f"{prefix}inputs_embeds")
    shaped = tokens if isinstance(tokens, Tensor) else embeddings
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
    """The input of the encoder, if only its output is given."""
    states = inputs.get("encoder_outputs")
    states = states[0] if states is not None else None
    return _span({"inputs_embeds": states, "attention_mask": inputs.get("attention_mask")}, "", 0)


def _reference(cache: Any) -> Callable[[], Any] | None:
    try:
        return None if cache is None else ref(cache)
    except TypeError:  # a tuple: every pass returns another one
        return lambda: None


def _seen_before(cache: Any, before: PassProgress | None) -> int:
    """The number of positions in the key-value cache."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (AttributeError, NotImplementedError, ValueError, TypeError):  # a cache of recurrent states has no length
        return before.stop if before is not None and before.left(cache) else 0
