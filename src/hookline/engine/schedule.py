"""Schedules: which actions wait at which tap. A run is one, and so are the permanent hooks of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from hookline.engine.calls import Count
from hookline.engine.order import arrange

if TYPE_CHECKING:
    from hookline.engine.actions import Action
    from hookline.engine.taps import Tap

Step: TypeAlias = Callable[[Any], Any]
"""Takes the value at an event, and returns the value to continue with."""


class Schedule:
    """The actions of one run, or the permanent hooks of a model, by the tap that they wait at."""

    is_open = True
    """Whether its actions are to be taken. A context that was left may still be in the `active` of another task."""
    is_one_pass = False
    """Whether it lasts for a single forward pass."""

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self.actions: Sequence[Action] = ()
        self.actions_at: dict[Tap, list[Action]] = {}
        self.steps: dict[Tap, list[Step]] = {}
        self.count = self.new_count()
        self.set(actions)

    def hooked_modules(self) -> set[nn.Module]:
        """The modules that its actions are at."""
        return {action.module for action in self.actions}

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
