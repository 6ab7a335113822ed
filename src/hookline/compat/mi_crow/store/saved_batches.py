"""A harvested run as mi-crow's batches: padded activations, with their attention mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.store import Store


class SavedBatches:
    """The batches of the texts whose activations were saved, by the metadata of the run."""

    def __init__(self, store: Store, about: dict[str, Any]) -> None:
        self._store, self.points = store, dict(zip(about["layer_signatures"], about["points"], strict=True))
        self._size, self._has_mask = about["options"]["batch_size"], about["options"]["save_attention_mask"]

    def __len__(self) -> int:
        return -(-self._store.examples // self._size)

    def tensors(self, index: int) -> dict[str, dict[str, Tensor]]:
        """The activations of a batch by layer, [batch, pos, …], padded with 0 on the right; and the mask if saved."""
        first = index * self._size
        rows = [self._store.example(example) for example in range(first, min(first + self._size, self._store.examples))]
        mask = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.bool)
        for row, example_rows in enumerate(rows):
            mask[row, : len(example_rows)] = True
        tensors = {}
        for signature, point in self.points.items():
            values = torch.cat([example_rows[point] for example_rows in rows])
            padded = values.new_zeros(*mask.shape, *values.shape[1:])
            padded[mask] = values
            tensors[signature] = {"activations": padded}
        return tensors | ({"attention_masks": {"attention_mask": mask.long()}} if self._has_mask else {})
