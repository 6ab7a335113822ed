"""Ready runs: planned runs that are used again, because planning one costs more than the run itself adds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from hookline.engine._recording.lineage import Lineage
from hookline.engine.helpers import only_reads_input
from hookline.engine.hook_actions import Edit
from hookline.engine.runs import Run
from hookline.functions.callers import call_style

if TYPE_CHECKING:
    from hookline.engine.names import Points


class ReadyRuns(threading.local):
    """The last runs of this thread that ended normally, by what they were planned from."""

    def __init__(self) -> None:
        self._runs: list[tuple[Any, Any]] = []

    def take(self, planned_from: Any) -> Any:
        """Return a run that was planned from the same, if there is one; it is kept again when it has ended."""
        for index, (other, run) in enumerate(self._runs):
            if other == planned_from:
                del self._runs[index]
                return run
        return None

    def keep(self, planned_from: Any, run: Any) -> None:
        """Keep a run that has ended."""
        self._runs = [(planned_from, run), *self._runs[:7]]


class HookRun:
    """A run with functions at named points, in which other functions can take their places."""

    def __init__(self, run: Run, numbers: Sequence[int], lineage: Lineage) -> None:
        self.run, self._actions, self._lineage = run, run.actions, lineage
        self._edits = [action for action in run.actions if type(action) is Edit]
        self._numbers = numbers
        """For each edit, the number of its hook, which may be at several points."""
        self._forms = [_form(edit.module) for edit in self._edits]

    def is_current(self) -> bool:
        """Whether its modules are where they were when it was planned, and treat their inputs as then."""
        return self._lineage.is_same() and [_form(edit.module) for edit in self._edits] == self._forms

    def fill(self, hooks: Sequence[Any], planned_from: list[Any]) -> None:
        """Let these hooks act in the run."""
        self.run.renew()
        for edit, number in zip(self._edits, self._numbers, strict=True):
            edit.renew(hooks[number][1], planned_from[2 * number + 1])

    def empty(self) -> bool:
        """Drop the functions, which may hold anything. Returns whether the run can be used again."""
        if self.run.actions is not self._actions or self.run.is_held:
            return False  # hooks were removed from it, or a checkpoint may need it
        for edit in self._edits:
            if edit.choices is not None:
                return False  # an embedding may have got more tokens
            edit.renew(None)
        return True


def _form(module: nn.Module) -> tuple[type, bool, bool]:
    """The class of a module, whether it works in place, and whether it only reads its input."""
    kind = type(module)
    return kind, bool(module.__dict__.get("inplace", getattr(kind, "inplace", False))), only_reads_input(module)


def planned_from(hooks: Any) -> list[Any] | None:
    """What a run with these hooks is planned from: names, and how each function takes its arguments.

    None if the run has to be planned each time: it has hooks that are more than a function.
    """
    if type(hooks) is not list:
        return None
    names_and_styles: list[Any] = []
    for pair in hooks:
        if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not str:
            return None
        hook = pair[1]
        if type(hook) is not FunctionType or hook.__dict__:
            return None
        names_and_styles += pair[0], call_style(hook)
    return names_and_styles


def hook_run(points: Points, key: Any, hooks: Sequence[Any]) -> HookRun | None:
    """Return a planned run with these hooks in it, if there is one."""
    ready: HookRun | None = points.ready_runs.take(key)
    if ready is None or not ready.is_current():
        return None
    ready.fill(hooks, key)
    return ready
