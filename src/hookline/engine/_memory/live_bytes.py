"""The memory of a forward pass, without running it: the most bytes that are alive at once in a pass without data."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from hookline.engine._torch.fake_tensors import FakeTensorMode, TorchDispatchMode, tree_leaves
from hookline.engine._undo.modes import GradMode
from hookline.engine.plan import empty_copy


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return, for as long as they are alive; `peak` is the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def ignore(self, tensor: Tensor) -> None:
        """Do not count a tensor that was there before, such as a parameter, or views of it."""
        self._note(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it returns."""
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._note(x, x.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _note(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += nbytes
        weakref.finalize(storage, self._free, storage._cdata, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def pass_without_data(root: nn.Module, inputs: dict[str, Any]) -> tuple[int, Any]:
    """Run an empty copy of a model on empty inputs; returns the peak in bytes, and the output, which has no data."""
    mode, count = FakeTensorMode(allow_non_fake_inputs=True), LiveBytes()
    copied = empty_copy(root, mode)
    for tensor in (*copied.parameters(), *copied.buffers()):
        count.ignore(tensor)
    given = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    with GradMode(False), mode, count:
        output = copied(**given)
    return count.peak, output
