"""Actions: what is done with a value that flows past a tap.

The order in which they are taken is stated in `taps.py`, by `Turn` and `Phase`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError

from hookline.engine import passes
from hookline.engine.aliases import copy_of, is_discarded, is_passed_through, write_through
from hookline.engine.callbacks import Caller, OnError, caller
from hookline.engine.casting import cast, choices_at
from hookline.engine.checkpointing import keep_for_second_run, passing_in_second_run
from hookline.engine.signatures import parameters_of
from hookline.engine.snapshots import begin_sharing, end_sharing, is_as_lent, is_part_of_pass, lend, snapshot
from hookline.engine.structures import NoTensorError
from hookline.engine.taps import Count, Kind, Phase, Step, Tap, Turn, has_foreign_hooks, now, tap_on
from hookline.errors import HookError, HooklineError, NeverFiredWarning, UnavailablePointError, describe

if TYPE_CHECKING:
    from hookline.engine.permanent import Standing
    from hookline.engine.points import HookPoint
    from hookline.engine.recorder import Recorder
    from hookline.engine.runs import Run

_numbers = count(1)

UNKNOWN = -1
"""The call of a module that was called several times, when a checkpointed region recomputes."""


class Action:
    """Something that is done at a tap; it belongs to one run, or stands until it is removed."""

    turn: Turn = Turn.AT_POINTS
    stage: int = 0
    phase: ClassVar[Phase] = Phase.EDIT
    is_late: ClassVar[bool] = False
    only_reads: ClassVar[bool] = False
    dir: ClassVar[Literal["fwd", "bwd"]] = "fwd"

    def __init__(self, *, prepend: bool = False) -> None:
        self.order = -next(_numbers) if prepend else next(_numbers)
        self.fired = False
        self.why_not: str | None = None
        self.is_permanent = False
        self.owner: ref[Run] | None = None  # the run that holds it, which it does not hold

    @property
    def run(self) -> Run | None:
        """The run that it belongs to; None for a standing one, and once the run is freed."""
        return None if self.owner is None else self.owner()

    @property
    def is_standing(self) -> bool:
        """Whether it belongs to no run."""
        return self.owner is None

    module: nn.Module
    tap: Tap
    count: Count

    def begin(self) -> None:
        """A run begins that it belongs to."""
        self.fired = False

    def end_pass(self) -> None:
        """A forward pass is over, however it ended."""

    def settle(self) -> None:
        """The run is over."""

    def extend(self, steps: list[Step]) -> None:
        """Take its place after `steps`."""
        steps.append(self)

    def __call__(self, value: Any) -> Any:
        """What becomes of a value that passes."""
        raise NotImplementedError


class Begin(Action):
    """At the input of the root module: a forward pass begins, and calls are counted anew."""

    turn = Turn.BEGIN

    def __init__(self, root: nn.Module) -> None:
        super().__init__(prepend=True)
        self.module, self.tap = root, tap_on(root, Kind.INPUT)

    def __call__(self, value: Any) -> Any:
        """Count from 0."""
        self.fired = True
        if not now.is_second_run:
            self.count.here().begin(self.tap, self.module)
            now.starts_with_grad = torch.is_grad_enabled()
            begin_sharing(self.module, value)
            passes.text().begin(self.module, _by_name(self.module, value))
        return value


def _by_name(module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """The arguments of a call by the names of the parameters."""
    args, kwargs = given
    return dict(zip(parameters_of(module)[0], args, strict=False)) | kwargs


class BeginEncoder(Action):
    """At the input of an encoder, which `generate` runs before the model itself: it has a text too."""

    turn = Turn.BEGIN

    def __init__(self, root: nn.Module, encoder: nn.Module) -> None:
        super().__init__(prepend=True)
        self.root, self.module, self.tap = root, encoder, tap_on(encoder, Kind.INPUT)
        self.fired = True  # whether it does is nobody's concern

    def begin(self) -> None:
        """Nothing is to be awaited."""

    def __call__(self, value: Any) -> Any:
        """Note the text, unless the whole model is running and has done so."""
        if not now.is_second_run and not self.count.here().is_on():
            args, kwargs = value
            passes.text().begin_encoder(
                self.root, dict(zip(parameters_of(self.module)[0], args, strict=False)) | kwargs
            )
        return value


class End(Action):
    """When the root module is done, or has failed: the forward pass is over."""

    phase = Phase.BOUND

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.module, self.tap = root, tap_on(root, Kind.END)
        self.fired = True  # whether it does is nobody's concern

    def begin(self) -> None:
        """Nothing is to be awaited."""

    def __call__(self, value: Any) -> Any:
        """Count no more."""
        if not now.is_second_run:
            self.count.here().end()
            if not self.count.here().is_on():
                now.passing = None  # a module that is called by itself after this pass is in no text
            end_sharing()
            if not self.is_standing:
                if (run := self.run) is not None:
                    run.end_forward(has_succeeded=value is not None)
            elif (failure := self.count.here().failure) is not None:
                self.count.here().failure = None
                if value is not None:  # the model caught the error of a hook
                    raise failure
        return value


def bounds(root: nn.Module) -> list[Action]:
    """What notes that a forward pass of the whole model begins and ends."""
    config = getattr(root, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or not hasattr(root, "get_encoder"):
        return [Begin(root), End(root)]
    encoder = root.get_encoder()  # type: ignore[operator]
    # A model that is its own encoder has none apart from it.
    more = [BeginEncoder(root, encoder)] if isinstance(encoder, nn.Module) and encoder is not root else []
    return [Begin(root), End(root), *more]


class PointAction(Action):
    """An action at a point: it sees the value through the point's lens."""

    must_fire = True
    times = 0  # how often its module was called in the first run of a checkpointed region

    def __init__(self, point: HookPoint, *, prepend: bool = False) -> None:
        super().__init__(prepend=prepend)
        self.point = point
        site = point.site
        self.module, self.lens, self.stage, self.needs = site.module, site.lens, site.stage, site.needs
        # What looks at the outcome comes after other people's hooks, if there are any.
        self.is_worked_out = bool(site.needs) or site.kind.is_inner
        late = self.is_late and has_foreign_hooks(site.module, site.kind)
        self.tap = tap_on(site.module, site.kind, late=True) if late else site.tap

    def call(self) -> int | None:
        """Which call of its module is going on; None where that cannot be known."""
        if now.is_second_run:
            return 0 if self.times == 1 else UNKNOWN
        return self.count.of(self.tap)

    def keep_for_second_run(self) -> None:
        """Act again when the checkpointed region recomputes that is running now, if it is one."""
        if now.starts_with_grad:
            keep_for_second_run(self.run, now.passing)

    def is_for_this_call(self) -> bool:
        """Whether the point is for every call of its module, or just for the one going on."""
        if self.point.only is None:
            return True
        call = self.call()
        if call is None or call == UNKNOWN:
            raise self.uncounted()
        return call == self.point.only

    def uncounted(self) -> HooklineError:
        """The error for a point that is for one call of its module, where calls are not counted."""
        if now.is_second_run:
            why = "a checkpointed region, where calls cannot be told apart when it recomputes; switch gradient "
            why += "checkpointing off"
        elif not self.is_standing:
            why = "another thread than that of the run, and calls in several threads have no order"
        else:
            why = "a call of that module by itself; calls are counted in a forward pass of the whole model"
        return HooklineError(f"is for one call of its module ({self.point.name!r}), but this is {why}")


