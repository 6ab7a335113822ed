"""Examples: any supported data set as a stream of examples, with a running checksum."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from hookline.errors import HooklineError, StoreError, a_type
from hookline.store.manifest import Manifest, Progress
from hookline.text.tokenizer import Text


@dataclass(frozen=True)
class Tokens:
    """The token ids of one example without padding, and the other columns of its row."""

    ids: Tensor
    is_masked: bool = False
    """Whether an attention_mask marked the padding."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """The columns with one integer per token, such as token_type_ids."""
    others: tuple[str, ...] = ()
    """The names of all other columns."""


Example = str | Tokens | Tensor
"""A text, its tokens, or one sample for a network that is not a language model."""


BatchSize = int | Literal["auto"]

PASS_TOKENS, MOST_EXAMPLES, SAMPLES = 8192, 256, 16
"""With `batch_size="auto"`, a forward pass has at most this many tokens, padding included, and this many texts; or this
many samples of a network that is not a language model. A GPU is idle half of the time on passes of 1,000 tokens."""

_ITERABLE = ("__iter__", "__getitem__")


class Examples:
    """The examples of a data set in order; `progress` counts those that were yielded so far."""

    def __init__(self, dataset: Any, column: str | int | None, convert: Callable[[Any], Example]) -> None:
        self._column, self._convert = column, convert
        self._items = _items(dataset)
        self.progress = Progress()
        self.total: int | None = None
        with suppress(TypeError):  # a generator has no length
            self.total = len(dataset["input_ids"] if isinstance(dataset, Mapping) else dataset)

    def __iter__(self) -> Iterator[Example]:
        for item in self._items:
            yield self._counted(self._converted(item))

    def _converted(self, item: Any) -> Example:
        try:
            return self._convert(self._value(item))
        except HooklineError as error:
            raise HooklineError(f"example {self.progress.examples}: {error}") from error

    def _counted(self, example: Example) -> Example:
        chained = hashlib.blake2b(self.progress.sum.encode() + _raw(example), digest_size=16).hexdigest()
        self.progress = Progress(self.progress.examples + 1, chained)
        return example

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
            has = f"it has {list(item)}" if is_row else f"it is {a_type(item)}"
            raise HooklineError(f"there is no column {self._column!r}: {has}") from None

    def batches(self, size: BatchSize, max_tokens: int | None = None) -> Iterator[tuple[Progress, list[Example]]]:
        """Yield each batch with the progress before it; which examples it has depends only on the data."""
        before, batch, longest = self.progress, list[Example](), 0
        for item in self._items:
            example = self._converted(item)
            longest = max(longest, _length(example, max_tokens))
            if batch and len(batch) >= (_at_once(example, longest) if size == "auto" else size):
                yield before, batch  # `progress` does not count the example that begins the next batch
                before, batch, longest = self.progress, [], _length(example, max_tokens)
            batch.append(self._counted(example))
            if len(batch) == size:  # without waiting for the next example
                yield before, batch
                before, batch, longest = self.progress, [], 0
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


def _length(example: Example, max_tokens: int | None) -> int:
    """The number of tokens; of a text it is estimated, by four bytes per token."""
    length = len(example.encode("utf-8", "surrogatepass")) // 4 if isinstance(example, str) else _count(example)
    return max(1, length if max_tokens is None else min(length, max_tokens))


def _count(example: Tokens | Tensor) -> int:
    return len(example.ids) if isinstance(example, Tokens) else 1


def _at_once(example: Example, longest: int) -> int:
    """How many examples an automatic batch may have, if the longest has this many tokens."""
    return SAMPLES if isinstance(example, Tensor) else min(MOST_EXAMPLES, PASS_TOKENS // longest)


def _raw(example: Example) -> bytes:
    """The bytes of an example, for its checksum."""
    if isinstance(example, str):
        return example.encode("utf-8", "surrogatepass")
    if isinstance(example, Tokens):
        return _raw(example.ids) + b"".join(name.encode() + _raw(x) for name, x in sorted(example.extra.items()))
    shape = repr((example.dtype, tuple(example.shape))).encode()
    return shape + example.reshape(-1).view(torch.uint8).numpy().tobytes()


def _items(dataset: Any) -> Iterator[Any]:
    mask = getattr(dataset, "padding_mask", None)  # of the output of `to_tokens`
    if isinstance(dataset, Tensor) and dataset.ndim > 1 and mask is not None:
        dataset = {"input_ids": dataset, "attention_mask": mask}
    if isinstance(dataset, Mapping) and "input_ids" in dataset:  # the output of a tokenizer for several texts
        lengths = {name: len(column) for name, column in dataset.items()}
        if len({*lengths.values()}) != 1:
            raise HooklineError(f"the columns of the data set have different lengths: {lengths}")
        return (dict(zip(dataset, row, strict=True)) for row in zip(*dataset.values(), strict=True))
    if isinstance(dataset, Tensor) and dataset.ndim < 2:
        raise HooklineError(
            f"a data set given as a tensor needs one row per example, not the shape {list(dataset.shape)}"
        )
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(dataset, pandas.DataFrame):  # iterating over it yields column names
        names = list(dataset.columns)
        return (dict(zip(names, row, strict=True)) for row in dataset.itertuples(index=False, name=None))
    if isinstance(dataset, str | bytes | Mapping) or not any(hasattr(dataset, method) for method in _ITERABLE):
        inside = f" of {list(dataset)[:4]}: pass one of them" if isinstance(dataset, Mapping) else ""
        raise HooklineError(
            "a data set is a list of texts, a tensor of tokens, or another iterable of examples, "
            f"not {a_type(dataset)}{inside}"
        )
    return iter(dataset)


def as_sample(item: Any) -> Tensor:
    """Convert an item to an example for a network that is not a language model: a tensor."""
    if not isinstance(item, Tensor):
        raise HooklineError(
            f"a network that is not a language model takes tensors, not {a_type(item)}; in a tuple "
            f"or a dictionary, select the tensor with column=…"
        )
    return item.detach().cpu().contiguous()


def as_text(item: Any, text: Text | None = None) -> str | Tokens:
    """Convert an item to an example for a language model: text (also of a conversation), or its tokens."""
    item = item if text is None else text.prompts(item)
    if isinstance(item, str):
        return item
    fields = item if isinstance(item, Mapping) else {"input_ids": item}
    row = {name: value for name, value in fields.items() if value is not None and name != "labels"}
    ids, mask = _ids(row.pop("input_ids", item)), row.pop("attention_mask", None)
    if mask is None and not row:
        return Tokens(ids.clone())  # a data set may reuse its memory for the next example
    real = torch.ones(len(ids), dtype=torch.bool) if mask is None else _checked_mask(ids, mask)
    columns = {name: _numbers(value) for name, value in row.items()}
    fit = {name: x for name, x in columns.items() if x is not None and x.shape == ids.shape and _is_whole(x)}
    extra = {name: x[real].long() for name, x in fit.items()}
    return Tokens(ids[real], mask is not None, extra, tuple(name for name in columns if name not in extra))


def _ids(values: Any) -> Tensor:
    ids = _numbers(values)
    if ids is None or ids.ndim != 1 or (len(ids) and not _is_whole(ids)):
        description = _advice(values) if ids is None else f"{list(ids.shape)} numbers of {ids.dtype}"
        raise HooklineError(f"an example is a text or one row of token ids, not {description}")
    return ids.long()


def _advice(example: Any) -> str:
    """A description of an item without numbers, and what to do about it."""
    if isinstance(example, Mapping):
        return f"columns {list(example)}: choose one with column=…"
    if not isinstance(example, list | tuple):
        return f"{example!r:.60}" + (": decode it first" if isinstance(example, bytes) else "")
    if isinstance(example, tuple):
        return f"{len(example)} items in a tuple: choose one with column=0 …"
    return f"a list of {len(example)} items ({example[0]!r:.40} …): pass one example at a time, not batches"


def _numbers(values: Any) -> Tensor | None:
    """A tensor of the numbers in an item, on the CPU; None if there are none."""
    try:
        return torch.as_tensor(values).cpu()
    except (TypeError, ValueError, RuntimeError):  # texts, or rows of different lengths
        return None


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _checked_mask(ids: Tensor, attention_mask: Any) -> Tensor:
    mask = _numbers(attention_mask)
    mask = torch.zeros(0) if mask is None else mask
    places = mask.nonzero().flatten()
    if mask.shape != ids.shape or (len(places) and int(places[-1] - places[0]) + 1 != len(places)):
        raise HooklineError("an attention_mask must be as long as the tokens and may mask padding only at the ends")
    return mask.bool()
