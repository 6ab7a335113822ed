"""Positions: where in a text, by index or by meaning.

    3, -1, slice(2, 5), [1, 4]        counted in the text of each row: padding does not count, tokens kept from earlier
                                      steps of a generation do
    torch.tensor([4, 6])              one such index per row
    a mask                            true at the columns that are meant, of the pass at hand
    last                              the last token of each row
    token(" Paris")                   where that token stands, the last time if it is there several times (nth=0: first)
    image_tokens                      the places that pictures take
    new_tokens, step(3)               in a generation: all tokens after the prompt, or those of one step

`at(last, fn)` makes a hook of `fn` that changes nothing elsewhere, and `run_with_cache(…, pos_slice=last)` caches that
position only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from hookline.casting import cast
from hookline.errors import HooklineError
from hookline.functions import caller
from hookline.passes import Pass, Span, is_of_pictures, tokenizers
from hookline.taps import now
from hookline.text import single_token
from hookline.vision.places import mask_in


@dataclass(frozen=True)
class Meaning:
    """A position that is found in the text at hand."""

    def mask(self, text: Pass, span: Span) -> Bool[Tensor, "row pos"]:
        """Where it is, among the positions of a forward pass."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Last(Meaning):
    def mask(self, text: Pass, span: Span) -> Tensor:
        """The last that is no padding."""
        return _of_text(-1, span, is_strict=text.is_only)

    def __repr__(self) -> str:
        return "last"


@dataclass(frozen=True)
class _Token(Meaning):
    what: str | int
    nth: int = -1

    def mask(self, text: Pass, span: Span) -> Tensor:
        """The first, last or n-th of those tokens in each row."""
        if span.tokens is None:
            raise HooklineError(f"the place of the token {self.what!r} is not known: the model was given no tokens")
        real = span.real()[:, span.positions.start :]
        found = torch.zeros_like(real)
        for row, here in enumerate((span.tokens == self._id(text)).cpu() & real):
            places = here.nonzero().flatten().tolist()
            if not places and text.step > 0:
                continue
            if self.nth not in range(-len(places), len(places)):
                raise HooklineError(
                    f"the token {self.what!r} is {len(places)} times in row {row} of the prompt"
                    + (f": there is no nth={self.nth}" if places else ", but its place is asked for")
                )
            found[row, places[self.nth]] = True
        return found

    def _id(self, text: Pass) -> int:
        if isinstance(self.what, int):
            return self.what
        model = text.model()
        return single_token(tokenizers.get(model) if model is not None else None, self.what)

    def __repr__(self) -> str:
        return f"token({self.what!r})" if self.nth == -1 else f"token({self.what!r}, nth={self.nth})"


@dataclass(frozen=True)
class _Images(Meaning):
    def mask(self, text: Pass, span: Span) -> Tensor:
        """Where the token stands that the model puts pictures in place of."""
        if span.tokens is None:
            raise HooklineError("where pictures are is not known: the model was given no tokens")
        if text.step > 0 and len(span.positions) == 1:  # a token that the model has made, whichever it is
            return torch.zeros(span.rows, 1, dtype=torch.bool)
        return mask_in(span.tokens, text.model().config).cpu()  # type: ignore[union-attr]

    def __repr__(self) -> str:
        return "image_tokens"


@dataclass(frozen=True)
class _Steps(Meaning):
    only: int | None = None

    def mask(self, text: Pass, span: Span) -> Tensor:
        """All positions of those passes, and none of others."""
        wanted = text.step > 0 if self.only is None else text.step == self.only
        return torch.full((span.rows, len(span.positions)), wanted)

    def __repr__(self) -> str:
        return "new_tokens" if self.only is None else f"step({self.only})"


last = _Last()
image_tokens = _Images()
new_tokens = _Steps()


def token(what: str | int, nth: int = -1) -> Meaning:
    """Where a token stands, given as text or id: the last time, or `nth=0` the first time, in each row."""
    return _Token(what, nth)


def step(k: int) -> Meaning:
    """The positions of one step of a generation; 0 is the prompt."""
    return _Steps(k)


Positions: TypeAlias = int | slice | Sequence[int] | Tensor | Meaning | None


def mask_of(positions: Positions, point: Any, rows: int, n: int) -> Bool[Tensor, "row pos"]:
    """The positions as a mask over the `n` positions that a point sees in the forward pass going on."""
    if isinstance(positions, Tensor) and positions.dtype == torch.bool:
        if positions.shape[-1] != n:
            raise HooklineError(f"a mask of {positions.shape[-1]} positions, but there are {n}")
        return positions.cpu().expand(rows, n)
    if positions is None:
        return torch.ones(rows, n, dtype=torch.bool)
    text, span = _passing(positions, point, rows, n)
    if isinstance(positions, Meaning):
        return positions.mask(text, span).expand(rows, n)
    return _of_text(_checked(positions, rows), span, is_strict=text.is_only).expand(rows, n)


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
    return found[:, span.positions.start :]


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
    """A hook that does what `hook` does at these positions, and changes nothing elsewhere.

    `hook` gets the whole activation; of what it makes of it, only these positions count.
    """
    invoke = caller(hook)
    if not isinstance(positions, Tensor | Meaning | None):
        _checked(positions, None)

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
    raise HooklineError(f"no axis of positions is known of a point with axes {axes!r} and shape {list(x.shape)}")


def _passing(positions: Positions, point: Any, rows: int, n: int) -> tuple[Pass, Span]:
    """The forward pass going on, and the positions of it that the point sees."""
    if is_of_pictures(point.listed):
        if isinstance(positions, _Last | _Token | _Images):
            raise HooklineError(
                f"{positions!r} is a place in the prompt, but the positions of {point.name!r} are places in pictures: "
                "give indices or a mask"
            )
        span = Span(range(n), rows, None, None)
        return Pass(0, span, None, lambda: None, True), span  # type: ignore[arg-type]
    text: Pass | None = now.passing
    if text is None and (isinstance(positions, Meaning) or point.axes):
        raise HooklineError(
            f"{positions!r} is a place in a text: it is known while a language model runs, the whole of it"
        )
    if text is None:  # some other network: what there is, is the text
        span = Span(range(n), rows, None, None)
        return Pass(0, span, None, lambda: None, True), span  # type: ignore[arg-type]
    span = text.span_at(point.listed)
    if len(span.positions) != n == span.positions.stop:  # keys: of this step and of all before it
        span = replace(span, positions=range(n), tokens=None)
    if len(span.positions) != n:
        raise HooklineError(
            f"{point.name!r} has {n} positions, but the text has {len(span.positions)} in this pass: {positions!r} "
            f"cannot be told there"
        )
    return text, span


def _checked(positions: Any, rows: int | None) -> Any:
    """The positions, if that is what they are."""
    if isinstance(positions, Tensor) and positions.ndim == 1 and not positions.is_floating_point():
        if rows is not None and len(positions) != rows:
            raise HooklineError(f"one position per row: {rows} of them, not a tensor of shape {list(positions.shape)}")
        return positions
    is_number = positions.ndim == 0 if isinstance(positions, Tensor) else hasattr(positions, "__index__")
    if is_number and not isinstance(positions, bool):  # numpy's too
        return int(positions)
    if isinstance(positions, slice):
        return positions
    if isinstance(positions, list | tuple | range) and positions and all(isinstance(each, int) for each in positions):
        return list(positions)
    raise HooklineError(
        "positions are an index, a slice, a list of indices, one index per row as a tensor, or last, token(…), "
        f"image_tokens, new_tokens, step(…); not {positions!r}"
    )
