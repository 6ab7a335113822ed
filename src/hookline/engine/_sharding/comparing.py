"""Actions at the beginning and the end of a pass of a sharded model, at which its processes compare what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hookline.engine._sharding.split_values import processes
from hookline.engine._staying.pass_bounds import by_name
from hookline.engine.actions import Action
from hookline.engine.order import Kind, Phase, Turn
from hookline.engine.taps import tap_on


class CompareInputs(Action):
    """At the input of a sharded model: its processes compare their hooks and inputs."""

    turn = Turn.BEGIN
    is_replayed = False

    def __init__(self, root: nn.Module, hooks: Sequence[Action]) -> None:
        super().__init__(prepend=True)
        self.module, self.tap, self._hooks = root, tap_on(root, Kind.INPUT), hooks

    def __call__(self, value: Any) -> Any:
        """Raise if the hooks or the inputs of another process differ."""
        processes[self.module].enter(self._hooks, by_name(self.module, value))
        return value


class Compare(Action):
    """At the end of a pass of a sharded model: its processes compare what the hooks did.

    Not later, because gradients are collected where the hooks of this process have put activations back.
    """

    phase = Phase.BOUND
    is_replayed = False

    def __init__(self, root: nn.Module, hooks: Sequence[Action]) -> None:
        super().__init__()
        self.module, self.tap, self._hooks = root, tap_on(root, Kind.END), hooks

    def __call__(self, value: Any) -> Any:
        """Raise if a hook of another process did something else."""
        error = self.count.here().raised()
        if error is None:
            processes[self.module].end(self._hooks)
        else:  # torch drops an error that is raised here
            processes[self.module].explain(error)
        return value
