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
from hookline.factored import FactoredMatrix
from hookline.model import HookedModel
from hookline.module import HookedModule, HookedRootModule
from hookline.points import HookPoint
from hookline.positions import at, image_tokens, last, new_tokens, step, token
from hookline.wrap import hook, load

__all__ = [
    "hook",
    "load",
    "HookPoint",
    "HookedModule",
    "HookedModel",
    "HookedRootModule",
    "ActivationCache",
    "FactoredMatrix",
    "at",
    "last",
    "token",
    "new_tokens",
    "step",
    "image_tokens",
    "HooklineError",
    "HookError",
    "UnknownPointError",
    "UnavailablePointError",
    "InvalidHookError",
    "HooklineWarning",
    "NeverFiredWarning",
]
