"""Keys and values of a prefix that is not recomputed, shared by all rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.functions.signatures import parameters_of

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicCache


def empty_past(root: nn.Module) -> DynamicCache | None:
    """An empty key-value cache for the model; None if it takes none."""
    from transformers.cache_utils import DynamicCache  # slow to import

    return DynamicCache() if "past_key_values" in parameters_of(root)[0] else None


def kept_pairs(past: DynamicCache | None) -> list[tuple[Tensor, Tensor]] | None:
    """Each layer's keys and values, [1, head, position, d_head]; None if a layer stores something else."""
    from transformers.cache_utils import DynamicLayer

    layers: list[Any] = [] if past is None else past.layers
    if past is None or any(type(layer) is not DynamicLayer or layer.keys is None for layer in layers):
        return None
    return [(layer.keys, layer.values) for layer in layers]


def prefix_cache(pairs: Sequence[tuple[Tensor, Tensor]], length: int) -> DynamicCache:
    """A key-value cache of the first positions, which every row of a batch has; new ones are not stored."""
    from transformers.cache_utils import DynamicCache

    past = DynamicCache()
    past.layers = layers = [_layer_class()() for _ in pairs]
    for layer, (keys, values) in zip(layers, pairs, strict=True):
        layer.keys, layer.values = keys[..., :length, :], values[..., :length, :]
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    return past


@cache
def _layer_class() -> Any:
    from transformers.cache_utils import DynamicLayer

    class PrefixLayer(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return _after(self.keys, key_states), _after(self.values, value_states)

    return PrefixLayer


def _after(before: Any, new: Tensor) -> Tensor:
    return torch.cat([before.expand(new.shape[0], *before.shape[1:]), new], dim=-2)
