"""Derived points: tensors that a model does not compute, but that can be computed from one that it does (the source).

An edit of a derived tensor is applied as the difference that it makes to what the model computed, and remembered as
long as the same source passes, so that the next hook sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from hookline.engine.actions import Action
from hookline.engine.formulas import Formula
from hookline.engine.order import Kind, Turn
from hookline.engine.pass_state import Saved, pass_state
from hookline.engine.taps import tap_on

if TYPE_CHECKING:
    from hookline.engine.points import Site


class Derived(Formula):
    """A formula whose edits are applied as differences, so that an identity edit changes no bit, and remembered."""

    can_wait = False

    def source(self, value: Any) -> Tensor:
        """The tensor that it is computed from."""
        raise NotImplementedError

    def computed(self, value: Any) -> Tensor:
        """Compute the tensor, without edits."""
        return super().get(value)

    def changed(self, value: Any, before: Tensor, after: Tensor) -> Any:
        """Return the value at the event after an edit of the tensor."""
        raise NotImplementedError

    def get(self, value: Any) -> Tensor:
        """Return the tensor after the edits so far."""
        edited = self.edited(self.source(value))
        return self.computed(value) if edited is None else edited

    def put(self, value: Any, tensor: Tensor) -> Any:
        """Return the value at the event after an edit, which is remembered."""
        new = self.changed(value, self.get(value), tensor)
        pass_state.edited[self] = self.source(value), tensor
        return new

    def edited(self, source: Tensor) -> Tensor | None:
        """The tensor after an edit; None if there was none for this source."""
        if not pass_state.edited:
            return None
        origin, tensor = pass_state.edited.get(self, (None, None))
        return tensor if origin is source else None

    def is_as_computed(self, value: Any) -> bool:
        """Whether it was not edited."""
        return not pass_state.edited or self.edited(self.source(value)) is None


class Stash(Action):
    """Saves the activation that leaves a site, after all edits there.

    If only later events need it, it is what leaves the hooks of others there, too: a norm gets what they return.
    """

    turn = Turn.KEEP
    only_reads = True
    is_helper = True

    def __init__(self, site: Site, *, is_for_later: bool) -> None:
        super().__init__()
        self.site, self.module = site, site.module
        self.tap = site.last_tap() if is_for_later else site.tap

    def __call__(self, value: Any) -> Any:
        """Return the value unchanged."""
        pass_state.saved[self.site] = Saved(self.site.lens.get(value))
        return value


class Consequence(Protocol):
    """The effect at a later event of an edit made at an earlier one."""

    @property
    def module(self) -> nn.Module: ...  # noqa: D102
    def __call__(self, output: Any) -> Any: ...  # noqa: D102


class Effect(Action):
    """Applies the effect of an edit at the output where it shows."""

    turn = Turn.EFFECT

    def __init__(self, consequence: Consequence) -> None:
        super().__init__()
        self.module, self.consequence = consequence.module, consequence
        self.tap = tap_on(self.module, Kind.OUTPUT)

    def __call__(self, value: Any) -> Any:
        """Return the value after the edit, if there was one."""
        return self.consequence(value)


class Forget(Action):
    """Drops the edits of derived tensors when their source passes again, in another pass or a recomputation."""

    turn = Turn.BEGIN

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.module, self.tap = site, site.module, site.tap

    def __call__(self, value: Any) -> Any:
        """Return the value unchanged."""
        source = self.site.lens.get(value)
        for lens in [lens for lens, (origin, _) in pass_state.edited.items() if origin is source]:
            del pass_state.edited[lens]
        return value
