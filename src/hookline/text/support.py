"""The functions that the engine calls about texts: see `hookline.engine.passes`."""

from __future__ import annotations

from typing import Any

from hookline.engine import passes
from hookline.text.forward_pass import begin_encoder, begin_pass
from hookline.text.token_positions import picked
from hookline.text.unreached import UnreachedPositions


class Texts:
    """Answers from the current forward pass of this thread."""

    begin = staticmethod(begin_pass)
    begin_encoder = staticmethod(begin_encoder)
    pick = staticmethod(picked)
    unreached = UnreachedPositions

    @staticmethod
    def rows(passing: Any, which: Any) -> Any:
        """A forward pass with only some rows of its batch."""
        return None if passing is None else passing.of_rows(which)


passes.use(Texts())
