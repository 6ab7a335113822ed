"""Swaps: replace parameters of a model, and put the original objects back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hookline.engine import undo
from hookline.errors import HooklineError


class Swaps:
    """The parameters that were replaced, and their replacements. The original parameters are never written to."""

    def __init__(self) -> None:
        self._done: list[tuple[nn.Module, str, nn.Parameter | None, nn.Parameter]] = []
        self._is_undoing = False

    def put(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Replace the parameter `name` of `module`, which may have been None (the bias of a linear module)."""
        old = module._parameters[name]
        like = old if old is not None else module._parameters["weight"]
        assert like is not None
        with torch._C._InferenceMode(False), undo.GradMode(False):  # an interrupt cannot skip their exits
            new = nn.Parameter(value.detach().to(like.device, like.dtype).clone(), requires_grad=like.requires_grad)
        self._done.append((module, name, old, new))  # first, so that an interrupt in between loses nothing
        module._parameters[name] = new

    def __len__(self) -> int:
        return len(self._done)

    def undo(self, to: int = 0) -> None:
        """Put parameters back, all but those of the first `to` swaps. After an interrupt, a second call continues.

        Raises, and puts nothing back, if a parameter was replaced or the model was moved in the meantime.
        """
        if not self._is_undoing:
            self._check()
            self._is_undoing = True
        while len(self._done) > to:
            module, name, old, _ = self._done[-1]
            module._parameters[name] = old
            del self._done[-1]
        self._is_undoing = False

    def _check(self) -> None:
        newest = {(module, name): (old, new) for module, name, old, new in self._done}
        last = self._done[-1][:2] if self._done else None  # an interrupt may have arrived before it was put in place
        oldest: dict[tuple[nn.Module, str], nn.Parameter | None] = {}
        for module, name, old, _ in self._done:
            oldest.setdefault((module, name), old)
        for (module, name), (before, new) in newest.items():
            where, current = f"{name} of {type(module).__name__}", module._parameters.get(name)
            if current is not new and not (current is before and (module, name) == last):
                raise HooklineError(f"{where} was replaced while the weights were processed, so it cannot be restored")
            old = oldest[module, name]
            if old is not None and (old.device, old.dtype) != (new.device, new.dtype):
                raise HooklineError(
                    f"the model was moved while its weights were processed: {where} is {new.dtype} on {new.device}, "
                    f"and was {old.dtype} on {old.device}. Move it back, then call restore_weights()"
                )


def rounding(dtype: torch.dtype) -> float:
    """The relative change of the output that counts as rounding."""
    return {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2}.get(dtype, 5e-2)
