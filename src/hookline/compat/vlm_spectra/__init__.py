"""vlm-spectra's interface over hookline: change `vlm_spectra` to `hookline.compat.vlm_spectra`.

    from hookline.compat.vlm_spectra import HookedVLM
    from hookline.compat.vlm_spectra.hooks import PatchHeadHook

docs/from-vlm-spectra.md lists what differs and what is not available.
"""

from hookline.compat.vlm_spectra.core.activation_cache import ActivationCache as ActivationCache
from hookline.compat.vlm_spectra.core.hooked_vlm import HookedVLM as HookedVLM
from hookline.compat.vlm_spectra.hooks import Hook as Hook
from hookline.compat.vlm_spectra.hooks import PatchHeadHook as PatchHeadHook
from hookline.compat.vlm_spectra.hooks import PatchMLPHook as PatchMLPHook
from hookline.compat.vlm_spectra.hooks import PatchResidualHook as PatchResidualHook
from hookline.compat.vlm_spectra.models.base_adapter import ModelAdapter as ModelAdapter
