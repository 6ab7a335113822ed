"""Positions: where in a text, by index or by meaning.

    3, -1, slice(2, 5), [1, 4]        indices, the same in every row
    torch.tensor([4, 6])              one index per row
    last                              the last token of each row that is no padding
    token(" Paris")                   where that token stands, the last time if it is there several times
    image_tokens                      the places that pictures take
    new_tokens, step(3)               in a generation: all tokens after the prompt, or those of one step

`at(last, fn)` makes a hook of `fn` that changes nothing elsewhere, and `run_with_cache(…, pos_slice=last)` caches that
position only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from hookline.errors import HooklineError
from hookline.functions import caller
from hookline.passes import Pass, tokenizers
from hookline.taps import now


@dataclass(frozen=True)
class Meaning:
    """A position that is found in the text at hand."""

    def mask(self, text: Pass, rows: int) -> Bool[Tensor, "batch pos"]:
        """Where it is, among the positions of a forward pass."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Last(Meaning):
    def mask(self, text: Pass, rows: int) -> Tensor:
        """The last that is no padding."""
        n = len(text.positions)
        found = torch.zeros(rows, n, dtype=torch.bool)
        if text.mask is None:
            found[:, -1] = True
            return found
        real = text.mask.cpu().bool()
        ends = real.shape[1] - 1 - real.flip(1).int().argmax(1)  # counted over all positions so far
        for row, end in enumerate(ends.tolist()):
            if end in text.positions:
                found[row, end - text.positions.start] = True
        return found


@dataclass(frozen=True)
class _Token(Meaning):
    what: str | int
    nth: int = -1

    def mask(self, text: Pass, rows: int) -> Tensor:
        """The first, last or n-th of those tokens in each row."""
        if text.tokens is None:
            raise HooklineError(f"the place of the token {self.what!r} is not known: the model was given no tokens")
        found = torch.zeros(rows, len(text.positions), dtype=torch.bool)
        for row, here in enumerate((text.tokens == self._id(text)).cpu()):
            places = here.nonzero().flatten().tolist()
            if not places and text.step == 0:
                raise HooklineError(f"the token {self.what!r} is not in row {row} of the prompt")
            if places:
                found[row, places[self.nth]] = True
        return found

    def _id(self, text: Pass) -> int:
        if isinstance(self.what, int):
            return self.what
        model = text.model()
        tokenizer = tokenizers.get(model) if model is not None else None
        if tokenizer is None:
            raise HooklineError(f"the token {self.what!r} cannot be found without a tokenizer: give its id")
        ids = tokenizer(self.what, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            pieces = [tokenizer.decode([each]) for each in ids]
            raise HooklineError(f"{self.what!r} is {len(ids)} tokens, not one: {pieces}")
        return int(ids[0])


@dataclass(frozen=True)
class _Images(Meaning):
    def mask(self, text: Pass, rows: int) -> Tensor:  # noqa: ARG002
        """Where the token stands that the model puts pictures in place of."""
        config = getattr(text.model(), "config", None)
        ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
        image = next((each for each in ids if each is not None), None)
        if image is None or text.tokens is None:
            raise HooklineError("image_tokens are for a model that takes pictures, given tokens")
        return (text.tokens == image).cpu()


@dataclass(frozen=True)
class _Steps(Meaning):
    only: int | None = None

    def mask(self, text: Pass, rows: int) -> Tensor:
        """All positions of those passes, and none of others."""
        wanted = text.step > 0 if self.only is None else text.step == self.only
        return torch.full((rows, len(text.positions)), wanted)


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


def mask_of(positions: Positions, rows: int, n: int) -> Bool[Tensor, "batch pos"]:
    """The positions as a mask over the forward pass going on, of `n` positions."""
    if isinstance(positions, Meaning):
        found = positions.mask(_passing(positions, n), rows)
        return found.expand(rows, n)
    mask = torch.zeros(rows, n, dtype=torch.bool)
    if positions is None:
        return ~mask
    if isinstance(positions, Tensor) and positions.dtype == torch.bool:
        return positions.cpu().expand(rows, n)
    if isinstance(positions, Tensor):
        _check_rows(positions, rows)
        for row, index in enumerate(positions.tolist()):
            mask[row, _checked(index, n)] = True
        return mask
    for index in [positions] if isinstance(positions, int) else _indices(positions, n):
        mask[:, _checked(index, n)] = True
    return mask


def is_one_per_row(positions: Positions) -> bool:
    """Whether there is one position in each row, so that the axis can be left out."""
    return isinstance(positions, int | _Last | _Token) or (
        isinstance(positions, Tensor) and positions.dtype != torch.bool
    )


def picked(x: Tensor, axes: str, positions: Positions) -> Tensor:
    """An activation at some positions: without that axis if it is one in each row, else with a shorter one."""
    axis = _axis(axes, x)
    by_position = x.movedim(axis, 1)
    rows, n = by_position.shape[:2]
    if isinstance(positions, slice):
        return by_position[:, positions].movedim(1, axis)
    if not is_one_per_row(positions) and not isinstance(positions, Meaning | Tensor):
        indices = [_checked(index, n) for index in _indices(positions, n)]
        return by_position[:, indices].movedim(1, axis)
    mask = mask_of(positions, rows, n).to(x.device)
    counts = mask.sum(1)
    if not bool((counts == counts[0]).all()):
        raise HooklineError(f"{positions!r} is a different number of positions in each row: cache all, then pick")
    chosen = by_position[mask].unflatten(0, (rows, -1))
    return chosen[:, 0] if is_one_per_row(positions) else chosen.movedim(1, axis)


def at(positions: Positions, hook: Callable[..., Any]) -> Callable[..., Tensor | None]:
    """A hook that does what `hook` does at these positions, and changes nothing elsewhere.

    `hook` gets the whole activation; of what it makes of it, only these positions count.
    """
    invoke = caller(hook)

    def hook_there(x: Tensor, hook: Any) -> Tensor | None:
        axis = _axis(hook.axes, x)
        mask = mask_of(positions, x.shape[0], x.shape[axis])
        if not bool(mask.any()):
            return None
        given = x.clone()
        result = invoke(given, hook)
        new = given if result is None else result
        shape = [x.shape[each] if each in (0, axis) else 1 for each in range(x.ndim)]
        return torch.where(mask.to(x.device).view(shape), new, x)

    hook_there.func = hook  # type: ignore[attr-defined]  # so that errors name the hook itself
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


def _passing(positions: Meaning, n: int) -> Pass:
    if now.passing is None:
        raise HooklineError(f"{positions!r} is a place in a text: it is known while a language model runs")
    if len(now.passing.positions) != n:
        raise HooklineError(f"{positions!r} is one of {len(now.passing.positions)} positions, but here there are {n}")
    return now.passing


def _indices(positions: Any, n: int) -> list[int]:
    if isinstance(positions, slice):
        return list(range(n))[positions]
    if isinstance(positions, Sequence) and all(isinstance(each, int) for each in positions):
        return list(positions)
    raise HooklineError(
        "positions are an index, a slice, a list of indices, one index per row as a tensor, or last, token(…), "
        f"image_tokens, new_tokens, step(…); not {positions!r}"
    )


def _check_rows(positions: Tensor, rows: int) -> None:
    if positions.ndim != 1 or len(positions) != rows:
        raise HooklineError(f"one position per row: {rows} of them, not a tensor of shape {list(positions.shape)}")


def _checked(index: int, n: int) -> int:
    if index not in range(-n, n):
        raise HooklineError(f"position {index}, but there are {n} positions")
    return index
