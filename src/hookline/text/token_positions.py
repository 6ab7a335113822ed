"""Positions: where in a text, by index or by meaning.

    3, -1, slice(2, 5), [1, 4]        indices into the text of each row: padding does not count, tokens of earlier steps
                                      of a generation do
    torch.tensor([4, 6])              one such index per row
    a bool tensor                     a mask over the columns of the current forward pass
    last                              the last token of each row that is not padding
    token(" Paris")                   its last occurrence in the text so far, with generated tokens (nth=0: its first)
    image_tokens                      the tokens of images
    new_tokens, step(3)               in a generation: all tokens after the prompt, or those of one step
    turn("user"), span("words"),      what the messages of a role say, the tokens of some words, a sentence: see
    sentence(0)                       `turn_positions.py`

`at(last, fn)` makes a hook of `fn` that changes nothing elsewhere, and `run_with_cache(…, pos_slice=last)` caches that
position only. `canonical` checks positions when they are given, and `mask_of` resolves them in a forward pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool
from numpy import ndarray
from torch import Tensor

from hookline.engine import pass_state
from hookline.errors import HooklineError, how_many
from hookline.text.forward_pass import ForwardPass, Span, tokenizers
from hookline.text.image_tokens import mask_in
from hookline.text.tokenizer import single_token

Lacking: TypeAlias = dict[tuple[int, int], str]
"""Positions that a text does not have: by row and index, described for a message."""
Mask: TypeAlias = Bool[Tensor, "row pos"]


@dataclass(frozen=True)
class Meaning:
    """A position given by its meaning, which is resolved in each text."""

    @property
    def counts_from_the_end(self) -> bool:
        """Whether it may be another position when the text goes on."""
        return False

    def counted(self, text: ForwardPass, span: Span) -> tuple[int, Mask] | None:  # noqa: ARG002
        """The index of the position, and the columns of the text so far that it counts; None if it has no index."""
        return None

    def mask(self, text: ForwardPass, span: Span) -> Mask:
        """True at the columns of this forward pass that are meant."""
        counted = self.counted(text, span)
        assert counted is not None  # other meanings have their own way
        return mask_of_indices(*counted, text, span)

    def lacking(self, text: ForwardPass, span: Span) -> Lacking:
        """The positions that the text so far does not have."""
        counted = self.counted(text, span)
        return {} if counted is None else _missing(self, *counted)


@dataclass(frozen=True)
class _Last(Meaning):
    @property
    def counts_from_the_end(self) -> bool:
        return True

    def counted(self, text: ForwardPass, span: Span) -> tuple[int, Mask]:  # noqa: ARG002
        return -1, span.real()

    def __repr__(self) -> str:
        return "last"


@dataclass(frozen=True)
class TokenMeaning(Meaning):
    """The position of a token, by its text or id: its `nth` occurrence in each row."""

    what: str | int
    nth: int = -1

    @property
    def counts_from_the_end(self) -> bool:
        """Whether the last occurrences are counted."""
        return self.nth < 0

    def counted(self, text: ForwardPass, span: Span) -> tuple[int, Mask]:
        """Counts the occurrences of the token."""
        generation = text.generation
        rows_move = generation is not None and not generation.keeps_rows
        whole = text_so_far(self, text, span, is_partly_known=rows_move or self.nth < 0)
        occurrences = (whole == self.token_id(text)).cpu() & span.real()
        if generation is not None and rows_move and self.nth >= 0:
            for row, count in enumerate(occurrences[:, : generation.prompt].sum(1).tolist()):
                if count <= self.nth:
                    raise HooklineError(
                        f"{self!r} is not in the prompt of row {row}, and cannot be counted after it: in this kind of "
                        f"generation (such as beam search) rows exchange their texts between steps"
                    )
        return self.nth, occurrences

    def token_id(self, text: ForwardPass) -> int:
        """The id of the token."""
        if isinstance(self.what, int):
            return self.what
        model = text.model()
        return single_token(tokenizers.get(model) if model is not None else None, self.what)

    def __repr__(self) -> str:
        return f"token({self.what!r})" if self.nth == -1 else f"token({self.what!r}, nth={self.nth})"


def text_so_far(what: Meaning, text: ForwardPass, span: Span, *, is_partly_known: bool) -> Tensor:
    """The tokens of the text so far; with `is_partly_known`, -1 where they are not known."""
    whole, generation = span.text(), text.generation
    if whole is None and span.tokens is not None and is_partly_known:
        whole = _with_blanks(generation.tokens if generation is not None else None, span, span.tokens)
    if whole is None:
        why = "the model was not given tokens" if span.tokens is None else "the earlier tokens are unknown"
        raise HooklineError(f"the position of {what!r} is unknown: {why}")
    return whole


def _with_blanks(prompt: Tensor | None, span: Span, tokens: Tensor) -> Tensor:
    """The text so far with -1 for unknown tokens: they are not needed to count from the end, or in the prompt."""
    whole = tokens.new_full((span.rows, span.width), -1)
    if prompt is not None and len(prompt) == span.rows:
        whole[:, : prompt.shape[1]] = prompt[:, : span.width]
    whole[:, span.positions.start : span.positions.stop] = tokens
    return whole


@dataclass(frozen=True)
class _Images(Meaning):
    def mask(self, text: ForwardPass, span: Span) -> Mask:
        """The placeholder tokens that the model replaces by images; generated tokens are not images."""
        if span.tokens is None:
            raise HooklineError("image positions are unknown: the model was not given tokens")
        mask = mask_in(span.tokens, text.model().config).cpu()  # type: ignore[union-attr]
        is_generated = text.generation is not None or len(span.positions) == 1
        return mask & ~torch.tensor(text.is_new(span)) if is_generated else mask

    def __repr__(self) -> str:
        return "image_tokens"


@dataclass(frozen=True)
class Steps(Meaning):
    """The positions of one step of a generation, or of all steps after the prompt."""

    only: int | None = None

    def mask(self, text: ForwardPass, span: Span) -> Mask:
        """All columns of those steps, and none of other steps."""
        flags = text.is_new(span) if self.only is None else [number == self.only for number in text.steps(span)]
        return torch.tensor(flags).expand(span.rows, -1)

    def __repr__(self) -> str:
        return "new_tokens" if self.only is None else f"step({self.only})"


last = _Last()
image_tokens = _Images()
new_tokens = Steps()


def token(what: str | int, nth: int = -1) -> Meaning:
    """The position of a token in each row, given as text or id: its last occurrence, or the first with `nth=0`."""
    return TokenMeaning(what if isinstance(what, str) else whole_number("token", what), whole_number("nth", nth))


def step(k: int) -> Meaning:
    """The positions of one step of a generation; 0 is the prompt."""
    return Steps(whole_number("step", k))


Positions: TypeAlias = int | slice | Sequence[int] | Tensor | Meaning | None


def is_index(value: Any) -> bool:
    """Whether it is an integer of Python or numpy, and not a bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool | Tensor | ndarray)


