"""The model and its cache, under vlm-spectra's paths."""

from hookline.compat.vlm_spectra.core.activation_cache import ActivationCache as ActivationCache
from hookline.compat.vlm_spectra.core.hooked_vlm import HookedVLM as HookedVLM
from hookline.compat.vlm_spectra.core.patch_hooks import VALID_PATCH_HOOK_TYPES as VALID_PATCH_HOOK_TYPES
from hookline.compat.vlm_spectra.core.patch_hooks import AddActivation as AddActivation
from hookline.compat.vlm_spectra.core.patch_hooks import BlockAttention as BlockAttention
from hookline.compat.vlm_spectra.core.patch_hooks import HookFn as HookFn
from hookline.compat.vlm_spectra.core.patch_hooks import PatchActivation as PatchActivation
from hookline.compat.vlm_spectra.core.patch_hooks import PatchHead as PatchHead
from hookline.compat.vlm_spectra.core.patch_hooks import ScaleActivation as ScaleActivation
from hookline.compat.vlm_spectra.core.patch_hooks import SetAttentionMask as SetAttentionMask
from hookline.compat.vlm_spectra.core.patch_hooks import ZeroAblation as ZeroAblation
from hookline.compat.vlm_spectra.core.patch_hooks import validate_patch_hook_type as validate_patch_hook_type
