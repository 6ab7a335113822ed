"""Models that make their own `hook_dict`, and call its points from torch hooks, as SAELens's HookedProxyLM does.

class Proxy(HookedRootModule):
    def setup(self):
        self.mod_dict, self.hook_dict = {}, {}
        for name, module in self.model.named_modules():
            self.hook_dict[name] = point = HookPoint()
            module.register_forward_hook(lambda _module, _input, output, point=point: point(output))
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from weakref import ref

from torch import nn

from hookline.engine import HookPoint, Kind, PermanentHooks, Points
from hookline.hooks.hooked_module import HookedRootModule as _HookedRootModule


class GivenPoints(Points):
    """The points in a dict that a user has made, and those placed in the model."""

    def __init__(self, root: nn.Module, points: dict[str, HookPoint]) -> None:
        self.given = points
        super().__init__(root, PermanentHooks.of(root), only_placed=True)
        self_ref = ref(self)
        self.permanent.attached = lambda: getattr(self_ref(), "given", None)

    def _walk(self, module: nn.Module, path: str) -> Iterator[tuple[nn.Module, Kind]]:
        yield from super()._walk(module, path)
        if path == "":
            self._children.append(self.given)  # type: ignore[arg-type]
            for name, point in self.given.items():
                yield from super()._walk(point, name)


class PlacedPoints(Points):
    """The points placed in a model. If all are replaced by other modules for a while, a run records nothing."""

    def _all(self) -> list[HookPoint]:
        return super()._all() if self.hook_dict else []


class GivenDicts(_HookedRootModule):
    """A HookedRootModule whose `hook_dict` and `mod_dict` can be assigned. A mixin.

    Its `hook_dict` also has the points that it had when `setup` was called. SAELens puts other modules in their places
    for a while, and then restores the points from it.
    """

    def setup(self) -> None:
        """Name every HookPoint by its path. Call it at the end of `__init__`."""
        super().setup()
        vars(self)["_at_setup"] = dict(self._points.hook_dict)
        if self._points.hook_dict:
            vars(self)["_hookline"] = PlacedPoints(self, self._points.permanent, only_placed=True)

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """All points by name: those of the dict that was assigned, or those placed in the model."""
        if (assigned := vars(self).get("_given")) is not None:
            return assigned
        points = super().hook_dict
        for name, point in vars(self).get("_at_setup", {}).items():
            points.setdefault(name, point)
        return points

    @hook_dict.setter
    def hook_dict(self, points: dict[str, HookPoint]) -> None:
        vars(self)["_given"] = points
        vars(self).pop("_hookline", None)

    @property
    def mod_dict(self) -> dict[str, Any]:
        """All modules by their paths; or the dict that was assigned."""
        assigned_modules = vars(self).get("_given_modules")
        return {**dict(self.named_modules()), **self.hook_dict} if assigned_modules is None else assigned_modules

    @mod_dict.setter
    def mod_dict(self, modules: dict[str, Any]) -> None:
        vars(self)["_given_modules"] = modules

    @property
    def _points(self) -> Points:  # type: ignore[override]
        if "_given" in vars(self) and "_hookline" not in vars(self):
            vars(self)["_hookline"] = GivenPoints(self, vars(self)["_given"])
        return super()._points

    def _check_options(self, kwargs: dict[str, Any]) -> None:
        """Pass all keywords to a `forward` of your own that takes any, as TransformerLens does."""
        parameters = inspect.signature(self.forward).parameters.values()
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            super()._check_options(kwargs)
