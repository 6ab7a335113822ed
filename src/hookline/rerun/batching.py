"""Parts: which variants of a run go through the model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hookline.engine.halving import free_bytes
from hookline.rerun.changes import Entry


@dataclass(frozen=True)
class Room:
    """How much goes through a model at once."""

    tokens: int
    """At most, so that there is memory for what a layer computes."""
    per_pass: float
    """What a pass costs in each layer beside its tokens, in tokens: reading the weights, and Python."""


def room_for(block: nn.Module) -> Room:
    """By the size of a layer, and where it is."""
    parameters = list(block.parameters())
    size, first = sum(parameter.numel() for parameter in parameters), parameters[0]
    widest = max(max(parameter.shape) for parameter in parameters) * first.element_size()
    if first.is_cuda:
        free = free_bytes(first.device)
        return Room(max(256, int(free * 0.4) // (8 * widest)), 30 + _OVERHEAD * 4e14 / (2 * size))
    return Room(max(256, min(4096, 2**25 // widest)), 30 + _OVERHEAD * 2.5e11 / (2 * size))


_OVERHEAD = 1.5e-4
"""Seconds that Python takes for a layer. What follows are operations a second, of a GPU and of a few cores."""


@dataclass(frozen=True)
class Part:
    """Variants that go through together, by their numbers, from one position on."""

    start: int
    numbers: tuple[int, ...]


def parts(
    entries: dict[int, Entry], n_layers: int, stop: int, room: Room, most_rows: int | None, *, from_any: bool
) -> list[Part]:
    """Variants in parts, so that little is computed twice and none has more tokens than there is room for."""
    by_position: dict[int, list[int]] = {}
    for number, entry in entries.items():
        by_position.setdefault(entry.position if from_any else 0, []).append(number)
    found: list[Part] = []
    for start, positions in _bounds(by_position, entries, n_layers, stop, room.per_pass):
        numbers = [number for position in positions for number in by_position[position]]
        numbers.sort(key=lambda number: entries[number].layer)
        rows = most_rows or max(1, room.tokens // (stop - start))
        for pieces in _even(numbers, rows):
            found.append(Part(start, tuple(pieces)))
    return found


def _even(numbers: list[int], most: int) -> list[list[int]]:
    """In as few pieces as there must be, of about the same size."""
    n_pieces = -(-len(numbers) // most)
    size = -(-len(numbers) // n_pieces)
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def _bounds(
    by_position: dict[int, list[int]], entries: dict[int, Entry], n_layers: int, stop: int, per_pass: float
) -> list[tuple[int, Sequence[int]]]:
    """Where to begin each part: positions next to each other go together where a pass of their own costs more."""
    positions = sorted(by_position)
    work = [sum(n_layers - entries[number].layer + 1 for number in by_position[each]) for each in positions]
    layers = [n_layers - min(entries[number].layer for number in by_position[each]) + 1 for each in positions]
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first so many positions: the cost, and where the last part is
    for end in range(1, len(positions) + 1):
        choices, tokens, depth = [], 0, 0
        for begin in range(end - 1, -1, -1):
            tokens, depth = tokens + work[begin], max(depth, layers[begin])
            cost = best[begin][0] + per_pass * depth + tokens * (stop - positions[begin])
            choices.append((cost, begin))
        best.append(min(choices))
    bounds: list[tuple[int, Sequence[int]]] = []
    end = len(positions)
    while end:
        begin = best[end][1]
        bounds.append((positions[begin], positions[begin:end]))
        end = begin
    return bounds[::-1]
