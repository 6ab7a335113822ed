"""Positions that mean the same in each prompt, whose columns may differ: the cells of a sweep over such positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from hookline.errors import HooklineError, how_many, warn_deprecated
from hookline.experiments.core.labels import Label
from hookline.experiments.core.prompts import Prompts, prompt_positions
from hookline.model import HookedModel
from hookline.text.token_positions import Meaning, Positions, is_index

PromptPositions: TypeAlias = Positions | Sequence[Positions] | Sequence[Sequence[int]]
"""Positions in prompts of any lengths: an index, several, a slice, a meaning (`last`, `token(…)`, …), a list of indices
and meanings, or a list of indices for each prompt. Negative indices count from the end of each prompt."""


@dataclass(frozen=True, eq=False)
class Aligned:
    """Cells of positions: `at[cell][row]` are the positions of a cell in each prompt."""

    labels: list[Label]
    at: list[list[list[int]]]

    @classmethod
    def of(
        cls, model: HookedModel, prompts: Prompts, positions: Any, *, apart: bool, name: str = "positions"
    ) -> Aligned:
        """The positions as cells: with `apart`, one for each position or meaning, otherwise one for all of them."""
        if isinstance(positions, Tensor | ndarray) and positions.ndim > 1 and positions.dtype != torch.bool:
            positions = positions.tolist()
        if isinstance(positions, list | tuple) and any(isinstance(place, list | tuple | range) for place in positions):
            rows = _for_each_prompt(prompts, positions, name)
            return cls._of_rows(rows, positions, name) if apart else cls([0], [rows])
        if apart and isinstance(positions, list | tuple) and positions:
            labels = [_label(place) for place in positions]
            return cls(labels, [_in_prompts(model, prompts, place, name) for place in positions])
        if isinstance(positions, list | tuple):
            if not positions:
                raise HooklineError(f"{name}=[] selects nothing")
            every = [_in_prompts(model, prompts, place, name) for place in positions]
            return cls([0], [[sorted(set(chain.from_iterable(of_row))) for of_row in zip(*every, strict=True)]])
        rows = _in_prompts(model, prompts, positions, name)
        if apart and all(len(row) == 1 for row in rows):
            return cls([_label(positions)], [rows])
        return cls._of_rows(rows, positions, name) if apart else cls([0], [rows])

    @classmethod
    def _of_rows(cls, rows: list[list[int]], positions: Any, name: str) -> Aligned:
        """A cell for the first position of each prompt, for the second, …"""
        sizes = [len(row) for row in rows]
        if len({*sizes}) > 1:
            other = next(row for row, size in enumerate(sizes) if size != sizes[0])
            raise HooklineError(
                f"{name}={positions!r:.80} has {how_many(sizes[0], 'position')} in prompt 0, but {sizes[other]} in "
                f"prompt {other}, so they cannot be an axis: leave 'pos' out of over, or put a meaning into a list, "
                f"{name}=[…], which makes it one cell"
            )
        return cls([*range(sizes[0])], [[[row[at]] for row in rows] for at in range(sizes[0])])

    def membership(self, prompts: Prompts) -> Float[Tensor, "row pos cell"]:
        """1 at the columns of each cell."""
        member = torch.zeros(len(prompts), prompts.width, len(self.at), device=prompts.tokens.device)
        for cell, rows in enumerate(self.at):
            for row, positions in enumerate(rows):
                member[row, [prompts.spans[row].start + position for position in positions], cell] = 1.0
        return member

    def columns(self, prompts: Prompts, row: int) -> list[int]:
        """The columns of all cells in a row, in the order of the cells."""
        return [prompts.spans[row].start + position for cell in self.at for position in cell[row]]


def aligned_pair(
    model: HookedModel, source: Prompts, target: Prompts, positions: PromptPositions, *, apart: bool
) -> tuple[Aligned, Aligned]:
    """The same positions in the prompts to patch from and in those to patch: as many in both."""
    ours, theirs = (Aligned.of(model, prompts, positions, apart=apart) for prompts in (source, target))
    for label, cells in zip(ours.labels, zip(ours.at, theirs.at, strict=False), strict=True):
        for row, (one, other) in enumerate(zip(*cells, strict=True)):
            if len(one) != len(other):
                raise HooklineError(
                    f"positions={positions!r:.80}: {label!r} is {how_many(len(one), 'token')} in prompt {row} to patch "
                    f"from, but {len(other)} in the prompt to patch: use positions that are as many in both"
                )
    return ours, theirs


def one_of(positions: PromptPositions, pos: PromptPositions) -> PromptPositions:
    """The positions of experiments that called them `pos`, too."""
    if positions is not None and pos is not None:
        raise HooklineError("positions=… and pos=… are the same: pass one of them")
    if pos is not None:
        warn_deprecated("pos=…", "positions=…", since="0.1")
    return pos if positions is None else positions


def _label(place: Any) -> Label:
    return int(place) if is_index(place) else repr(place) if isinstance(place, Meaning) else 0


def _in_prompts(model: HookedModel, prompts: Prompts, place: Any, name: str) -> list[list[int]]:
    """One position, slice or meaning in each row, which may be one of several with the same prompt."""
    if isinstance(place, Tensor) and place.ndim == 1 and len(place) * prompts.copies == len(prompts):
        place = place.repeat_interleave(prompts.copies) if place.dtype != torch.bool else place
    return prompt_positions(model, prompts, place, name)


def _for_each_prompt(prompts: Prompts, lists: Sequence[Any], name: str) -> list[list[int]]:
    count = len(prompts) // prompts.copies
    are_indices = all(isinstance(places, list | tuple | range) and all(map(is_index, places)) for places in lists)
    if len(lists) != count or not are_indices or not all(map(len, lists)):
        raise HooklineError(
            f"{name}={lists!r:.80} must be one list of indices for each of the {how_many(count, 'prompt')}, got "
            f"{len(lists)} entries. For the same positions in each prompt, pass a flat list"
        )
    rows = []
    for row in range(len(prompts)):
        length, places = prompts.length(row), lists[row // prompts.copies]
        for place in places:
            if place not in range(-length, length):
                raise HooklineError(f"{name}: position {place} is out of range: prompt {row} has {length} tokens")
        rows.append([int(place) % length for place in places])
    return rows
