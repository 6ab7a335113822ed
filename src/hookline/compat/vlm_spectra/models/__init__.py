"""The model adapter, under vlm-spectra's path."""

from hookline.compat.vlm_spectra.models.base_adapter import ModelAdapter as ModelAdapter
