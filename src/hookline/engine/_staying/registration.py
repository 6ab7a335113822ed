"""How a hook is held from run to run: its id, whether it is enabled, and whether it survives a reset."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookline.engine._staying.permanent import PermanentHooks
    from hookline.engine.hook_actions import HookAction


class Registration:
    """The state of one hook in the registry, or of one that was added to stay."""

    id: str | None = None
    """The id in the registry; None for a hook that is not there."""
    is_permanent = False
    """Whether it survives `reset_hooks()`."""
    level: int | None = None
    """How deep its context is nested, where removing hooks also removes those of open contexts."""
    last_fired: object = None
    """A new object each time the hook fires, for hook objects that keep what they saw."""
    _is_on, _switches = True, 0

    def is_enabled(self) -> bool:
        """Whether the hook is to be called."""
        return self._is_on

    @property
    def switches(self) -> int:
        """How often the hook was enabled or disabled."""
        return self._switches

    def switch(self, on: bool) -> None:
        """Enable or disable the hook."""
        self._is_on = on
        self._switches += 1

    def is_stale(self, last_fired: object) -> bool:  # noqa: ARG002 (for hook objects)
        """Whether the hook holds data of an earlier run that could be mistaken for that of the last one."""
        return False

    def check_place(self, action: HookAction) -> None:
        """Raise if the hook cannot be here in addition to where it is already."""

    def join(self, hooks: PermanentHooks) -> None:
        """The hook becomes one of these."""

    def leave(self, hooks: PermanentHooks) -> None:
        """The hook is no longer one of these."""
