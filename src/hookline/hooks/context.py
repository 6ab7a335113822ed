"""HookContext: the model that a hook object is used on, its registry and its store."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from hookline.errors import HooklineError
from hookline.text.forward_pass import processors, tokenizers

if TYPE_CHECKING:
    from hookline.engine import Hooked
    from hookline.hooks.registry import Registry

contexts: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""The context that hooks on each model get. A compatibility package may put its own here."""


class HookContext:
    """The model that a hook object is used on. It does not keep the model alive."""

    def __init__(self, root: nn.Module, model: Hooked | None = None) -> None:
        self._root = ref(root)
        self._model = ref(model) if model is not None else lambda: None

    @property
    def model(self) -> Any:
        """The hooked model; a new wrapper if the old one was garbage-collected."""
        model, root = self._model(), self._root()
        if model is not None:
            return model
        if root is None:
            raise HooklineError("the model that this hook was used on was garbage-collected")
        loading = import_module("hookline.loading")  # by name: it knows all kinds of models, and imports this module
        return loading.hook(root, processors.get(root, tokenizers.get(root)))

    language_model = model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return getattr(self.model, "tokenizer", None)

    @property
    def registry(self) -> Registry:
        """The model's registry of hooks."""
        from hookline.hooks.registry import Registry

        return Registry(self.model)

    @property
    def store(self) -> Any:
        """The store that was set as `model.registry.store`, or None."""
        return self.registry.store

    @property
    def hooks(self) -> list[Any]:
        """All registered hooks."""
        return self.registry.hooks()


def context_of(root: nn.Module, model: Hooked | None = None) -> Any:
    """The context of a model, updated if it is used through another wrapper, `model`."""
    context = contexts.get(root)
    if context is None or (type(context) is HookContext and model is not None):
        context = contexts[root] = HookContext(root, model)
    return context
