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


@dataclass(eq=False)
class HookedTransformerKeyValueCacheEntry:
    """The keys and values of one layer; rotary models store rotated keys."""

    past_keys: Float[Tensor, "batch pos head d_head"]
    past_values: Float[Tensor, "batch pos head d_head"]
    frozen: bool = False

    @classmethod
    def init_cache_entry(cls, cfg: Any, device: torch.device | str | None, batch_size: int = 1) -> Self:
        """An entry without positions."""
        heads = cfg.n_key_value_heads or cfg.n_heads
        empty = torch.empty(batch_size, 0, heads, cfg.d_head, device=device, dtype=cfg.dtype)
        return cls(empty, empty.clone())

    def append(
        self, new_keys: Float[Tensor, "batch new head d_head"], new_values: Float[Tensor, "batch new head d_head"]
    ) -> tuple[Tensor, Tensor]:
        """All keys and values, with these at the end; stored unless frozen."""
        keys = torch.cat([self.past_keys.to(new_keys), new_keys], 1)
        values = torch.cat([self.past_values.to(new_values), new_values], 1)
        if not self.frozen:
            self.past_keys, self.past_values = keys, values
        return keys, values


class HookedTransformerKeyValueCache:
    """Keys and values of all layers, so that a run can continue where an earlier one ended.

    kept = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device, batch_size=1)
    model(prefix, past_kv_cache=kept)
    kept.freeze()                          # later runs read it, but do not add to it
    model(rest, past_kv_cache=kept)
    """

    def __init__(
        self,
        entries: list[HookedTransformerKeyValueCacheEntry],
        previous_attention_mask: Int[Tensor, "batch pos"],
        frozen: bool = False,
    ) -> None:
        self.entries, self.previous_attention_mask, self.frozen = entries, previous_attention_mask, frozen
        self._kept: Any = None
        self._stored: list[tuple[Tensor, Tensor]] = []
        """The tensors of the entries as the last run left them."""

    @classmethod
    def init_cache(cls, cfg: Any, device: torch.device | str | None, batch_size: int = 1) -> Self:
        """An empty cache."""
        entry = HookedTransformerKeyValueCacheEntry.init_cache_entry
        mask = torch.empty((batch_size, 0), dtype=torch.int64, device=device)
        return cls([entry(cfg, device, batch_size) for _ in range(cfg.n_layers)], mask)

    def freeze(self) -> None:
        """Freeze: later runs read it, but do not add to it."""
        self._freeze(True)

    def unfreeze(self) -> None:
        """Unfreeze: later runs add to it again."""
        self._freeze(False)

    def _freeze(self, frozen: bool) -> None:
        self.frozen = frozen
        for entry in self.entries:
            entry.frozen = frozen

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, layer: int) -> HookedTransformerKeyValueCacheEntry:
        return self.entries[layer]

    def append_attention_mask(self, attention_mask: Int[Tensor, "batch new"]) -> Int[Tensor, "batch pos"]:
        """The mask over all positions so far and these; stored unless frozen."""
        whole = torch.cat([self.previous_attention_mask.to(attention_mask), attention_mask], 1)
        if not self.frozen:
            self.previous_attention_mask = whole
        return whole

    @contextmanager
    def resumed(self, config: Any, new: Tensor, new_mask: Tensor | None) -> Iterator[dict[str, Any]]:
        """The inputs of a run that continues from here; new keys and values are stored when it ends.

        `new` are tokens or a stream, and `new_mask` is their mask, which may begin with the mask of earlier tokens.
        """
        shape = new.shape[:2]
        mask = new.new_ones(shape, dtype=torch.int64) if new_mask is None else new_mask[:, -shape[1] :].to(new.device)
        rows = len(self.previous_attention_mask)
        if len(mask) != rows:
            raise HooklineError(f"this cache has batch size {rows}, but got {len(mask)} rows")
        whole = torch.cat([self.previous_attention_mask.to(mask), mask], 1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)[:, -mask.shape[1] :]
        cache = self._copied(config)
        yield {"past_key_values": cache, "use_cache": True, "attention_mask": whole, "position_ids": positions}
        if not self.frozen:
            self._kept, self.previous_attention_mask = cache, whole
            for entry, layer in zip(self.entries, cache.layers, strict=False):
                if isinstance(keys := getattr(layer, "keys", None), Tensor):
                    entry.past_keys, entry.past_values = keys.transpose(1, 2), layer.values.transpose(1, 2)
            self._stored = [(entry.past_keys, entry.past_values) for entry in self.entries]

    def _copied(self, config: Any) -> Any:
        """A cache of transformers that can grow without changing this one: tensors are replaced, never overwritten.

        It is made from the entries, unless they are still those of the last run: sliding windows have more state.
        """
        from transformers import DynamicCache

        now = [(entry.past_keys, entry.past_values) for entry in self.entries]
        if self._kept is not None and all(a is c and b is d for (a, b), (c, d) in zip(now, self._stored, strict=True)):
            new = copy.copy(self._kept)
            new.layers = [copy.copy(layer) for layer in self._kept.layers]
            return new
        new = DynamicCache(config=config)
        for layer, (keys, values) in enumerate(now):
            if keys.shape[1]:
                new.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
        return new


def get_pos_offset(past_kv_cache: HookedTransformerKeyValueCache | None, batch_size: int) -> int:  # noqa: ARG001
    """The number of positions in a cache."""
    return 0 if past_kv_cache is None else past_kv_cache[0].past_keys.shape[1]


TransformerLensKeyValueCache = HookedTransformerKeyValueCache
TransformerLensKeyValueCacheEntry = HookedTransformerKeyValueCacheEntry
