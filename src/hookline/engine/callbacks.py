"""Hooks as users write them: the base class of hook objects, and lists of names and hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hookline.errors import InvalidHookError
from hookline.functions.callers import refuse_class
from hookline.types import OnError

if TYPE_CHECKING:
    from hookline.engine.hook_actions import HookAction
    from hookline.engine.names import Points
    from hookline.engine.points import HookPoint


class HookObject:
    """A hook that is an object: it makes its own action, wherever a hook is accepted."""

    on_error: OnError | None = None
    """What to do when it fails; None: as the run says."""

    @property
    def described(self) -> str:
        """Its name in messages."""
        return repr(self)

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> HookAction:
        """Return the action that calls it at `point`; mistakes are raised here, not during the run."""
        raise NotImplementedError

    def declared(self, points: Points) -> list[HookPoint]:  # noqa: ARG002 (for objects that declare a target)
        """Return the points of a model that it declares as its target."""
        raise InvalidHookError(f"{self.described} declares no point: give it as (name, hook)")

    def attached(self, model: Any) -> None:
        """Called before it is used on `model`."""

    def check_points(self, points: list[HookPoint]) -> None:
        """Raise if it cannot be at all of these points at once."""

    def check_target(self, given: list[HookPoint], points: Points) -> None:
        """Raise if the points given for it are not those that it declares."""


def is_none(pairs: Any) -> bool:
    """Whether this is an empty list of hooks. An iterator may have some."""
    return type(pairs) in (tuple, list) and not pairs


def hook_pairs(pairs: Iterable[Any], argument: str) -> Iterator[tuple[Any, Any]]:
    """The names and hooks in the value of `argument`. A hook object that declares its target is its own name."""
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Iterable):
        raise InvalidHookError(f"{argument} must be a list of (name, hook) pairs, not {pairs!r}")
    for pair in pairs:
        refuse_class(pair)
        if isinstance(pair, HookObject):
            yield pair, pair
            continue
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidHookError(f"{argument} must be a list of (name, hook) pairs, but it has {pair!r}")
        if isinstance(pair[0], HookObject) or (isinstance(pair[1], str | int) and callable(pair[0])):
            raise InvalidHookError(f"{argument} takes (name, hook), the name first, but it has {pair!r}")
        yield pair[0], pair[1]
