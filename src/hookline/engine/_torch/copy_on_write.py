"""Copy-on-write clones of tensors: memory that is shared until either side is written to.

Why: a snapshot then costs less than a microsecond and no memory.
Needs: `torch._lazy_clone`, which raises RuntimeError for memory that torch does not own; that each side gets memory
of its own when it is written to, in Python or by a kernel; a test for shared memory and its address, which leave it
shared.
If it does not hold, each snapshot is a plain copy: slower, and equally correct.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.engine._torch.proofs import insist, once, private

lazy_clone = private(torch, "_lazy_clone")
is_shared = private(torch, "_C._is_cow_tensor")
"""Whether the memory of a tensor may be shared with a lazy clone."""
data_address = getattr(torch._C, "_data_address", lambda x: x.untyped_storage().data_ptr())
"""The address of the memory of a tensor, which stays shared."""
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The current stream of a GPU: 0 is the default one."""


def probe() -> None:
    """A lazily cloned tensor shares memory, and is separated by a write to either side."""
    for writes_to_clone in (True, False):
        x = torch.zeros(4)
        clone: Tensor = lazy_clone(x)
        insist(is_shared(x) and is_shared(clone), "a lazy clone and its original say that they share memory")
        insist(data_address(x) == data_address(clone), "a lazy clone has the memory of its original")
        insist(is_shared(clone), "looking at the address leaves memory shared")
        written, other = (clone, x) if writes_to_clone else (x, clone)
        written.add_(1)
        insist(
            (written.sum().item(), other.sum().item()) == (4, 0),
            "a write to shared memory is not seen from the other side",
        )
        insist(data_address(x) != data_address(clone), "a write separates a lazy clone from its original")
    insist(lazy_clone(torch.ones(2, requires_grad=True)).requires_grad, "gradients flow through a lazy clone")


can_share = once(probe)
