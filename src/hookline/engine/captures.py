"""Captures: all records of a full cache at one event, taken at once.

A run that only records, and is the only one in its thread, has nothing to arrange at an event: one snapshot of the
value serves all points there, and what a lens computes from it is deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

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


class Capture:
    """What a full cache keeps at one event of one module."""

    def __init__(self, recorder: Recorder, actions: Sequence[Record | Stash]) -> None:
        self._recorder, self._actions = recorder, actions
        self._lens = next((each for each in map(_root, actions) if each is not None), None)
        self._sites = [each.site for each in actions if isinstance(each, Stash) and each.site.lens == self._lens]
        """The sites of which the tensor is saved for points at later events."""
        self._ways = [self._way(action) for action in actions if getattr(action, "site", None) not in self._sites]

    def _way(self, action: Record | Stash) -> Callable[[Any, Tensor | None], None]:
        """Return what takes one action."""
        name, recorder = action.point.name if isinstance(action, Record) else "", self._recorder
        functions = _functions(action, self._lens)
        later = action.later if isinstance(action, Record) else None

        def add(value: Any, same: Tensor | None) -> None:  # noqa: ARG001
            entry = Deferred(functions[0], same)  # type: ignore[index]
            for function in functions[1:]:  # type: ignore[index]
                entry = Deferred(function, entry)
            recorder.add(name, entry)

        def add_later(value: Any, same: Tensor | None) -> None:  # noqa: ARG001
            entry = None if later is None else later(value)
            if entry is None:
                action(value)  # computes it now, unless there is nothing
            else:
                recorder.add(name, entry)

        return add if functions is not None else add_later

    def __call__(self, value: Any) -> None:
        """Keep the activations in `value`."""
        x = same = None
        is_usual = self._recorder.forward_pass is current.forward_pass and not self._recorder.is_padded
        if is_usual and self._lens is not None:
            try:
                x = self._lens.get(value)
            except NoTensorError:  # a full cache leaves it out
                return
            same = kept(x)
            is_usual = same is not None
        if not is_usual:
            for action in self._actions:
                action(value)
            return
        for site in self._sites:
            stashed.saved[site], stashed.memo[site] = x, {"kept": same}
        for way in self._ways:
            way(value, same)


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
    return ([each.get for each in rest] or [_same]) if all(map(is_pure, rest)) else None


def captures_in(run: Schedule, recorder: Recorder) -> dict[Tap, Capture]:
    """Return the captures of a run that only records, at the events where that is all that happens."""
    found: dict[Tap, Capture] = {}
    for tap, steps in run.steps.items():
        actions: Iterable[Any] = steps
        if all(_is_simple(action, tap) for action in actions):
            found[tap] = Capture(recorder, [*actions])
    return found


def _is_simple(action: Any, tap: Tap) -> bool:
    if isinstance(action, Stash):
        return not tap.kind.is_inner
    return isinstance(action, Record) and action.point.only is None
