"""What a registered hook can get at, in mi-crow's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import nn

from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.compat.mi_crow.language_model.language_model import LanguageModel
    from hookline.compat.mi_crow.language_model.layers import LanguageModelLayers


class LanguageModelContext:
    """The language model that a hook is registered on. It keeps no model alive."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = ref(lm)

    @property
    def language_model(self) -> LanguageModel:
        """The language model."""
        lm = self._lm()
        if lm is None:
            raise HooklineError("the language model that this hook was registered on is gone")
        return lm

    @property
    def model(self) -> nn.Module:
        """The torch module."""
        return self.language_model.model

    @property
    def device(self) -> str:
        """Where the model is."""
        return str(self.language_model.hooked._device)

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.language_model.tokenizer

    @property
    def model_id(self) -> str:
        """What it is called."""
        return self.language_model.model_id

    @property
    def layers(self) -> LanguageModelLayers:
        """The layers manager."""
        return self.language_model.layers

    @property
    def store(self) -> Any:
        """The store."""
        return self.language_model.store

    @property
    def hooks(self) -> list[Any]:
        """All registered hooks."""
        return self.layers.hooks()

    @property
    def special_token_ids(self) -> set[int]:
        """The tokens that are no text."""
        return set(self.tokenizer.all_special_ids) if self.tokenizer is not None else set()
