"""Names: the point of the model for each of vlm-spectra's names.

"lm.layer.post"                   at every layer, under the keys ("lm.layer.post", 0), …
"lm_resid_post"                   the same by its older name, with keys of that name
"lm.blocks.*.hook_resid_post"     the same by its newer name, under the keys "lm.blocks.0.hook_resid_post", …
"vision.layer.post"               and so on: all that hookline has a name for
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from hookline.compat.vlm_spectra.core.activation_cache import Key
from hookline.engine.lenses import FIRST
from hookline.engine.order import Kind
from hookline.engine.points import HookPoint, Site
from hookline.errors import HooklineError, UnavailablePointError, UnknownHookPointError, UnknownPointError
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
_MODULES = {"hook_attn_out": "o", "hook_mlp_out": "mlp"}


def cached_places(names: Iterable[Any], points: ModelPoints) -> dict[Key, HookPoint]:
    """The points to cache, by their keys in the cache."""
    if isinstance(names, str):
        raise HooklineError(f"run_with_cache takes a list of names: [{names!r}]")
    places = {key: point for name in names for key, point in _keyed(name, points)}
    if not places:
        raise HooklineError("nothing to cache: pass names such as 'lm.layer.post'")
    return places


def _keyed(name: Any, points: ModelPoints) -> Iterator[tuple[Key, HookPoint]]:
    found = places_of(name, points)
    if isinstance(name, tuple):
        yield name, found[0]
    elif _is_of_every_layer(name):
        yield from (((name, point.layer()), point) for point in found)
    elif isinstance(name, str) and _BLOCK.fullmatch(name):
        yield from ((name.replace("*", str(point.layer())), point) for point in found)
    else:
        yield from ((point.name, point) for point in found)


def _is_of_every_layer(name: Any) -> bool:
    return isinstance(name, str) and _ROLE.fullmatch(_OLDER.get(name, name)) is not None


def places_of(name: Any, points: ModelPoints) -> list[HookPoint]:
    """The points of a name, at the modules that vlm-spectra uses."""
    try:
        found = points.select(_in_hookline(name, points))
    except UnavailablePointError:
        raise
    except UnknownPointError as error:
        raise UnknownHookPointError(f"{error} Valid hook points: {points.targets()}.") from error
    return [as_meant(point, points) for point in found]


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

    In most models the value is that of hookline's point anyway; where a norm comes after the module, it is before it.
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
