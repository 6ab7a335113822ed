"""The key/value cache, backed by a cache of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError


@dataclass(frozen=True)
class HookedTransformerKeyValueCacheEntry:
    """The keys and values of one layer."""

    past_keys: Float[Tensor, "batch pos head d_head"]
    past_values: Float[Tensor, "batch pos head d_head"]

    @classmethod
    def init_cache_entry(cls, cfg: Any, device: torch.device | str | None, batch_size: int = 1) -> Self:
        """An entry without positions."""
        heads = cfg.n_key_value_heads or cfg.n_heads
        empty = torch.empty(batch_size, 0, heads, cfg.d_head, device=device, dtype=cfg.dtype)
        return cls(empty, empty.clone())


class HookedTransformerKeyValueCache:
    """Keys and values of all layers, so that a run can continue where an earlier one ended.

    kept = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device, batch_size=1)
    model(prefix, past_kv_cache=kept)
    kept.freeze()                          # later runs read it, but do not add to it
    model(rest, past_kv_cache=kept)
    """

    def __init__(self, cfg: Any, device: torch.device | str | None, batch_size: int) -> None:
        self.cfg, self.device, self.batch_size, self.frozen = cfg, device, batch_size, False
        self.previous_attention_mask: Int[Tensor, "batch pos"] = torch.empty(
            (batch_size, 0), dtype=torch.int64, device=device
        )
        self._kept: Any = None

    @classmethod
    def init_cache(cls, cfg: Any, device: torch.device | str | None, batch_size: int = 1) -> Self:
        """An empty cache."""
        return cls(cfg, device, batch_size)

    def freeze(self) -> None:
        """Freeze: later runs read it, but do not add to it."""
        self.frozen = True

    def unfreeze(self) -> None:
        """Unfreeze: later runs add to it again."""
        self.frozen = False

    @property
    def entries(self) -> list[HookedTransformerKeyValueCacheEntry]:
        """The keys and values of each layer; rotary models store rotated keys."""
        return [self[layer] for layer in range(self.cfg.n_layers)]

    def __len__(self) -> int:
        return self.cfg.n_layers

    def __getitem__(self, layer: int) -> HookedTransformerKeyValueCacheEntry:
        if self._kept is None:
            return HookedTransformerKeyValueCacheEntry.init_cache_entry(self.cfg, self.device, self.batch_size)
        kept = self._kept.layers[layer]
        return HookedTransformerKeyValueCacheEntry(kept.keys.transpose(1, 2), kept.values.transpose(1, 2))

    def append_attention_mask(self, attention_mask: Int[Tensor, "batch new"]) -> Int[Tensor, "batch pos"]:
        """The mask over all positions so far and these; stored unless frozen."""
        whole = torch.cat([self.previous_attention_mask.to(attention_mask), attention_mask], 1)
        if not self.frozen:
            self.previous_attention_mask = whole
        return whole

    @contextmanager
    def resumed(self, config: Any, mask: Int[Tensor, "batch new"]) -> Iterator[dict[str, Any]]:
        """The inputs of a run that continues from here; new keys and values are stored when it ends."""
        if len(mask) != self.batch_size:
            raise HooklineError(f"this cache has batch size {self.batch_size}, but got {len(mask)} rows")
        whole = torch.cat([self.previous_attention_mask.to(mask), mask], 1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)[:, -mask.shape[1] :]
        kept = _copied(self._kept, config)
        yield {"past_key_values": kept, "use_cache": True, "attention_mask": whole, "position_ids": positions}
        if not self.frozen:
            self._kept, self.previous_attention_mask = kept, whole


TransformerLensKeyValueCache = HookedTransformerKeyValueCache
TransformerLensKeyValueCacheEntry = HookedTransformerKeyValueCacheEntry


def _copied(kept: Any, config: Any) -> Any:
    """A shallow copy that can grow without changing the original: tensors are replaced, never overwritten."""
    from transformers import DynamicCache

    if kept is None:
        return DynamicCache(config=config)
    new = copy.copy(kept)
    new.layers = [copy.copy(layer) for layer in kept.layers]
    return new
