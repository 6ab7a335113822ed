"""ConceptDictionary: names of features."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hookline.errors import HooklineError
from hookline.files.tensorfile import make_folder, read_json, taking_apart, write_bytes

_FILE = "concepts.json"


@dataclass(frozen=True)
class Concept:
    """The name of a feature, and how well it fits."""

    name: str
    score: float


class ConceptDictionary:
    """At most one concept per feature, by the number of the feature."""

    def __init__(self, n_size: int, store: Any = None) -> None:
        self.n_size, self.store = n_size, store
        self.concepts_map: dict[int, Concept] = {}
        self._directory: Path | None = None

    def add(self, index: int, name: str, score: float) -> None:
        """Name a feature; an earlier name is replaced."""
        self.concepts_map[self._checked(index)] = Concept(name, score)

    def get(self, index: int) -> Concept | None:
        """The concept of a feature, or None."""
        return self.concepts_map.get(self._checked(index))

    def get_many(self, indices: Sequence[int]) -> dict[int, Concept | None]:
        """The concepts of several features."""
        return {index: self.get(index) for index in indices}

    def _checked(self, index: int) -> int:
        if index not in range(self.n_size):
            raise IndexError(f"feature {index} does not exist: there are {self.n_size}, 0 to {self.n_size - 1}")
        return index

    def set_directory(self, directory: str | Path) -> None:
        """The folder for `save` and `load`."""
        self._directory = Path(directory)

    def save(self, directory: str | Path | None = None) -> Path:
        """Write all concepts to `concepts.json` in a folder."""
        folder = self._folder(directory)
        make_folder(folder, "the concepts")
        concepts = {str(index): asdict(concept) for index, concept in self.concepts_map.items()}
        text = json.dumps({"n_size": self.n_size, "concepts": concepts}, ensure_ascii=False, indent=1)
        write_bytes(folder / _FILE, text.encode(), "the concepts")
        return folder / _FILE

    def load(self, directory: str | Path | None = None) -> None:
        """Read what `save` wrote, in place of the current concepts."""
        read = type(self).from_json(self._folder(directory) / _FILE, self.n_size)
        self.n_size, self.concepts_map = read.n_size, read.concepts_map

    def _folder(self, directory: str | Path | None) -> Path:
        if directory is not None:
            self.set_directory(directory)
        if self._directory is None:
            raise HooklineError("no folder was given: pass directory=, or call set_directory")
        return self._directory

    @classmethod
    def from_csv(cls, csv_filepath: str | Path, n_size: int, store: Any = None) -> Self:
        """Read a file with the columns neuron_idx, concept_name and score; the best score per feature counts."""
        with Path(csv_filepath).open(encoding="utf-8", newline="") as file, taking_apart(str(csv_filepath)):
            rows = [(int(row["neuron_idx"]), row["concept_name"], float(row["score"])) for row in csv.DictReader(file)]
        return cls._of(rows, n_size, store)

    @classmethod
    def from_json(cls, json_filepath: str | Path, n_size: int, store: Any = None) -> Self:
        """Read a file with `{"7": {"name": …, "score": …}}`, or a list of such concepts per feature."""
        data = read_json(Path(json_filepath))
        with taking_apart(str(json_filepath)):
            n_size = int(data.get("n_size", n_size))
            several = {
                int(index): concepts if isinstance(concepts, list) else [concepts]
                for index, concepts in data.get("concepts", data).items()
                if index.isdecimal()
            }
            rows = [
                (index, one["name"], float(one["score"])) for index, concepts in several.items() for one in concepts
            ]
        return cls._of(rows, n_size, store)

    @classmethod
    def _of(cls, rows: Iterable[tuple[int, str, float]], n_size: int, store: Any) -> Self:
        new = cls(n_size, store)
        for index, name, score in sorted(rows, key=lambda row: row[2]):  # the best is added last
            new.add(index, name, score)
        return new
