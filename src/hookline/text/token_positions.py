"""Positions: where in a text, by index or by meaning.

    3, -1, slice(2, 5), [1, 4]        counted in the text of each row: padding does not count, tokens kept from earlier
                                      steps of a generation do
    torch.tensor([4, 6])              one such index per row
    a mask                            true at the columns that are meant, of the pass at hand
    last                              the last token of each row, not counting padding
    token(" Paris")                   where that token stands, the last time if it is there several times (nth=0: first)
                                      in the text so far: tokens that a generation writes count too
    image_tokens                      the tokens of images
    new_tokens, step(3)               in a generation: all tokens after the prompt, or those of one step

`at(last, fn)` makes a hook of `fn` that changes nothing elsewhere, and `run_with_cache(…, pos_slice=last)` caches that
position only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool
from numpy import ndarray
from torch import Tensor

from hookline.engine.callbacks import caller
from hookline.engine.casting import cast
from hookline.engine.passes import current
from hookline.errors import HooklineError
from hookline.text.forward_pass import ForwardPass, Span, tokenizers
from hookline.text.image_tokens import mask_in
from hookline.text.tokenizer import single_token


@dataclass(frozen=True)
class Meaning:
    """A position given by its meaning, which is found in each text."""

    def mask(self, text: ForwardPass, span: Span) -> Bool[Tensor, "row pos"]:
        """True at the positions of this forward pass that are meant."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Last(Meaning):
    def mask(self, text: ForwardPass, span: Span) -> Tensor:
        """The last token that is not padding."""
        return _of_text(-1, span, is_strict=text.is_only)

    def __repr__(self) -> str:
        return "last"


@dataclass(frozen=True)
class _Token(Meaning):
    what: str | int
    nth: int = -1

    def mask(self, text: ForwardPass, span: Span) -> Tensor:
        """The first, last or n-th of those tokens in the text of each row so far."""
        found = torch.zeros_like(span.real())
        for row, places in enumerate(self._places(text, span)):
            if self.nth in range(-len(places), len(places)):
                found[row, places[self.nth]] = True
            elif text.is_only:
                raise HooklineError(
                    f"the token {self.what!r} is {len(places)} times in row {row} of the prompt"
                    + (f": there is no nth={self.nth}" if places else ", but its place is asked for")
                )
        return found[:, span.positions.start : span.positions.stop]

    def lacking(self, text: ForwardPass, span: Span) -> dict[int, int]:
        """The rows that do not have it so far, and how often the token is there."""
        counts = [len(places) for places in self._places(text, span)]
        return {row: count for row, count in enumerate(counts) if self.nth not in range(-count, count)}

    def _places(self, text: ForwardPass, span: Span) -> list[list[int]]:
        """Where the token stands in each row, up to the last position of the pass."""
        whole, start = span.text(), span.positions.start
        trades = text.generation is not None and not text.generation.keeps_rows
        if whole is None and span.tokens is not None and start and (trades or self.nth < 0):
            # What was written before is not known, and does not matter: tokens counted from the end, or in the prompt.
            prompt = text.generation.tokens if text.generation is not None else None
            known = prompt if prompt is not None and len(prompt) == span.rows else span.tokens[:, :0]
            blank = span.tokens.new_full((span.rows, max(0, start - known.shape[1])), -1)
            whole = torch.cat([known[:, :start].to(blank.device), blank, span.tokens], 1)
        if whole is None:
            why = "the model was given no tokens" if span.tokens is None else "the tokens before are not known"
            raise HooklineError(f"the place of the token {self.what!r} is not known: {why}")
        counted = [row.nonzero().flatten().tolist() for row in (whole == self._id(text)).cpu() & span.real()]
        if trades and self.nth >= 0:
            self._check_rows(text.prompt, counted)
        return counted

    def _check_rows(self, prompt: int, counted: list[list[int]]) -> None:
        """Where rows trade their texts, as in beam search, only what stands in the prompt can be counted."""
        for row, places in enumerate(counted):
            if sum(place < prompt for place in places) <= self.nth:
                raise HooklineError(
                    f"{self!r} is not in the prompt of row {row}, and cannot be counted after it: in this kind of "
                    f"generation (beam search, …) rows trade their texts from step to step"
                )

    def _id(self, text: ForwardPass) -> int:
        if isinstance(self.what, int):
            return self.what
        model = text.model()
        return single_token(tokenizers.get(model) if model is not None else None, self.what)

    def __repr__(self) -> str:
        return f"token({self.what!r})" if self.nth == -1 else f"token({self.what!r}, nth={self.nth})"


