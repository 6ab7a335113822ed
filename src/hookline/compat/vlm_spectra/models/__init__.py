"""What a model is made of, under vlm-spectra's path."""

from hookline.compat.vlm_spectra.models.base_adapter import ModelAdapter

__all__ = ["ModelAdapter"]
