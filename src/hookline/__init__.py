"""hookline: read, cache, edit and trace the activations inside any PyTorch model, by name."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hookline.engine.cache import ActivationCache
from hookline.engine.points import HookPoint
from hookline.errors import (
    HookError,
    HooklineError,
    HooklineWarning,
    InvalidHookError,
    NeverFiredWarning,
    SkippedHookWarning,
    StoreError,
    UnavailablePointError,
    UnknownHookPointError,
    UnknownPointError,
)
from hookline.hooks import (
    Controller,
    Detector,
    FunctionController,
    Hook,
    HookType,
    LayerActivationDetector,
    ModelInputDetector,
    ModelOutputDetector,
    add,
    freeze,
    load_edits,
    mean,
    noise,
    project_out,
    replace,
    save_edits,
    scale,
    zero,
)
from hookline.hooks.hooked_module import HookedModule, HookedRootModule
from hookline.load import hook, load
from hookline.model import HookedModel
from hookline.text.token_positions import at, image_tokens, last, new_tokens, step, token
from hookline.weights.factored import FactoredMatrix

if TYPE_CHECKING:
    from hookline import sae, store
    from hookline.store import harvest

__all__ = [
    "hook",
    "load",
    "harvest",
    "store",
    "sae",
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
    "Hook",
    "HookType",
    "Detector",
    "Controller",
    "LayerActivationDetector",
    "ModelInputDetector",
    "ModelOutputDetector",
    "FunctionController",
    "zero",
    "mean",
    "replace",
    "add",
    "scale",
    "noise",
    "freeze",
    "project_out",
    "save_edits",
    "load_edits",
    "HooklineError",
    "HookError",
    "StoreError",
    "UnknownPointError",
    "UnavailablePointError",
    "UnknownHookPointError",
    "InvalidHookError",
    "HooklineWarning",
    "NeverFiredWarning",
    "SkippedHookWarning",
]


def __getattr__(name: str) -> Any:
    """What is not needed by everybody is imported when it is first asked for."""
    if name in ("sae", "store"):
        return import_module(f"hookline.{name}")
    if name == "harvest":
        return import_module("hookline.store").harvest
    raise AttributeError(f"module 'hookline' has no attribute {name!r}")
