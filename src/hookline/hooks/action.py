"""The action of a hook object: it is called as `hook(module, args, kwargs, output)`, in order with all other hooks.

It is given snapshots, as every hook is. At a module's own output, named by the module's path, `output` is everything
that the module returned; at every other point it is the point's tensor. At a module's input `output` is None, and the
hook returns new `(args, kwargs)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.engine import (
    FIRST,
    Edit,
    HookAction,
    HookPoint,
    Kind,
    Registration,
    Site,
    lens_of,
    parts_of,
    pass_state,
    snapshot,
)
from hookline.errors import InvalidHookError, a_type
from hookline.hooks.context import HookContext
from hookline.hooks.values import WHOLE, Loans, arguments_of, copied, is_as_it_was, needs_grad
from hookline.values.structures import NoTensorError, first_tensor, look, replaced, tensor_paths, tensors_in

if TYPE_CHECKING:
    from hookline.engine import PermanentHooks
    from hookline.functions.callers import Caller
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


class _ObjectRegistration(Registration):
    """How a hook object is held: the object itself can be enabled and disabled, and may hold data."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def is_enabled(self) -> bool:
        """Whether the object is enabled."""
        return self._hook.is_enabled()

    @property
    def switches(self) -> int:
        """How often the object was enabled or disabled."""
        return self._hook.switches

    def is_stale(self, last_fired: object) -> bool:
        """Whether the object holds data of an earlier run, and was not called since `last_fired`."""
        return self.is_enabled() and self._hook.is_holding() and self.last_fired is last_fired

    def check_place(self, action: HookAction) -> None:
        """Raise if the object cannot be here in addition to where it is already."""
        self._hook.check_points([action.point])
        root = action.point.permanent.root()
        if not action.is_in_run and self.id is None and root is not None and self._hook.says_where():
            self._hook.check_target([action.point], HookContext(root).model.index)  # it may have been given a point

    def join(self, hooks: PermanentHooks) -> None:
        """Let the object report when it is enabled or disabled."""
        self._hook.joined(hooks)

    def leave(self, hooks: PermanentHooks) -> None:
        """Undo `join`, unless the object is there at another point."""
        if all(action.hook is not self._hook for action in hooks.hooks()):
            self._hook.left(hooks)


class ObjectEdit(Edit):
    """Calls a hook object, which may change the value: see `engine/events.py` for the algorithm."""

    hook: Hook

    def __init__(self, point: HookPoint, hook: Hook, *, prepend: bool = False) -> None:
        super().__init__(point, hook, prepend=prepend)
        self.registration = _ObjectRegistration(hook)
        self.takes_call = hook.is_pre
        if hook.is_pre:
            self.view = arguments_of(point.site.module)
        elif _is_own_output(point):
            self.view = WHOLE
        self._must_fire = True
        if hook.on_error is not None:
            self.on_error = hook.on_error

    def caller(self) -> Caller:
        """With the module and the arguments of its call."""
        return self._invoke

    @property
    def must_fire(self) -> bool:
        """Whether to report it if it does not fire; a disabled hook is not reported."""
        return self._must_fire and self.hook.is_enabled()

    @must_fire.setter
    def must_fire(self, value: bool) -> None:
        self._must_fire = value

    def extend(self, steps: list[Callable[[Any], Any]], *, is_replay: bool = False) -> None:
        """Append the step."""
        super().extend(steps, is_replay=is_replay)
        steps[-1] = partial(_if_enabled, self, steps[-1])

    def lend(self, x: Any) -> tuple[Any, Loans]:  # type: ignore[override]
        """A copy of the structure with a snapshot of each tensor, and the loans."""
        try:
            first_tensor(x)
        except NoTensorError as error:
            raise self.nothing_there(error) from error
        loans: Loans = {}
        self.registration.last_fired = object()

        def lent(tensor: Tensor) -> Tensor:
            loan = Edit.lend(tensor)
            loans[id(loan[0])] = loan
            return loan[0]

        return copied(x, lent), loans

    def is_as_lent(self, given: Any, kept: Any, x: Any) -> bool:
        """Whether the hook left what it was given unchanged."""
        return is_as_it_was(given, x, kept)

    def wants_gradient(self, given: Any, x: Any) -> bool:
        """Whether the hook may have kept what it was given with its graph; not if the caller continues with `x`."""
        return needs_grad(given) and not (
            self.tap.kind is Kind.OUTPUT and any(map(self.is_passed_through, tensors_in(x)))
        )

    def passed_on(self, value: Any, x: Any, given: Any) -> Any:  # noqa: ARG002 (a structure has no single original)
        """The value with the tensors that the hook saw."""
        self.has_passed_on = True
        if self.is_derived:
            self.keep_for_second_run()
        return self.view.put(value, copied(given, snapshot))

    def fitted_result(self, result: Any, x: Any, given: Any) -> Any:  # type: ignore[override]
        """What the hook returned, with a snapshot of each tensor, in the structure of `x`."""
        if isinstance(x, Tensor):
            return self.fit(result, x)
        if self.takes_call:
            return self._fitted_call(result, x)
        if isinstance(result, Tensor):
            result = replaced(given, first_tensor(x), result)
        paths = list(tensor_paths(x))
        if list(tensor_paths(result)) != paths:
            raise self.error(
                f"returned {_shown(result)}; it must return None, the first tensor, or {a_type(x)} "
                f"with tensors at the same places: {_places(paths)}"
            )
        return self._with_fitted(result, x, paths)

    def fitted_loan(self, given: Any, x: Any, *, is_kept: bool) -> Any:  # noqa: ARG002
        """What the hook wrote to, with a snapshot of each tensor."""
        return self.fitted_result(given, x, given)

    def _fitted_call(self, result: Any, x: Any) -> Any:
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise self.error(f"returned {_shown(result)}; before a module runs it must return None or (args, kwargs)")
        if not isinstance(result[0], tuple | list):
            raise self.error(
                f"returned (args, kwargs) with {a_type(result[0])} for args: it must be a tuple, as in ((x,), kwargs)"
            )
        result = (tuple(result[0]), result[1])
        before = set(tensor_paths(x))
        return self._with_fitted(result, x, [path for path in tensor_paths(result) if path in before])

    def _with_fitted(self, result: Any, x: Any, paths: list[Any]) -> Any:
        for path in paths:
            result = replaced(result, path, self.fit(look(result, path), look(x, path)))
        return result

    def _invoke(self, given: Any, point: HookPoint) -> Any:
        with being_at(point):
            args, kwargs = given if self.takes_call else self._arguments()
            return self.hook(self.module, args, kwargs, None if self.takes_call else given)

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the module's call; none where they are not known, inside the module."""
        if self.tap.kind.is_inner:
            return (), {}
        return copied(arguments_of(self.module).get(pass_state.arguments), snapshot)


