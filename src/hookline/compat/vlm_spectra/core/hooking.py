"""The points of vlm-spectra's names, and runs of hookline's engine that hook or cache them.

"lm.layer.post"                   every layer, under the keys ("lm.layer.post", 0), …
"lm_resid_post"                   an older name of these points, with keys of that name
"lm.blocks.*.hook_resid_post"     a newer name of them, with the keys "lm.blocks.0.hook_resid_post", …
"vision.layer.post"               and every other name of hookline
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hookline.compat.vlm_spectra.core.activation_cache import ActivationCache, Key
from hookline.compat.vlm_spectra.core.attention_masks import MaskHook
from hookline.engine import FIRST, HookAction, HookObject, HookPoint, Kind, Record, Recorder, Run, Site, snapshot
from hookline.errors import (
    HooklineError,
    InvalidHookError,
    UnavailablePointError,
    UnknownHookPointError,
    UnknownPointError,
    describe,
)
from hookline.functions.callers import refuse_class
from hookline.hooks import Hook
from hookline.model import HookedModel
from hookline.transformer.index import ModelPoints

_OLDER = {
    "lm_resid_pre": "lm.layer.pre",
    "lm_resid_mid": "lm.layer.mid",
    "lm_resid_post": "lm.layer.post",
    "lm_attn_out": "lm.attn.out",
    "lm_attn_pattern": "lm.attn.pattern",
    "lm_mlp_out": "lm.mlp.out",
}
_NEWER = {"attn.hook_head_out": "attn.hook_result", "attn.hook_scores": "attn.hook_attn_scores"}
"""Names in newer versions that differ from TransformerLens."""

_ROLE = re.compile(r"((?:lm|vision)\.(?:layer|attn|mlp))\.([a-z]+)")
_BLOCK = re.compile(r"lm\.blocks\.(\d+|\*)\.(.+)")
_MASK = re.compile(r"lm\.blocks\.(\d+|\*)\.attn\.hook_mask")
_FLAT = (".attn.hook_q", ".attn.hook_k", ".attn.hook_v", ".attn.hook_z")
"""Points whose heads are side by side in vlm-spectra's hooks; in its cache they are not."""
_MODULES = {"hook_attn_out": "o", "hook_mlp_out": "mlp"}


def cached_places(names: Iterable[Any], points: ModelPoints) -> dict[Key, HookPoint]:
    """The points to cache, by their keys in the cache."""
    if isinstance(names, str):
        raise HooklineError(f"run_with_cache takes a list of names: [{names!r}]")
    places = {_key(name, point): point for name in names for point in places_of(name, points)}
    if not places:
        raise HooklineError("nothing to cache: pass names such as 'lm.layer.post'")
    return places


def _key(name: Any, point: HookPoint) -> Key:
    """The key of a point in the cache, if it was requested by this name."""
    if isinstance(name, str) and _BLOCK.fullmatch(name):
        return name.replace("*", str(point.layer()))
    if isinstance(name, str):
        return (name, point.layer()) if _ROLE.fullmatch(_OLDER.get(name, name)) else point.name
    return name if isinstance(name, tuple) else point.name


def places_of(name: Any, points: ModelPoints) -> list[HookPoint]:
    """The points of a name, at the modules that vlm-spectra uses."""
    try:
        selected = points.select(_in_hookline(name, points))
    except UnavailablePointError:
        raise
    except UnknownPointError as error:
        raise UnknownHookPointError(f"{error} Valid hook points: {points.targets()}.") from error
    return [as_meant(point, points) for point in selected]


def _in_hookline(name: Any, points: ModelPoints) -> Any:
    if isinstance(name, tuple) and len(name) == 2:
        role = _OLDER.get(name[0], name[0])
        return ("resid_mid" if role == "lm.layer.mid" else role, name[1])
    if not isinstance(name, str):
        return name
    name = _OLDER.get(name, name)
    if match := _BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.{_NEWER.get(match[2], match[2])}"
    if name == "lm.layer.mid":
        return f"{points.anatomy.main.name}.*.hook_resid_mid"
    return f"{match[1]}.*.{match[2]}" if (match := _ROLE.fullmatch(name)) else name


