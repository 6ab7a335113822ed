"""Grouping: short titles for many names that differ only in their layer."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable

_NUMBER = re.compile(r"(?<![^.#])\d+(?![^.#\[_])")
"""A number between the dots of a name: the index of a layer or a call."""


def grouped(items: Iterable[tuple[str, Hashable]]) -> list[tuple[str, list[str]]]:
    """Group names that have the same value and differ only in their first number, each group with a title.

    >>> grouped([("blocks.0.hook_q", 1), ("blocks.1.hook_q", 1), ("blocks.2.hook_q", 2)])
    [('blocks.0-1.hook_q', ['blocks.0.hook_q', 'blocks.1.hook_q']), ('blocks.2.hook_q', ['blocks.2.hook_q'])]
    """
    groups: dict[Hashable, list[tuple[str, int | None]]] = {}
    for name, value in items:
        match = _NUMBER.search(name)
        kind = name if match is None else (name[: match.start()], name[match.end() :])
        groups.setdefault((kind, value), []).append((name, int(match[0]) if match else None))
    return [(_title(members), [name for name, _ in members]) for members in groups.values()]


def _title(members: list[tuple[str, int | None]]) -> str:
    name = members[0][0]
    if len(members) == 1:
        return name
    return _NUMBER.sub(ranges([number for _, number in members if number is not None]), name, count=1)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: `0-3,5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
