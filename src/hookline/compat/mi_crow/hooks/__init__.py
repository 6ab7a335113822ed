"""Hooks, detectors and controllers: hookline's own, under mi-crow's paths."""

from hookline.hooks import (
    Controller,
    Detector,
    FunctionController,
    Hook,
    HookError,
    HookType,
    LayerActivationDetector,
    ModelInputDetector,
    ModelOutputDetector,
)

__all__ = [
    "Hook",
    "HookType",
    "HookError",
    "Detector",
    "Controller",
    "LayerActivationDetector",
    "ModelInputDetector",
    "ModelOutputDetector",
    "FunctionController",
]
