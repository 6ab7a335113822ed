"""Notebooks as raw JSON: the code of each cell, with the place of every string in the file.

A notebook is changed by replacing the strings of single source lines. Everything else in the file (outputs, metadata,
indentation, the order of keys) stays as it is, byte for byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # (not in the stubs)
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from hookline.migrate.import_changes import LIBRARIES, Insertion, SourceLines, inserted

PYTHON_CELL_MAGICS = ("time", "timeit", "capture", "prun", "memit", "python", "python3", "debug")
_LINE_MAGIC = re.compile(r"^(\s*)(?:[%!?].*|[\w.*]+\?{1,2}\s*)$")
_ASSIGNED_MAGIC = re.compile(r"^(\s*[\w.,\[\]() ]+=\s*)[%!].*$")
_PIP = re.compile(r"\s*[%!]\s*(?:uv\s+|[\w./{}-]*python[\w.]*\s+-m\s+)?pip3?\s+install\s")
_NAMES = "|".join(library.replace("_", "[-_]?") for library in LIBRARIES)
_REQUIREMENT = re.compile(
    rf"""(["']?)(?:(?:{_NAMES})(?:\[[\w,-]*\])?(?:[=<>~!][^"']*)?|(?:git\+)?\w+://[^"']+/(?:{_NAMES})(?:\.git)?(?:[@#][^"']*)?)\1""",
    re.I,
)


class PlacedString(str):
    """A string of a JSON file, with the span of its token there."""

    span: tuple[int, int]


@dataclass(frozen=True)
class CodeCell:
    """A code cell: its number among all cells, from 1, and the strings of its source."""

    number: int
    parts: tuple[PlacedString, ...]

    @property
    def text(self) -> str:
        """The source of the cell."""
        return "".join(self.parts)

    def new_tokens(self, raw: str, insertions: list[Insertion]) -> list[tuple[tuple[int, int], str]]:
        """Return the tokens of the file that insertions into this cell's text change: their spans, and new tokens."""
        tokens, begin = [], 0
        for index, part in enumerate(self.parts):
            end = begin + len(part) + (index == len(self.parts) - 1)
            part_insertions = [
                insertion._replace(at=insertion.at - begin) for insertion in insertions if begin <= insertion.at < end
            ]
            if part_insertions:
                is_ascii = raw[slice(*part.span)].isascii()
                tokens.append((part.span, json.dumps(inserted(part, part_insertions), ensure_ascii=is_ascii)))
            begin = end
        return tokens


def code_cells(raw: str) -> list[CodeCell]:
    """Return the code cells of a notebook of format 4."""
    notebook = _decoder().decode(raw)
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ValueError(
            "not a notebook of format 4, which has a list of cells (jupyter nbconvert converts older ones)"
        )
    code = []
    for number, cell in enumerate(cells, 1):
        if cell.get("cell_type") == "code":
            source = cell.get("source", [])
            parts = tuple(source) if isinstance(source, list) else (source,)
            if not all(isinstance(part, PlacedString) for part in parts):
                raise ValueError(f"the source of cell {number} is not text")
            code.append(CodeCell(number, parts))
    return code


def requirement_changes(text: str) -> Iterator[Insertion]:
    """Yield the changes of a cell's `%pip install` and `!pip install` lines after which they install hookline."""
    lines = SourceLines(text)
    continues = False
    for number, start in enumerate(lines.starts, 1):
        line = lines.line(number)
        pip = _PIP.match(line)
        if continues or pip:
            for word in re.compile(r"\S+").finditer(line, pip.end() if pip else 0):
                if word[0].startswith("#"):
                    break
                if _REQUIREMENT.fullmatch(word[0]):
                    yield Insertion(start + word.start(), "hookline", len(word[0]))
        continues = (continues or pip is not None) and line.endswith("\\")


def without_magics(text: str) -> str | None:
    """Return a cell's code with its magics masked, line by line, or None if the cell has another language."""
    lines = text.split("\n")
    first = next((index for index, line in enumerate(lines) if line.strip()), 0)
    if lines[first].startswith("%%"):
        if (lines[first][2:].split() or [""])[0] not in PYTHON_CELL_MAGICS:
            return None
        lines[first] = ""
    continues = False
    for index, line in enumerate(lines):
        magic = _LINE_MAGIC.match(line)
        if continues or magic:
            continues = line.rstrip().endswith("\\")
            lines[index] = f"{magic[1]}pass" if magic else ""
        else:
            lines[index] = _ASSIGNED_MAGIC.sub(r"\1None", line)
    return "\n".join(lines)


def _decoder() -> json.JSONDecoder:
    """A decoder whose strings know their places."""

    def parse_string(text: str, begin: int, strict: bool = True) -> tuple[PlacedString, int]:
        value, end = scanstring(text, begin, strict)
        placed = PlacedString(value)
        placed.span = begin - 1, end
        return placed, end

    decoder: Any = json.JSONDecoder()
    decoder.parse_string = parse_string
    decoder.scan_once = py_make_scanner(decoder)
    return decoder
