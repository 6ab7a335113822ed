"""What a hook object can get at: the model it is used on, and what belongs to that."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import nn

from hookline.engine.names import Points
from hookline.errors import HooklineError
from hookline.text.forward_pass import processors, tokenizers
from hookline.transformer.dialects import other_names
from hookline.transformer.index import ModelPoints

if TYPE_CHECKING:
    from hookline.engine.hooked import Hooked
    from hookline.hooks.registry import Layers


class HookContext:
    """The model that a hook object is used on. It keeps no model alive."""

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
        from hookline.load import hook

        return hook(root, processors.get(root, tokenizers.get(root)))

    language_model = model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, if it has one."""
        return getattr(self.model, "tokenizer", None)

    @property
    def layers(self) -> Layers:
        """The model's registry of hooks."""
        from hookline.hooks.registry import layers_of

        return layers_of(self.model)

    @property
    def store(self) -> Any:
        """Where the model's activations go, if `model.layers.store` was set."""
        return self.layers.store

    @property
    def hooks(self) -> list[Any]:
        """All registered hooks."""
        return self.layers.hooks()


def known_targets(points: Points) -> str:
    """What a hook object may declare as its `hook_point` in this model."""
    if not isinstance(points, ModelPoints):
        return "no layers by role; its points are " + ", ".join(map(repr, list(points.hook_dict)[:8]))
    stacks = {stack.name: len(stack.blocks) for stack in points.anatomy.every_stack}
    names = [name for name, spec in points.specs.items() if spec.site is not None]
    roles = dict.fromkeys(
        re.sub(r"\.\d+\.", ".", other)
        for name in names
        for other in other_names(name, stacks)
        if other.startswith(("lm.", "vision.", "projector.")) and ".blocks." not in other
    )
    if not roles:
        return f"several stacks of layers: declare the name of a point, such as {names[-1]!r}, and no layer"
    depth = ", ".join(f"0 to {n - 1}" + (f" ({name})" if len(stacks) > 1 else "") for name, n in stacks.items())
    return f"{', '.join(map(repr, roles))}, with a layer from {depth}, and every point by its name alone"
