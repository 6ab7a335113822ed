"""What keeps a call of a model out of a graph: modes, hooks of others, and calls that are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from hookline.engine._compiler import pausing
from hookline.engine._recording import skipping
from hookline.engine._torch.compiled_calls import ATTRIBUTE
from hookline.engine._torch.hooks_on_modules import (
    after_all,
    before_all,
    gradients_of_all,
    hooks_after,
    hooks_before,
    hooks_on_gradients,
)
from hookline.engine._torch.mode_stacks import count_dispatch_modes, count_function_modes
from hookline.engine._torch.stance import WRAPPED
from hookline.engine.order import Kind
from hookline.engine.pass_state import pass_state
from hookline.engine.taps import Tap, has_foreign_hooks

if TYPE_CHECKING:
    from hookline.engine.names import Points


def why_not_here() -> str | None:
    """Why nothing can run in a graph in this thread now; None if it can."""
    if pass_state.hooks:
        return "it is called in a hook"
    if pass_state.interceptors or count_function_modes() or count_dispatch_modes():
        return "a mode of torch is on"
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if skipping.skips_here():
        return "some of its layers are skipped"
    if before_all or after_all or gradients_of_all:
        return "there are hooks on all modules of the process"
    return pausing.why_no_graphs()


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module go into compiled code, which ignores torch hooks that are added to it later."""
    return WRAPPED in module._modules or vars(module).get(ATTRIBUTE) is not None


def why_replaced(points: Points, modules: Sequence[nn.Module]) -> str | None:
    """Why a graph would not do what calling these modules does: hooks of others, or replaced calls."""
    permanent_hooks = points.permanent_hooks()
    for module in modules:
        if hooks_after(module) or hooks_before(module) or hooks_on_gradients(module):
            is_foreign = has_foreign_hooks(module, Kind.INPUT) or has_foreign_hooks(module, Kind.OUTPUT)
            if is_foreign or hooks_on_gradients(module):
                return f"somebody else has a torch hook on {_path(points.root, module)}"
            hooks = (*hooks_after(module).values(), *hooks_before(module).values())
            if any(other not in permanent_hooks for hook in hooks if type(hook) is Tap for other in hook.permanent):
                return f"a wrapper of a part of the model has a permanent hook on {_path(points.root, module)}"
        attributes = vars(module)
        if "forward" in attributes or attributes.get(ATTRIBUTE) is not None:
            if skipping.is_detoured(module):
                return "another thread skips some of its layers"
            return f"the call of {_path(points.root, module)} is replaced"
    return None


def _path(root: nn.Module, module: nn.Module) -> str:
    path = next(path for path, candidate in root.named_modules() if candidate is module)
    return repr(path or "the model")
