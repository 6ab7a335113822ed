"""Snapshots: tensors that keep their value when the original is written to, copied only when that happens."""

from __future__ import annotations

import threading
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hookline.engine._memory.outside import memory_outside
from hookline.engine._torch.copy_on_write import can_share, current_stream, data_address, is_shared, lazy_clone
from hookline.engine._torch.interrupts import is_held_here
from hookline.engine._torch.refcounts import can_count, memory_references, references, tensor_references
from hookline.engine._torch.transforms import is_wrapped, unwrapped
from hookline.engine.pass_state import pass_state

# torch's copy-on-write clone shares memory until either side is written to, in Python or in a kernel; the writer then
# gets a copy. It exists for plain tensors that torch allocated itself, on CPU and CUDA; for all others a plain clone is
# equally correct, but slower.
_PLAIN = (Tensor, nn.Parameter)

# torch does not see writes through a bare pointer (numpy, DLPack, a CUDA graph), and the first write that it does see
# moves a shared tensor away from that pointer. So memory that others may point to is copied instead of shared: tensors
# exported to numpy, the inputs of the pass, the parameters and buffers of the model, and every tensor outside a forward
# pass of a whole model.
#
# On a GPU torch makes the copy in the default stream, and no other stream waits for that. So in other streams memory is
# copied at once.
_sharing = threading.RLock()
"""Held while memory is shared: two threads that share the same tensor for the first time would race.

Nobody waits for it for long: an interrupt may come between the last line under a lock and its release, and a copy is as
correct as sharing.
"""


_SMALL, _FEW = 1 << 17, 2
"""In each pass, a few tensors with few elements are copied rather than looked for among all parameters."""

_STRIDED = torch.strided


def _owners(x: Tensor) -> tuple[int, int]:
    """The references to the object of the memory of `x`, beyond those of any local variable, and to the memory."""
    storage, alone = x.untyped_storage(), object()
    return references(storage) - references(alone), memory_references(storage._cdata)


_ONE_OWNER = _owners(torch.empty(0))
"""The owners of memory that only one tensor has, and no view of it."""
_ONE_TENSOR = _ONE_OWNER[1]
_NOT_EXPORTED = 1 - _ONE_TENSOR
"""The uses of a tensor less those of its memory: each view uses both, an export through DLPack only the tensor."""


def stop_sharing() -> None:
    """Note that no pass is running in this thread."""
    pass_state.outside.clear()
    while is_held_here(_sharing):  # left by an interrupt
        _sharing.release()


def is_from_outside(x: Tensor) -> bool:
    """Whether `x` existed before the current forward pass: an input, a parameter or a buffer, or a view of one."""
    outside = memory_outside()
    return outside is not None and _is_plain(x) and id(x.untyped_storage()) in (outside.storages or outside.find())


def snapshot(x: Tensor, *, is_for_reading: bool = False, is_ours: bool = False) -> Tensor:
    """Return the current value of `x`. Where possible it is copied only when `x` or the snapshot is written to later.

    Differentiable: gradients flow through it to `x`. `data_ptr()` and `numpy()` count as writing, because torch cannot
    know how a bare pointer is used. `is_ours` states that nobody else can have a pointer to `x`.
    """
    if not (is_for_reading or is_ours) and _is_better_copied(x):
        return x.clone() if x.is_contiguous() else _clone(x)
    same = shared(x, is_for_reading=is_for_reading, is_ours=is_ours)
    if same is not None:
        return same
    return _copied(x) if is_for_reading and type(x) is Tensor and _is_plain(x) else _clone(x)


def _clone(x: Tensor) -> Tensor:
    """Copy `x` with its strides: kernels compute, and round, contiguous memory in other ways than a view with gaps."""
    copy = x.clone()
    if copy.is_contiguous() == x.is_contiguous() or not _is_plain(x) or has_overlaps(x):
        return copy
    return x.new_empty_strided(x.shape, x.stride()).copy_(x)


