"""vlm-spectra's interface over hookline: change `vlm_spectra` to `hookline.compat.vlm_spectra`.

    from hookline.compat.vlm_spectra import HookedVLM
    from hookline.compat.vlm_spectra.hooks import PatchHeadHook

docs/from-vlm-spectra.md lists what differs and what is not available.
"""

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
from hookline.compat.vlm_spectra.hooks import Hook as Hook
from hookline.compat.vlm_spectra.hooks import PatchHeadHook as PatchHeadHook
from hookline.compat.vlm_spectra.hooks import PatchMLPHook as PatchMLPHook
from hookline.compat.vlm_spectra.hooks import PatchResidualHook as PatchResidualHook
from hookline.compat.vlm_spectra.models.base_adapter import ModelAdapter as ModelAdapter
from hookline.compat.vlm_spectra.models.registry import ModelRegistry as ModelRegistry
