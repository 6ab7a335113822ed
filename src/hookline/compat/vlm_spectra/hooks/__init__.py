"""The hooks, under vlm-spectra's paths."""

from hookline.compat.vlm_spectra.hooks.base import Hook as Hook
from hookline.compat.vlm_spectra.hooks.capture_hooks import CaptureInputHook as CaptureInputHook
from hookline.compat.vlm_spectra.hooks.capture_hooks import CaptureOutputHook as CaptureOutputHook
from hookline.compat.vlm_spectra.hooks.patch_hooks import PatchHeadHook as PatchHeadHook
from hookline.compat.vlm_spectra.hooks.patch_hooks import PatchMLPHook as PatchMLPHook
from hookline.compat.vlm_spectra.hooks.patch_hooks import PatchResidualHook as PatchResidualHook