class HookAction(PointAction):
    """Calls a user's hook."""

    on_error: OnError | None = None
    registered: str | None = None
    """The id under which it is in the registry, if it is."""
    last_fired: object = None
    """Another object each time that it fires, where that is to be told from run to run."""
    partial: Any = None
    """The hook, if it is for some positions only: it says whether it acted. See `positions.at`."""
    missed: passes.Unreached | None = None
    level: int | None = None
    """How deep in other contexts its own is, where removing hooks also removes those of open contexts."""
    _is_on, _switches = True, 0
    _is_told = False

    def __init__(self, point: HookPoint, hook: Any, *, prepend: bool = False) -> None:
        super().__init__(point, prepend=prepend)
        self.hook = hook
        self.choices = choices_at(point)
        self.invoke = self.caller()
        self.errors: list[HookError] = []
        """What was skipped: of all actions of its run, if it belongs to one."""

    def caller(self) -> Caller:
        """How to call the hook."""
        return caller(self.hook)

    def only_at(self, partial: Any) -> None:
        """It is for some positions only."""
        self.partial, self.missed = partial, passes.text().unreached(partial.where)

    def note_whether_it_acted(self) -> None:
        """A hook for some positions only has fired when it came by one of them."""
        self.fired = self.fired or self.partial.acted
        self.why_not = None if self.fired else f"none of the positions that ran is {self.partial.where!r}"
        if self.missed is not None and not now.is_second_run:
            self.missed.note(self.point)

    def begin(self) -> None:
        """Nothing has been missed yet."""
        super().begin()
        if self.missed is not None:
            self.missed.clear()

    def is_enabled(self) -> bool:
        """Whether the hook is to be called at all."""
        return self._is_on

    @property
    def switches(self) -> int:
        """How often the hook was enabled or disabled."""
        return self._switches

    def switch(self, on: bool) -> None:
        """Enable or disable it, where it stands."""
        self._is_on = on
        self._switches += 1

    def is_stale(self, last_fired: object) -> bool:  # noqa: ARG002 (of an object that keeps what it saw)
        """Whether what the hook holds would pass for what it saw in the run just over, and is not."""
        return False

    def check_place(self) -> None:
        """Whether the hook may be there, beside the places where it is already."""

    def join(self, standing: Standing) -> None:
        """It is one of these standing hooks."""

    def leave(self, standing: Standing) -> None:
        """It is no longer one of them."""

    def extend(self, steps: list[Step]) -> None:
        """Take its place after `steps`."""
        steps.append(self._forgiving if self.on_error == "skip" else self)

    def forgive(self) -> None:
        """From now on, when the hook fails, drop its effect and let the run go on."""
        if self.on_error != "skip" and self.dir == "bwd":
            self.invoke = self._forgiving_gradient(self.invoke)
        self.on_error = "skip"

    def _forgiving(self, value: Any) -> Any:
        try:
            return self(value)
        except HookError as failure:
            self._skip(failure)
            return value

    def _forgiving_gradient(self, invoke: Caller) -> Caller:
        def call(grad: Tensor, point: Any) -> Tensor:
            before = snapshot(grad, is_ours=True)
            try:
                result = invoke(grad, point)
                new = (
                    grad if result is None else result[0] if isinstance(result, tuple) and len(result) == 1 else result
                )
                return self.fitted(new, before)
            except HookError as failure:
                self._skip(failure)
            except Exception as error:  # not swallowed: it is kept, and a warning tells
                self._skip(self._raised(error))
            return before

        return call

    def _skip(self, failure: HookError) -> None:
        """Keep the error, the first of its kind, and say so: when the run is over, or now if it is in none."""
        from hookline.engine.runs import report_skipped

        self.fired = True
        failure.let_go()
        known = next((each for each in self.errors if each.hook is failure.hook and each.point is failure.point), None)
        if known is None:
            self.errors.append(failure)
        else:
            known.times += 1
        run = self.run
        is_over = run is None or not run.is_open
        if self.point.standing.is_news(self) if self.is_standing else is_over and known is None:
            report_skipped([failure])

    def ask(self, given: Any, call: int | None) -> Any:
        """Call the hook; whatever goes wrong in it is raised as a `HookError`, unless the model wants it as it is."""
        before = now.call, now.is_second_run, now.hooks, now.passing, now.asked
        try:
            if now.is_second_run:
                now.passing = passing_in_second_run()
            now.call, now.hooks, now.asked = call, now.hooks + 1, now.passing
            return self.invoke(given, self.point)
        except _StopRecomputationError:  # no failure: torch has recomputed all that it needs of a checkpointed region
            raise
        except Exception as error:  # not swallowed: every error of a hook reaches the caller as one kind
            failure = self._raised(error)
            if self.point.standing.raises_own and self.on_error != "skip":
                error.add_note(str(failure))
                raise
            raise failure from error
        finally:
            now.call, now.is_second_run, now.hooks, now.passing, now.asked = before

    def written_back(self, value: Any, new: Any) -> Any:
        """What is returned for an edit that makes `new` of `value`, where the module's caller looks elsewhere."""
        if write_through(value, new):
            return value
        if not self._is_told:
            self._is_told = True
            warnings.warn(
                f"hook {describe(self.hook)} at point {self.point.name!r} has no effect: what calls "
                f"{type(self.module).__name__} discards its return value",
                NeverFiredWarning,
                stacklevel=2,
            )
        return new

    def _raised(self, error: Exception) -> HookError:
        return self.error(f"raised {type(error).__name__}: {error}", error)

    def fitted(self, result: Any, like: Tensor) -> Tensor:
        """A hook's result as the point needs it, or the error that says why it does not fit."""
        if not isinstance(result, Tensor):
            raise self.error(
                f"returned a {type(result).__name__}; it must return None, or a tensor of shape {tuple(like.shape)}"
            )
        if not like.is_nested and result.shape != like.shape:
            raise self.error(
                f"returned a tensor of shape {tuple(result.shape)}, but the shape there is {tuple(like.shape)}"
            )
        if result.is_meta and not like.is_meta:
            raise self.error("returned a tensor without data (on the device 'meta')")
        if result.dtype != like.dtype or result.device != like.device:
            try:
                result = cast(result, like)
            except HooklineError as error:
                raise self.error(f"returned a tensor of {result.dtype} that does not fit: {error}", error) from error
        if self.choices is not None and (wrong := self.choices.wrong(result, like)) is not None:
            raise self.error(wrong)
        return result

    def error(self, what: str, original: BaseException | None = None) -> HookError:
        """The error that names this hook and its point."""
        failure = HookError(
            f"hook {describe(self.hook)} at point {self.point.name!r} {what}",
            point=self.point,
            hook=self.hook,
            hook_id=self.registered or getattr(self.hook, "id", None),
            original_error=original,
        )
        if self.on_error != "skip" and (routes := self.point.standing if self.is_standing else self.run) is not None:
            routes.note(failure)
        return failure

    def uncounted(self) -> HooklineError:
        """As an error of this hook."""
        return self.error(str(super().uncounted()))


