"""The events of a module, and the order in which actions are taken at one event. Stated here and nowhere else."""

from __future__ import annotations

from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookline.engine.actions import Action
    from hookline.engine.schedule import Step


class Kind(Enum):
    """An event of a module. Kinds after the first three happen inside it, while it runs: see `_inner/inner.py`."""

    INPUT = "input"
    OUTPUT = "output"
    END = "end"  # the call is over, even if it raised
    QUERY = "query"
    KEY = "key"
    SCORES = "scores"
    PATTERN = "pattern"
    ROUTER = "router"  # inside a router of experts

    is_inner: bool
    """Whether it happens while the module runs."""

    def __init__(self, name: str) -> None:
        self.is_inner = name not in ("input", "output", "end")


class Turn(IntEnum):
    """The order of actions at one event. Actions of one turn are taken in the order in which they were added."""

    CALLERS_TENSORS = auto()  # ReturnOriginals: the caller gets back its own tensors, before any hook sees the output
    BEGIN = auto()  # Begin, Forget: a forward pass begins; values derived from an earlier tensor are dropped
    EFFECT = auto()  # Effect: an edit made at an earlier event takes effect
    ENTER = auto()  # rows or a residual stream enter at the input of a layer
    AT_POINTS = auto()  # hooks and caches: by `Site.stage` along the data flow, then by `Phase`
    LEAVE = auto()  # rows enter at the output of a layer
    KEEP = auto()  # Stash: the value is saved for points at later events
    DERIVE = auto()  # what depends on nothing else is recorded already, if no hook can change it until its own event
    SEND = auto()  # Send: the arguments that the module is called with are noted


class Phase(IntEnum):
    """The order at one point: a cache holds what the edits made, and a gradient is that of the edited tensor."""

    BOUND = auto()  # the end of a pass
    EDIT = auto()
    GRADIENT = auto()
    RECORD = auto()


def arrange(actions: list[Action], *, is_replay: bool = False) -> list[Step]:
    """Return the actions at one event as steps, in order. A replay happens when a checkpointed region recomputes."""
    steps: list[Step] = []
    for action in sorted(actions, key=_turn) if len(actions) > 1 else actions:
        action.extend(steps, is_replay=is_replay)
    return steps


def _turn(action: Action) -> tuple[Turn, int, Phase, int]:
    return action.turn, action.stage, action.phase, action.order
