"""Lineages: whether modules are still where they were in a model. To look at the whole model takes much longer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Lineage:
    """The modules above some modules of a model, with the children that they had."""

    def __init__(self, above: Iterable[nn.Module]) -> None:
        self._children = [module._modules for module in above]
        self._children_then = [dict(children) for children in self._children]

    def is_same(self) -> bool:
        """Whether no child was added, removed or replaced since."""
        return self._children == self._children_then
