"""How many references there are to an object, and to the memory of a tensor.

Why: what nobody else has need not be copied.
Needs: the count of an object that only a local variable has is that of any other such object in the same frame, and
each further reference raises it; torch's count of the tensors with one memory.
Count only in the frame that has the object, against one that only this frame has.
If it does not hold, everything counts as held by others, and is copied once more.
"""

from __future__ import annotations

import sys

import torch

from hookline.engine._torch.proofs import insist, once, private

references = sys.getrefcount
memory_references = private(torch, "_C._storage_Use_Count")
"""The tensors and storages that have the memory with this address."""
tensor_references = private(torch, "Tensor._use_count")
"""How many in C refer to a tensor: one if Python alone has it; an export through DLPack is another."""


def probe() -> None:
    """A second holder of an object or of memory is counted, and goes away again."""
    mine, alone = torch.ones(1), object()
    insist(references(mine) == references(alone), "objects that one variable holds are counted alike")
    holder = [mine]
    insist(references(mine) > references(alone), "a second reference to an object is counted")
    holder.clear()
    insist(references(mine) <= references(alone), "a reference that is gone is not counted")
    address = mine.untyped_storage()._cdata
    before = memory_references(address)
    view = mine.view(1)
    insist(memory_references(address) > before, "a view of a tensor's memory is counted")
    del view
    insist(memory_references(address) == before, "a view that is gone is not counted")


can_count = once(probe)
