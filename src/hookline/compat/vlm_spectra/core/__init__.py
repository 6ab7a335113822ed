"""The model and its cache, under vlm-spectra's paths."""

from hookline.compat.vlm_spectra.core.activation_cache import ActivationCache as ActivationCache
from hookline.compat.vlm_spectra.core.hooked_vlm import HookedVLM as HookedVLM
