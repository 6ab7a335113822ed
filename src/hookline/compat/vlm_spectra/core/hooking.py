"""Converts the hooks and names of a `HookedVLM` to runs of hookline's engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hookline.compat.vlm_spectra.core.activation_cache import ActivationCache, Key
from hookline.compat.vlm_spectra.core.hook_names import as_meant, places_of
from hookline.engine.actions import Record
from hookline.engine.callbacks import HookObject, refuse_class
from hookline.engine.hook_actions import HookAction
from hookline.engine.points import HookPoint
from hookline.engine.recorder import Recorder
from hookline.engine.runs import Run
from hookline.engine.snapshots import snapshot
from hookline.errors import InvalidHookError, describe
from hookline.hooks import Hook
from hookline.model import HookedModel
from hookline.transformer.index import ModelPoints


class _Called(Hook):
    """A hook object around any callable `(module, args, kwargs, output)`."""

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.hook = hook

    def __call__(self, *given: Any) -> Any:
        """Call the function."""
        return self.hook(*given)

    @property
    def described(self) -> str:
        """The name in messages."""
        return describe(self.hook)


class _Keeper(Recorder):
    """Records the value of a point in a cache; a later pass overwrites it."""

    def __init__(self, cache: ActivationCache, key: Key) -> None:
        super().__init__()
        self._cache_of_all, self._key = cache, key

    def keep(self, point: HookPoint, x: Tensor) -> None:  # noqa: ARG002
        """Record a snapshot of `x`."""
        self._cache_of_all[self._key] = snapshot(x.detach(), is_for_reading=True)


def hooking(hooked: HookedModel, hooks: Iterable[Any]) -> Run:
    """A context manager in which these hooks are active."""
    if isinstance(hooks, HookObject | str) or not isinstance(hooks, Iterable):
        raise InvalidHookError(f"run_with_hooks takes a list of hooks, not {hooks!r}")
    points = hooked._points
    actions: list[HookAction] = []
    for given in hooks:
        hook, places = _placed(given, points)
        hook.check_points(places)
        actions += [hook.action(point, "fwd") for point in places]
        hook.attached(hooked)
    return Run(points.root, actions)


def caching(hooked: HookedModel, places: dict[Key, HookPoint], cache: ActivationCache) -> Run:
    """A context manager that records these points in the cache."""
    return Run(hooked._points.root, [Record(point, _Keeper(cache, key)) for key, point in places.items()])


def _placed(given: Any, points: ModelPoints) -> tuple[HookObject, list[HookPoint]]:
    """A hook and its point, declared by the hook itself or given as a name."""
    refuse_class(given)
    if isinstance(given, tuple) and len(given) == 2:
        name, hook = given
        return _as_object(hook), places_of(name, points)
    hook = _as_object(given)
    if isinstance(hook, _Called):
        if not isinstance(getattr(given, "layer", None), int):
            raise InvalidHookError(f"{describe(given)} has no location: it needs a hook_point and a layer")
        hook.hook_point, hook.layer = getattr(given, "hook_point", "lm.layer.post"), given.layer
    return hook, [as_meant(point, points) for point in hook.declared(points)]


def _as_object(hook: Any) -> HookObject:
    if isinstance(hook, HookObject):
        return hook
    refuse_class(hook)
    if not callable(hook):
        raise InvalidHookError(
            f"a hook must be callable as hook(module, args, kwargs, output), but {hook!r} is not callable"
        )
    return _Called(hook)