def _is_better_copied(x: Tensor) -> bool:
    """Whether a copy costs less than to find out whether `x` can be shared: for a few small tensors in each pass."""
    passes = pass_state.outside.get(pass_state.hooks)  # as `memory_outside` does, without a call
    outside = passes[-1] if passes else None
    if outside is None or outside.copies >= _FEW or outside.tensors is not None or x.numel() > _SMALL:
        return False
    outside.copies += 1
    return True


Loan: TypeAlias = tuple[Tensor, Tensor | None]
"""A snapshot for a hook, and a tensor that shares its memory until the hook writes to it; None if none can."""


def lend(x: Tensor) -> Loan:
    """Return a snapshot of `x` and what `is_as_lent` needs to detect writes to it."""
    if not _is_plain(x):
        return x.clone(), x if x.is_nested else None
    given = None if _is_better_copied(x) else shared(x)
    if given is not None:
        return given, x
    copy = x.clone() if x.is_contiguous() else _clone(x)
    given = _lazy_clone(copy)  # as `shared`: nobody else has the copy
    return (copy, None) if given is None else (given, copy)


def is_as_lent(given: Tensor, kept: Tensor | None) -> bool:
    """Whether a hook certainly did not write to the snapshot that it was given."""
    if kept is None:
        return False
    if is_unchanged(given, kept):
        return True
    # `given.numpy()` ends the sharing, though it may be for reading only.
    is_tracked, is_nested = not given.is_inference(), given.is_nested
    if given._version if is_tracked else given.is_cuda and not is_nested:
        return False
    return (is_nested or given.shape == kept.shape) and has_same_bits(given, kept)


def shared(x: Tensor, *, is_for_reading: bool = False, is_ours: bool = False) -> Tensor | None:
    """Return a snapshot that shares memory; None if that is not safe."""
    is_plain = (  # as `_is_plain`, which would cost a call at each event; a parameter is held by others
        type(x) is Tensor
        and (x.is_cpu or x.is_cuda)
        and x.layout is _STRIDED
        and not (x.is_nested or x.is_quantized)
        and not is_wrapped(x)
    )
    if not (is_plain and can_share()):
        return None
    if not is_for_reading and not x.is_contiguous() and has_overlaps(x):
        return None  # several elements in one place: nobody could write to one of them
    if x.is_cuda and current_stream(x.get_device()):  # type: ignore[misc]
        return None
    storage = x.untyped_storage()
    if is_shared(x):  # it is shared already, so that it may be, and not for the first time in two threads
        try:
            return lazy_clone(x)
        except RuntimeError:  # as `_lazy_clone`, without a call
            return None
    if not storage.resizable():  # there is a numpy array of it
        return None
    if not is_ours:
        if not (x.requires_grad or pass_state.is_in_kernel):  # else it is not exported through DLPack, which holds it
            owner = x if x._base is None else x._base
            uses = tensor_references(owner)
            if uses > 1 if owner is x else uses - memory_references(storage._cdata) > _NOT_EXPORTED:
                return None
        passes = pass_state.outside.get(pass_state.hooks)  # as `memory_outside` does, without a call
        outside = passes[-1] if passes else None
        if outside is None:
            is_known = False
        elif outside.storages is None and can_count() and memory_references(storage._cdata) == _ONE_TENSOR:
            # No other tensor has this memory. To look at the memory of all parameters would take long.
            is_known = id(x) not in (outside.tensors or outside.find_tensors())
        else:
            is_known = id(storage) not in (outside.storages or outside.find())
        if not is_known:
            return None
    if not (_sharing.acquire(False) or _sharing.acquire(timeout=0.01)):
        return None
    try:
        return lazy_clone(x)
    except RuntimeError:  # as `_lazy_clone`, without a call
        return None
    finally:
        _sharing.release()


