"""Blocks that undo what they did, however they end: also if an interrupt arrives on the way out.

`UndoBlock` is their base class. The others put torch hooks on modules, torch modes on their stacks, or a gradient mode
in place, or keep hooks from acting, for the length of a block. A lock that is entered through `interrupt_safe` is
always released; `attaching` is the one that is held while hooks are attached to modules.
"""

from hookline.engine._undo.blocks import UndoBlock, interrupt_safe, run_twice_on_interrupt
from hookline.engine._undo.modes import GradMode, Modes
from hookline.engine._undo.torch_hooks import TorchHooks, remove_hook
from hookline.engine._undo.unhooked import Unhooked
from hookline.engine.runs import clear_state
from hookline.engine.taps import lock as attaching

__all__ = (
    "GradMode",
    "Modes",
    "TorchHooks",
    "UndoBlock",
    "Unhooked",
    "attaching",
    "clear_state",
    "interrupt_safe",
    "remove_hook",
    "run_twice_on_interrupt",
)
