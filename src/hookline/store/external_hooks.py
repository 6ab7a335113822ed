"""What changes activations on their way through a module: torch hooks of other people, and our own hooks that stay."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn

from hookline.engine.actions import Action, HookAction
from hookline.engine.taps import Tap

_HARMLESS = ("torch", "transformers", "accelerate", "hookline")
"""Whose torch hooks take notes or move tensors about, and change no activation that is not in the weights anyway."""


def torch_hooks(module: nn.Module) -> list[Any]:
    """The forward hooks that other people have put on a module."""
    every = chain(module._forward_pre_hooks.values(), module._forward_hooks.values())
    return [hook for hook in every if not is_harmless(hook)]


def is_harmless(hook: Any) -> bool:
    """Whether a torch hook, or a forward method put in a module's place, changes nothing."""
    if isinstance(hook, Tap):
        return True
    inner = hook
    while hasattr(inner, "func"):  # functools.partial, however often
        inner = inner.func
    return str(getattr(inner, "__module__", None) or type(inner).__module__).partition(".")[0] in _HARMLESS


def changing(actions: Iterable[Action]) -> list[HookAction]:
    """Those of our hooks that change activations, in the order of where they are; at one place, as they fire.

    Detectors only read, and are left out, as are hooks that are disabled.
    """
    found = [
        each
        for each in actions
        if isinstance(each, HookAction) and each.dir == "fwd" and each.is_enabled() and not each.only_reads
    ]
    places = {each.tap: each.point.listed for each in reversed(found)}
    return sorted(found, key=lambda each: (places[each.tap], each.tap.kind.value, each.stage))
