"""How each hook of a plan runs in a graph: as a table, or traced into it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import FunctionType
from typing import Any, Literal

from hookline.compiled.not_compiled import NotCompiled, check_no
from hookline.compiled.traceable import check_stateless
from hookline.compiled.traced_lenses import can_trace
from hookline.engine import Action, Edit, HookAction, HookPoint, PointAction, Record
from hookline.hooks.data_edits import Add, Cap, DataEdit, EditAction, Freeze, Mean, ProjectOut, Replace, Scale, Zero
from hookline.hooks.scores import Score
from hookline.text.at_positions import PositionHook
from hookline.text.score_positions import Crossed

How = Literal["table", "traced", "read"]

AFFINE = (Zero, Scale, Add, Replace, Mean, Freeze)
"""Edits of the form `x * keep + add`; if norms are matched, of the other form."""
ALONG = (ProjectOut, Cap)
"""Edits that only change the component along a direction."""


def placed(action: Action) -> How:
    """How an action of a run runs in a graph; raises NotCompiled if it cannot."""
    if action.is_helper:
        return "read"
    if not isinstance(action, PointAction):
        raise NotCompiled(f"{type(action).__name__} changes how the model runs")
    if action.dir == "bwd":
        raise NotCompiled("a gradient needs a run with gradients")
    check_no(no_site(action.point))
    if type(action) in (Record, Score):
        return "read"
    if not isinstance(action, HookAction):
        raise NotCompiled("it records gradients")
    return _hook(action)


def check_placed(actions: Iterable[Action]) -> None:
    """Raise NotCompiled, with the name of the point, if one of the actions cannot run in a graph."""
    for action in actions:
        try:
            placed(action)
        except NotCompiled as error:
            if (point := getattr(action, "point", None)) is None:
                raise
            raise NotCompiled(f"the hook at {point.name!r} cannot: {error}") from None


def placement_text(action: Action) -> str:
    """How an action runs, for a plan: in a graph, or "eager", and why."""
    try:
        return placed(action)
    except NotCompiled as error:
        return f"eager: {error}"


def no_site(point: HookPoint) -> str | None:
    """Why a point cannot be read or edited in a graph; None if it can."""
    site, axes = point.site, point.axes.split()
    if site.kind.is_inner:
        return "the point is inside its module"
    if point.only is not None:
        return "the point is for one call of its module"
    if point.stream != "text":
        return f"the point is of the {point.stream}"
    if axes and (axes[:2] != ["b", "p"] or len(axes) < 3):
        return f"the axes of the point are {point.axes!r}, not batch, position and features"
    if site.effects or not can_trace(site.lens):
        return "the point is derived from others"
    return None


def _hook(action: HookAction) -> How:
    if action.on_error == "skip":
        raise NotCompiled('on_error="skip" needs Python')
    if action.allows_shape:
        raise NotCompiled("allow_shape=True lets it change the shape")
    if action.choices is not None:
        raise NotCompiled("the point has indices, which are checked")
    hook: Any = action.hook
    if isinstance(action, EditAction):
        if type(hook) not in (*AFFINE, *ALONG):
            raise NotCompiled(f"{hook.kind} has no table")
        return "table"
    if type(action) is not Edit:
        raise NotCompiled("a hook object is called in Python")
    check_stateless(function_of(action))
    return "traced"


def function_of(action: HookAction) -> Any:
    """The user's function of a traced hook."""
    return action.hook.func if isinstance(action.hook, PositionHook) else action.hook


def code_of(function: Any) -> Any:
    """A key that is equal for functions that differ only in the values they refer to."""
    while isinstance(function, partial):
        function = function.func
    return function.__code__ if isinstance(function, FunctionType) else function


def positions_of(action: HookAction) -> Any:
    """The positions that a hook is limited to; None for all."""
    return action.hook.pos if isinstance(action.hook, DataEdit) else getattr(action.hook, "where", None)


def condition_of(action: HookAction) -> Crossed | None:
    """The bound of a monitor from whose crossing on a hook acts; None if it needs none."""
    on, positions = getattr(action.hook, "on", None), positions_of(action)
    return positions if isinstance(positions, Crossed) else on if isinstance(on, Crossed) else None
