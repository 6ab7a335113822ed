"""Captures: all records of a recording run at one event, taken at once.

A run that only records, and is the only one in its thread, has nothing to arrange at an event: one snapshot of the
value serves all points there. In a full cache, what a lens computes from it is deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from hookline.engine.actions import Record
from hookline.engine.calls import stashed
from hookline.engine.deferred import Deferred, kept
from hookline.engine.derived import Stash
from hookline.engine.lenses import Chain, Lens, is_pure, is_root
from hookline.engine.passes import current
from hookline.engine.recorder import Recorder
from hookline.engine.schedule import Schedule
from hookline.engine.structures import NoTensorError
from hookline.engine.taps import Tap

Capture: TypeAlias = Callable[[Any], None]
"""Keeps the activations in the value at an event."""


def capture_of(recorder: Recorder, actions: Sequence[Record | Stash]) -> Capture:
    """Return what takes all actions at one event of a module."""
    lens = next((each for each in map(_root, actions) if each is not None), None)
    # The sites of which the tensor is saved for points at later events.
    sites = [each.site for each in actions if isinstance(each, Stash) and each.site.lens == lens]
    ways = [(each, _functions(each, lens)) for each in actions if getattr(each, "site", None) not in sites]
    is_one = not sites and len(ways) == 1 and ways[0][1] == []
    """Whether there is one record, of the tensor as it is: nobody else needs the snapshot."""

    def one_by_one(value: Any) -> None:
        for action in actions:
            action(value)

    def capture(value: Any) -> None:
        same = None
        if recorder.forward_pass is not current.forward_pass or recorder.is_padded:
            return one_by_one(value)
        if lens is not None:
            try:
                x = lens.get(value)
            except NoTensorError:
                return None if recorder.skips_missing else one_by_one(value)
            if (same := kept(x)) is None:
                return one_by_one(value)
            for site in sites:
                stashed.saved[site], stashed.memo[site] = x, {"kept": same}
        for action, functions in ways:
            if functions is None:
                _take(action, value)
                continue
            entry: Any = same
            for function in functions:
                entry = Deferred(function, entry)
            if entry is same and not is_one:
                entry = Deferred(_same, same)
            recorder.add(action, entry)  # type: ignore[arg-type]
        return None

    return capture if recorder.defers or is_one else one_by_one


def _take(action: Record | Stash, value: Any) -> None:
    """Take an action that needs more than one tensor of the event: later if it can wait, else now."""
    later = action.later if isinstance(action, Record) else None
    entry = None if later is None else later(value)
    if entry is None:
        action(value)
    else:
        action.recorder.add(action, entry)  # type: ignore[union-attr,arg-type]


def _same(x: Tensor) -> Tensor:
    return x


def _root(action: Record | Stash) -> Lens | None:
    """The lens that finds the tensor of the model that an action is about."""
    lens: Lens = action.lens if isinstance(action, Record) else action.site.lens
    first = lens.lenses[0] if isinstance(lens, Chain) else lens
    return first if is_root(first) else None


def _functions(action: Record | Stash, root: Lens | None) -> list[Callable[[Tensor], Tensor]] | None:
    """The functions that make the activation of a record from the tensor at `root`; None if it takes more than that."""
    if not isinstance(action, Record) or _root(action) != root or root is None:
        return None
    rest = action.lens.lenses[1:] if isinstance(action.lens, Chain) else ()
    return [each.get for each in rest] if all(map(is_pure, rest)) else None


def captures_in(run: Schedule, recorder: Recorder) -> dict[Tap, Capture]:
    """Return the captures of a run that only records, at the events where that is all that happens."""
    found: dict[Tap, Capture] = {}
    for tap, steps in run.steps.items():
        actions: Iterable[Any] = steps
        # Inside a module, a value that is computed for the records only is not computed if they can wait.
        can_capture = recorder.defers or not tap.kind.is_inner
        if can_capture and all(_is_simple(action, tap) for action in actions):
            found[tap] = capture_of(recorder, [*actions])
    return found


def _is_simple(action: Any, tap: Tap) -> bool:
    if isinstance(action, Stash):
        return not tap.kind.is_inner
    return isinstance(action, Record) and action.point.only is None