def own(x: Tensor) -> Tensor:
    """Return `x`, which nobody writes to, in memory of its own, at the latest when it is written to."""
    same = _lazy_clone(x)
    return x.clone() if same is None else same


def _lazy_clone(x: Tensor) -> Tensor | None:
    if not can_share():
        return None
    if x.is_cuda and current_stream(x.get_device()):  # type: ignore[misc]
        return None
    try:
        return lazy_clone(x)
    except RuntimeError:  # memory that torch does not own: from numpy, shared with a process, mapped from a file
        return None


def _copied(x: Tensor) -> Tensor:
    """Return a copy for reading; expanded dimensions stay expanded."""
    once = x[tuple(slice(0, 1 if stride == 0 else None) for stride in x.stride())]
    return once.clone().expand(x.shape)


def separated(x: Tensor) -> Tensor:
    """Return `x`; a copy if several of its elements are at one address, where a write to one would change others."""
    if not _is_plain(x) or x.is_contiguous() or not has_overlaps(x):
        return x
    copy = x.clone(memory_format=torch.contiguous_format)
    vars(copy).update(vars(x))  # what was noted on it
    return copy


def is_unchanged(snapshot: Tensor, x: Tensor) -> bool:
    """Whether certainly nobody wrote to `x` or to its snapshot. A plain clone never counts as unchanged.

    Shared memory detects more than a version counter: also writes through `.data`, and in inference mode.
    """
    return (
        can_share()
        and _is_plain(snapshot)
        and is_shared(snapshot)
        and address(snapshot) == address(x)
        and snapshot.shape == x.shape
        and snapshot.stride() == x.stride()
    )


def has_own_memory(x: Tensor) -> bool:
    """Whether nobody else has the memory of `x`: no view, no storage object, no other process."""
    if not (can_count() and _is_plain(x)) or (not x.is_contiguous() and has_overlaps(x)):
        return False
    storage = x.untyped_storage()
    is_owned = storage.resizable() and not (x.is_cpu and storage.is_shared())
    del storage  # the same object as one that somebody kept
    return is_owned and _owners(x) == _ONE_OWNER


def inside_transform(x: Tensor) -> Tensor | None:
    """The tensor that `x` wraps inside `torch.func.grad`, `vmap` and the like; None outside of them.

    Memory cannot be shared there. This tensor counts writes to `x`, which `x` itself does not in `vmap`.
    """
    if not is_wrapped(x):
        return None
    while is_wrapped(x):
        x = unwrapped(x)
    return x


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN and the sign of zero included."""
    with torch.no_grad():
        return all(map(_are_same_bits, _dense_parts(one), _dense_parts(other)))


def _dense_parts(x: Tensor) -> tuple[Tensor, ...]:
    """The plain tensors that the values of `x` are in."""
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.is_quantized:
        return (x.int_repr(),)
    if x.is_nested:
        return x.unbind()
    return (x if x.layout is _STRIDED else x.values(),)


def _are_same_bits(one: Tensor, other: Tensor) -> bool:
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    bits = _BITS[one.itemsize]
    return torch.equal(one.resolve_neg().view(bits), other.resolve_neg().view(bits))


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory; a snapshot is not, it only shares memory until a write."""
    if not (_is_plain(one) and _is_plain(other)):
        return one is other
    return one.untyped_storage() is other.untyped_storage()


def _is_plain(x: Tensor) -> bool:
    return (
        type(x) in _PLAIN
        and (x.is_cpu or x.is_cuda)
        and x.layout is _STRIDED
        and not (x.is_nested or x.is_quantized)
        and not is_wrapped(x)  # inside vmap and the like
    )


def has_overlaps(x: Tensor) -> bool:
    """Whether several elements are at one address, as in an expanded or unfolded tensor."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 < x.numel()


def address(x: Tensor) -> int:
    """The address of the data of `x`. Unlike `data_ptr()`, it leaves shared memory shared."""
    return data_address(x) + x.storage_offset() * x.itemsize
