"""Modules whose values are only part of an activation, because a model is sharded over processes.

`complete(module, kind, lens)` tells the engine how to make the whole activation of what this process has; from then on
every point at that event, whatever its name, is whole. `refuse(module, why)` is for modules where that is not known.
`preparations` find out about a model, and `before_runs` has what its processes do together before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from hookline.engine.order import Kind

if TYPE_CHECKING:
    from hookline.engine.actions import Action
    from hookline.engine.lenses import Lens

_lenses: WeakKeyDictionary[nn.Module, dict[Kind, Lens]] = WeakKeyDictionary()
_refused: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

preparations: list[Callable[[nn.Module], None]] = []
"""What is called with a module before its points are listed."""

before_runs: WeakKeyDictionary[nn.Module, Callable[[Sequence[Action]], None]] = WeakKeyDictionary()
"""By model: what is called with the actions of a run before it is attached."""


def complete(module: nn.Module, kind: Kind, lens: Lens) -> None:
    """Read and write the value of an event through this lens, after the one that finds its tensor."""
    _lenses.setdefault(module, {})[kind] = lens


def refuse(module: nn.Module, why: str) -> None:
    """Offer no points at a module, for a reason."""
    _refused[module] = why


def why_refused(module: nn.Module) -> str | None:
    """Why a module has no points; None if it has."""
    return _refused.get(module)


def completing(module: nn.Module, kind: Kind) -> tuple[Lens, ...]:
    """The lens that makes the value of an event whole, if it needs one."""
    found = _lenses.get(module, {}).get(kind)
    return () if found is None else (found,)