def _if_enabled(action: ObjectEdit, step: Callable[[Any], Any], value: Any) -> Any:
    """Take the step unless the hook object is disabled."""
    if not action.hook.is_enabled() and not pass_state.is_recomputing:
        return value
    if action.tap.kind is not Kind.INPUT or action.takes_call:
        return step(value)
    before, pass_state.arguments = pass_state.arguments, value  # as the hooks before it left them
    try:
        return step(value)
    finally:
        pass_state.arguments = before


class ObjectRead(ObjectEdit):
    """Calls a hook object that only reads: it gets its own copy, and the value continues unchanged."""

    only_reads = True

    def is_as_lent(self, given: Any, kept: Any, x: Any) -> bool:  # noqa: ARG002
        """Changes of its own copy have no effect."""
        return True

    def wants_gradient(self, given: Any, x: Any) -> bool:  # noqa: ARG002
        """Its own copy is not in the model's graph."""
        return False

    def _invoke(self, given: Any, point: HookPoint) -> Any:
        result = super()._invoke(given, point)
        return None if result is None else (result,)  # never the same object as `given`

    def fitted_result(self, result: Any, x: Any, given: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        """A detector must return None."""
        raise self.error(
            f"returned {_shown(result[0])}, but a Detector only reads: derive from Controller to change values"
        )


def input_point_of(point: HookPoint, describe: Callable[[], str]) -> HookPoint:
    """The point at which a hook is called before a module runs, from the name of that module's input or output."""
    site = point.site
    whole = lens_of(site.module, Kind.INPUT)
    if site.kind is Kind.INPUT and site.lens == whole:
        return point
    first = parts_of(whole)
    if site.kind is Kind.INPUT and parts_of(site.lens)[: len(first)] == first:
        return HookPoint.at_site(point.name, Site(site.module, Kind.INPUT, whole), point.permanent)
    names_module = not point.axes or point.name.lstrip("-").isdigit()
    is_output = site.kind is Kind.OUTPUT and site.lens == lens_of(site.module, Kind.OUTPUT)
    if not is_output or not names_module:
        raise InvalidHookError(
            f"{describe()} is to run before a module (PRE_FORWARD), but {point.name!r} is a value inside or at the end "
            f"of one: name a module or its input, or make it a FORWARD hook"
        )
    name = "input" if point.name == "output" else f"{point.name.removesuffix('.output')}.input"
    return HookPoint.at_site(name, Site(site.module, Kind.INPUT, whole), point.permanent)


def _is_own_output(point: HookPoint) -> bool:
    """Whether it is the output of a module named by its path: that is given whole, as torch would."""
    return point.site.kind is Kind.OUTPUT and point.site.lens is FIRST and not point.axes


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return a_type(value) + (f" with tensors at {_places(paths)}" if (paths := [*tensor_paths(value)]) else "")


def _places(paths: list[Any]) -> str:
    return ", ".join("".join(f"[{key}]" for key in path) or "itself" for path in paths)
