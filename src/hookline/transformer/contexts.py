"""Context managers that change a model's mode and restore it: eval mode, eager attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookline.engine import undo


class EvalMode(undo.UndoBlock):
    """Eval mode inside the block; afterwards every module has its previous mode."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._training = [module for module in model.modules() if module.training]

    def open(self) -> None:
        """Switch the model to eval mode."""
        self._model.eval()

    def close(self) -> None:
        """Switch modules that were training back to training mode."""
        for module in self._training:
            module.training = True


class EagerAttention(undo.UndoBlock):
    """Eager attention inside the block, the only implementation that reports patterns; restored afterwards."""

    def __init__(self, model: Any) -> None:
        self._model = model
        parts = {name: getattr(model.config, name) for name in model.config.sub_configs} | {"": model.config}
        implementations = {name: getattr(part, "_attn_implementation", None) for name, part in parts.items()}
        self._own = {
            name: implementation for name, implementation in implementations.items() if implementation is not None
        }

    def open(self) -> None:
        """Switch to eager attention."""
        self._model.set_attn_implementation("eager")

    def close(self) -> None:
        """Restore the attention implementation of each submodel."""
        self._model.set_attn_implementation(self._own)
