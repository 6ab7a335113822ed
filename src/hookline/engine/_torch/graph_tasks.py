"""Which backward pass this thread is in.

Why: a forward call inside a backward pass is one of a checkpointed region that runs again, and hooks act differently
there.
Needs: torch's number of the backward pass, -1 outside of any; callbacks at the end of a backward pass.
If it does not hold, no hook can be attached: the first raises an error.
"""

from __future__ import annotations

import torch

from hookline.engine._torch.proofs import insist, private

current_graph_task = private(torch, "_C._current_graph_task_id")
"""The number of the backward pass that this thread is in; -1 if it is in none."""
at_end_of_backward = private(torch.autograd, "Variable._execution_engine.queue_callback")
"""Call a function when the backward pass that this thread is in has ended."""


def probe() -> None:
    """The number is -1 outside a backward pass only, and the end of the pass is reported."""
    x, seen = torch.ones(1, requires_grad=True), []

    def hook(_grad: torch.Tensor) -> None:
        seen.append(current_graph_task())
        at_end_of_backward(lambda: seen.append("end"))

    x.register_hook(hook)
    insist(current_graph_task() == -1, "outside a backward pass its number is -1")
    (x * 2).sum().backward()
    insist(len(seen) == 2 and seen[0] != -1, "a backward pass has a number")
    insist(seen[-1:] == ["end"], "the end of a backward pass is reported")
    insist(current_graph_task() == -1, "after a backward pass the number is -1 again")