_OURS = 3
"""References to what a hook was given while they are counted: two variables, and the argument itself."""


class Edit(HookAction):
    """A forward hook: reads the activation, changes it in place, or returns another."""

    phase = Phase.EDIT

    def __init__(self, point: HookPoint, hook: Callable[..., Any], *, prepend: bool = False) -> None:
        super().__init__(point, hook, prepend=prepend)
        self.has_edited = self.has_passed_on = False
        if hasattr(hook, "where"):
            self.only_at(hook)

    def __call__(self, value: Any) -> Any:
        """The value after the hook."""
        if not now.is_second_run:
            call = self.count.of(self.tap)
            self.times = (call or 0) + 1
        elif not self.has_edited:  # reading once is enough
            x = self.lens.get(value) if self.has_passed_on else None
            return value if x is None else self._pass_on(value, x, x)
        else:
            call = self.call()
        if self.point.only is not None and not self.is_for_this_call():
            return value
        try:
            x = self.lens.get(value)
        except NoTensorError as error:
            raise self.error(f"has nothing to work on: {error}", error) from error
        given, kept = lend(x)
        self.fired = self.fired or self.partial is None
        result = self.ask(given, call)
        if self.partial is not None:
            self.note_whether_it_acted()
        if result is None or result is given:
            if is_as_lent(given, kept) and given.requires_grad == (x.requires_grad and torch.is_grad_enabled()):
                return self._pass_on(value, x, given) if self._asks_for_gradient(given, x) else value
            result = given
        # What flows on is nobody else's: the model may write to it, and the hook may have kept its result.
        new = self.lens.put(value, snapshot(self.fitted(result, x)))
        self.has_edited = True
        if now.starts_with_grad:
            self.keep_for_second_run()
        is_lost = self.tap.kind is Kind.OUTPUT and is_part_of_pass(self.module) and is_discarded()
        return self.written_back(value, new) if is_lost else new

    def _asks_for_gradient(self, given: Tensor, x: Tensor) -> bool:
        """Whether the hook may have asked for the gradient of what it was given, which must be on the way then."""
        if not given.requires_grad or self.is_worked_out:
            return given.requires_grad
        if given.retains_grad or given._backward_hooks:
            return True
        # Kept by the hook, if only for later: but passing it on must not separate the model's tensors from each other.
        return sys.getrefcount(given) > _OURS and not (self.tap.kind is Kind.OUTPUT and is_passed_through(x))

    def _pass_on(self, value: Any, x: Tensor, given: Tensor) -> Any:
        """The value with the same tensor in it. A checkpoint counts what working that out saves, so it is repeated."""
        self.has_passed_on = True
        if self.is_worked_out:
            self.keep_for_second_run()
        return self.lens.put(value, copy_of(x, given))


class Record(PointAction):
    """Keeps what flows out of a point."""

    phase = Phase.RECORD
    is_late = True
    only_reads = True

    def __init__(self, point: HookPoint, recording: Recorder) -> None:
        super().__init__(point)
        self.recording = recording
        self.must_fire = not recording.skips_missing

    def __call__(self, value: Any) -> Any:
        """The value, unchanged."""
        if now.is_second_run or not self.is_for_this_call():
            return value
        try:
            x = self._get(value)
        except NoTensorError as error:
            if self.recording.skips_missing:
                return value
            raise UnavailablePointError(f"nothing can be cached at {self.point.name!r}: {error}") from error
        self.fired = True
        self.recording.keep(self.point, x)
        return value

    def _get(self, value: Any) -> Tensor:
        if not self.is_worked_out or not torch.is_grad_enabled():
            return self.lens.get(value)
        try:  # beside the model's graph: a checkpoint would miss what that saves when it recomputes
            torch._C._set_grad_enabled(False)  # not `torch.no_grad()`, whose exit an interrupt can skip
            return self.lens.get(value)
        finally:
            torch._C._set_grad_enabled(True)
