"""Swaps: parameters of a model replaced by others, and put back as the very objects they were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.transformer.contexts import GradMode


class Swaps:
    """What was put in place of which parameters. No number in any of the old ones is ever written to."""

    def __init__(self) -> None:
        self._done: list[tuple[nn.Module, str, nn.Parameter | None, nn.Parameter]] = []
        self._is_undoing = False

    def put(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Let `module` have this value as its parameter `name`, where it may have had none (a linear map's bias)."""
        old = module._parameters[name]
        like = old if old is not None else module._parameters["weight"]
        assert like is not None
        with torch._C._InferenceMode(False), GradMode(False):  # whose exits no interrupt can skip
            new = nn.Parameter(value.detach().to(like.device, like.dtype).clone(), requires_grad=like.requires_grad)
        self._done.append((module, name, old, new))  # first: an interrupt in between leaves nothing that is not noted
        module._parameters[name] = new

    def __len__(self) -> int:
        return len(self._done)

    def undo(self, to: int = 0) -> None:
        """Put every parameter back, or leave the first `to` swaps; all of them, if the model was moved meanwhile.

        Called again after an interrupt, it goes on where it was.
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
        last = self._done[-1][:2] if self._done else None  # an interrupt may have come before it was put in place
        oldest: dict[tuple[nn.Module, str], nn.Parameter | None] = {}
        for module, name, old, _ in self._done:
            oldest.setdefault((module, name), old)
        for (module, name), (before, new) in newest.items():
            where, found = f"{name} of {type(module).__name__}", module._parameters.get(name)
            if found is not new and not (found is before and (module, name) == last):
                raise HooklineError(f"{where} was replaced while the weights were processed: it cannot be put back")
            old = oldest[module, name]
            if old is not None and (old.device, old.dtype) != (new.device, new.dtype):
                raise HooklineError(
                    f"the model was moved while its weights were processed: {where} is {new.dtype} on {new.device}, "
                    f"and was {old.dtype} on {old.device}. Move it back, then restore_weights()"
                )