def whole_number(name: str, value: Any) -> int:
    """The integer that was given for `name`."""
    if not is_index(value):
        raise HooklineError(f"{name} must be an integer, not {value!r:.60}")
    return index(value)


def canonical(positions: Any) -> Positions:
    """Positions in one form: an int, slice, tuple of ints, tensor, or meaning; an error for anything else."""
    if positions is None or isinstance(positions, Meaning):
        return positions
    if isinstance(positions, ndarray) and positions.ndim and positions.dtype.kind in "iu":
        raise HooklineError(
            f"a numpy array of shape {list(positions.shape)} could be one position per row or several positions in "
            f"every row: pass torch.from_numpy(…) for the former, .tolist() for the latter"
        )
    if isinstance(positions, ndarray) and positions.dtype == bool:
        positions = torch.from_numpy(positions)
    if isinstance(positions, Tensor) and positions.ndim:
        if positions.dtype == torch.bool or (positions.ndim == 1 and not positions.is_floating_point()):
            return positions
    elif isinstance(positions, Tensor | ndarray) and not positions.ndim:
        positions = positions.item()
    if is_index(positions):
        return index(positions)
    if isinstance(positions, slice) and positions.step != 0:
        ends = (positions.start, positions.stop, positions.step)
        if all(end is None or is_index(end) for end in ends):
            return slice(*(None if end is None else index(end) for end in ends))
    if isinstance(positions, list | tuple | range) and positions and all(map(is_index, positions)):
        return tuple(map(index, positions))
    raise HooklineError(
        "positions must be an index, a slice, a list of indices, a tensor with one index per row, or last, token(…), "
        f"turn(…), span(…), sentence(…), image_tokens, new_tokens, step(…); got {positions!r:.200}"
    )


def mask_of(positions: Positions, point: Any, rows: int, n: int) -> Bool[Tensor, "row pos"]:
    """The positions as a mask over the `n` positions that a point has in the current forward pass."""
    if positions is None:
        return torch.ones(rows, n, dtype=torch.bool)
    positions = canonical(positions)
    if isinstance(positions, Tensor):
        positions = _for_rows(positions, rows)
        if positions.dtype == torch.bool:
            if positions.shape[-1] != n:
                raise HooklineError(f"the mask has {positions.shape[-1]} positions, but there are {n}")
            return positions.cpu().expand(rows, n)
    text, span = _current_pass(positions, point, rows, n)
    axes = point.axes.split()
    if "k" in axes and "p" not in axes and not isinstance(positions, Steps):
        # Keys of earlier passes are present again in every pass, and all queries of a pass see the same keys.
        if len(set(text.ends(text.span))) > 1 and _counts_from_the_end(positions):
            raise HooklineError(
                f"{positions!r} is counted from the end of the text, but this pass has several ends: the keys at "
                f"{point.name!r} are the same for all of its new tokens. Generate with a cache, without an assistant "
                f"and without prompt lookup"
            )
        text = replace(text, prompt=span.width)
    if text.is_only and (missing := lacking(positions, text, span)):
        raise HooklineError(f"there is no {next(iter(missing.values()))}")
    if isinstance(positions, Meaning):
        return positions.mask(text, span).expand(rows, n)
    return mask_of_indices(positions, span.real(), text, span).expand(rows, n)


