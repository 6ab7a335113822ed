"""Hook objects: hooks with an identity and a lifecycle, and edits as data. See docs/hook-objects.md."""

from hookline.errors import HookError
from hookline.hooks.context import HookContext
from hookline.hooks.controllers import Controller, FunctionController
from hookline.hooks.detectors import Detector, LayerActivationDetector, ModelInputDetector, ModelOutputDetector
from hookline.hooks.editfile import load_edits, save_edits
from hookline.hooks.data_edits import DataEdit, add, freeze, mean, noise, project_out, replace, scale, zero
from hookline.hooks.hook import Hook, HookType
from hookline.hooks.registry import Layers

__all__ = [
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
    "DataEdit",
    "save_edits",
    "load_edits",
    "Layers",
    "HookContext",
    "HookError",
]
