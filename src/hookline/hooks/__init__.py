"""Hook objects: hooks with an identity and a lifecycle. See docs/hook-objects.md; edits are in `hookline.edits`."""

from hookline.errors import HookError
from hookline.hooks.context import HookContext
from hookline.hooks.controllers import Controller, FunctionController
from hookline.hooks.detectors import Detector, LayerActivationDetector, ModelInputDetector, ModelOutputDetector
from hookline.hooks.hook import Hook, HookType
from hookline.hooks.registry import Registry

__all__ = [
    "Hook",
    "HookType",
    "Detector",
    "Controller",
    "LayerActivationDetector",
    "ModelInputDetector",
    "ModelOutputDetector",
    "FunctionController",
    "Registry",
    "HookContext",
    "HookError",
]


def __dir__() -> list[str]:
    return sorted(__all__)
