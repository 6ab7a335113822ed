"""Our own torch hooks on modules, for the length of a block or of a run that looks into a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from hookline.engine._compiler import pausing
from hookline.engine._torch.hooks_on_modules import (
    always_after,
    hooks_after,
    hooks_before,
    keywords_after,
    keywords_before,
)
from hookline.engine._undo.blocks import UndoBlock


class TorchHooks(UndoBlock):
    """A block with torch hooks before or after the calls of some modules.

    Compiled code, which would not call them, runs uncompiled meanwhile.
    """

    def __init__(
        self,
        *,
        before: Iterable[tuple[nn.Module | None, Callable[[nn.Module, Any, Any], None]]] = (),
        after: Iterable[tuple[nn.Module | None, Callable[[nn.Module, Any, Any], Any]]] = (),
    ) -> None:
        self._before = [(module, hook) for module, hook in before if module is not None]
        self._after = [(module, hook) for module, hook in after if module is not None]

    def open(self) -> None:
        """Attach the hooks; those before a call also get its keywords."""
        with pausing.tracing_lock():
            pausing.pause(self)
            for module, hook in self._before:
                module.register_forward_pre_hook(hook, with_kwargs=True)
            for module, hook in self._after:
                module.register_forward_hook(hook)

    def close(self) -> None:
        """Detach the hooks."""
        with pausing.tracing_lock():
            for module, hook in (*self._before, *self._after):
                remove_hook(module, hook)
            pausing.resume(self)


def remove_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove a forward hook by its function: torch's own handle is lost if an interrupt arrives while it is made."""
    before = hooks_before(module), keywords_before(module)
    after = hooks_after(module), keywords_after(module), always_after(module)
    for hooks, *flags in (before, after):
        for key in [key for key, each in list(hooks.items()) if each is hook]:
            for place in (*flags, hooks):
                place.pop(key, None)
