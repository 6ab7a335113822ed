"""The type of a wrapped transformer, for packages that `hookline.model` imports."""

from __future__ import annotations

from typing import Any

from hookline.hooks.hooked_module import HookedModule
from hookline.transformer.anatomy import Anatomy
from hookline.transformer.index import ModelPoints


class WrappedTransformer(HookedModule):
    """A module whose points are those of a transformer. `HookedModel` adds text, generation and weights."""

    _points: ModelPoints
    _graphs: Any = None
    """The compiled runs of the model, `hookline.compiled.executor.CompiledRuns`, while `compile` is on."""

    @property
    def index(self) -> ModelPoints:
        """The points, found by any of their names: `model.index.select("*.hook_z")`, `model.index.find("q5")`."""
        return self._points

    @property
    def anatomy(self) -> Anatomy:
        """The modules of the model by role: `model.anatomy.blocks[0].attn`."""
        return self._points.anatomy
