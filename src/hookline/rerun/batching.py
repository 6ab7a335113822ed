"""Batching: which variants of a run go through the model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hookline.rerun.changes import Entry
from hookline.transformer.memory.halving import free_bytes


@dataclass(frozen=True)
class Budget:
    """How many tokens go through a model at once."""

    tokens: int
    """The maximum, so that the activations of a layer fit into memory."""
    per_pass: float
    """The fixed cost of a pass in each layer, in tokens: reading the weights, and Python overhead."""


def budget_for(block: nn.Module) -> Budget:
    """The budget for a layer of this size, on its device."""
    parameters = list(block.parameters())
    size, first = sum(parameter.numel() for parameter in parameters), parameters[0]
    widest = max(max(parameter.shape) for parameter in parameters) * first.element_size()
    if first.is_cuda:
        free = free_bytes(first.device)
        return Budget(max(256, int(free * 0.4) // (8 * widest)), 30 + _OVERHEAD * 4e14 / (2 * size))
    return Budget(max(256, min(4096, 2**25 // widest)), 30 + _OVERHEAD * 2.5e11 / (2 * size))


_OVERHEAD = 1.5e-4
"""Seconds of Python overhead per layer. The factors above are operations per second, of a GPU and of a few cores."""


@dataclass(frozen=True)
class VariantBatch:
    """Variants that run together, by their indices, starting at one position."""

    start: int
    numbers: tuple[int, ...]


def make_batches(
    entries: dict[int, Entry], n_layers: int, stop: int, budget: Budget, most_rows: int | None, *, from_any: bool
) -> list[VariantBatch]:
    """Split variants into batches within the budget, so that little is computed twice."""
    by_position: dict[int, list[int]] = {}
    for number, entry in entries.items():
        by_position.setdefault(entry.position if from_any else 0, []).append(number)
    batches: list[VariantBatch] = []
    for start, positions in _bounds(by_position, entries, n_layers, stop, budget.per_pass):
        numbers = [number for position in positions for number in by_position[position]]
        numbers.sort(key=lambda number: entries[number].layer)
        rows = most_rows or max(1, budget.tokens // (stop - start))
        for pieces in _even(numbers, rows):
            batches.append(VariantBatch(start, tuple(pieces)))
    return batches


def _even(numbers: list[int], most: int) -> list[list[int]]:
    """Split into as few chunks as possible, of about the same size."""
    n_pieces = -(-len(numbers) // most)
    size = -(-len(numbers) // n_pieces)
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def _bounds(
    by_position: dict[int, list[int]], entries: dict[int, Entry], n_layers: int, stop: int, per_pass: float
) -> list[tuple[int, Sequence[int]]]:
    """Where each batch starts: neighboring positions share one where separate passes would cost more."""
    positions = sorted(by_position)
    work = [sum(n_layers - entries[number].layer + 1 for number in by_position[position]) for position in positions]
    layers = [n_layers - min(entries[number].layer for number in by_position[position]) + 1 for position in positions]
    best: list[tuple[float, int]] = [(0.0, 0)]  # for the first n positions: the cost, and where the last batch starts
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
