"""Snapshots: tensors that keep their value whoever writes to the original, copied only if somebody does."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

# torch's copy-on-write clone shares memory until either side is written to, by anybody, in Python or in a
# kernel; the writer then gets a copy. It exists for plain tensors that torch allocated itself, on CPU and CUDA; for all
# others a plain clone is as right, only slower.
_PLAIN = (Tensor, torch.nn.Parameter)


class _Foreign(threading.local):
    """Tensors that came from outside. Others may hold them, look at their memory as numpy does, or use them in another
    thread, so their memory is not shared with snapshots."""

    def __init__(self) -> None:
        self.storages: frozenset[int] = frozenset()
        self.copies: dict[tuple[object, ...], Tensor] = {}


_foreign = _Foreign()


def mark_foreign(tensors: Iterable[Tensor]) -> None:
    """From now on, in this thread, these are the tensors that came from outside."""
    _foreign.storages = frozenset(x.untyped_storage()._cdata for x in tensors if _is_plain(x))
    _foreign.copies = {}


def snapshot(x: Tensor, *, is_for_reading: bool = False) -> Tensor:
    """The value of `x` now, for good. Nothing is copied unless `x` or the snapshot is written to later.

    Differentiable: gradients flow through it to `x`. `data_ptr()` and `numpy()` count as writing, since torch
    cannot know what will be done with a bare pointer.
    """
    if not _is_plain(x) or type(x) is not Tensor:  # a parameter too is held by others
        return x.clone()
    if not is_for_reading and not x.is_contiguous() and _overlaps(x):
        return x.clone()  # several elements in one place: nobody could write to one of them
    if _foreign.storages and x.untyped_storage()._cdata in _foreign.storages:
        return _copy_of_foreign(x)
    try:
        return torch._lazy_clone(x)
    except RuntimeError:  # memory that torch does not own: from numpy, or mapped from a file
        return x.clone()


def _copy_of_foreign(x: Tensor) -> Tensor:
    """A copy, shared by all who only read and ask for the same."""
    if x.requires_grad or x.is_inference():
        return x.clone()
    key = (address(x), x.shape, x.stride(), x.dtype, x._version)
    if key not in _foreign.copies:
        once = x[tuple(slice(0, 1 if stride == 0 else None) for stride in x.stride())]
        _foreign.copies[key] = once.clone().expand(x.shape)  # what was expanded stays so
    return torch._lazy_clone(_foreign.copies[key])


def is_unchanged(snapshot: Tensor, x: Tensor) -> bool:
    """Whether a snapshot of `x` certainly is as it was made. A plain clone never counts as that.

    Sharing tells more than a version counter: it also sees writes through `.data`, and in inference mode.
    """
    return (
        _is_plain(snapshot)
        and torch._C._is_cow_tensor(snapshot)  # type: ignore[attr-defined]
        and address(snapshot) == address(x)
        and snapshot.shape == x.shape
        and snapshot.stride() == x.stride()
    )


def _is_plain(x: Tensor) -> bool:
    if type(x) not in _PLAIN:
        return False
    keys = torch._C._dispatch_keys(x).raw_repr()
    if keys not in _plain_keys:
        _plain_keys[keys] = _has_plain_memory(x)
    return _plain_keys[keys]


_plain_keys: dict[int, bool] = {}
"""Whether tensors are plain, by how torch dispatches on them: it tells all of what is asked here, and at once."""


def _has_plain_memory(x: Tensor) -> bool:
    return (
        (x.is_cpu or x.is_cuda)
        and x.layout is torch.strided
        and not (x.is_nested or x.is_quantized)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # inside vmap and the like
    )


def _overlaps(x: Tensor) -> bool:
    """Whether there are more elements than places for them, as in an expanded or unfolded tensor."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 < x.numel()


def address(x: Tensor) -> int:
    """Where the data of `x` begins. Unlike `data_ptr()` it leaves shared memory shared."""
    return torch._C._data_address(x) + x.storage_offset() * x.itemsize  # type: ignore[attr-defined]
