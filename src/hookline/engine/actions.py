"""Actions: what is done with a value at a tap. `order.py` states the order in which they are taken."""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import ref

import torch
from torch import Tensor, nn

from hookline.engine._gradients.checkpointing import keep_for_second_run
from hookline.engine._recording.deferred import Deferred
from hookline.engine._torch.thread_state import set_grad_enabled
from hookline.engine.calls import Count
from hookline.engine.formulas import deferred
from hookline.engine.order import Phase, Turn
from hookline.engine.pass_state import pass_state
from hookline.engine.schedule import Step
from hookline.engine.taps import Tap
from hookline.errors import HooklineError, UnavailablePointError
from hookline.values.structures import NoTensorError

if TYPE_CHECKING:
    from hookline.engine._recording.recorder import Recorder
    from hookline.engine.points import HookPoint
    from hookline.engine.runs import Run

numbers = count(1)
"""Order actions by when they were made."""

UNKNOWN = -1
"""The call of a module that was called several times, when a checkpointed region recomputes."""


class Action:
    """Something that is done at a tap. It belongs to one run, or stays until it is removed."""

    turn: Turn = Turn.AT_POINTS
    stage: int = 0
    phase: ClassVar[Phase] = Phase.EDIT
    is_late: ClassVar[bool] = False
    """Whether it waits behind the torch hooks of others."""
    only_reads: ClassVar[bool] = False
    """Whether it never changes the value: nothing is prepared for an edit."""
    is_replayed: ClassVar[bool] = True
    """Whether it is done again when a checkpointed region recomputes. Not what counts or keeps something."""
    is_helper: ClassVar[bool] = False
    """Whether it is there for other actions only, and does nothing to a value that it passes on."""
    takes_deferred: bool = False
    """Whether it also takes a value that is not computed yet: see `_recording/deferred.py`."""
    dir: ClassVar[Literal["fwd", "bwd"]] = "fwd"

    module: nn.Module
    tap: Tap
    count: Count

    def __init__(self, *, prepend: bool = False) -> None:
        self.order = -next(numbers) if prepend else next(numbers)
        self.fired = False
        self.why_not: str | None = None
        self.owner: ref[Run] | None = None  # a weak reference, because the run holds the action

    @property
    def run(self) -> Run | None:
        """The run that it belongs to; None for a permanent hook, and once the run is freed."""
        return None if self.owner is None else self.owner()

    @property
    def is_in_run(self) -> bool:
        """Whether it belongs to a run. If not, it stays until it is removed."""
        return self.owner is not None

    # In a run: `begin` where its block is entered, the action itself for each value that passes, `settle` at the end.

    def begin(self) -> None:
        """Prepare for a run that it belongs to."""
        self.fired, self.why_not = False, None

    def end_pass(self) -> None:
        """A forward pass has ended, normally or not. Called for actions on gradients only."""

    def settle(self) -> None:
        """The run has ended normally."""

    def refuse(self, why: str) -> None:
        """The model turned out not to compute what it is about."""

    def extend(self, steps: list[Step], *, is_replay: bool = False) -> None:
        """Append the step of this action."""
        if self.is_replayed or not is_replay:
            steps.append(self)

    def __call__(self, value: Any) -> Any:
        """Return the value to continue with: the one that it got, if it only reads."""
        raise NotImplementedError


