"""What changes while a model runs, in one object for each thread.

A hook may run the model: `events.call_hook` keeps what belongs to the pass around it, and puts it back.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from hookline.engine._inner.interception import FunctionInterceptor
    from hookline.engine._memory.outside import PreexistingMemory
    from hookline.engine.schedule import ModuleCall


class PassState(threading.local):
    """The state of the forward pass that runs in this thread, and of the hooks that run in it."""

    def __init__(self) -> None:
        self.hooks = 0
        """How many hooks are running, each called (indirectly) by the one before."""
        self.call: int | None = None
        """The number of the call of its module that the innermost hook sees."""
        self.arguments: Any = None
        """The arguments of the module call whose tap a value passes."""
        self.sent: dict[int, Any] = {}
        """Tensors that replaced the caller's: see `aliases.py`."""
        self.copies: dict[int, Any] = {}
        """Lists and dicts that did: see `containers.py`."""
        self.saved: dict[Any, Any] = {}
        """What earlier events left for points that need it: by site; by lens, for an edit of a derived tensor."""
        self.memo: dict[Any, Any] = {}
        """What was computed from it since."""
        self.has_edits = False
        """Whether a derived tensor may have been edited."""
        self.forward_pass: Any = None
        """The forward pass of a language model: a `text.forward_pass.ForwardPass`."""
        self.at_hook: Any = None
        """The same when the innermost hook was called, which may have run the model since."""
        self.is_recomputing = False
        """Whether a checkpointed region is recomputing."""
        self.starts_with_grad = True
        """Whether gradients were enabled when the forward pass began, as far as is known."""
        self.outside: dict[int, list[PreexistingMemory]] = {}
        """The memory from before each pass of a whole model, by the number of hooks that it runs in."""
        self.interceptors: list[FunctionInterceptor] = []
        """Those of the modules that are running, innermost last."""
        self.is_in_kernel = False
        """Whether torch waits for a kernel of ours, and refers to its arguments meanwhile."""
        self.skipped: Mapping[nn.Module, ModuleCall] = {}
        """The modules that are skipped, with what they return instead."""
        self.has_hooks_in_graph = False
        """Whether a graph is running that was compiled with the hooks in it."""
        self.left_out = ""
        """Why passes run without our graphs; empty if they do not."""


pass_state = PassState()
