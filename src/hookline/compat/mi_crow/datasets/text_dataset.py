"""TextDataset: one column of a data set as a sequence of texts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

from hookline.compat.mi_crow.datasets.loading_strategy import LoadingStrategy
from hookline.compat.mi_crow.wrong_argument import WrongArgumentError
from hookline.errors import HooklineError


class TextDataset:
    """Texts, from a column of a Hugging Face data set (or of anything with `column_names` and rows).

    dataset = TextDataset(Dataset.from_dict({"text": texts}), store=store)
    dataset[0], dataset[2:5], dataset.iter_batches(32)
    """

    def __init__(
        self,
        ds: Any,
        store: Any = None,
        loading_strategy: LoadingStrategy = LoadingStrategy.DISK,
        text_field: str = "text",
    ) -> None:
        columns = getattr(ds, "column_names", None)
        if columns is not None and text_field not in columns:
            raise WrongArgumentError(f"the data set has no column {text_field!r}: it has {list(columns)}")
        self._ds, self._store, self.text_field = ds, store, text_field
        self.loading_strategy = LoadingStrategy(loading_strategy)

    @classmethod
    def from_huggingface(
        cls,
        repo_id: str,
        store: Any = None,
        *,
        split: str = "train",
        loading_strategy: LoadingStrategy = LoadingStrategy.MEMORY,
        text_field: str = "text",
        limit: int | None = None,
        **options: Any,
    ) -> Self:
        """Load a data set from the hub. The other options are those of `datasets.load_dataset`."""
        return cls._loaded(repo_id, store, loading_strategy, text_field, limit, split=split, **options)

    @classmethod
    def from_csv(cls, source: str | Path, store: Any = None, **options: Any) -> Self:
        """Load a CSV file with a header; `text_field`, `limit` and `loading_strategy` are as in `from_huggingface`."""
        return cls._from_file("csv", source, store, **options)

    @classmethod
    def from_json(cls, source: str | Path, store: Any = None, **options: Any) -> Self:
        """Load a file of JSON objects, one per line or in a list."""
        return cls._from_file("json", source, store, **options)

    @classmethod
    def from_local(cls, source: str | Path, store: Any = None, *, recursive: bool = True, **options: Any) -> Self:
        """Load a CSV, TSV or JSON file, or a folder of .txt files, each of which is one text."""
        path = Path(source)
        if path.is_dir():
            files = sorted(path.glob("**/*.txt" if recursive else "*.txt"))
            if not files:
                raise WrongArgumentError(f"there are no .txt files in {path}")
            return cls._from_file("text", [str(file) for file in files], store, sample_by="document", **options)
        kinds = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json"}
        kind = kinds.get(path.suffix.lower())
        if kind is None:
            raise WrongArgumentError(f"{path} is not a folder of .txt files, or one of {', '.join(kinds)}")
        reading = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
        return cls._from_file(kind, path, store, **options | reading)

    @classmethod
    def _from_file(
        cls,
        kind: str,
        source: str | Path | list[str],
        store: Any,
        *,
        loading_strategy: LoadingStrategy = LoadingStrategy.MEMORY,
        text_field: str = "text",
        limit: int | None = None,
        **reading: Any,
    ) -> Self:
        files = source if isinstance(source, list) else str(source)
        return cls._loaded(kind, store, loading_strategy, text_field, limit, data_files=files, split="train", **reading)

    @classmethod
    def _loaded(
        cls, path: str, store: Any, strategy: LoadingStrategy, text_field: str, limit: int | None, **options: Any
    ) -> Self:
        try:
            from datasets import load_dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError as error:
            raise HooklineError("loading a data set needs the package datasets: pip install datasets") from error
        ds = load_dataset(path, streaming=strategy is LoadingStrategy.STREAMING, **options)
        if limit is not None:
            is_streaming = strategy is LoadingStrategy.STREAMING
            ds = ds.take(limit) if is_streaming else ds.select(range(min(limit, len(ds))))
        return cls(ds, store, strategy, text_field)

    @property
    def is_streaming(self) -> bool:
        """Whether rows are read as they come, so that there is no length."""
        return self.loading_strategy is LoadingStrategy.STREAMING

    def __len__(self) -> int:
        if self.is_streaming:
            raise HooklineError("a streaming data set has no length and no indices: use iter_batches")
        return len(self._ds)

    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        if isinstance(index, int):
            if index not in range(-len(self), len(self)):
                raise IndexError(f"row {index} is out of range: there are {len(self)} rows")
            return self._ds[index % len(self)][self.text_field]
        chosen = range(len(self))[index] if isinstance(index, slice) else index
        return [self[row] for row in chosen]

    def __iter__(self) -> Iterator[str]:
        return (row[self.text_field] for row in self._ds)

    iter_items = __iter__

    def iter_batches(self, batch_size: int) -> Iterator[list[str]]:
        """Yield lists of up to `batch_size` texts."""
        if batch_size < 1:
            raise WrongArgumentError(f"batch_size must be a positive integer, not {batch_size!r}")
        texts = iter(self)
        while batch := list(islice(texts, batch_size)):
            yield batch

    def extract_texts_from_batch(self, batch: list[str]) -> list[str]:
        """The texts of a batch: the batch itself."""
        return batch

    def get_all_texts(self) -> list[str]:
        """All texts, as a list."""
        return list(self)

    def get_batch(self, start: int, batch_size: int) -> list[str]:
        """The texts from `start` on, at most `batch_size` of them."""
        return self[start : start + batch_size]

    def head(self, n: int = 5) -> list[str]:
        """The first texts."""
        return list(islice(self, n))

    def sample(self, n: int = 5, seed: int | None = None) -> list[str]:
        """Some texts, drawn at random without replacement."""
        return self[random.Random(seed).sample(range(len(self)), min(n, len(self)))]

    def random_sample(self, n: int, seed: int | None = None) -> Self:
        """A data set of some texts, drawn at random without replacement."""
        rows = random.Random(seed).sample(range(len(self)), min(n, len(self)))
        return type(self)(self._ds.select(rows), self._store, self.loading_strategy, self.text_field)
