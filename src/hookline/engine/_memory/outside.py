"""The memory outside a forward pass: the inputs, parameters and buffers that existed before it began.

Others may hold pointers to it, so snapshots (`snapshots.py`) copy it, and share only what a pass makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import methodcaller
from typing import Any, TypeAlias
from weakref import ref

from torch import Tensor, UntypedStorage, nn

from hookline.engine.calls import running_modules
from hookline.engine.pass_state import pass_state
from hookline.values.structures import tensors_in

OwnedTensors: TypeAlias = list[dict[str, Any]]
"""The dictionaries in which modules hold their tensors."""


class PreexistingMemory:
    """The memory that existed before a forward pass began."""

    def __init__(self, root: nn.Module, inputs: Any, held: Callable[[], OwnedTensors] | None) -> None:
        self._root, self.inputs, self._held = ref(root), inputs, held
        self.storages: set[int] | None = None
        """The `id`s of its storages; None until first needed."""
        self.tensors: set[int] | None = None
        """The `id`s of the tensors in it; None until first needed."""
        self._alive: list[Any] = []
        self.copies = 0
        """How many small tensors snapshots have copied in this pass rather than look for them here."""

    @property
    def root(self) -> nn.Module | None:
        """The whole model, held weakly: torch does not report the end of a pass that was interrupted."""
        return self._root()

    def find_tensors(self) -> set[int]:
        """Find the tensors in it, once per pass."""
        root = self._root()
        held = self._held() if self._held is not None else [] if root is None else held_in(root)
        self._alive = [*tensors_in(self.inputs), *chain.from_iterable(map(_values, held))]
        self.tensors = set(map(id, self._alive))
        return self.tensors

    def find(self) -> set[int]:
        """Find it, once per pass."""
        if self.tensors is None:
            self.find_tensors()
        try:
            storages = [tensor.untyped_storage() for tensor in self._alive if tensor is not None]
        except (NotImplementedError, RuntimeError, ValueError):
            storages = [
                storage for tensor in self._alive if tensor is not None and (storage := _memory(tensor)) is not None
            ]
        self.storages = set(map(id, storages))
        self._alive += storages  # an `id` is valid while its object is alive
        return self.storages


_values = methodcaller("values")


def _memory(tensor: Tensor) -> UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return None  # sparse, or not initialized yet: it has no memory to share


def held_in(root: nn.Module) -> OwnedTensors:
    """The dictionaries in which the modules of a model hold their parameters and buffers.

    It makes no call per module and bypasses `nn.Module.__getattr__`: small networks would notice the cost.
    """
    modules, seen, held = [root], {id(root)}, []
    for module in modules:  # which grows meanwhile
        attributes = module.__dict__
        if "_modules" not in attributes:  # traced by TorchScript
            attributes = {name: getattr(module, name) for name in ("_parameters", "_buffers", "_modules")}
        held += [attributes["_parameters"], attributes["_buffers"]]
        for child in attributes["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return held


def memory_outside() -> PreexistingMemory | None:
    """The memory from before the innermost pass, at the current depth of hooks."""
    passes = pass_state.outside.get(pass_state.hooks)
    return passes[-1] if passes else None


def begin_sharing(root: nn.Module, inputs: Any, held: Callable[[], OwnedTensors] | None = None) -> int:
    """Begin a forward pass of a whole model, whose tensors snapshots may share. Returns what `end_sharing` takes.

    `held` returns `held_in(root)`, faster than a walk over all modules.
    """
    before = memory_outside() if is_in_pass() else None
    pass_state.is_in_kernel = False  # an interrupt may have left it
    new = PreexistingMemory(root, inputs if before is None else (before.inputs, inputs), held)
    passes = pass_state.outside.setdefault(pass_state.hooks, [])
    passes.append(new)
    return len(passes) - 1


def end_sharing(begun: int = -1) -> None:
    """End the pass that `begin_sharing` returned `begun` for, and those inside it; by default the innermost."""
    passes = pass_state.outside.get(pass_state.hooks, [])
    del passes[begun:]
    if not passes:
        pass_state.outside.pop(pass_state.hooks, None)
    if not pass_state.outside:
        pass_state.sent.clear()  # of modules that failed
        pass_state.copies.clear()


def is_in_pass() -> bool:
    """Whether a forward pass of a whole model is running in this thread. Interrupted ones are removed."""
    if pass_state.outside:
        running = {id(module) for module in running_modules()}
        by_depth = {
            hooks: [memory for memory in passes if id(memory.root) in running]
            for hooks, passes in pass_state.outside.items()
        }
        pass_state.outside = {hooks: passes for hooks, passes in by_depth.items() if passes}
    return bool(pass_state.outside)


def is_whole(module: nn.Module) -> bool:
    """Whether the forward pass that is running is one of `module` as the whole model."""
    passes = pass_state.outside.get(
        pass_state.hooks
    )  # as `memory_outside` does, without a call: this is asked in every event
    return bool(passes) and passes[-1]._root() is module  # type: ignore[index]


def root_of_pass() -> nn.Module | None:
    """The whole model whose forward pass is running, at the current depth of hooks."""
    outside = memory_outside()
    return None if outside is None else outside.root


@contextmanager
def sharing(root: nn.Module, inputs: Any) -> Iterator[None]:
    """Around a forward pass of a whole model."""
    begun = begin_sharing(root, inputs)
    try:
        yield
    finally:
        end_sharing(begun)
