"""Actions: what is done with a value that flows past a tap.

At one tap they are taken in this order: `Begin`, the edits as registered, the watches of gradients, the records. So
a record holds what flowed out of the point after every edit, and a gradient is that of what flowed out.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hookline.errors import HookError, UnavailablePointError, describe
from hookline.functions import caller
from hookline.memory import is_untouched, snapshot
from hookline.recompute import keep_for_second_run
from hookline.structures import NoTensorError
from hookline.taps import Kind, Routes, Step, Tap, has_foreign_hooks, now, tap_on

if TYPE_CHECKING:
    from hookline.points import HookPoint
    from hookline.recording import Recording
    from hookline.runtime import Run

_numbers = count(1)


class Action:
    """Something that is done at a tap; it belongs to one run, or stands until it is removed."""

    phase: ClassVar[int]
    is_late: ClassVar[bool] = False
    dir: ClassVar[Literal["fwd", "bwd"]] = "fwd"

    def __init__(self, *, prepend: bool = False) -> None:
        self.order = -next(_numbers) if prepend else next(_numbers)
        self.fired = False
        self.why_not: str | None = None
        self.is_permanent = False
        self.run: Run | None = None

    module: nn.Module
    tap: Tap

    def extend(self, steps: list[Step]) -> None:
        """Take its place after `steps`."""
        raise NotImplementedError


class Begin(Action):
    """At the input of the root module: a forward pass begins, and calls are counted anew."""

    phase = 0

    def __init__(self, root: nn.Module, routes: Routes) -> None:
        super().__init__(prepend=True)
        self.module, self.tap, self.routes = root, tap_on(root, Kind.INPUT), routes

    def extend(self, steps: list[Step]) -> None:
        """Be a step."""
        steps.append(self)

    def __call__(self, value: Any) -> Any:
        """Count from 0."""
        self.fired = True
        for tap in self.routes.steps:
            now.calls.pop(tap, None)
        now.call = now.calls[self.tap] = 0
        now.starts_with_grad = torch.is_grad_enabled()
        return value


class PointAction(Action):
    """An action at a point: it sees the value through the point's lens."""

    must_fire = True

    def __init__(self, point: HookPoint, *, prepend: bool = False) -> None:
        super().__init__(prepend=prepend)
        self.point = point
        site = point.site
        self.module, self.lens = site.module, site.lens
        # What looks at the outcome comes after other people's hooks, if there are any.
        late = self.is_late and has_foreign_hooks(site.module, site.kind)
        self.tap = tap_on(site.module, site.kind, late=True) if late else site.tap

    def is_for_this_call(self) -> bool:
        """Whether the point is for every call of its module, or just for the one going on."""
        return self.point.only is None or self.point.only == now.call


class HookAction(PointAction):
    """Calls a user's hook."""

    def __init__(self, point: HookPoint, hook: Callable[..., Any], *, prepend: bool = False) -> None:
        super().__init__(point, prepend=prepend)
        self.hook, self.invoke = hook, caller(hook)

    def ask(self, given: Tensor, call: int | None) -> Any:
        """Call the hook; whatever goes wrong in it is raised as a `HookError`."""
        before, now.call = now.call, call
        try:
            return self.invoke(given, self.point)
        except Exception as error:  # not swallowed: every error of a hook reaches the caller as one kind
            raise self.error(f"raised {type(error).__name__}: {error}", error) from error
        finally:
            now.call = before

    def fitted(self, result: Any, like: Tensor) -> Tensor:
        """A hook's result as the point needs it, or the error that says why it does not fit."""
        if not isinstance(result, Tensor):
            raise self.error(
                f"returned a {type(result).__name__}; it must return None, or a tensor of shape {tuple(like.shape)}"
            )
        if result.shape != like.shape:
            raise self.error(
                f"returned a tensor of shape {tuple(result.shape)}, but the shape there is {tuple(like.shape)}"
            )
        if result.dtype != like.dtype or result.device != like.device:
            return result.to(device=like.device, dtype=like.dtype)
        return result

    def error(self, what: str, original: BaseException | None = None) -> HookError:
        """The error that names this hook and its point."""
        return HookError(
            f"hook {describe(self.hook)} at point {self.point.name!r} {what}",
            point=self.point,
            hook=self.hook,
            hook_id=getattr(self.hook, "id", None),
            original_error=original,
        )


