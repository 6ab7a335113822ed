"""The action of a hook object: it is called as `hook(module, args, kwargs, output)`, in the order of all hooks.

What it is given are snapshots, as for every hook. At a module's own output, named by the module's path, `output` is all
that the module returned; at every other point it is the point's tensor. At a module's input `output` is None, and what
is returned is new `(args, kwargs)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.engine.actions import HookAction
from hookline.engine.aliases import is_discarded, is_passed_through
from hookline.engine.lenses import FIRST, Argument, Chain, First, Lens
from hookline.engine.names import lens_of
from hookline.engine.points import HookPoint, Site
from hookline.engine.snapshots import Loan, is_part_of_pass, lend, snapshot
from hookline.engine.structures import NoTensorError, first_tensor, look, replaced, tensor_paths, tensors_in
from hookline.engine.taps import Kind, Step, Tap, now, tap_on
from hookline.errors import InvalidHookError
from hookline.hooks.context import HookContext
from hookline.hooks.values import WHOLE, copied, is_as_it_was, needs_grad

if TYPE_CHECKING:
    from hookline.engine.callbacks import Caller
    from hookline.engine.permanent import Standing
    from hookline.hooks.hook import Hook

here: ContextVar[HookPoint | None] = ContextVar("hookline_here", default=None)
"""The point at which a hook object is being called, in this thread or task."""


@contextmanager
def being_at(point: HookPoint) -> Iterator[None]:
    """While a hook object is called at `point`."""
    token = here.set(point)
    try:
        yield
    finally:
        here.reset(token)


class _Arguments(Site):
    """What a module is called with, after everybody's hooks."""

    @cached_property
    def tap(self) -> Tap:
        """Behind all others at the input."""
        return tap_on(self.module, self.kind, late=True)


class _Release:
    """Lets go of the arguments that were kept for the hook objects at an output."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, value: Any) -> Any:
        now.kept.pop(self.site, None)
        return value


class ObjectEdit(HookAction):
    """Calls a hook object, which may change what passes."""

    hook: Hook

    def __init__(self, point: HookPoint, hook: Hook, *, prepend: bool = False) -> None:
        super().__init__(point, hook, prepend=prepend)
        self.is_call = hook.is_pre
        self.view: Lens = WHOLE if hook.is_pre or _is_own_output(point) else self.lens
        self.has_edited = self.has_passed_on = False
        self._must_fire = True
        # The arguments of the call that an output is of, as they came in.
        site = point.site
        self.before = _Arguments(site.module, Kind.INPUT, WHOLE) if site.kind is Kind.OUTPUT else None
        if self.before is not None:
            self.needs = (*self.needs, self.before)
        if hook.on_error is not None:
            self.on_error = hook.on_error

    def caller(self) -> Caller:
        """With the module, and what it is called with."""
        return self._invoke

    @property
    def must_fire(self) -> bool:
        """Whether it is to be reported if it does not; not of one that is disabled."""
        return self._must_fire and self.is_enabled()

    @must_fire.setter
    def must_fire(self, wanted: bool) -> None:
        self._must_fire = wanted

    def is_enabled(self) -> bool:
        """Whether the object is."""
        return self.hook.is_enabled()

    @property
    def switches(self) -> int:
        """How often the object was enabled or disabled."""
        return self.hook.switches

    def is_stale(self, last_fired: object) -> bool:
        """Whether the object holds what it saw in an earlier run, and was not called since `last_fired`."""
        return self.is_enabled() and self.hook.is_holding() and self.last_fired is last_fired

    def check_place(self) -> None:
        """Whether the object may be there, beside the places where it is already."""
        self.hook.check_points([self.point])
        root = self.point.standing.root()
        if self.is_standing and self.registered is None and root is not None and self.hook.says_where():
            self.hook.check_target([self.point], HookContext(root).model._points)  # it may have come by the point alone

    def join(self, standing: Standing) -> None:
        """Let the object tell when it is enabled or disabled."""
        self.hook.joined(standing)

    def leave(self, standing: Standing) -> None:
        """No more, unless it stands there in another place."""
        if all(action.hook is not self.hook for action in standing.hooks()):
            self.hook.left(standing)

    def extend(self, steps: list[Step]) -> None:
        """Take its place; the arguments are kept until the last of these has seen them."""
        steps[:] = [step for step in steps if not isinstance(step, _Release)]
        super().extend(steps)
        if self.before is not None:
            steps.append(_Release(self.before))

    def __call__(self, value: Any) -> Any:
        """The value after the hook."""
        if not self.is_enabled():
            return value
        if not now.is_second_run:
            self.times = (self.count.of(self.tap) or 0) + 1
        elif not self.has_edited:  # reading once is enough
            return self._pass_on(value, self.view.get(value)) if self.has_passed_on else value
        if not self.is_for_this_call():
            return value
        seen = self._see(value)
        loans: dict[int, Loan] = {}
        given = copied(seen, lambda x: _lent(x, loans))
        self.fired, self.last_fired = self.fired or self.partial is None, object()
        result = self.ask((given, value), self.call())
        if self.partial is not None:
            self.note_whether_it_acted()
        return self._outcome(value, seen, given, result, loans)

    def _see(self, value: Any) -> Any:
        try:
            seen = self.view.get(value)
            first_tensor(seen)
        except NoTensorError as error:
            raise self.error(f"has nothing to work on: {error}", error) from error
        return seen

    def _invoke(self, given_and_value: tuple[Any, Any], point: HookPoint) -> Any:
        given, value = given_and_value
        known = now.kept.get(self.before)
        try:
            with being_at(point):
                args, kwargs = given if self.is_call else self._arguments(value)
                return self.hook(self.module, args, kwargs, None if self.is_call else given)
        finally:
            if known is not None:  # the hook may have run the model, and kept other arguments there
                now.kept[self.before] = known

    def _arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module was called with; nothing where that is not known, inside it."""
        if self.before is None and self.point.site.kind is not Kind.INPUT:
            return (), {}
        known = value if self.before is None else now.kept.get(self.before, ((), {}))
        return copied(known, snapshot)

    def _outcome(self, value: Any, seen: Any, given: Any, result: Any, loans: dict[int, Loan]) -> Any:
        if result is None or result is given:
            if is_as_it_was(given, seen, loans):
                # With gradients on, the hook may have kept what it was given, so that must be on the way.
                return self._pass_on(value, given) if needs_grad(given) and not self._is_callers(seen) else value
            result = given
        new = self.view.put(value, self._fitted(result, seen, given))
        self.has_edited = True
        self.keep_for_second_run()
        is_lost = self.tap.kind is Kind.OUTPUT and is_part_of_pass(self.module) and is_discarded()
        return self.written_back(value, new) if is_lost else new

    def _is_callers(self, seen: Any) -> bool:
        """Whether the module returns its arguments, which its caller may go on using."""
        return self.tap.kind is Kind.OUTPUT and any(map(is_passed_through, tensors_in(seen)))

    def _pass_on(self, value: Any, given: Any) -> Any:
        self.has_passed_on = True
        if self.is_worked_out:
            self.keep_for_second_run()
        return self.view.put(value, copied(given, snapshot))

    def _fitted(self, result: Any, seen: Any, given: Any) -> Any:
        """The result as what it stands for, or the error that says why it does not fit."""
        if isinstance(seen, Tensor):
            return snapshot(self.fitted(result, seen))
        if self.is_call:
            return self._fitted_call(result, seen)
        if isinstance(result, Tensor):
            result = replaced(given, first_tensor(seen), result)
        paths = list(tensor_paths(seen))
        if list(tensor_paths(result)) != paths:
            raise self.error(
                f"returned {_shown(result)}; it must return None, the first tensor, or a {type(seen).__name__} "
                f"with tensors where there are some now: {_places(paths)}"
            )
        return self._with_fitted(result, seen, paths)

    def _fitted_call(self, result: Any, seen: Any) -> Any:
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise self.error(f"returned {_shown(result)}; before a module runs it must return None or (args, kwargs)")
        if not isinstance(result[0], tuple | list):
            raise self.error(
                f"returned (args, kwargs) with a {type(result[0]).__name__} for args: it must be a tuple, as in "
                f"((x,), kwargs)"
            )
        result = (tuple(result[0]), result[1])
        before = set(tensor_paths(seen))
        return self._with_fitted(result, seen, [path for path in tensor_paths(result) if path in before])

    def _with_fitted(self, result: Any, seen: Any, paths: list[Any]) -> Any:
        for path in paths:
            result = replaced(result, path, snapshot(self.fitted(look(result, path), look(seen, path))))
        return result


