"""Modes that a model is in for a while, and then again as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def reporting_attention(model: Any) -> Iterator[None]:
    """With the one implementation of attention that reports its patterns; afterwards each part with the one it had."""
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs} | {"": model.config}
    own = {name: getattr(part, "_attn_implementation", None) for name, part in parts.items()}
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation({name: each for name, each in own.items() if each is not None})
