"""Keys and values of a prefix that is not recomputed, shared by all rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


class PrefixLayer(DynamicLayer):
    """One layer's keys and values of the prefix; new ones are not stored."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the prefix, repeated for each row, followed by the new keys and values."""
        assert self.keys is not None  # from the beginning
        assert self.values is not None
        return _after(self.keys, key_states), _after(self.values, value_states)


def _after(before: Tensor, new: Tensor) -> Tensor:
    return torch.cat([before.expand(new.shape[0], *before.shape[1:]), new], dim=-2)


def kept_pairs(cache: DynamicCache) -> list[tuple[Tensor, Tensor]] | None:
    """Each layer's keys and values, [1, head, position, d_head]; None if a layer stores something else."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for layer in cache.layers:
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            return None
        pairs.append((layer.keys, layer.values))
    return pairs


def prefix_cache(pairs: Sequence[tuple[Tensor, Tensor]], length: int) -> DynamicCache:
    """A key-value cache of the first positions."""
    cache = DynamicCache()
    cache.layers = [PrefixLayer(keys[..., :length, :], values[..., :length, :]) for keys, values in pairs]
    return cache