def _lent(x: Tensor, loans: dict[int, Loan]) -> Tensor:
    loan = lend(x)
    loans[id(loan[0])] = loan
    return loan[0]


class ObjectRead(ObjectEdit):
    """Calls a hook object that only reads: what it is given is its own, and the value passes untouched."""

    only_reads = True

    def _outcome(self, value: Any, seen: Any, given: Any, result: Any, loans: dict[int, Loan]) -> Any:  # noqa: ARG002
        if result is not None:
            raise self.error(f"returned {_shown(result)}, but a Detector only reads: derive from Controller to change")
        return value


def input_of(point: HookPoint, describe: Callable[[], str]) -> HookPoint:
    """The point at which a hook is called before a module runs, from the name of that module's input or output."""
    site = point.site
    if site.kind is Kind.INPUT and isinstance(site.lens, Argument) and site.lens.key is None:
        return point
    whole = lens_of(site.module, Kind.INPUT)
    if site.kind is Kind.INPUT and isinstance(site.lens, Chain) and site.lens.lenses[0] == whole:
        return HookPoint.at_site(point.name, Site(site.module, Kind.INPUT, whole), point.standing)
    names_module = not point.axes or point.name.lstrip("-").isdigit()
    if site.kind is not Kind.OUTPUT or not isinstance(site.lens, First) or not names_module:
        raise InvalidHookError(
            f"{describe()} is to run before a module (PRE_FORWARD), but {point.name!r} is a value inside or at the end "
            f"of one: name a module or its input, or make it a FORWARD hook"
        )
    name = "input" if point.name == "output" else f"{point.name.removesuffix('.output')}.input"
    return HookPoint.at_site(name, Site(site.module, Kind.INPUT, lens_of(site.module, Kind.INPUT)), point.standing)


def _is_own_output(point: HookPoint) -> bool:
    """Whether it is the output of a module named by its path: that is given whole, as torch would."""
    return point.site.kind is Kind.OUTPUT and point.site.lens is FIRST and not point.axes


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (
        f" with tensors at {_places(paths)}" if (paths := [*tensor_paths(value)]) else ""
    )


def _places(paths: list[Any]) -> str:
    return ", ".join("".join(f"[{key}]" for key in path) or "itself" for path in paths)
