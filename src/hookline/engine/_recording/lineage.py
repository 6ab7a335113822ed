"""Lineages: whether modules are still where they were in a model. To look at the whole model takes much longer."""

from __future__ import annotations

from torch import nn


class Lineage:
    """The children of some modules of a model, and those that they had."""

    def __init__(self, children: list[dict[str, nn.Module | None]]) -> None:
        self._children, self._children_then = children, [dict(each) for each in children]

    def is_same(self) -> bool:
        """Whether no child was added, removed or replaced since."""
        return self._children == self._children_then


def is_exact(name: object) -> bool:
    """Whether it is the name of one point, not a glob: what that matches depends on the whole tree."""
    return isinstance(name, str) and "*" not in name and "?" not in name
