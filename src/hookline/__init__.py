"""hookline: read, cache, edit and trace the activations inside any PyTorch model, by name."""

from hookline.cache import ActivationCache
from hookline.errors import (
    HookError,
    HooklineError,
    HooklineWarning,
    InvalidHookError,
    NeverFiredWarning,
    UnavailablePointError,
    UnknownPointError,
)
from hookline.model import HookedModel
from hookline.module import HookedModule, HookedRootModule
from hookline.points import HookPoint
from hookline.wrap import hook, load

__all__ = [
    "hook",
    "load",
    "HookPoint",
    "HookedModule",
    "HookedModel",
    "HookedRootModule",
    "ActivationCache",
    "HooklineError",
    "HookError",
    "UnknownPointError",
    "UnavailablePointError",
    "InvalidHookError",
    "HooklineWarning",
    "NeverFiredWarning",
]
