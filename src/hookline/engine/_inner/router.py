"""Taps inside routers of experts: the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

from hookline.engine._inner.inner import InnerTap
from hookline.engine._inner.interception import ModeInterceptor
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