class Edit(HookAction):
    """A forward hook: reads the activation, changes it in place, or returns another."""

    phase = 1

    def __init__(self, point: HookPoint, hook: Callable[..., Any], *, prepend: bool = False) -> None:
        super().__init__(point, hook, prepend=prepend)
        self.has_edited = False

    def extend(self, steps: list[Step]) -> None:
        """Be a step."""
        steps.append(self)

    def __call__(self, value: Any) -> Any:
        """The value after the hook."""
        if not self._is_wanted():
            return value
        self.fired = True
        try:
            x = self.lens.get(value)
        except NoTensorError as error:
            raise self.error(f"has nothing to work on: {error}", error) from error
        given = snapshot(x)
        result = self.ask(given, now.call)
        if result is None or result is given:
            if is_untouched(given):
                return value
            result = given
        new = self.lens.put(value, self.fitted(result, x))
        self.has_edited = True
        if self.run is not None and now.starts_with_grad:
            keep_for_second_run(self.run)
        return new

    def _is_wanted(self) -> bool:
        if now.call is not None:
            return self.is_for_this_call()
        # A second run repeats what the first one changed, and nothing else: reading once is enough.
        if self.has_edited and self.point.only is not None:
            raise self.error(
                "is for one call of its module only, but that module is in a checkpointed region, where calls "
                "cannot be told apart when it recomputes; switch gradient checkpointing off"
            )
        return self.has_edited


class Watch(PointAction):
    """Something that wants the gradient of what flows out of a point."""

    phase = 2
    is_late = True
    dir = "bwd"

    def extend(self, steps: list[Step]) -> None:
        """Share one step with the other watches of the same tensor, so that they see it in order."""
        last = steps[-1] if steps else None
        if isinstance(last, _WatchStep) and (last.first.lens, last.first.point.only) == (
            self.lens,
            self.point.only,
        ):
            last.watches.append(self)
        else:
            steps.append(_WatchStep(self))

    def attach(self, tensor: Tensor) -> None:
        """Ask for the gradient of `tensor`, which is on its way out of the point."""
        raise NotImplementedError

    def miss(self, error: NoTensorError) -> None:
        """There is no tensor at the point."""
        raise NotImplementedError


class _WatchStep:
    """Sends on a tensor of its own, so that its gradient is the point's and no other's."""

    def __init__(self, first: Watch) -> None:
        self.first, self.watches = first, [first]

    def __call__(self, value: Any) -> Any:
        first = self.first
        if now.call is not None and not first.is_for_this_call():
            return value
        try:
            x = first.lens.get(value)
        except NoTensorError as error:
            for watch in self.watches:
                watch.miss(error)
            return value
        why_not = self._why_not(x)
        for watch in self.watches:
            watch.why_not, watch.fired = why_not, watch.fired or why_not is None
        if why_not is not None or not torch.is_grad_enabled():
            return value
        out = snapshot(x)
        if not out.requires_grad:
            out.requires_grad_()
        for watch in self.watches:
            watch.attach(out)
        return first.lens.put(value, out)

    def _why_not(self, x: Tensor) -> str | None:
        if not (x.is_floating_point() or x.is_complex()):
            return f"its dtype {x.dtype} has no gradient"
        if torch.is_grad_enabled() or self._comes_later():
            return None
        return "gradients are switched off (torch.no_grad or torch.inference_mode)"

    def _comes_later(self) -> bool:
        run = self.first.run
        return run is not None and now.starts_with_grad and keep_for_second_run(run)


class BackwardHook(Watch, HookAction):
    """A backward hook: reads the gradient, changes it in place, or returns another."""

    def attach(self, tensor: Tensor) -> None:
        """Be called with the gradient of `tensor`, whenever it is computed."""
        call = now.call

        def on_gradient(grad: Tensor) -> Tensor | None:
            given = snapshot(grad)
            result = self.ask(given, call)
            if isinstance(result, tuple) and len(result) == 1:
                result = result[0]
            if result is None or result is given:
                return None if is_untouched(given) else given
            return self.fitted(result, grad)

        tensor.register_hook(on_gradient)

    def miss(self, error: NoTensorError) -> None:
        """A hook cannot work on nothing."""
        raise self.error(f"has nothing to work on: {error}", error) from error


class GradientRecord(Watch):
    """Keeps the tensor, so that its gradient can be asked for when the forward pass is over."""

    def __init__(self, point: HookPoint, recording: Recording) -> None:
        super().__init__(point)
        self.recording = recording
        self.must_fire = False  # the record of the value, at the same point, tells

    def attach(self, tensor: Tensor) -> None:
        """Remember `tensor`."""
        if now.call is not None:
            self.recording.watch(self.point, tensor)

    def miss(self, error: NoTensorError) -> None:
        """The record of the value, at the same point, says so."""


class Record(PointAction):
    """Keeps what flows out of a point."""

    phase = 3
    is_late = True

    def __init__(self, point: HookPoint, recording: Recording) -> None:
        super().__init__(point)
        self.recording = recording
        self.must_fire = not recording.skips_missing

    def extend(self, steps: list[Step]) -> None:
        """Be a step."""
        steps.append(self)

    def __call__(self, value: Any) -> Any:
        """The value, unchanged."""
        if now.call is None or not self.is_for_this_call():
            return value
        try:
            x = self.lens.get(value)
        except NoTensorError as error:
            if self.recording.skips_missing:
                return value
            raise UnavailablePointError(f"nothing can be cached at {self.point.name!r}: {error}") from error
        self.fired = True
        self.recording.keep(self.point, x)
        return value
