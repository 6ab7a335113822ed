"""Sums of tensors: every value counts, at what it costs to read them once, wherever they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_WIDTH = 1024


def tensor_checksum(x: Tensor) -> str:
    """A sum of dtype, shape and all values. Of a tensor without values (on "meta") the values are left out."""
    found = hashlib.blake2b(digest_size=16)
    for part in _parts(x):
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        if part.device.type != "meta" and part.numel():
            for each in _reduced(part):
                found.update(each.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _parts(x: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of, if it is one of several (quantized, or spread over devices)."""
    if is_traceable_wrapper_subclass(x):
        names, _ = x.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(x, name))
        return
    x = x.detach()
    if x.layout != torch.strided:
        x = x.to_dense()
    x = x.as_subclass(Tensor)
    if x.is_nested:
        for row in x.unbind():
            yield from _parts(row)
        return
    x = x.dequantize() if x.is_quantized else x
    yield x.resolve_conj().resolve_neg()


def _reduced(x: Tensor) -> tuple[Tensor, ...]:
    """The sums of the rows and of the columns of its bytes, as a table of whole numbers; and what is left over.

    They stay where the tensor is. Any value that changes changes its row's sum, and two that change places their
    rows' or their columns'.
    """
    raw = x.reshape(-1).contiguous().view(torch.uint8)  # a column is one row that is not
    whole = raw.numel() // (8 * _WIDTH) * 8 * _WIDTH
    head = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
    table = head.view(torch.int64).view(-1, _WIDTH)
    return table.sum(0), table.sum(1), raw[whole:]