@dataclass(frozen=True)
class _Images(Meaning):
    def mask(self, text: ForwardPass, span: Span) -> Tensor:
        """The placeholder tokens that the model replaces by images."""
        if span.tokens is None:
            raise HooklineError("image positions are unknown: the model was given no tokens")
        if text.step != 0 and len(span.positions) == 1:  # a token that the model has made, whichever it is
            return torch.zeros(span.rows, 1, dtype=torch.bool)
        return mask_in(span.tokens, text.model().config).cpu()  # type: ignore[union-attr]

    def __repr__(self) -> str:
        return "image_tokens"


@dataclass(frozen=True)
class _Steps(Meaning):
    only: int | None = None

    def mask(self, text: ForwardPass, span: Span) -> Tensor:
        """All positions of those steps, and none of other steps."""
        wanted = span.positions.start >= text.prompt if self.only is None else text.known_step() == self.only
        return torch.full((span.rows, len(span.positions)), wanted)

    def __repr__(self) -> str:
        return "new_tokens" if self.only is None else f"step({self.only})"


last = _Last()
image_tokens = _Images()
new_tokens = _Steps()


def token(what: str | int, nth: int = -1) -> Meaning:
    """The position of a token in each row, given as text or id: its last occurrence, or the first with `nth=0`."""
    return _Token(what if isinstance(what, str) else _whole("token(…)", what), _whole("nth=", nth))


def step(k: int) -> Meaning:
    """The positions of one step of a generation; 0 is the prompt."""
    return _Steps(_whole("step(…)", k))


Positions: TypeAlias = int | slice | Sequence[int] | Tensor | Meaning | None