def _for_rows(positions: Tensor, rows: int) -> Tensor:
    """Positions per row, with one for each row of the batch: a generation may write several texts per prompt."""
    count = 1 if positions.dtype == torch.bool and positions.ndim == 1 else len(positions)
    if count == rows or (count == 1 and positions.dtype == torch.bool):
        return positions
    text: ForwardPass | None = pass_state.forward_pass
    if not count or rows % count or text is None or text.generation is None:
        raise HooklineError(f"positions are given for {count} rows, but the batch has {rows}")
    return positions.repeat_interleave(rows // count, 0)


def lacking(positions: Positions, text: ForwardPass, span: Span) -> Lacking:
    """The positions, in canonical form, that the text so far does not have."""
    if isinstance(positions, Meaning):
        return positions.lacking(text, span)
    return {} if positions is None or isinstance(positions, slice) else _missing(positions, positions, span.real())


def _missing(positions: Positions, indices: Any, counted: Mask) -> Lacking:
    """Those of the indices that the counted columns of a row do not have."""
    return {
        (row, position): _lacks(positions, row, position, count)
        for row, count in enumerate(counted.sum(1).tolist())
        for position in _indices_in(indices, row)
        if position not in range(-count, count)
    }


def _lacks(positions: Positions, row: int, index: int, count: int) -> str:
    """A position that a row does not have, as a message describes it."""
    if not isinstance(positions, TokenMeaning):
        return f"position {index} in row {row}, which has {count}"
    if not count and isinstance(positions.what, str):
        return f"{positions!r} in row {row} (with and without a space before it, a word is two tokens)"
    return f"{positions!r} in row {row}" + (f", where this token occurs {how_many(count, 'time')}" if count else "")


def _indices_in(positions: Any, row: int) -> Sequence[int]:
    if isinstance(positions, Tensor):
        return positions[row : row + 1].tolist() if positions.dtype != torch.bool else ()
    return (positions,) if isinstance(positions, int) else positions


def mask_of_indices(positions: Any, counted: Mask, text: ForwardPass, span: Span) -> Mask:
    """The columns of the pass with these indices among the counted columns of each row, in the text up to them."""
    start, ends = span.positions.start, text.ends(span)
    mask = torch.zeros(len(counted), len(ends), dtype=torch.bool)
    for row, flags in enumerate(counted.tolist()):
        columns = [column for column, is_counted in enumerate(flags) if is_counted]
        for end in set(ends):
            so_far = columns[: bisect_left(columns, end)]
            if isinstance(positions, slice):
                selected = so_far[positions]
            else:
                valid_indices = range(-len(so_far), len(so_far))
                selected = [so_far[position] for position in _indices_in(positions, row) if position in valid_indices]
            offsets = [column - start for column in selected if column in span.positions]
            mask[row, [column for column in offsets if ends[column] == end]] = True
    return mask


def _counts_from_the_end(positions: Any) -> bool:
    if isinstance(positions, Meaning):
        return positions.counts_from_the_end
    if isinstance(positions, slice):
        return any(end is not None and end < 0 for end in (positions.start, positions.stop))
    return bool((torch.as_tensor(positions) < 0).any())


def is_one_per_row(positions: Positions) -> bool:
    """Whether there is exactly one position in each row, so that the axis can be dropped."""
    if isinstance(positions, Tensor):
        return positions.dtype != torch.bool
    return isinstance(positions, int | _Last | TokenMeaning)


def _current_pass(positions: Positions, point: Any, rows: int, n: int) -> tuple[ForwardPass, Span]:
    """The current forward pass, and its positions as the point sees them."""
    is_meaning, is_image = isinstance(positions, Meaning), point.stream == "image"
    text: ForwardPass | None = None if is_image else pass_state.forward_pass
    if is_image and is_meaning:
        raise HooklineError(
            f"{positions!r} is a position in the prompt, but the positions of {point.name!r} are image patches: "
            "give indices or a mask"
        )
    if text is None and not is_image and (is_meaning or point.axes):
        raise HooklineError(f"{positions!r} can only be resolved during a full forward pass of a language model")
    if text is None:  # image patches, or any other network
        span = Span(range(n), rows, None, None)
        return ForwardPass(0, span, None, lambda: None, True), span  # type: ignore[arg-type]
    if is_meaning or point.axes:
        text.check(repr(positions))
    span = text.span_at(point.stream)
    if len(span.positions) != n == span.positions.stop:  # keys: of this step and of all before it
        span = replace(span, positions=range(n), tokens=span.text(), earlier=())
    if len(span.positions) != n:
        raise HooklineError(
            f"{point.name!r} has {n} positions, but the text has {len(span.positions)} in this pass, so {positions!r} "
            f"is ambiguous there"
        )
    return text, span
