"""Modes that a model is in for one run."""

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
    """With the one implementation of attention that reports its patterns; afterwards with those it had."""
    before = {name: getattr(model.config, name)._attn_implementation for name in model.config.sub_configs}
    before[""] = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
