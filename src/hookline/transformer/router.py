"""Mixtures of experts: the tap on router logits, and the range of valid expert indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import functional as F

from hookline.engine._inner.inner import InnerTap
from hookline.engine._inner.interception import ModeInterceptor
from hookline.engine._memory.casting import Choices
from hookline.engine.order import Kind


class RouterInterceptor(ModeInterceptor):
    """Intercepts the first linear call of a router, which returns the logits."""

    kinds = (Kind.ROUTER,)
    seen_logits = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch instead of `func`."""
        result = func(*args, **(kwargs or {}))
        if func is not F.linear or self.seen_logits or self.muted:
            return result
        self.seen_logits = True
        return self.taps[Kind.ROUTER].flow(result)


class RouterTap(InnerTap):
    """A tap inside a router."""

    interceptor = RouterInterceptor


def choices_of(experts: nn.Module) -> Choices | None:
    """The valid expert indices; None if the number of experts is not known."""
    count = _count(experts)
    return Choices("expert", count, has_marks=True) if count is not None else None


def _count(experts: nn.Module) -> int | None:
    if isinstance(count := getattr(experts, "num_experts", None), int):
        return count
    weights = [parameter.shape[0] for parameter in experts.parameters(recurse=False) if parameter.ndim == 3]
    return weights[0] if weights else None
