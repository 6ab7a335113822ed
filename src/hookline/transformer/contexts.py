"""Modes: what a model is switched to for a while, and is switched back from."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any, Self

import torch
from torch import nn

from hookline.engine.blocks import Block


class Evaluating(Block):
    """A block without dropout; afterwards every module is in the mode it was in."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._training = [module for module in model.modules() if module.training]

    def open(self) -> None:
        """Evaluate."""
        self._model.eval()

    def close(self) -> None:
        """Train what was training."""
        for module in self._training:
            module.training = True


class ReportingAttention(Block):
    """A block with the one implementation of attention that reports its patterns; afterwards each part has its own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        parts = {name: getattr(model.config, name) for name in model.config.sub_configs} | {"": model.config}
        own = {name: getattr(part, "_attn_implementation", None) for name, part in parts.items()}
        self._own = {name: each for name, each in own.items() if each is not None}

    def open(self) -> None:
        """Switch."""
        self._model.set_attn_implementation("eager")

    def close(self) -> None:
        """Switch back."""
        self._model.set_attn_implementation(self._own)


class GradMode(ContextDecorator, Block):
    """A block with gradients on or off, as `torch.set_grad_enabled`, whose own undoing an interrupt can skip."""

    def __init__(self, is_on: bool) -> None:
        self._wanted, self._before = is_on, torch.is_grad_enabled()

    def _recreate_cm(self) -> Self:
        """A block of its own for each call of a decorated function."""
        return type(self)(self._wanted)

    def open(self) -> None:
        """Switch."""
        torch._C._set_grad_enabled(self._wanted)

    def close(self) -> None:
        """Switch back."""
        torch._C._set_grad_enabled(self._before)
