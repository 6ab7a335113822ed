"""Swaps: parameters of a model replaced by others, and put back as the very objects they were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError


class Swaps:
    """What was put in place of which parameters. No number in any of the old ones is ever written to."""

    def __init__(self) -> None:
        self._done: list[tuple[nn.Module, str, nn.Parameter | None, nn.Parameter]] = []

    def put(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Let `module` have this value as its parameter `name`, where it may have had none (a linear map's bias)."""
        old = module._parameters[name]
        like = old if old is not None else module._parameters["weight"]
        assert like is not None
        with torch.inference_mode(False), torch.no_grad():
            new = nn.Parameter(value.detach().to(like.device, like.dtype).clone(), requires_grad=like.requires_grad)
        module._parameters[name] = new
        self._done.append((module, name, old, new))

    def extend(self, later: Swaps) -> None:
        """These, and then those of `later`."""
        self._done += later._done

    def undo(self) -> None:
        """Put every parameter back; nothing is, if the model was moved or given others meanwhile."""
        self._check()
        while self._done:
            module, name, old, _ = self._done.pop()
            module._parameters[name] = old

    def _check(self) -> None:
        newest = {(module, name): new for module, name, _, new in self._done}
        oldest: dict[tuple[nn.Module, str], nn.Parameter | None] = {}
        for module, name, old, _ in self._done:
            oldest.setdefault((module, name), old)
        for (module, name), new in newest.items():
            where = f"{name} of {type(module).__name__}"
            if module._parameters.get(name) is not new:
                raise HooklineError(f"{where} was replaced while the weights were processed: it cannot be put back")
            old = oldest[module, name]
            if old is not None and (old.device, old.dtype) != (new.device, new.dtype):
                raise HooklineError(
                    f"the model was moved while its weights were processed: {where} is {new.dtype} on {new.device}, "
                    f"and was {old.dtype} on {old.device}. Move it back, then restore_weights()"
                )
