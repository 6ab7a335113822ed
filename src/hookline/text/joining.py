"""The activations of a generation as one tensor per point: of the prompt, and then of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hookline.engine import HookPoint, Kind
from hookline.errors import HooklineError


def joined_steps(
    pieces: Mapping[str, Sequence[Tensor]], points: Mapping[str, HookPoint], length: int, rows: int
) -> dict[str, Tensor]:
    """One tensor per point, with `length` positions."""
    return {name: _joined(points[name], steps, length, rows) for name, steps in pieces.items()}


def _joined(point: HookPoint, pieces: Sequence[Tensor], length: int, rows: int) -> Tensor:
    names = point.axes.split() or (["b", "p", "d"] if pieces[0].ndim == 3 else [])
    if point.stream != "text":
        return pieces[0]  # images and the input of an encoder are not part of the text that grows
    if "k" in names and "p" not in names:
        joined = pieces[-1]  # every step has all keys so far
    elif "p" in names:
        if "k" in names:
            pieces = _with_all_keys(point, pieces, names, length)
        joined = torch.cat([*pieces], names.index("p"))
    else:
        raise HooklineError(f"{point.name!r} has no known axis of positions: leave it out of names_filter")
    place = names.index("p" if "p" in names else "k")
    if joined.shape[0] != rows or joined.shape[place] != length:
        raise HooklineError(
            f"{point.name!r} has the shape {list(joined.shape)} in this generation, which does not fit {rows} rows "
            f"of {length} positions: generate_with_cache is for generations that run each position once, with a cache "
            f"and without beams"
        )
    return joined


def _with_all_keys(point: HookPoint, pieces: Sequence[Tensor], names: list[str], length: int) -> list[Tensor]:
    """Scores or weights over all keys: -inf or 0 for those that did not exist yet."""
    axis, new, so_far = names.index("k"), [], 0
    value = -torch.inf if point.site.kind is Kind.SCORES else 0.0
    for piece in pieces:
        so_far += piece.shape[names.index("p")]
        if piece.shape[axis] != so_far:
            raise HooklineError(
                f"{point.name!r} has {piece.shape[axis]} keys after {so_far} positions (a sliding window, perhaps), so "
                f"steps cannot be joined: leave it out of names_filter"
            )
        sizes = (*[0, 0] * (piece.ndim - 1 - axis), 0, length - so_far)
        new.append(torch.nn.functional.pad(piece, sizes, value=value))
    return new
