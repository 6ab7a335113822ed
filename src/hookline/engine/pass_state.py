"""What changes while a model runs, in one object for each thread.

A hook may run the model: `events.call_hook` keeps what belongs to the pass around it, and puts it back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from hookline.engine._inner.interception import FunctionInterceptor
    from hookline.engine._memory.outside import PreexistingMemory
    from hookline.engine.derived import Derived
    from hookline.engine.points import Site
    from hookline.types import ModuleCall


@dataclass(slots=True)
class Saved:
    """What passed at a site in this pass, for points that need it."""

    x: Any
    snapshot: Tensor | None = None
    """A snapshot of it, once there is one."""
    parts: dict[Any, Any] = field(default_factory=dict)
    """What was computed from it."""


class PassState(threading.local):
    """The state of the forward pass that runs in this thread, and of the hooks that run in it."""

    def __init__(self) -> None:
        self.hooks = 0
        """How many hooks are running, each called (indirectly) by the one before."""
        self.call: int | None = None
        """The number of the call of its module that the innermost hook sees."""
        self.arguments: Any = None
        """The arguments of the module call whose tap a value passes."""
        self.originals: Sequence[Any] = ()
        """The caller's own tensors and containers, in whose place that module got others."""
        self.sent: dict[int, Any] = {}
        """Tensors that replaced the caller's: see `_memory/aliases.py`."""
        self.copies: dict[int, Any] = {}
        """Lists and dicts that did: see `_memory/containers.py`."""
        self.saved: dict[Site, Saved] = {}
        """What passed at earlier events, for points that need it."""
        self.edited: dict[Derived, tuple[Tensor, Tensor]] = {}
        """The derived tensors that were edited: what each was computed from, and what it is now."""
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

    @contextmanager
    def as_part_of_the_model(self) -> Iterator[None]:
        """What the innermost hook calls in this context counts as calls of the model: it stands in for a part of it."""
        self.hooks -= 1
        try:
            yield
        finally:
            self.hooks += 1


pass_state = PassState()
