"""The patch hooks, under vlm-spectra's path."""

from hookline.compat.vlm_spectra.hooks.base import Hook
from hookline.compat.vlm_spectra.patches import PatchHeadHook, PatchMLPHook, PatchResidualHook

Hook.register(PatchResidualHook)
Hook.register(PatchHeadHook)
Hook.register(PatchMLPHook)

__all__ = ["PatchResidualHook", "PatchHeadHook", "PatchMLPHook"]
