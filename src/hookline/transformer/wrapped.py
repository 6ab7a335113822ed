"""The type of a wrapped transformer, for packages that `hookline.model` imports."""

from __future__ import annotations

from typing import Any

from hookline.hooks.hooked_module import HookedModule
from hookline.transformer.index import ModelPoints


class WrappedTransformer(HookedModule):
    """A module whose points are those of a transformer. `HookedModel` adds text, generation and weights."""

    _points: ModelPoints
    _graphs: Any = None
    """The compiled runs of the model, `hookline.compiled.executor.CompiledRuns`, while `compile` is on."""
