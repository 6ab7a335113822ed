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
from hookline.module import HookedModule, HookedRootModule, hook
from hookline.points import HookPoint

__all__ = [
    "hook",
    "HookPoint",
    "HookedModule",
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