def mask_of(positions: Positions, point: Any, rows: int, n: int) -> Bool[Tensor, "row pos"]:
    """The positions as a mask over the `n` positions that a point has in the current forward pass."""
    if isinstance(positions, Tensor) and positions.dtype == torch.bool:
        if positions.shape[-1] != n:
            raise HooklineError(f"a mask of {positions.shape[-1]} positions, but there are {n}")
        if positions.ndim == 2 and 1 < len(positions) != rows:
            if not _writes_several(rows, len(positions)):
                raise HooklineError(f"a mask of {len(positions)} rows, but there are {rows}")
            positions = positions.repeat_interleave(rows // len(positions), 0)
        return positions.cpu().expand(rows, n)
    if positions is None:
        return torch.ones(rows, n, dtype=torch.bool)
    text, span = _passing(positions, point, rows, n)
    if not isinstance(positions, Meaning):
        positions = _checked(positions, rows)
    parts = text.parts(span)
    if len(parts) > 1 and "k" in (axes := point.axes.split()) and "p" not in axes:
        parts = _parts_of_keys(parts, text, span, positions, point)
    masks = [_mask_in(*part, positions) for part in parts]
    return (masks[0] if len(masks) == 1 else torch.cat(masks, 1)).expand(rows, n)


def _mask_in(text: ForwardPass, span: Span, positions: Any) -> Bool[Tensor, "row pos"]:
    if isinstance(positions, Meaning):
        return positions.mask(text, span)
    return _of_text(positions, span, is_strict=text.is_only)


def _parts_of_keys(
    parts: list[tuple[ForwardPass, Span]], text: ForwardPass, span: Span, positions: Any, point: Any
) -> list[tuple[ForwardPass, Span]]:
    """Keys of earlier passes are there again in every pass, where all queries of the pass see the same."""
    if isinstance(positions, _Steps):
        return parts
    is_one_query = len(text.parts(text.span)) == 1
    if not is_one_query and _counts_from_the_end(positions):
        raise HooklineError(
            f"{positions!r} is counted from the end of the text, but this pass has several ends: the keys at "
            f"{point.name!r} are the same for all of its new tokens. Generate with a cache, without an assistant and "
            f"without prompt lookup"
        )
    return [(text, span)]


def _counts_from_the_end(positions: Any) -> bool:
    if isinstance(positions, _Token):
        return positions.nth < 0
    if isinstance(positions, slice):
        return any(each is not None and each < 0 for each in (positions.start, positions.stop))
    if isinstance(positions, Meaning):
        return isinstance(positions, _Last)
    return bool((torch.as_tensor(positions) < 0).any())


def _of_text(positions: Any, span: Span, *, is_strict: bool) -> Bool[Tensor, "row pos"]:
    """Indices that count in the text of each row, as a mask over the columns of the pass."""
    real = span.real()
    found = torch.zeros_like(real)
    for row in range(len(real)):
        columns = real[row].nonzero().flatten().tolist()
        here: Any = int(positions[row]) if isinstance(positions, Tensor) else positions
        if isinstance(here, slice):
            chosen = columns[here]
        else:
            wanted = [here] if isinstance(here, int) else here
            outside = [index for index in wanted if index not in range(-len(columns), len(columns))]
            if outside and is_strict:
                where = f" in row {row}" if len(real) > 1 else ""
                raise HooklineError(f"position {outside[0]}, but there are {len(columns)} positions{where}")
            chosen = [columns[index] for index in wanted if index not in outside]
        found[row, chosen] = True
    return found[:, span.positions.start : span.positions.stop]


def is_one_per_row(positions: Positions) -> bool:
    """Whether there is one position in each row, so that the axis can be left out."""
    return isinstance(positions, int | _Last | _Token) or (
        isinstance(positions, Tensor) and positions.dtype != torch.bool
    )


def picked(x: Tensor, point: Any, positions: Positions) -> Tensor:
    """An activation at some positions: without that axis if it is one in each row, else with a shorter one."""
    axis = _axis(point.axes, x)
    if not isinstance(positions, Tensor | Meaning | list | tuple):
        positions = _checked(positions, None)
    by_position = x.movedim(axis, 1)
    rows, n = by_position.shape[:2]
    if isinstance(positions, list | tuple):  # in the order in which they are asked for
        return torch.stack([picked(x, point, index) for index in _checked(positions, rows)], axis)
    mask = mask_of(positions, point, rows, n).to(x.device)
    counts = mask.sum(1)
    if not bool((counts == counts[0]).all()) or not bool(counts[0]):
        raise HooklineError(
            f"{positions!r} is {' or '.join(map(str, sorted(set(counts.tolist()))))} positions in a row here: cache "
            f"all of them, and pick afterwards"
        )
    chosen = by_position[mask].unflatten(0, (rows, -1))
    return chosen[:, 0] if is_one_per_row(positions) else chosen.movedim(1, axis)


def at(positions: Positions, hook: Callable[..., Any]) -> Callable[..., Tensor | None]:
    """A hook that applies `hook` at these positions and leaves all others unchanged.

    `hook` receives the whole activation; its result is used at these positions only.
    """
    invoke = caller(hook)
    positions = canonical(positions)

    def hook_there(x: Tensor, hook: Any) -> Tensor | None:
        axis = _axis(hook.axes, x)
        mask = mask_of(positions, hook, x.shape[0], x.shape[axis])
        hook_there.acted = bool(mask.any())  # type: ignore[attr-defined]
        if not hook_there.acted:  # type: ignore[attr-defined]
            return None
        given = x.clone()
        result = invoke(given, hook)
        new = given if result is None else result
        if not isinstance(new, Tensor) or new.shape != x.shape:
            return new  # an error, as of any hook
        shape = [x.shape[each] if each in (0, axis) else 1 for each in range(x.ndim)]
        there = mask.to(x.device).view(shape)
        if not (x.is_floating_point() or x.is_complex()):  # else all of x would become what `new` is, and lose digits
            new = cast(torch.where(there, new, torch.zeros_like(new)), x)
        return torch.where(there, new, x)

    hook_there.func = hook  # type: ignore[attr-defined]  # so that errors name the hook itself
    hook_there.where, hook_there.acted = positions, False  # type: ignore[attr-defined]
    return hook_there


def _axis(axes: str, x: Tensor) -> int:
    """Which axis is that of positions."""
    names = axes.split()
    for name in ("p", "k"):
        if name in names:
            return names.index(name)
    if not names and x.ndim == 3:
        return 1
    raise HooklineError(f"this point has no known axis of positions: its axes are {axes!r}, its shape {list(x.shape)}")


def _passing(positions: Positions, point: Any, rows: int, n: int) -> tuple[ForwardPass, Span]:
    """The forward pass going on, and the positions of it that the point sees."""
    if point.stream == "image":
        if isinstance(positions, Meaning):
            raise HooklineError(
                f"{positions!r} is a position in the prompt, but the positions of {point.name!r} are image patches: "
                "give indices or a mask"
            )
        span = Span(range(n), rows, None, None)
        return ForwardPass(0, span, None, lambda: None, True), span  # type: ignore[arg-type]
    text: ForwardPass | None = current.forward_pass
    if text is None and (isinstance(positions, Meaning) or point.axes):
        raise HooklineError(f"{positions!r} can only be resolved during a full forward pass of a language model")
    if text is None:  # some other network: what there is, is the text
        span = Span(range(n), rows, None, None)
        return ForwardPass(0, span, None, lambda: None, True), span  # type: ignore[arg-type]
    if isinstance(positions, Meaning) or point.axes:
        text.check(repr(positions))
    span = text.span_at(point.stream)
    if len(span.positions) != n == span.positions.stop:  # keys: of this step and of all before it
        span = replace(span, positions=range(n), tokens=span.text(), earlier=None)
    if len(span.positions) != n:
        raise HooklineError(
            f"{point.name!r} has {n} positions, but the text has {len(span.positions)} in this pass: {positions!r} "
            f"cannot be told there"
        )
    return text, span


def canonical(positions: Any) -> Positions:
    """Positions in one form: an int, a slice or a tuple of ints, a tensor, or what they mean; an error for others."""
    if positions is None or isinstance(positions, Meaning):
        return positions
    if isinstance(positions, ndarray) and positions.dtype == bool:
        positions = torch.from_numpy(positions)
    if isinstance(positions, Tensor) and positions.dtype == torch.bool and positions.ndim:
        return positions
    found = _checked(positions, None)
    return tuple(found) if isinstance(found, list) else found


def _whole(name: str, given: Any) -> int:
    """A whole number, also one of numpy's."""
    if isinstance(given, bool | Tensor | ndarray) or not hasattr(given, "__index__"):
        raise HooklineError(f"{name} takes a whole number, not {given!r:.60}")
    return index(given)


def _writes_several(rows: int, texts: int) -> bool:
    """Whether a generation writes several texts for each of its prompts, as beams or `num_return_sequences` do."""
    text: ForwardPass | None = current.forward_pass
    return text is not None and text.generation is not None and rows % texts == 0


def _checked(positions: Any, rows: int | None) -> Any:
    """The positions, if that is what they are."""
    if isinstance(positions, ndarray) and positions.ndim and positions.dtype.kind in "iu":
        raise HooklineError(
            f"positions are given as a numpy array of shape {list(positions.shape)}, which could be one index per row "
            f"or several in every row: torch.from_numpy(…) means the former, and .tolist() the latter"
        )
    if isinstance(positions, Tensor) and positions.ndim == 1 and not positions.is_floating_point():
        if rows is not None and len(positions) and len(positions) != rows and _writes_several(rows, len(positions)):
            return positions.repeat_interleave(rows // len(positions))
        if rows is not None and len(positions) != rows:
            raise HooklineError(f"one position per row: {rows} of them, not a tensor of shape {list(positions.shape)}")
        return positions
    if isinstance(positions, Tensor | ndarray) and not positions.ndim:
        positions = positions.item()
    if _is_index(positions):
        return index(positions)
    if isinstance(positions, slice):
        ends = (positions.start, positions.stop, positions.step)
        if all(end is None or _is_index(end) for end in ends) and positions.step != 0:
            return slice(*(None if end is None else index(end) for end in ends))
    if isinstance(positions, list | tuple | range) and positions and all(map(_is_index, positions)):
        return [index(each) for each in positions]
    raise HooklineError(
        "positions are an index, a slice, a list of indices, one index per row as a tensor, or last, token(…), "
        f"image_tokens, new_tokens, step(…); not {positions!r:.200}"
    )


def _is_index(given: Any) -> bool:
    return hasattr(given, "__index__") and not isinstance(given, bool | Tensor | ndarray)
