"""HookPoint and HookedRootModule at the module path of TransformerLens."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import torch

from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.compat.transformer_lens._impl.given_points import GivenDicts
from hookline.compat.transformer_lens._impl.hooks import HookIntrospectionMixin as HookIntrospectionMixin
from hookline.compat.transformer_lens._impl.hooks import LensHooks
from hookline.engine import HookHandle as LensHandle  # noqa: F401
from hookline.engine import HookPoint as HookPoint
from hookline.types import Filter
from hookline.types import HookFunction as HookFunction

NamesFilter = Filter
DeviceType = torch.device | str | None


class _Roots(ABCMeta):
    """The metaclass of HookedRootModule, of which every model with the methods of TransformerLens is an instance.

    Subclasses may be abstract, as the autoencoders of sae-lens are.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or (cls is HookedRootModule and LensHooks in subclass.__mro__)


class HookedRootModule(GivenDicts, LensHooks, metaclass=_Roots):
    """Base class for your own model with `HookPoint`s; call `self.setup()` after creating them."""

    def setup(self) -> None:
        """Name every HookPoint by its path. Call it at the end of `__init__`."""
        super().setup()
        self._points.permanent.raises_own = True


__getattr__ = refusing("transformer_lens.hook_points")
