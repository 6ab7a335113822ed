"""Hooked modules: any nn.Module, wrapped; and the base class for a model of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from hookline.errors import HooklineError
from hookline.hooks.registry import Layers
from hookline.names import Points
from hookline.points import HookPoint
from hookline.standing import standing_of
from hookline.verbs import Hooked


class HookedModule(Hooked):
    """Any nn.Module, wrapped but not changed: what is not a verb of ours is the module's own.

        net = hookline.hook(module)
        net(x)                   # the module's own forward
        net.fc1, net.eval()      # the module's own attributes and methods

    The module stays usable on its own, as `net.module`.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise HooklineError(f"hookline.hook takes an nn.Module, not {type(module).__name__}")
        if isinstance(module, torch.jit.ScriptModule):
            raise HooklineError("torch allows no hooks on a ScriptModule: wrap the module it was made from")
        self.module = module
        self._points = Points(module, standing_of(module))

    @property
    def layers(self) -> Layers:
        """The registry of hooks that stay: `net.layers.register_hook("fc1", hook)`. See `hooks/registry.py`."""
        return Layers(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with whatever hooks are active."""
        return self._run(self.module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "module" not in vars(self):
            raise AttributeError(name)
        value = getattr(self.module, name)
        if isinstance(value, MethodType) and value.__self__ is self.module:
            return self._returning_self(value)
        return value

    def _returning_self(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`net.to("cuda")` and the like return the module; here that is the wrapped one."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self if result is self.module else result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        # `net.fc1 = other` means the module's fc1, not an attribute of the wrapper that hides it.
        target = vars(self).get("module")
        if target is not None and name not in vars(self) and hasattr(target, name):
            setattr(target, name, value)
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_points", "_store")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._points = Points(self.module, standing_of(self.module))

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __repr__(self) -> str:
        return f"HookedModule({self.module!r})"


class HookedRootModule(nn.Module, Hooked):
    """Base class for a model of one's own with `HookPoint`s placed in it.

        class Net(HookedRootModule):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)
                self.hook_mid = HookPoint()
                self.setup()

            def forward(self, x):
                return self.hook_mid(self.fc(x))

    `hook_dict` has the placed points; every module's input and output can be asked for by name as well.
    """

    def setup(self) -> None:
        """Name every placed point by its path. Call it at the end of `__init__`."""
        hidden = [name for name in self._modules if hasattr(type(self), name)]
        if hidden:
            raise HooklineError(f"a HookedRootModule has methods of its own called {hidden}: rename those modules")
        vars(self)["_hookline"] = Points(self, standing_of(self), only_placed=True)
        for name, point in self.named_modules():
            if isinstance(point, HookPoint):
                point.name = name  # also of one that a model inside has named: the outermost model's names count

    @property
    def module(self) -> nn.Module:  # type: ignore[override]
        """The model itself."""
        return self

    @property
    def _points(self) -> Points:  # type: ignore[override]
        if "_hookline" not in vars(self):
            self.setup()
        return vars(self)["_hookline"]

    @property
    def mod_dict(self) -> dict[str, nn.Module]:
        """All modules by their paths."""
        return dict(self.named_modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with whatever hooks are active."""
        return self._run(super().__call__, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hookline"}