def as_meant(point: HookPoint, points: ModelPoints) -> HookPoint:
    """The point at the output of the module itself: the output projection of attention, or the MLP.

    In most models this is hookline's point. If a norm follows the module, hookline's point is after the norm.
    """
    layer, _, what = point.canonical_name.rpartition(".")
    stack, _, number = layer.rpartition(".")
    main = points.anatomy.main
    if stack != main.name or what not in _MODULES:
        return point
    module = getattr(main.blocks[int(number)], _MODULES[what])
    if module is None or point.site.module is module:
        return point
    return HookPoint.at_site(point.canonical_name, Site(module, Kind.OUTPUT, FIRST), points.permanent, point.axes)


class _Called(Hook):
    """A hook object around any callable `(module, args, kwargs, output)`."""

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.hook = hook

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.hook(*args)

    @property
    def described(self) -> str:
        """The name in messages."""
        return describe(self.hook)


class _CalledFlat(_Called):
    """Calls a function with heads side by side, [batch, pos, heads * d_head], as a projection returns them."""

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Call the function; it may return either shape."""
        new = self.hook(module, args, kwargs, output.flatten(2))
        return new.view(output.shape) if isinstance(new, Tensor) and new.shape == output.flatten(2).shape else new


class _Keeper(Recorder):
    """Records the value of a point in a cache; a later pass overwrites it."""

    def __init__(self, cache: ActivationCache, key: Key) -> None:
        super().__init__()
        self._cache_of_all, self._key = cache, key

    def keep(self, point: HookPoint, x: Any) -> None:  # noqa: ARG002
        """Record a snapshot of `x`."""
        self._cache_of_all[self._key] = snapshot(x.detach())


def hooking(hooked: HookedModel, hooks: Iterable[Any]) -> Run:
    """A context manager in which these hooks are active."""
    if isinstance(hooks, HookObject | str) or not isinstance(hooks, Iterable):
        raise InvalidHookError(f"run_with_hooks takes a list of hooks, not {hooks!r}")
    points = hooked.index
    actions: list[HookAction] = []
    for hook_spec in hooks:
        hook, places = _placed(hook_spec, points)
        hook.check_points(places)
        actions += [hook.action(point, "fwd") for point in places]
        hook.attached(hooked)
    return Run(points.root, actions)


def caching(hooked: HookedModel, places: dict[Key, HookPoint], cache: ActivationCache) -> Run:
    """A context manager that records these points in the cache."""
    return Run(hooked.index.root, [Record(point, _Keeper(cache, key)) for key, point in places.items()])


def _placed(hook_spec: Any, points: ModelPoints) -> tuple[HookObject, list[HookPoint]]:
    """A hook and its point, declared by the hook itself or given as a name."""
    if isinstance(hook_spec, tuple) and len(hook_spec) == 2:
        name, hook = hook_spec
        if match := _MASK.fullmatch(str(name)):
            return MaskHook(_callable(hook)), places_of(f"lm.blocks.{match[1]}.attn.hook_in", points)
        is_flat = str(name).endswith(_FLAT) and _BLOCK.fullmatch(str(name)) and not isinstance(hook, HookObject)
        return _CalledFlat(_callable(hook)) if is_flat else _as_object(hook), places_of(name, points)
    hook = _as_object(hook_spec)
    if isinstance(hook, _Called):
        if not isinstance(getattr(hook_spec, "layer", None), int):
            raise InvalidHookError(f"{describe(hook_spec)} has no location: it needs a hook_point and a layer")
        hook.hook_point, hook.layer = getattr(hook_spec, "hook_point", "lm.layer.post"), hook_spec.layer
    return hook, [as_meant(point, points) for point in hook.declared(points)]


def _as_object(hook: Any) -> HookObject:
    if isinstance(hook, HookObject):
        return hook
    return _Called(_callable(hook))


def _callable(hook: Any) -> Any:
    refuse_class(hook)
    if not callable(hook):
        raise InvalidHookError(f"{hook!r} is not callable: a hook is called as hook(module, args, kwargs, output)")
    return hook