class PointAction(Action):
    """An action at a point: it sees the value through the point's lens.

    A new kind of action defines `act`, which is called when the model computes the value of the point:

        class Count(PointAction):
            only_reads, is_replayed, phase = True, False, Record.phase  # after all edits at the point

            def act(self, value):
                self.calls += 1
                return value

        with Run(model.module, [Count(model.point("fc"))]):
            model(x)
    """

    must_fire = True
    """Whether it is a mistake if its module is not called, or has no tensor there."""
    times = 0
    """How often its module was called in the first run of a checkpointed region."""

    def __init__(self, point: HookPoint, *, prepend: bool = False) -> None:
        super().__init__(prepend=prepend)
        self.point = point
        site = point.site
        self.module, self.lens, self.stage, self.needs = site.module, site.lens, site.stage, site.needs
        self.is_derived = bool(site.needs) or site.kind.is_inner
        # Actions that record come after other people's hooks, if there are any.
        self.tap = site.last_tap() if self.is_late else site.tap

    @cached_property
    def is_inplace(self) -> bool:
        """Whether its module works in place."""
        return bool(getattr(self.module, "inplace", False))

    def __call__(self, value: Any) -> Any:
        """Act, unless a hook called the module, or the point is for another call of it."""
        if pass_state.hooks and self.count.here().is_below_hook():
            return value
        if self.point.only is not None and not self.is_for_this_call():
            return value
        self.fired = True
        return self.act(value)

    def act(self, value: Any) -> Any:
        """Return the value to continue with."""
        raise NotImplementedError

    def call(self) -> int | None:
        """The number, from 0, of the current call of its module; None where calls are not counted."""
        if pass_state.is_recomputing:
            return 0 if self.times == 1 else UNKNOWN
        return self.count.of(self.tap)

    def keep_for_second_run(self, *, must_act: bool = False) -> None:
        """Act again when the checkpointed region that is running now, if there is one, recomputes."""
        if pass_state.starts_with_grad or torch.is_grad_enabled():
            keep_for_second_run(self, pass_state.forward_pass, must_act=must_act)

    def is_for_this_call(self) -> bool:
        """Whether the point is for every call of its module, or for the current one."""
        if self.point.only is None:
            return True
        if pass_state.hooks and self.count.here().is_of_hook():
            return False
        call = self.call()
        if call is None or call == UNKNOWN:
            raise self.uncounted()
        return call == self.point.only

    def refuse(self, why: str) -> None:
        """Raise: the model turned out not to compute the value of the point."""
        raise UnavailablePointError(f"{self.point.name!r} is not available on this model: {why}")

    def uncounted(self) -> HooklineError:
        """The error for a point that is for one call of its module, where calls are not counted."""
        if pass_state.is_recomputing:
            why = "recomputed by a checkpoint, where calls have no number: turn gradient checkpointing off"
        elif self.is_in_run:
            why = "in another thread than the run, and calls in several threads have no order"
        else:
            why = "not in a forward pass of the whole model, where calls are counted"
        return HooklineError(f"is for one call of its module ({self.point.name!r}), but this call is {why}")


class Record(PointAction):
    """Keeps the activation that leaves a point."""

    phase = Phase.RECORD
    is_late = True
    is_replayed = False
    only_reads = True

    def __init__(self, point: HookPoint, recorder: Recorder, hooked: Container[nn.Module] | None = None) -> None:
        """`hooked` are all modules with hooks: elsewhere an activation is recorded where all that it needs is known."""
        super().__init__(point)
        self.recorder = recorder
        can_be_early = recorder.defers and getattr(self.lens, "ignores_value", False)
        if can_be_early and hooked is not None and not (self.module in hooked or self.needs[0].module in hooked):
            self.module, self.tap, self.turn = self.needs[0].module, self.needs[0].last_tap(), Turn.DERIVE
        self.must_fire = not recorder.skips_missing
        self.takes_deferred = recorder.defers

    def __call__(self, value: Any) -> Any:
        """Keep the activation; the value continues unchanged."""
        if pass_state.hooks and self.count.here().is_below_hook():
            return value  # a hook called the module, not the model
        if self.point.only is not None and not self.is_for_this_call():
            return value
        try:
            x = self._later(value) if self.takes_deferred else self.value_of(value)
        except NoTensorError as error:
            if self.recorder.skips_missing:
                self.recorder.miss(self.point.name)
                return value
            raise UnavailablePointError(f"nothing can be cached at {self.point.name!r}: {error}") from error
        self.fired = True
        self.recorder.keep(self.point, x)
        return value

    def refuse(self, why: str) -> None:
        """Raise, unless everything was asked for that there is."""
        if not self.recorder.skips_missing:
            super().refuse(why)

    def _later(self, value: Any) -> Tensor | Deferred:
        x = deferred(self.lens, value)
        return self.value_of(value.compute() if type(value) is Deferred else value) if x is None else x

    def value_of(self, value: Any) -> Tensor:
        """What is kept of a value."""
        if not self.is_derived or not torch.is_grad_enabled():
            return self.lens.get(value)
        try:  # outside the model's graph: a checkpoint would miss the tensors saved for it when it recomputes
            set_grad_enabled(False)  # not `torch.no_grad()`, whose exit an interrupt can skip
            return self.lens.get(value)
        finally:
            set_grad_enabled(True)
