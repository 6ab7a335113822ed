"""hookline: read, cache, edit and trace the activations inside any PyTorch model, by name."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hookline import edits, errors, hooks, positions, vision, weights
from hookline.engine.cache import ActivationCache
from hookline.engine.points import HookPoint
from hookline.errors import HookError, HooklineError, NeverFiredWarning, UnknownPointError
from hookline.hooks.hooked_module import HookedModule, HookedRootModule
from hookline.load import hook, load
from hookline.model import HookedModel
from hookline.positions import at, last, token

if TYPE_CHECKING:
    from hookline import experiments, sae, store
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
]


def __getattr__(name: str) -> Any:
    """Import what only some programs need when it is first used, so that `import hookline` costs what torch costs."""
    if name in ("experiments", "sae", "store"):
        return import_module(f"hookline.{name}")
    if name == "harvest":
        return import_module("hookline.store").harvest
    raise AttributeError(f"module 'hookline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
