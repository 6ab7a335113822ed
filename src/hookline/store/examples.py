"""Examples: any supported data set as a stream of examples, with a running checksum."""

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
"""A text, its token ids without padding, or one sample for a network that is not a language model."""


class Examples:
    """The examples of a data set in order; `progress` counts those that were yielded so far."""

    def __init__(self, dataset: Any, column: str | int | None, convert: Callable[[Any], Example]) -> None:
        self._column, self._convert = column, convert
        self._items = _items(dataset)
        self.total = _length(dataset)
        self.progress = Progress()

    def __iter__(self) -> Iterator[Example]:
        for item in self._items:
            try:
                example = self._convert(self._value(item))
            except HooklineError as error:
                raise HooklineError(f"example {self.progress.examples}: {error}") from error
            self.progress = Progress(self.progress.examples + 1, _chained(self.progress.sum, example))
            yield example

    def _value(self, item: Any) -> Any:
        is_row = isinstance(item, Mapping)
        if self._column in (None, "input_ids") and is_row and "input_ids" in item:
            return item  # with its mask
        if self._column is None:
            if is_row and len(item) > 1:
                raise HooklineError(
                    f"it has several columns, {list(item)}: choose one with column={next(iter(item))!r}"
                )
            return next(iter(item.values())) if is_row and item else item
        try:
            return item[self._column]
        except (KeyError, IndexError, TypeError):
            has = f"it has {list(item)}" if is_row else f"it is a {type(item).__name__}"
            raise HooklineError(f"there is no column {self._column!r}: {has}") from None

    def batches(self, size: int) -> Iterator[tuple[Progress, list[Example]]]:
        """Yield each batch with the progress before it."""
        before, batch = self.progress, list[Example]()
        for example in self:
            batch.append(example)
            if len(batch) == size:
                yield before, batch
                before, batch = self.progress, []
        if batch:
            yield before, batch

    def skip(self, manifest: Manifest, where: str) -> None:
        """Skip the examples that are already stored; StoreError if the data differs."""
        for shard in manifest.shards:
            for _ in islice(self, shard.stop_example - self.progress.examples):
                pass
            if self.progress != shard.progress:
                raise StoreError(
                    f"{where} was made from other data: it differs among the examples {shard.first_example} to "
                    f"{shard.stop_example - 1}. Harvest into another store, or pass the data set from its beginning"
                )


def _items(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, Mapping) and "input_ids" in dataset:  # the output of a tokenizer for several texts
        return _rows(dataset)
    if isinstance(dataset, str | bytes | Mapping):
        raise _no_dataset(dataset)
    if isinstance(dataset, Tensor) and dataset.ndim < 2:
        raise HooklineError(
            f"a data set given as a tensor needs one row per example, not the shape {list(dataset.shape)}"
        )
    mask = getattr(dataset, "padding_mask", None)  # of the output of `to_tokens`
    if isinstance(dataset, Tensor) and mask is not None:
        return _rows({"input_ids": dataset, "attention_mask": mask})
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(dataset, pandas.DataFrame):  # iterating over it yields column names
        names = list(dataset.columns)
        return (dict(zip(names, row, strict=True)) for row in dataset.itertuples(index=False, name=None))
    try:
        return iter(dataset)
    except TypeError:
        raise _no_dataset(dataset) from None


def _rows(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a table given by its columns."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len({*lengths.values()}) != 1:
        raise HooklineError(f"the columns of the data set have different lengths: {lengths}")
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _no_dataset(given: Any) -> HooklineError:
    inside = f" of {list(given)[:4]}: pass one of them" if isinstance(given, Mapping) else ""
    return HooklineError(
        "a data set is a list of texts, a tensor of tokens, or another iterable of examples, "
        f"not a {type(given).__name__}{inside}"
    )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset["input_ids"] if isinstance(dataset, Mapping) else dataset)
    except TypeError:  # a generator
        return None


def _chained(before: str, example: Example) -> str:
    """The checksum of all examples up to this one."""
    return hashlib.blake2b(before.encode() + raw(example), digest_size=16).hexdigest()


def as_text(item: Any) -> Example:
    """Convert an item to an example for a language model: a text, or its token ids without padding."""
    return item if isinstance(item, str) else as_tokens(item)


def as_sample(item: Any) -> Example:
    """Convert an item to an example for any other network: a tensor."""
    if not isinstance(item, Tensor):
        raise HooklineError(
            f"a network that is not a language model takes tensors, not a {type(item).__name__}; in a tuple "
            f"or a dictionary, select the tensor with column=…"
        )
    return item.detach().cpu().contiguous()
