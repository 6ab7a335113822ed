"""Hooks that record activations in a cache, under `(hook_name, layer)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hookline.compat.vlm_spectra.core.activation_cache import ActivationCache
from hookline.compat.vlm_spectra.hooks.base import Hook
from hookline.engine import FIRST, Kind, lens_of


class CaptureOutputHook(Hook):
    """Records the output, by default of a decoder layer."""

    def __init__(self, cache: ActivationCache, hook_name: str, layer: int) -> None:
        super().__init__()
        self.cache, self.key = cache, (hook_name, layer)
        self.hook_name, self.layer = hook_name, layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record the activation."""
        self.cache[self.key] = self.seen(module, args, kwargs, output).detach().clone()

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:  # noqa: ARG002
        """The tensor to record."""
        return FIRST.get(output)


class CaptureInputHook(CaptureOutputHook):
    """Records the first tensor argument of the module."""

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:  # noqa: ARG002
        """The tensor to record."""
        return lens_of(module, Kind.INPUT).get((args, kwargs))
