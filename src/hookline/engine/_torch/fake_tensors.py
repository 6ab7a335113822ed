"""Tensors that have shapes but no data, operators that a mode sees, and the tensors in a structure.

Why: the shapes and the memory of a run are then known without running it.
Needs: torch's `FakeTensorMode`, `TorchDispatchMode` and `tree_leaves`.
If it does not hold, plans have no shapes: one with an input raises an error.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hookline.engine._torch.proofs import insist, requirement

__all__ = ["FakeTensorMode", "TorchDispatchMode", "need_fake_tensors", "probe", "tree_leaves"]


class _Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **kwargs or {})


def probe() -> None:
    """A module runs on tensors without data, and a mode sees its operators."""
    mode, count = FakeTensorMode(allow_non_fake_inputs=True), _Counting()
    x, weight = mode.from_tensor(torch.ones(5, 3)), mode.from_tensor(torch.ones(2, 3))
    with mode:
        out = nn.functional.linear(x, weight)
    insist(type(out) is type(x) is not torch.Tensor, "what is computed without data has no data")
    insist(out.shape == (5, 2) and out.device.type == "cpu", "tensors without data have shapes and a device")
    with count:
        torch.ones(1).add(1)
    insist(count.calls > 0, "a mode sees operators")
    insist(tree_leaves({"a": [1, (2,)]}) == [1, 2], "the leaves of a structure are found")


need_fake_tensors = requirement(probe)
