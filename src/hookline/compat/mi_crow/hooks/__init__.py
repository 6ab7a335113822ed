"""Hooks, detectors and controllers: hookline's own, under mi-crow's paths."""

from hookline.hooks import Controller as Controller
from hookline.hooks import Detector as Detector
from hookline.hooks import FunctionController as FunctionController
from hookline.hooks import Hook as Hook
from hookline.hooks import HookError as HookError
from hookline.hooks import HookType as HookType
from hookline.hooks import LayerActivationDetector as LayerActivationDetector
from hookline.hooks import ModelInputDetector as ModelInputDetector
from hookline.hooks import ModelOutputDetector as ModelOutputDetector
