"""Mixtures of experts: the tap inside a router, on its logits before it chooses; and which choices there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import functional as F

from hookline.engine.casting import Choices
from hookline.engine.inner import InnerTap, Watching
from hookline.engine.taps import Kind


class WatchingRouter(Watching):
    """Watches one router. Its first linear map gives the logits."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, (Kind.ROUTER,), RouterTap)
        self.has_seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch instead of `func`."""
        result = func(*args, **(kwargs or {}))
        if func is not F.linear or self.has_seen or self.away:
            return result
        self.has_seen = True
        return self.taps[Kind.ROUTER].flow(result)


class RouterTap(InnerTap):
    """A tap inside a router."""

    watch = WatchingRouter


def choices_of(experts: nn.Module) -> Choices | None:
    """The experts there are to choose from; None if their number is not known."""
    count = _count(experts)
    return Choices("expert", count) if count is not None else None


def _count(experts: nn.Module) -> int | None:
    if isinstance(known := getattr(experts, "num_experts", None), int):
        return known
    weights = [parameter.shape[0] for parameter in experts.parameters(recurse=False) if parameter.ndim == 3]
    return weights[0] if weights else None
