"""The actions that begin and end a forward pass of the whole model, in contexts and under hooks that stay.

A run of one pass does not need them: it begins and ends with its block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from hookline.engine import passes
from hookline.engine._gradients.checkpointing import is_first_run
from hookline.engine._memory.outside import OwnedTensors, begin_sharing, end_sharing
from hookline.engine.actions import Action
from hookline.engine.order import Kind, Phase, Turn
from hookline.engine.pass_state import pass_state
from hookline.engine.taps import tap_on
from hookline.functions.signatures import parameters_of


class Begin(Action):
    """At the input of the root module: begins a forward pass, in which calls are counted from 0."""

    turn = Turn.BEGIN
    is_replayed = False
    is_helper = True

    def __init__(self, root: nn.Module, held: Callable[[], OwnedTensors] | None) -> None:
        super().__init__(prepend=True)
        self.module, self.tap, self._held = root, tap_on(root, Kind.INPUT), held

    def __call__(self, value: Any) -> Any:
        """Begin the pass."""
        self.fired = True
        self.count.here().begin(self.tap, self.module)
        pass_state.starts_with_grad = torch.is_grad_enabled() or is_first_run()
        begin_sharing(self.module, value, self._held)
        passes.text().begin(self.module, by_name(self.module, value))
        return value


def by_name(module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """The arguments of a call by the names of the parameters."""
    args, kwargs = given
    return dict(zip(parameters_of(module)[0], args, strict=False)) | kwargs


class BeginEncoder(Action):
    """At the input of an encoder, which `generate` runs before the model itself: notes its text."""

    turn = Turn.BEGIN
    is_replayed = False

    def __init__(self, root: nn.Module, encoder: nn.Module) -> None:
        super().__init__(prepend=True)
        self.root, self.module, self.tap = root, encoder, tap_on(encoder, Kind.INPUT)

    def __call__(self, value: Any) -> Any:
        """Note the text, unless the whole model is running and has noted it."""
        if not self.count.here().is_on():
            passes.text().begin_encoder(self.root, by_name(self.module, value))
        return value


class End(Action):
    """At the end of the root module's call, even if it raised: ends the forward pass."""

    phase = Phase.BOUND
    is_replayed = False
    is_helper = True

    def __init__(self, root: nn.Module, after: WeakMethod[Callable[[], None]] | None) -> None:
        super().__init__()
        self.module, self.tap, self._after = root, tap_on(root, Kind.END), after

    def __call__(self, value: Any) -> Any:
        """End the pass."""
        calls = self.count.here()
        has_succeeded = calls.raised() is None  # a hook at the output may have raised: there is a value then, too
        calls.end()
        if not calls.is_on():
            pass_state.forward_pass = None  # a module that is called by itself after this pass has no text
        pass_state.starts_with_grad = True  # as far as is known of modules that are called by themselves now
        end_sharing()
        if self._after is not None and not calls.is_on() and (after := self._after()) is not None:
            after()
        if self.is_in_run:
            if (run := self.run) is not None:
                run.end_forward(has_succeeded=has_succeeded)
        elif (failure := calls.failure) is not None:
            calls.failure = None
            if has_succeeded:  # the model caught the error of a hook
                raise failure
        return value


def bounds(
    root: nn.Module,
    after: WeakMethod[Callable[[], None]] | None = None,
    held: Callable[[], OwnedTensors] | None = None,
) -> list[Action]:
    """The actions that begin and end a forward pass of the whole model, the beginning first.

    `held` returns `held_in(root)`, faster than a walk over all modules.
    `after` is called when the pass has ended; a weak reference, because its owner holds these actions.
    """
    config = getattr(root, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or not hasattr(root, "get_encoder"):
        return [Begin(root, held), End(root, after)]
    encoder = root.get_encoder()  # type: ignore[operator]
    # Some models are their own encoder.
    more = [BeginEncoder(root, encoder)] if isinstance(encoder, nn.Module) and encoder is not root else []
    return [Begin(root, held), End(root, after), *more]
