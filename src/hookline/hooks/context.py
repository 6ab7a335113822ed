"""What a hook object can get at: the model it is used on, and what belongs to that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import nn

from hookline.errors import HooklineError
from hookline.text.forward_pass import processors, tokenizers

if TYPE_CHECKING:
    from hookline.engine.hooked import Hooked
    from hookline.hooks.registry import Registry


class HookContext:
    """The model that a hook object is used on. It keeps no model alive."""

    wrap: Any
    """The function that wraps a model: set by `hookline.load`, which knows all kinds of models."""

    def __init__(self, root: nn.Module, model: Hooked | None = None) -> None:
        self._root = ref(root)
        self._model = ref(model) if model is not None else lambda: None

    @property
    def model(self) -> Any:
        """The hooked model; wrapped anew if its wrapper is gone."""
        model, root = self._model(), self._root()
        if model is not None:
            return model
        if root is None:
            raise HooklineError("the model that this hook was used on is gone")
        return self.wrap(root, processors.get(root, tokenizers.get(root)))

    language_model = model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, if it has one."""
        return getattr(self.model, "tokenizer", None)

    @property
    def registry(self) -> Registry:
        """The model's registry of hooks."""
        from hookline.hooks.registry import Registry

        return Registry(self.model)

    @property
    def store(self) -> Any:
        """Where the model's activations go, if `model.registry.store` was set."""
        return self.registry.store

    @property
    def hooks(self) -> list[Any]:
        """All registered hooks."""
        return self.registry.hooks()
