"""Modules whose values are only part of an activation, because a model is sharded over processes.

`complete(module, kind, lens)` tells the engine how to make the whole activation of what this process has; from then on
every point at that event, whatever its name, is whole. `refuse(module, why)` is for events where that is not known.
`before_runs` has what the processes of a model do together before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hookline.engine.order import Kind
from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.engine.actions import Action
    from hookline.engine.lenses import Lens

_lenses: WeakKeyDictionary[nn.Module, dict[Kind, Lens]] = WeakKeyDictionary()

before_runs: WeakKeyDictionary[nn.Module, Callable[[Sequence[Action]], None]] = WeakKeyDictionary()
"""By model: what is called with the actions of a run before it is attached."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A lens for values that cannot be made whole: raises the reason."""

    why: str

    def get(self, value: Any) -> NoReturn:  # noqa: ARG002
        raise HooklineError(self.why)

    def put(self, value: Any, tensor: Tensor) -> NoReturn:  # noqa: ARG002
        raise HooklineError(self.why)


def complete(module: nn.Module, kind: Kind, lens: Lens) -> None:
    """Read and write the value of an event through this lens, after the one that finds its tensor."""
    _lenses.setdefault(module, {})[kind] = lens


def refuse(module: nn.Module, why: str) -> None:
    """Refuse the input and the output of a module, for a reason."""
    for kind in (Kind.INPUT, Kind.OUTPUT):
        complete(module, kind, Refused(why))


def completing(module: nn.Module, kind: Kind) -> tuple[Lens, ...]:
    """The lens that makes the value of an event whole, if it needs one."""
    found = _lenses.get(module, {}).get(kind)
    return () if found is None else (found,)
