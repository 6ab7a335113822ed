"""Snapshots: tensors that keep their value whoever writes to the original, copied only if somebody does."""

from __future__ import annotations

import torch
from torch import Tensor

# torch's copy-on-write clone shares memory until either side is written to, by anybody, in Python or in a
# kernel; the writer then gets a copy. It exists for plain tensors on these devices; for all others a plain clone is
# as right, only slower.
_COPY_ON_WRITE_DEVICES = frozenset({"cpu", "cuda"})
_PLAIN = (Tensor, torch.nn.Parameter)


def snapshot(x: Tensor) -> Tensor:
    """The value of `x` now, for good. Nothing is copied unless `x` or the snapshot is written to later.

    Differentiable: gradients flow through it to `x`. `data_ptr()` and `numpy()` count as writing, since torch
    cannot know what will be done with a bare pointer.
    """
    if not _can_share(x):
        return x.clone()
    if 0 in x.stride():  # an expanded tensor keeps several elements in one place: nobody could write to it
        return x.clone(memory_format=torch.contiguous_format)
    try:
        return torch._lazy_clone(x)
    except RuntimeError:  # memory that torch does not own: from numpy, or mapped from a file
        return x.clone()


def is_untouched(snapshot: Tensor) -> bool:
    """Whether a snapshot certainly has not been written to. A plain clone never counts as untouched.

    Sharing tells more than a version counter: it also sees writes through `.data`, and in inference mode.
    """
    return _can_share(snapshot) and torch._C._is_cow_tensor(snapshot)  # type: ignore[attr-defined]


def _can_share(x: Tensor) -> bool:
    return (
        type(x) in _PLAIN
        and x.device.type in _COPY_ON_WRITE_DEVICES
        and x.layout is torch.strided
        and not x.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # inside vmap and the like
    )


def address(x: Tensor) -> int:
    """Where the data of `x` lies. Unlike `data_ptr()` it leaves shared memory shared."""
    return torch._C._data_address(x)  # type: ignore[attr-defined]
