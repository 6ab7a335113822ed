"""Captures: all that a run records at one event, taken at once.

A run that only records has nothing to arrange at an event where nobody else acts: one snapshot of the tensor there
serves all points of the event. A full cache notes the snapshot and a recipe, which says how each activation is computed
from it, and works that out when the cache is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from hookline.engine._inner.interception import unintercepted
from hookline.engine._memory.snapshots import shared
from hookline.engine._recording.deferred import Deferred
from hookline.engine._recording.recorder import Recorder
from hookline.engine._torch.thread_state import is_autocast_on
from hookline.engine.actions import Record
from hookline.engine.derived import Stash
from hookline.engine.formulas import Formula, Need, lasting
from hookline.engine.lenses import FIRST, Lens, is_root, parts_of
from hookline.engine.pass_state import Saved, pass_state
from hookline.engine.schedule import Schedule
from hookline.engine.taps import Tap
from hookline.values.structures import NoTensorError

Step: TypeAlias = tuple[Callable[..., Tensor], list[int | tuple[float]]]
"""How one tensor is computed from the one before: by which function, and from what else, by its place in an entry of
the log; a number that never changes is in a tuple."""


class Recipe:
    """How the activations at one event are computed from what was kept there. It refers to no module and no tensor."""

    def __init__(self, steps_by_name: Sequence[tuple[str, list[Step]]]) -> None:
        self._steps_by_name = steps_by_name

    def __call__(self, *kept: Any) -> Iterator[tuple[str, Tensor | Deferred]]:
        """The activations by name, from the tensor of the event and what else was kept."""
        for name, steps in self._steps_by_name:
            x = kept[0]
            for compute, places in steps or [(_alone, [])]:
                x = Deferred(compute, x, *[kept[at] if isinstance(at, int) else at[0] for at in places])
            yield name, x


def _alone(x: Tensor) -> Tensor:
    return x


class Capture:
    """Takes all actions of one run at an event, if no other run acts there."""

    def __init__(self, actions: Sequence[Record | Stash], recorder: Recorder, tap: Tap) -> None:
        self._actions, self._recorder = actions, recorder
        self._needs: list[Need] = []  # what is kept beside the tensor of the event
        is_inner = tap.kind.is_inner
        lenses = [action.lens if isinstance(action, Record) else action.site.lens for action in actions]
        self._root = (
            None if is_inner else next((parts_of(lens)[0] for lens in lenses if is_root(parts_of(lens)[0])), None)
        )
        """The lens that finds the tensor of the model that they are about; inside a module, it is the value."""
        self._sites = [
            action.site for action in actions if isinstance(action, Stash) and action.site.lens == self._root
        ]
        """Where that tensor is saved for points at later events."""
        steps_by_name: list[tuple[str, list[Step]]] = []
        self._others: list[Record | Stash] = []
        for action in actions:
            steps = self._steps(action.lens) if isinstance(action, Record) else None
            if steps is not None:
                steps_by_name.append((action.point.name, steps))  # type: ignore[union-attr]
            elif isinstance(action, Record) or action.site not in self._sites:
                self._others.append(action)
        is_whole = len(actions) == 1 and steps_by_name and not steps_by_name[0][1] and not is_inner
        self._only = actions[0] if is_whole else None
        """The only action, if it records the tensor of the event as it is: nobody else needs the snapshot."""
        self._entry: Any = steps_by_name[0][0] if is_whole else Recipe(steps_by_name) if steps_by_name else None
        self._can_wait = recorder.defers or self._only is not None

    def _steps(self, lens: Lens) -> list[Step] | None:
        """How the tensor that a lens sees is computed from the entry of the event; None if it is taken by itself."""
        first, *formulas = parts_of(lens)
        if isinstance(first, Formula) and (self._root is None or first.ignores_value):
            formulas.insert(0, first)
        elif first != self._root:
            return None
        if not all(isinstance(formula, Formula) and formula.can_wait and formula.needs_all for formula in formulas):
            return None
        return [(formula.compute, [*map(self._place, formula.needs)]) for formula in formulas]  # type: ignore[attr-defined]

    def _place(self, need: Need) -> int | tuple[float]:
        """Where what a formula needs is in the entry: first is the tensor of the event."""
        if isinstance(need, int | float):
            return (need,)
        if need in self._sites:
            return 0
        if need not in self._needs:
            self._needs.append(need)
        return self._needs.index(need) + 1

    def __call__(self, value: Any) -> None:
        """Take them from the value at the event."""
        recorder = self._recorder
        if recorder.forward_pass is not pass_state.forward_pass:
            recorder.note_pass()
        if recorder.is_padded or not self._can_wait:
            return self._one_by_one(value)
        kept = value
        try:
            if self._root is not None:
                x = value if self._root is FIRST and type(value) is Tensor else self._root.get(value)
                if self._only is None and is_autocast_on():  # what is computed under autocast is computed now
                    return self._one_by_one(value)
                kept = shared(x.detach() if x.requires_grad else x, is_for_reading=True)
                if kept is None:
                    return self._one_by_one(value)
                for site in self._sites:
                    pass_state.saved[site] = Saved(x, kept)
            more = [*map(lasting, self._needs)] if self._needs else []
        except NoTensorError:
            return self._miss() if recorder.skips_missing else self._one_by_one(value)
        for needed in more:
            if needed is None:
                return self._one_by_one(value)
        if self._only is not None:
            self._only.fired = True
        if self._entry is not None:
            recorder.log.append((self._entry, kept, *more))
        return _unintercepted(self._take_others, value) if self._others else None

    def _one_by_one(self, value: Any) -> None:
        _unintercepted(self._take_each, value)

    def _take_each(self, value: Any) -> None:
        for action in self._actions:
            action(value)

    def _take_others(self, value: Any) -> None:
        for action in self._others:
            action(value)

    def _miss(self) -> None:
        for action in self._actions:
            if isinstance(action, Record):
                self._recorder.miss(action.point.name)


def _unintercepted(function: Callable[[Any], None], value: Any) -> None:
    unintercepted(function, value) if pass_state.interceptors else function(value)


def captures_in(run: Schedule, recorder: Recorder) -> dict[Tap, Capture]:
    """Return the captures of a run that only records, at the events where that is all that it does."""
    captures: dict[Tap, Capture] = {}
    for tap, actions in run.actions_at.items():
        # Inside a module, a value that is computed for the records only is not computed if they can wait.
        can_capture = recorder.defers or not tap.kind.is_inner
        if can_capture and all(_is_simple(action, tap) for action in actions):
            captures[tap] = Capture(run.steps[tap], recorder, tap)  # type: ignore[arg-type]
    return captures


def _is_simple(action: Any, tap: Tap) -> bool:
    if isinstance(action, Stash):
        return not tap.kind.is_inner
    return isinstance(action, Record) and action.point.only is None
