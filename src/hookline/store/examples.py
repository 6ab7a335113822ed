"""Examples: a data set, whatever it is, as one example after the other, with a sum that tells it from others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError, StoreError
from hookline.store.manifest import Manifest, Progress

Example = str | Tensor
"""A text, the ids of its tokens without padding, or, of other networks, one sample."""


class Examples:
    """A data set's examples in their order; `progress` is of those that were given so far."""

    def __init__(self, dataset: Any, column: str | int | None, normalise: Callable[[Any], Example]) -> None:
        self._column, self._normalise = column, normalise
        self._items = _items(dataset)
        self.total = _length(dataset)
        self.progress = Progress()

    def __iter__(self) -> Iterator[Example]:
        for item in self._items:
            example = self._normalise(self._value(item))
            self.progress = Progress(self.progress.examples + 1, _chained(self.progress.sum, example))
            yield example

    def _value(self, item: Any) -> Any:
        if self._column is None:
            if isinstance(item, Mapping) and "input_ids" not in item:
                raise HooklineError(
                    f"the examples have several columns, {list(item)}: say which, column={next(iter(item))!r}"
                )
            return item
        try:
            return item[self._column]
        except (KeyError, IndexError, TypeError):
            has = f"it has {list(item)}" if isinstance(item, Mapping) else f"it is a {type(item).__name__}"
            raise HooklineError(f"example {self.progress.examples} has no column {self._column!r}: {has}") from None

    def batches(self, size: int) -> Iterator[tuple[Progress, list[Example]]]:
        """Each batch with how far the data set had been looked at before it."""
        before, batch = self.progress, list[Example]()
        for example in self:
            batch.append(example)
            if len(batch) == size:
                yield before, batch
                before, batch = self.progress, []
        if batch:
            yield before, batch

    def skip(self, manifest: Manifest, where: str) -> None:
        """Pass over what is stored already; StoreError if it is other data."""
        for shard in manifest.shards:
            for _ in islice(self, shard.stop_example - self.progress.examples):
                pass
            if self.progress != shard.progress:
                raise StoreError(
                    f"{where} was made from other data: among the examples {shard.first_example} to "
                    f"{shard.stop_example - 1}. Harvest into another store, or give the data set from its beginning"
                )


def _items(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, str | bytes | Mapping):
        raise _no_dataset(dataset)
    if isinstance(dataset, Tensor) and dataset.ndim < 2:
        raise HooklineError(f"a data set of tensors has one row for each example, not the shape {list(dataset.shape)}")
    mask = getattr(dataset, "padding_mask", None)  # of what `to_tokens` gave
    if isinstance(dataset, Tensor) and mask is not None:
        return ({"input_ids": row, "attention_mask": each} for row, each in zip(dataset, mask, strict=True))
    try:
        return iter(dataset)
    except TypeError:
        raise _no_dataset(dataset) from None


def _no_dataset(given: Any) -> HooklineError:
    return HooklineError(
        "a data set is a list of texts, a tensor of tokens, or anything else that gives one example after the other, "
        f"not a {type(given).__name__}"
    )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # a generator
        return None


def _chained(before: str, example: Example) -> str:
    """The sum of all examples up to this one."""
    if isinstance(example, str):
        raw = example.encode("utf-8", "surrogatepass")
    else:
        raw = (
            repr((example.dtype, tuple(example.shape))).encode()
            + example.reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return hashlib.blake2b(before.encode() + raw, digest_size=16).hexdigest()


def as_text(item: Any) -> Example:
    """An example of a language model: a text, or the ids of its tokens without padding."""
    if isinstance(item, str):
        return item
    ids, mask = (item["input_ids"], item.get("attention_mask")) if isinstance(item, Mapping) else (item, None)
    ids = torch.as_tensor(ids).cpu()
    if ids.ndim != 1 or (len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool)):
        raise HooklineError(
            f"an example is a text or one row of token ids, not {list(ids.shape)} numbers of {ids.dtype}"
        )
    return (ids if mask is None else _unpadded(ids, torch.as_tensor(mask).cpu().bool())).long().contiguous()


def _unpadded(ids: Tensor, mask: Tensor) -> Tensor:
    places = mask.nonzero().flatten()
    if mask.shape != ids.shape or (len(places) and int(places[-1] - places[0]) + 1 != len(places)):
        raise HooklineError("an attention_mask is as long as the tokens, and hides padding at either end only")
    return ids[mask]


def as_sample(item: Any) -> Example:
    """An example of any other network: a tensor."""
    if not isinstance(item, Tensor):
        raise HooklineError(
            f"an example of a network that is no language model is a tensor, not a {type(item).__name__}; of several "
            f"things in a tuple or a dictionary, column=… says which"
        )
    return item.detach().cpu().contiguous()
