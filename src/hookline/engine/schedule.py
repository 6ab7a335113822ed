"""Schedules: which actions wait at which tap. A run is one, and so are the permanent hooks of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from hookline.engine._torch.graph_tasks import current_graph_task
from hookline.engine.calls import Count
from hookline.engine.order import arrange

if TYPE_CHECKING:
    from hookline.engine.actions import Action
    from hookline.engine.taps import Tap

Step: TypeAlias = Callable[[Any], Any]
"""Takes the value at an event, and returns the value to continue with."""

ModuleCall: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Takes the arguments of a module's call, and returns its value."""


class Schedule:
    """The actions of one run, or the permanent hooks of a model, by the tap that they wait at."""

    is_open = True
    """Whether its actions are to be taken. A context that was left may still be in the `active` of another task."""
    is_one_pass = False
    """Whether it lasts for a single forward pass."""
    captures: Mapping[Tap, Callable[[Any], None]] = MappingProxyType({})
    """What it does at taps where it only records, if no other schedule acts there: see `captures.py`."""
    ways: Mapping[nn.Module, ModuleCall] = MappingProxyType({})
    """What it does with calls of modules that it leads: see `detours.py`."""

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self.actions: Sequence[Action] = ()
        self.actions_at: dict[Tap, list[Action]] = {}
        self.steps: dict[Tap, list[Step]] = {}
        self.count = self.new_count()
        self.set(actions)

    def with_hooks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module that it leads, at which others act too."""
        raise NotImplementedError

    def hooked_modules(self) -> set[nn.Module]:
        """The modules that its actions are at."""
        return {action.module for action in self.actions}

    def capture_at(self, tap: Any) -> Callable[[Any], None] | None:
        """Return what it does at a tap if it only records there, and is the only one that acts there now."""
        capture = self.captures.get(tap)
        is_alone = capture is not None and not tap.permanent and self.is_open
        return capture if is_alone and current_graph_task() == -1 else None

    def new_count(self) -> Count:
        """Where its calls are counted: each schedule has a count of its own."""
        return Count()

    def set(self, actions: Sequence[Action]) -> None:
        """Replace all actions. Other threads see either the old ones or the new ones."""
        actions_at: dict[Tap, list[Action]] = {}
        for action in actions:
            action.count = self.count
            actions_at.setdefault(action.tap, []).append(action)
        self.steps = {tap: arrange(some) for tap, some in actions_at.items()}
        self.actions_at = actions_at
        self.actions = actions

    def extend(self, actions: Sequence[Action]) -> None:
        """Add actions to those that are there: `set`, at a cost that hardly depends on how many there are."""
        actions_at, steps = self.actions_at.copy(), self.steps.copy()
        for action in actions:
            action.count = self.count
            actions_at[action.tap] = [*actions_at.get(action.tap, ()), action]
        for tap in {action.tap for action in actions}:
            steps[tap] = arrange(actions_at[tap])
        self.steps, self.actions_at, self.actions = steps, actions_at, [*self.actions, *actions]

    def discard(self, actions: Mapping[Action, object]) -> None:
        """Take away some of its actions: the opposite of `extend`."""
        actions_at, steps = self.actions_at.copy(), self.steps.copy()
        for tap in {action.tap for action in actions}:
            actions_at[tap] = [action for action in actions_at[tap] if action not in actions]
            steps[tap] = arrange(actions_at[tap])
            if not actions_at[tap]:
                del actions_at[tap], steps[tap]
        self.steps, self.actions_at = steps, actions_at
        self.actions = [action for action in self.actions if action not in actions]


active: ContextVar[tuple[Schedule, ...]] = ContextVar("hookline_active", default=())
"""The runs of this thread or task, outermost first."""
