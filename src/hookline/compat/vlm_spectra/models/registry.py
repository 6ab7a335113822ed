"""ModelRegistry: the models that vlm-spectra names. hookline needs no registry, and loads many more."""

from __future__ import annotations

from hookline.compat.vlm_spectra.models.base_adapter import ModelAdapter
from hookline.errors import HooklineError


class UnknownModelError(HooklineError, ValueError):
    """A model that vlm-spectra does not name."""


class ModelRegistry:
    """The names of vlm-spectra's models; the adapter is the same for all."""

    @classmethod
    def list_supported_models(cls) -> list[str]:
        """The names of the models."""
        return list(ModelAdapter.SUPPORTED_MODELS)

    @classmethod
    def get_adapter_class(cls, model_name: str) -> type[ModelAdapter]:
        """The adapter of a model."""
        if model_name not in ModelAdapter.SUPPORTED_MODELS:
            how = "HookedVLM.from_pretrained loads any model that hookline supports"
            raise UnknownModelError(f"{model_name!r} is not supported by vlm-spectra; {how}")
        return ModelAdapter
