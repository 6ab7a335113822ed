"""Modules whose values are only part of an activation, because a model is sharded over processes.

`complete(module, kind, lens)` tells the engine how to make the whole activation of what this process has; from then on
every point at that event, whatever its name, is whole. `refuse(module, why)` is for modules where that is not known.
`preparations` find out about a model, and `processes` has what the processes that share it do together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn

from hookline.engine.order import Kind
from hookline.errors import HooklineError, UnavailablePointError

if TYPE_CHECKING:
    from hookline.engine.actions import Action
    from hookline.engine.lenses import Lens

_lenses: WeakKeyDictionary[nn.Module, dict[Kind, Lens]] = WeakKeyDictionary()
_refused: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_first_only: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

preparations: list[Callable[[nn.Module], None]] = []
"""What is called with a module before its points are listed."""


class Together(Protocol):
    """What the processes that share a model do together. Every method is called in all of them, in the same order."""

    def watch(self, actions: Sequence[Action]) -> None:
        """Note what these hooks will make of their activations."""

    def begin(self, actions: Sequence[Action]) -> None:
        """Raise if the hooks of another process differ."""

    def enter(self, actions: Sequence[Action], given: Any) -> None:
        """At the beginning of a forward pass: raise if the hooks or the inputs of another process differ."""

    def end(self, actions: Sequence[Action], error: BaseException | None = None) -> None:
        """At the end of a run: raise if a hook of another process made something else of its activation."""

    def explain(self, error: BaseException) -> None:
        """After an error in a forward pass: forget what hooks did, and add to the error what it means."""

    def least(self, number: int) -> int:
        """Return the smallest of the numbers that the processes pass."""

    def union(self, heads: Sequence[int]) -> list[int]:
        """Return the heads that any of the processes passes, in order."""


processes: WeakKeyDictionary[nn.Module, Together] = WeakKeyDictionary()
"""By model, if it is sharded."""
sharing: WeakKeyDictionary[nn.Module, Together] = WeakKeyDictionary()
"""By layer, if it is split: what it computes may need all processes."""


def complete(module: nn.Module, kind: Kind, lens: Lens) -> None:
    """Read and write the value of an event through this lens, after the one that finds its tensor."""
    _lenses.setdefault(module, {})[kind] = lens


def refuse(module: nn.Module, why: str) -> None:
    """Offer no points at a module, for a reason."""
    _refused[module] = why


def refuse_items(module: nn.Module, why: str) -> None:
    """Offer only the first tensor of what a module returns, for a reason."""
    _first_only[module] = why


def check_items(module: nn.Module, keys: Sequence[int | str]) -> None:
    """Raise if a part of what a module returns is refused."""
    if keys and keys[0] != 0 and (why := _first_only.get(module)) is not None:
        raise UnavailablePointError(f"{''.join(f'[{key}]' for key in keys)} of its output is not available: {why}")


def why_refused(module: nn.Module) -> str | None:
    """Why a module has no points; None if it has."""
    return _refused.get(module)


def completing(module: nn.Module, kind: Kind) -> tuple[Lens, ...]:
    """The lens that makes the value of an event whole, if it needs one."""
    found = _lenses.get(module, {}).get(kind)
    return () if found is None else (found,)


def changed_in_any(module: nn.Module, heads: list[int]) -> list[int]:
    """The heads that a hook has changed in any process that shares this layer: all of them compute the same then."""
    together = sharing.get(module) if sharing else None
    return heads if together is None else together.union(heads)


def check_not_sharded(root: nn.Module, what: str) -> None:
    """Raise if a model is sharded over processes, for what needs all of its weights."""
    if processes and root in processes:
        raise HooklineError(
            f"{what} is not available on a model that is sharded over processes, as each has only a part of its weights"
        )
