"""Checksums of tensors: every value counts, and each is read once, on its own device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_WIDTH = 1024


def tensor_checksum(x: Tensor) -> str:
    """Returns a checksum of dtype, shape and all values; of a tensor on "meta", of dtype and shape."""
    found = hashlib.blake2b(digest_size=16)
    for part in _parts(x):
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        if part.device.type != "meta" and part.numel():
            for each in _reduced(part):
                found.update(each.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _parts(x: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor consists of: several if it is quantized, nested or distributed."""
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
    """View the bytes as a table of integers; returns the sums of its rows, the sums of its columns, and the remainder.

    They are computed on the tensor's device. A changed value changes the sum of its row, and two swapped values change
    the sums of their rows or columns.
    """
    raw = x.reshape(-1).contiguous().view(torch.uint8)  # a column is one row that is not
    whole = raw.numel() // (8 * _WIDTH) * 8 * _WIDTH
    head = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
    table = head.view(torch.int64).view(-1, _WIDTH)
    return table.sum(0), table.sum(1), raw[whole:]
