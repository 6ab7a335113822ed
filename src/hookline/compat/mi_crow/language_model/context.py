"""The context of a registered hook: the language model, its layers and its store, by mi-crow's names."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.compat.mi_crow.language_model.language_model import LanguageModel


class LanguageModelContext:
    """The language model that a hook is registered on. It holds a weak reference, which keeps no model alive."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = ref(lm)

    @property
    def language_model(self) -> LanguageModel:
        """The language model."""
        lm = self._lm()
        if lm is None:
            raise HooklineError("the language model that this hook was registered on no longer exists")
        return lm

    model = property(attrgetter("language_model.model"), doc="The torch module.")
    tokenizer = property(attrgetter("language_model.tokenizer"), doc="The tokenizer.")
    model_id = property(attrgetter("language_model.model_id"), doc="The name of the model.")
    layers = property(attrgetter("language_model.layers"), doc="The registry of hooks, by layer.")

    @property
    def store(self) -> Any:
        """The store, or None."""
        return self.language_model.store

    @store.setter
    def store(self, store: Any) -> None:
        self.language_model.store = store

    @property
    def device(self) -> str:
        """The device of the model."""
        return str(self.language_model.hooked.device)

    @property
    def hooks(self) -> list[Any]:
        """All registered hooks."""
        return self.layers.hooks()

    @property
    def special_token_ids(self) -> set[int]:
        """The ids of special tokens, such as the end of text."""
        return set(self.tokenizer.all_special_ids) if self.tokenizer is not None else set()
