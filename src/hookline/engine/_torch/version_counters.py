"""A write that torch does not count.

Why: the gradient of a tensor can be led elsewhere by a write that leaves its value; counted, it would make torch
refuse the backward pass of what saved the tensor before.
Needs: torch's context that restores the count of writes to a tensor.
If it does not hold, the gradient of such a tensor is taken at its base.
"""

from __future__ import annotations

import torch

from hookline.engine._torch.proofs import insist, once, private

keep_version = private(torch.autograd, "_unsafe_preserve_version_counter")


def probe() -> None:
    """A write in the context is made, and not counted."""
    x = torch.zeros(1)
    with keep_version(x):
        x.add_(1)
    insist(x.item() == 1 and x._version == 0, "a write can be left out of the count")
    x.add_(1)
    insist(x._version == 1, "torch counts writes")


can_keep_version = once(probe)
