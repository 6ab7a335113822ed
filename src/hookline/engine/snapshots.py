"""Snapshots: tensors that keep their value whoever writes to the original, copied only if somebody does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn

from hookline.engine.structures import tensors_in
from hookline.engine.taps import now, running_modules

# torch's copy-on-write clone shares memory until either side is written to, by anybody, in Python or in a
# kernel; the writer then gets a copy. It exists for plain tensors that torch allocated itself, on CPU and CUDA; for all
# others a plain clone is as right, only slower.
_PLAIN = (Tensor, nn.Parameter)

# torch does not see what is written through a bare pointer (numpy, DLPack, a CUDA graph), and the first write that it
# does see moves a shared tensor away from that pointer. So memory that others may point to is copied instead of shared:
# whatever was exported to numpy, the inputs of the pass, the parameters and buffers of the model, and everything that
# passes when no forward pass of a whole model is known to be running.
_sharing = threading.RLock()
"""Held while memory is shared: two threads that share the same tensor for the first time would race.

Nobody waits for it for long. An interrupt may come between the last line under a lock and its release, and a copy is
as right as sharing.
"""


class _Outside:
    """The memory that was there before a forward pass began."""

    def __init__(self, root: nn.Module, inputs: Any) -> None:
        self._root, self.inputs = ref(root), inputs
        self._storages: dict[int, UntypedStorage] | None = None

    @property
    def root(self) -> nn.Module | None:
        """The whole model. It is not kept alive: torch does not tell when a pass ends in an interrupt."""
        return self._root()

    def has(self, storage: UntypedStorage) -> bool:
        """Whether this memory is among it. Looked for once in a pass, and only if anybody asks."""
        if self._storages is None:
            self._storages = {id(found): found for found in self._find()}
        return id(storage) in self._storages

    def _find(self) -> Iterator[UntypedStorage]:
        root = self.root
        waiting = [] if root is None else [root]
        seen = set(waiting)
        while waiting:
            module = waiting.pop()
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    yield from _storage(tensor)
            new = [child for child in module._modules.values() if child is not None and child not in seen]
            seen.update(new)
            waiting += new
        for tensor in tensors_in(self.inputs):
            yield from _storage(tensor)


def _storage(x: Tensor) -> Iterator[UntypedStorage]:
    try:
        yield x.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or not initialized yet: it has no memory to share
        return


class _Passes(threading.local):
    """The forward passes of whole models going on in this thread, by the number of hooks that they run in."""

    def __init__(self) -> None:
        self.outside: dict[int, list[_Outside]] = {}

    def last(self) -> _Outside | None:
        """Of the innermost pass, in the hooks that are running now."""
        some = self.outside.get(now.hooks)
        return some[-1] if some else None


_passes = _Passes()


def begin_sharing(root: nn.Module, inputs: Any) -> int:
    """A forward pass of a whole model begins: what it computes may be shared with snapshots. Returns what ends it."""
    before = _passes.last() if is_in_pass() else None
    new = _Outside(root, inputs if before is None else (before.inputs, inputs))
    some = _passes.outside.setdefault(now.hooks, [])
    some.append(new)
    return len(some) - 1


def end_sharing(begun: int = -1) -> None:
    """It is over: the pass that `begun` is of, with those inside that an interrupt ended; or else the innermost."""
    some = _passes.outside.get(now.hooks, [])
    del some[begun:]
    if not some:
        _passes.outside.pop(now.hooks, None)
    if not _passes.outside:
        now.sent.clear()  # of modules that failed


def is_in_pass() -> bool:
    """Whether a forward pass of a whole model is going on in this thread. One that an interrupt ended is struck off."""
    if _passes.outside:
        running = {id(each) for each in running_modules()}
        kept = {hooks: [each for each in some if id(each.root) in running] for hooks, some in _passes.outside.items()}
        _passes.outside = {hooks: some for hooks, some in kept.items() if some}
    return bool(_passes.outside)


def stop_sharing() -> None:
    """No pass is going on in this thread."""
    _passes.outside.clear()
    while _sharing._is_owned():  # type: ignore[attr-defined]  # left by an interrupt
        _sharing.release()


def is_part_of_pass(module: nn.Module) -> bool:
    """Whether a forward pass of a whole model is going on that `module` is only a part of."""
    outside = _passes.last()
    return outside is not None and outside.root is not module


def is_from_outside(x: Tensor) -> bool:
    """Whether `x` was there before the forward pass going on: an input, a parameter or a buffer, or a view of one."""
    outside = _passes.last()
    return outside is not None and _is_plain(x) and outside.has(x.untyped_storage())


@contextmanager
def sharing(root: nn.Module, inputs: Any) -> Iterator[None]:
    """Around a forward pass of a whole model."""
    begun = begin_sharing(root, inputs)
    try:
        yield
    finally:
        end_sharing(begun)


def snapshot(x: Tensor, *, is_for_reading: bool = False, is_ours: bool = False) -> Tensor:
    """The value of `x` now, for good. Where possible nothing is copied unless `x` or the snapshot is written to later.

    Differentiable: gradients flow through it to `x`. `data_ptr()` and `numpy()` count as writing, since torch
    cannot know what will be done with a bare pointer. `is_ours` says that nobody else can have a pointer to `x`.
    """
    if type(x) is not Tensor or not _is_plain(x):  # a parameter too is held by others
        return x.clone()
    if not is_for_reading and _overlaps(x):
        return x.clone()  # several elements in one place: nobody could write to one of them
    shared = _shared(x, is_ours=is_ours)
    return shared if shared is not None else _copied(x) if is_for_reading else x.clone()


class Loan(NamedTuple):
    """A snapshot that is given to a hook, beside a tensor that shares its memory until the hook writes to it."""

    given: Tensor
    kept: Tensor | None

    def is_unchanged(self) -> bool:
        """Whether the hook certainly did not write to what it was given."""
        if self.kept is None:
            return False
        if is_unchanged(self.given, self.kept):
            return True
        # `given.numpy()` ends the sharing, though it may be for reading only.
        is_tracked = not self.given.is_inference()
        if self.given.shape != self.kept.shape or (self.given._version if is_tracked else self.given.is_cuda):
            return False
        return _has_same_bits(self.given, self.kept)


def lend(x: Tensor) -> Loan:
    """A snapshot of `x`, with the means to tell whether it was written to."""
    if not _is_plain(x):
        return Loan(x.clone(), None)
    given = None if type(x) is not Tensor or _overlaps(x) else _shared(x)
    if given is not None:
        return Loan(given, x)
    copy = x.clone()
    given = _shared(copy, is_ours=True)
    return Loan(copy, None) if given is None else Loan(given, copy)


def _shared(x: Tensor, *, is_ours: bool = False) -> Tensor | None:
    """A snapshot that shares memory, if that is safe."""
    storage = x.untyped_storage()
    if not storage.resizable():  # there is a numpy array of it
        return None
    if not is_ours:
        outside = _passes.last()
        is_known = outside is not None and not outside.has(storage)
        if not is_known and not torch._C._is_cow_tensor(x):  # type: ignore[attr-defined]
            return None
    if not (_sharing.acquire(False) or _sharing.acquire(timeout=0.01)):
        return None
    try:
        return torch._lazy_clone(x)
    except RuntimeError:  # memory that torch does not own: from numpy, shared with a process, mapped from a file
        return None
    finally:
        _sharing.release()


def _copied(x: Tensor) -> Tensor:
    """A copy for reading: what was expanded stays so."""
    once = x[tuple(slice(0, 1 if stride == 0 else None) for stride in x.stride())]
    return once.clone().expand(x.shape)


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


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN and the sign of zero included."""
    one, other = one.detach(), other.detach()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    bits = _BITS[one.itemsize]
    return torch.equal(one.resolve_neg().view(bits), other.resolve_neg().view(bits))


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are, or are views of, the same memory; unlike a snapshot, which only shares it for now."""
    if not (_is_plain(one) and _is_plain(other)):
        return one is other
    return one.untyped_storage() is other.untyped_storage()


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
    if x.is_contiguous():
        return False
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 < x.numel()


def address(x: Tensor) -> int:
    """Where the data of `x` begins. Unlike `data_ptr()` it leaves shared memory shared."""
    return torch._C._data_address(x) + x.storage_offset() * x.itemsize  # type: ignore[attr-defined]
