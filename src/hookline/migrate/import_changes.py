"""The imports of a source text that change, as the characters to insert."""

from __future__ import annotations

import ast
import pkgutil
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import hookline.compat

LIBRARIES = tuple(sorted(module.name for module in pkgutil.iter_modules(hookline.compat.__path__) if module.ispkg))
PREFIX = "hookline.compat."


class Insertion(NamedTuple):
    """Characters to insert at an offset, in place of so many others."""

    at: int
    text: str
    removed: int = 0


class SourceLines:
    """A text whose lines are those of Python's parser: a form feed, for example, does not end a line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", text))]

    def line_at(self, offset: int) -> int:
        """Return the number of the line that has the character at `offset`, from 1."""
        return bisect_right(self.starts, offset)

    def line(self, number: int) -> str:
        """Return a line without its end."""
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[self.starts[number - 1] : end].rstrip("\r\n")

    def offset(self, number: int, column: int) -> int:
        """Return the offset of a column, which the parser counts in bytes of UTF-8."""
        return self.starts[number - 1] + len(self.line(number).encode()[:column].decode())


def parsed(text: str) -> ast.Module:
    """Parse a text, without warnings about its escapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def library_of(module: str) -> str | None:
    """Return the library that a module belongs to, if hookline has its interface."""
    top = module.partition(".")[0]
    return top if top in LIBRARIES else None


def import_insertions(tree: ast.Module, lines: SourceLines) -> Iterator[Insertion]:
    """Yield the insertions after which a text imports `hookline.compat.<library>`; the tree is that of the text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and library_of(node.module or ""):
            start = lines.offset(node.lineno, node.col_offset)
            match = re.compile(r"from(?:\s|\\)+").match(lines.text, start)
            assert match is not None, "a statement of its own begins with `from`"
            yield Insertion(match.end(), PREFIX)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if library := library_of(alias.name):
                    start = lines.offset(alias.lineno, alias.col_offset)
                    yield Insertion(start, PREFIX)
                    if alias.asname is None:  # the import binds the library's name, which the code goes on using
                        end = lines.offset(alias.end_lineno or alias.lineno, alias.end_col_offset or 0)
                        again = "" if alias.name == library else f", {PREFIX}{library}"
                        yield Insertion(end, f"{again} as {library}")


def inserted(text: str, insertions: list[Insertion]) -> str:
    """Return the text with all insertions made."""
    return spliced(text, [((at, at + removed), new) for at, new, removed in insertions])


def spliced(text: str, parts: list[tuple[tuple[int, int], str]]) -> str:
    """Return the text with new parts in place of the given spans."""
    pieces, at = [], 0
    for (start, end), new in sorted(parts):
        pieces += [text[at:start], new]
        at = end
    return "".join([*pieces, text[at:]])
