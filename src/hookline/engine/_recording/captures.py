"""Captures: all records of a recording run at one event, taken at once.

A run that only records, and is the only one in its thread, has nothing to arrange at an event: one snapshot of the
value serves all points there. A full cache notes the snapshot and a recipe, and works out the activations when it is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from hookline.engine._inner.interception import unintercepted
from hookline.engine._memory.snapshots import shared
from hookline.engine._memory.structures import NoTensorError
from hookline.engine._recording.deferred import Deferred
from hookline.engine._recording.recorder import Recorder
from hookline.engine._torch.thread_state import is_autocast_on
from hookline.engine.actions import Record
from hookline.engine.derived import Stash
from hookline.engine.lenses import Chain, First, Lens, is_pure, is_root
from hookline.engine.pass_state import pass_state
from hookline.engine.points import Site
from hookline.engine.schedule import Schedule
from hookline.engine.taps import Tap

Capture: TypeAlias = Callable[..., None]
"""Keeps the activations in the value at an event: `capture(value, is_new)`, with whether nobody else has the value."""

EntryBuilder: TypeAlias = Callable[..., Tensor | Deferred]
"""Makes an entry of a cache from the snapshot at an event, and from what else was read there."""


class Recipe:
    """What the activations at one event are made of. It refers to no module and no tensor."""

    def __init__(self, makes: Sequence[tuple[str, EntryBuilder]]) -> None:
        self._makes = makes

    def __call__(self, *kept: Any) -> Iterator[tuple[str, Tensor | Deferred]]:
        """The activations by name."""
        return ((name, make(*kept)) for name, make in self._makes)


class _Event:
    """How the actions at one event of a module are taken."""

    def __init__(self, actions: Sequence[Record | Stash], recorder: Recorder, tap: Tap) -> None:
        self.actions, self._recorder, self.is_outer = actions, recorder, not tap.kind.is_inner
        self.lens = next((each for each in map(_root, actions) if each is not None), None)
        """The lens that finds the tensor of the model that they are about."""
        self.sites = [each.site for each in actions if isinstance(each, Stash) and each.site.lens == self.lens]
        """Where that tensor is saved for points at later events."""
        self.reads: dict[Any, Callable[[], Any]] = {}
        """What is read besides, at most one thing, by what asks for it."""
        self.makes: list[tuple[str, EntryBuilder]] = []
        self.others: list[Record | Stash] = []
        """Those that take more than a snapshot: they are taken at once."""
        for action in actions:
            if isinstance(action, Stash):
                self.others += [] if action.site in self.sites else [action]
            elif (make := self._given(action) if tap.kind.is_inner else self._make(action)) is not None:
                self.makes.append((action.point.name, make))
            else:
                self.others.append(action)
        if len(actions) == 1 and self.makes and self.makes[0][1] is _apart and not tap.kind.is_inner:
            self.makes = [(self.makes[0][0], _alone)]  # nobody else needs the snapshot

    @property
    def is_one(self) -> bool:
        """Whether there is one record, of the tensor as it is."""
        return bool(self.makes) and self.makes[0][1] is _alone

    def _given(self, action: Record) -> EntryBuilder | None:
        """For a value inside a module, which is a snapshot or deferred already."""
        lenses = _lenses(action)
        return _applying([each.get for each in lenses]) if all(map(is_pure, lenses)) else None

    def _make(self, action: Record) -> EntryBuilder | None:
        first, *rest = _lenses(action)
        functions, formula = [each.get for each in rest], getattr(first, "formula", None)
        if not all(map(is_pure, rest)):
            return None
        if first == self.lens:
            return _applying(functions)
        if formula is None or not all(map(self._is_known, formula.arguments)):
            return None
        reads = {each: read for each in formula.arguments if (read := self._read(each)) is not None}
        if len(self.reads | reads) > 1:
            return None
        self.reads |= reads
        return partial(_computed, formula.function, [self._place(each) for each in formula.arguments], functions)

    def _is_known(self, argument: Any) -> bool:
        is_there = argument == self.lens or argument in self._recorder.places
        return is_there or not isinstance(argument, Site | Lens)  # which takes longest, so it comes last

    def _is_own(self, argument: Any) -> bool:
        """Whether it is the tensor of this event."""
        return argument == self.lens or argument in self.sites

    def _read(self, argument: Any) -> Callable[[], Any] | None:
        """How an argument is read at the event; None for its own tensor, and for a number that never changes."""
        if isinstance(argument, Site) and not self._is_own(argument):
            return partial(self._recorder.saved.__getitem__, self._recorder.places[argument])
        return argument if callable(argument) else None

    def _place(self, argument: Any) -> int | tuple[Any]:
        """The number of an argument in the entry of the log; a number that never changes, in a tuple."""
        return 0 if self._is_own(argument) else 1 if argument in self.reads else (argument,)

    def needed(self) -> set[Site]:
        """The sites whose saved tensors its other actions take."""
        needs = [each.needs if isinstance(each, Record) else each.site.needs for each in self.others]
        return {site for some in needs for site in some}


def _capture_of(recorder: Recorder, event: _Event, needed: set[Site]) -> Capture:
    """Return what takes all actions at an event; `needed` are the sites whose tensors are to be stashed too."""
    actions, others, saved, is_one = event.actions, event.others, recorder.saved, event.is_one
    recipe: Any = event.makes[0][0] if is_one else Recipe(event.makes) if event.makes else None
    read = next(iter(event.reads.values()), None)
    places = [recorder.places[site] for site in event.sites]
    stashes = [site for site in event.sites if site in needed]
    bases = [(site, recorder.places[site]) for site in event.reads if isinstance(site, Site)]
    lens, is_first = event.lens, type(event.lens) is First

    def one_by_one(value: Any, _is_new: bool = False) -> None:
        unintercepted(each_action, value) if pass_state.interceptors else each_action(value)

    def each_action(value: Any) -> None:
        for place in places:
            saved[place] = None
        for site, place in bases:
            if (base := saved[place]) is not None:
                pass_state.saved[site], pass_state.memo[site] = base, {"kept": base}
        for action in actions:
            action(value)

    def capture(value: Any, is_new: bool = False) -> None:
        if recorder.forward_pass is not pass_state.forward_pass:
            recorder.note_pass()
        if recorder.is_padded:
            return one_by_one(value)
        same = None if event.is_outer else value
        if lens is not None:
            try:
                x = value if is_first and type(value) is Tensor else lens.get(value)
            except NoTensorError:
                return missed() if recorder.skips_missing else one_by_one(value)
            if is_one or not is_autocast_on():  # what is computed under autocast is computed now
                tensor, is_new = (x.detach(), False) if x.requires_grad else (x, is_new and x is value)
                same = shared(tensor, is_for_reading=True, is_new=is_new)
            if same is None:
                return one_by_one(value)
            for place in places:
                saved[place] = same
            for site in stashes:
                pass_state.saved[site], pass_state.memo[site] = x, {"kept": same}
        if is_one:
            actions[0].fired = True
        if read is not None:
            more = read()
            if more is None:
                return one_by_one(value)
            recorder.log.append((recipe, same, more))
        elif recipe is not None:
            recorder.log.append((recipe, same))
        if others:
            unintercepted(take_others, value) if pass_state.interceptors else take_others(value)
        return None

    def missed() -> None:
        for action in actions:
            if isinstance(action, Record):
                recorder.miss(action.point.name)

    def take_others(value: Any) -> None:
        for action in others:
            _take(action, value)

    return capture if recorder.defers or is_one else one_by_one


def _take(action: Record | Stash, value: Any) -> None:
    """Take an action that needs more than one tensor of the event: later if it can wait, else now."""
    later = action.later if isinstance(action, Record) else None
    entry = None if later is None else later(value)
    if entry is None:
        action(value)
    else:
        action.recorder.log.append((action.point.name, entry))  # type: ignore[union-attr]


def _root(action: Record | Stash) -> Lens | None:
    """The lens that finds the tensor of the model that an action is about."""
    lens: Lens = action.lens if isinstance(action, Record) else action.site.lens
    first = lens.lenses[0] if isinstance(lens, Chain) else lens
    return first if is_root(first) else None


def _lenses(action: Record) -> tuple[Lens, ...]:
    return action.lens.lenses if isinstance(action.lens, Chain) else (action.lens,)


def _applying(functions: Sequence[Callable[[Any], Tensor]]) -> EntryBuilder:
    return partial(_applied, functions) if functions else _apart


def _alone(x: Tensor) -> Tensor:
    return x


def _apart(x: Tensor | Deferred, *_: Any) -> Deferred:
    return Deferred(_alone, x)


def _applied(functions: Sequence[Callable[[Any], Tensor]], x: Any, *_: Any) -> Any:
    for function in functions:
        x = Deferred(function, x)
    return x


def _computed(function: Callable[..., Tensor], places: list[Any], rest: list[Any], *kept: Any) -> Any:
    return _applied(rest, Deferred(function, *[at[0] if type(at) is tuple else kept[at] for at in places]))


def captures_in(run: Schedule, recorder: Recorder) -> dict[Tap, Capture]:
    """Return the captures of a run that only records, at the events where that is all that happens."""
    stashes = [each.site for each in run.actions if isinstance(each, Stash)]
    recorder.places = {site: place for place, site in enumerate(stashes)}
    recorder.saved[:] = [None] * len(stashes)
    events: dict[Tap, _Event] = {}
    needed: set[Site] = set()
    for tap, steps in run.steps.items():
        actions: Iterable[Any] = steps
        # Inside a module, a value that is computed for the records only is not computed if they can wait.
        can_capture = recorder.defers or not tap.kind.is_inner
        if can_capture and all(_is_simple(action, tap) for action in actions):
            events[tap] = _Event([*actions], recorder, tap)
            needed |= events[tap].needed()
        else:
            needed.update(recorder.places)
    return {tap: _capture_of(recorder, event, needed) for tap, event in events.items()}


def whole_output(actions: Sequence[Any]) -> Record | None:
    """The record of a module's output, if it is the only action there."""
    is_one = len(actions) == 1 and isinstance(actions[0], Record) and type(actions[0].lens) is First
    return actions[0] if is_one else None


def _is_simple(action: Any, tap: Tap) -> bool:
    if isinstance(action, Stash):
        return not tap.kind.is_inner
    return isinstance(action, Record) and action.point.only is None
