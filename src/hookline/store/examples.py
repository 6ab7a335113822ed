"""Examples: a data set, whatever it is, as one example after the other, with a sum that tells it from others."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from hookline.errors import HooklineError, StoreError
from hookline.store.manifest import Manifest, Progress
from hookline.store.token_rows import Tokens, as_tokens, raw

Example = str | Tensor | Tokens
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
            try:
                example = self._normalise(self._value(item))
            except HooklineError as error:
                raise HooklineError(f"example {self.progress.examples}: {error}") from error
            self.progress = Progress(self.progress.examples + 1, _chained(self.progress.sum, example))
            yield example

    def _value(self, item: Any) -> Any:
        is_row = isinstance(item, Mapping)
        if self._column in (None, "input_ids") and is_row and "input_ids" in item:
            return item  # with the mask beside it
        if self._column is None:
            if is_row and len(item) > 1:
                raise HooklineError(f"it has several columns, {list(item)}: say which, column={next(iter(item))!r}")
            return next(iter(item.values())) if is_row and item else item
        try:
            return item[self._column]
        except (KeyError, IndexError, TypeError):
            has = f"it has {list(item)}" if is_row else f"it is a {type(item).__name__}"
            raise HooklineError(f"there is no column {self._column!r}: {has}") from None

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
    if isinstance(dataset, Mapping) and "input_ids" in dataset:  # what a tokenizer gave for several texts
        return _rows(dataset)
    if isinstance(dataset, str | bytes | Mapping):
        raise _no_dataset(dataset)
    if isinstance(dataset, Tensor) and dataset.ndim < 2:
        raise HooklineError(f"a data set of tensors has one row for each example, not the shape {list(dataset.shape)}")
    mask = getattr(dataset, "padding_mask", None)  # of what `to_tokens` gave
    if isinstance(dataset, Tensor) and mask is not None:
        return _rows({"input_ids": dataset, "attention_mask": mask})
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(dataset, pandas.DataFrame):  # which gives its columns' names otherwise
        names = list(dataset.columns)
        return (dict(zip(names, row, strict=True)) for row in dataset.itertuples(index=False, name=None))
    try:
        return iter(dataset)
    except TypeError:
        raise _no_dataset(dataset) from None


def _rows(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a table that is given by its columns."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len({*lengths.values()}) != 1:
        raise HooklineError(f"the columns of the data set are not of one length: {lengths}")
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _no_dataset(given: Any) -> HooklineError:
    inside = f" of {list(given)[:4]}: give one of them" if isinstance(given, Mapping) else ""
    return HooklineError(
        "a data set is a list of texts, a tensor of tokens, or anything else that gives one example after the other, "
        f"not a {type(given).__name__}{inside}"
    )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset["input_ids"] if isinstance(dataset, Mapping) else dataset)
    except TypeError:  # a generator
        return None


def _chained(before: str, example: Example) -> str:
    """The sum of all examples up to this one."""
    return hashlib.blake2b(before.encode() + raw(example), digest_size=16).hexdigest()


def as_text(item: Any) -> Example:
    """An example of a language model: a text, or the ids of its tokens without padding."""
    return item if isinstance(item, str) else as_tokens(item)


def as_sample(item: Any) -> Example:
    """An example of any other network: a tensor."""
    if not isinstance(item, Tensor):
        raise HooklineError(
            f"an example of a network that is no language model is a tensor, not a {type(item).__name__}; of several "
            f"things in a tuple or a dictionary, column=… says which"
        )
    return item.detach().cpu().contiguous()
