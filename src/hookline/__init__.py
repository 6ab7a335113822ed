"""hookline: read, cache, edit and trace the activations inside any PyTorch model, by name."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookline import edits, errors, experiments, hooks, positions, sae, store, training, vision, weights
    from hookline.engine import ActivationCache, HookPoint
    from hookline.errors import HookError, HooklineError, NeverFiredWarning, UnknownPointError
    from hookline.hooks.hooked_module import HookedModule, HookedRootModule
    from hookline.loading import hook, load
    from hookline.model import HookedModel
    from hookline.positions import at, last, token
    from hookline.store import harvest

__version__ = "0.1.0.dev0"

__all__ = [
    "load",
    "hook",
    "HookedModel",
    "HookedModule",
    "HookedRootModule",
    "HookPoint",
    "ActivationCache",
    "at",
    "last",
    "token",
    "harvest",
    "edits",
    "experiments",
    "HooklineError",
    "HookError",
    "UnknownPointError",
    "NeverFiredWarning",
    # One level down:
    "hooks",
    "positions",
    "errors",
    "store",
    "sae",
    "weights",
    "vision",
    "training",
]

_HOMES = {
    "hookline.loading": ("load", "hook", "HookedModel", "HookedModule", "HookedRootModule"),
    "hookline.engine.points": ("HookPoint",),
    "hookline.engine.cache": ("ActivationCache",),
    "hookline.positions": ("at", "last", "token"),
    "hookline.store": ("harvest",),
    "hookline.errors": ("HooklineError", "HookError", "UnknownPointError", "NeverFiredWarning"),
}
"""The modules of the names that are not modules themselves."""


if not TYPE_CHECKING:  # a type checker sees the imports above, and no others

    def __getattr__(name: str) -> object:
        """Import what is used when it is used: the command line answers without torch."""
        if name not in __all__:
            raise AttributeError(f"module 'hookline' has no attribute {name!r}")
        home = next((module for module, names in _HOMES.items() if name in names), None)
        value = import_module(f"hookline.{name}") if home is None else getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
