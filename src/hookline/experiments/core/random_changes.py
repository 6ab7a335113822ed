"""Random changes as large as those of an experiment: the control that its effects are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from hookline.rerun.changes import Change, Variant

DRAWS, _ROUNDING = 20, 1e-5
CONTROL = ("control_low", "control_high", "control_draws")
"""The entries of a result's `info` about its control."""


class Control(NamedTuple):
    """The range of a metric under random changes that are as large as those of the experiment.

    `low` and `high` are the extremes of the draws and of no change at all; with several metrics, or one value for each
    example, they are results on these axes. Of `draws` draws of no effect, one more lies outside with a probability of
    about 2 / (draws + 1).
    """

    low: Any
    high: Any
    draws: int
    of: str = "random changes of equal norm"


def random_variants(cells: Sequence[Sequence[Variant]], draws: int, seed: int) -> list[list[Variant]]:
    """Variants in which the changes of a randomly chosen cell have random directions, and the norms that they had.

    One direction is drawn for each point, and is the same for all prompts and positions, as a steering vector is. A
    number has no direction: its change gets a random sign. Cells are chosen without replacement, as long as there are
    others; each is the list of changes of every prompt.
    """
    able = [number for number, cell in enumerate(cells) if any(cell) and all(map(_can_be_drawn, cell))]
    if not able:
        return []
    generator = torch.Generator().manual_seed(seed)
    order = [able[at] for at in torch.randperm(len(able), generator=generator).tolist()]
    return [
        [[_randomized(change, f"{seed} {draw}") for change in variant] for variant in cells[order[draw % len(order)]]]
        for draw in range(draws)
    ]


def _can_be_drawn(variant: Variant) -> bool:
    return all(change.before is not None and change.value.is_floating_point() for change in variant)


def _randomized(change: Change, seed: str) -> Change:
    """A change with another direction and the same norm along the last axis, at each position and head."""
    assert change.before is not None
    before = change.before.double()
    difference = (change.value.to(before) - before).nan_to_num(0.0, 0.0, 0.0)  # masked scores are -inf in both
    generator = torch.Generator().manual_seed(crc32(f"{seed} {change.point.canonical_name}".encode()))
    letters = change.free_axes
    last = letters[-1] if letters else ""  # a native point may have axes of unknown names
    if not difference.ndim or last == "p":
        signs = torch.randint(2, difference.shape, generator=generator).to(difference) * 2 - 1
        moved = difference * signs
    else:
        shape = [1 if letter == "p" else size for letter, size in zip(letters, difference.shape, strict=False)]
        shape += difference.shape[len(shape) :]
        noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(difference.device)
        if last == "k":  # of keys, those that are masked stay so
            noise = noise * ((before != 0) | (change.value.to(before) != 0))
        norms = noise.norm(dim=-1, keepdim=True)
        moved = noise * difference.norm(dim=-1, keepdim=True) / norms.masked_fill(norms == 0, 1.0)
    return replace(change, value=torch.where(moved == 0, before, before + moved).to(change.value))


def extremes(drawn: Tensor, baseline: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value of draws, `[metric, draw, …]`, and of no change; with a margin for rounding."""
    whole = torch.cat([drawn, baseline[:, None]], 1)
    margin = _ROUNDING * whole.abs().amax(1)
    return whole.amin(1) - margin, whole.amax(1) + margin
