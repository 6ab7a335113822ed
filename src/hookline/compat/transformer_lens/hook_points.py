"""HookPoint and HookedRootModule at the module path of TransformerLens."""

from __future__ import annotations

from hookline.compat.transformer_lens.absent import refusing
from hookline.compat.transformer_lens.given_points import GivenDicts
from hookline.compat.transformer_lens.hooks import LensHooks
from hookline.engine.points import HookPoint as HookPoint


class HookedRootModule(GivenDicts, LensHooks):
    """Base class for your own model with `HookPoint`s; call `self.setup()` after creating them."""

    def setup(self) -> None:
        """Name every HookPoint by its path. Call it at the end of `__init__`."""
        super().setup()
        self._points.permanent.raises_own = True


__getattr__ = refusing("transformer_lens.hook_points")
