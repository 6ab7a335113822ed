"""The hooks, under vlm-spectra's paths."""

from hookline.compat.vlm_spectra.hooks.base import Hook
from hookline.compat.vlm_spectra.hooks.capture_hooks import CaptureInputHook, CaptureOutputHook
from hookline.compat.vlm_spectra.hooks.patch_hooks import PatchHeadHook, PatchMLPHook, PatchResidualHook

__all__ = ["Hook", "CaptureOutputHook", "CaptureInputHook", "PatchResidualHook", "PatchHeadHook", "PatchMLPHook"]
