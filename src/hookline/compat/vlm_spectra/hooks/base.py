"""The base class of hooks under vlm-spectra's path: hookline's Hook with vlm-spectra's default location."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from hookline import hooks


class Hook(hooks.Hook, ABC):
    """A hook that declares its own location: `hook_point`, usually on the class, and `layer`.

    class Double(Hook):
        hook_point = "lm.mlp.out"

        def __init__(self, layer):
            self.layer = layer

        def __call__(self, module, args, kwargs, output):
            return output * 2
    """

    hook_point: str | None = "lm.layer.post"

    @abstractmethod
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the new output; None leaves it unchanged.

        At a hook_point that ends in `.pre` the output is None, and new `(args, kwargs)` may be returned.
        """
