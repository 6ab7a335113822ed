"""The changes of a file, and of all files under a path; a file is written as a whole or not at all."""

from __future__ import annotations

import ast
import io
import os
import shutil
import stat
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hookline.migrate.differences import Uses
from hookline.migrate.import_changes import (
    LIBRARIES,
    Insertion,
    SourceLines,
    import_insertions,
    inserted,
    parsed,
    spliced,
)
from hookline.migrate.notebook_cells import CodeCell, code_cells, requirement_changes, without_magics

SUFFIXES = (".py", ".ipynb")


class FileLine(NamedTuple):
    """A line, in a cell of a notebook or in a script; both count from 1, and cells of text count too."""

    cell: int | None
    line: int

    def __str__(self) -> str:
        return f"line {self.line}" if self.cell is None else f"cell {self.cell}, line {self.line}"


@dataclass(frozen=True)
class ImportChange:
    """A line with an import, or an installation in a notebook, that changes."""

    place: FileLine
    old: str
    new: str


@dataclass(frozen=True)
class BehaviorChange:
    """Something that will behave differently, or was left unchanged, and the lines where it occurs."""

    subject: str
    text: str
    places: tuple[FileLine, ...]


@dataclass(frozen=True)
class FileReport:
    """What changes in a file, what will behave differently, and the error if the file cannot be read or written."""

    path: Path
    changes: tuple[ImportChange, ...] = ()
    differences: tuple[BehaviorChange, ...] = ()
    error: str | None = None
    is_written: bool = False

    def __str__(self) -> str:
        lines = [str(self.path)]
        for change in self.changes:
            lines += [f"  {change.place}", f"    - {change.old.strip()}", f"    + {change.new.strip()}"]
        for difference in self.differences:
            subject = "" if difference.subject in difference.text else f"{difference.subject}: "
            lines += [f"  {_places(difference.places)}: {subject}{difference.text}"]
        return "\n".join([*lines, *([f"  error: {self.error}"] if self.error else [])])

    def to_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        changes = [asdict(change) | {"place": change.place._asdict()} for change in self.changes]
        differences = [
            asdict(difference) | {"places": [p._asdict() for p in difference.places]} for difference in self.differences
        ]
        return asdict(self) | {"path": str(self.path), "changes": changes, "differences": differences}


class _Code(NamedTuple):
    """A piece of Python: a script, or a cell that has no other language."""

    cell: CodeCell | None
    lines: SourceLines
    tree: ast.Module
    insertions: list[Insertion]

    def place(self, line: int) -> FileLine:
        return FileLine(self.cell.number if self.cell else None, line)


def migrate(paths: Iterable[str | Path], *, write: bool = False) -> Iterator[FileReport]:
    """Yield what changes in each script and notebook of the paths, folders with their subfolders; `write` changes them.

    Links inside folders are not followed, and folders that are hidden or virtual environments are left out. A file that
    cannot be read, parsed or written gets a report with an `error`, and is left as it is.
    """
    seen = set()
    for path in paths:
        for file in _files(Path(path)):
            if (real := os.path.realpath(file)) not in seen:
                seen.add(real)
                yield _migrated(file, write)


def summary(reports: Sequence[FileReport]) -> str:
    """Return how many files change, or were changed, and how many could not be."""
    changing = [report for report in reports if report.changes and not report.error]
    done = all(report.is_written for report in changing)
    text = f"{len(changing)} of {len(reports)} files {'changed' if changing and done else 'to change'}"
    failed = sum(report.error is not None for report in reports)
    text += f", {failed} with errors" if failed else ""
    return text if done else f"{text}; --write changes them"


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if _is_own(Path(folder, name)))
        files = (Path(folder, name) for name in sorted(names))
        yield from (file for file in files if file.suffix in SUFFIXES and not file.is_symlink())


def _is_own(folder: Path) -> bool:
    return not folder.name.startswith((".", "__pycache__", "node_modules")) and not (folder / "pyvenv.cfg").exists()


def _migrated(path: Path, write: bool) -> FileReport:
    report = FileReport(path)
    try:
        if not path.exists():
            raise ValueError("there is no such file or folder")
        if path.suffix not in SUFFIXES:
            raise ValueError("neither a script (.py) nor a notebook (.ipynb)")
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("not a regular file")
        data = path.read_bytes()
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0] if path.suffix == ".py" else "utf-8"
        raw = data.decode(encoding)
        if raw.encode(encoding) != data:
            raise ValueError(f"its encoding, {encoding}, has several spellings of one text")
        report, new = (_script if path.suffix == ".py" else _notebook)(report, raw)
        if write and new != raw:
            _write(path, new.encode(encoding))
            report = replace(report, is_written=True)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return replace(report, error=_message(error))
    return report


def _script(report: FileReport, raw: str) -> tuple[FileReport, str]:
    lines = SourceLines(raw)
    tree = parsed(raw)
    code = _Code(None, lines, tree, [*import_insertions(tree, lines)])
    return _reported(report, [code], []), inserted(raw, code.insertions)


def _notebook(report: FileReport, raw: str) -> tuple[FileReport, str]:
    codes: list[_Code] = []
    left: list[BehaviorChange] = []
    for cell in code_cells(raw.removeprefix("\ufeff").rjust(len(raw))):
        lines = SourceLines(cell.text)
        if (tree := _tree(cell)) is not None:
            changes = [*import_insertions(tree, lines), *requirement_changes(cell.text)]
            codes.append(_Code(cell, lines, tree, changes))
        left += _unchanged(cell, lines, tree)
    tokens = [token for code in codes if code.cell for token in code.cell.new_tokens(raw, code.insertions)]
    return _reported(report, codes, left), spliced(raw, tokens)


def _tree(cell: CodeCell) -> ast.Module | None:
    """The tree of a cell; None if it has another language, or cannot be parsed but names none of the libraries."""
    try:
        return parsed(cell.text)
    except (SyntaxError, ValueError):
        masked = without_magics(cell.text)
    try:
        return None if masked is None else parsed(masked)
    except (SyntaxError, ValueError) as error:
        if not _names_library(cell.text):
            return None
        raise ValueError(f"cell {cell.number}: {_message(error)}") from None


def _unchanged(cell: CodeCell, lines: SourceLines, tree: ast.Module | None) -> Iterator[BehaviorChange]:
    """Lines that name a library but are not Python: magics, shell commands, cells of another language."""
    changed = set() if tree is None else {lines.line_at(insertion.at) for insertion in requirement_changes(cell.text)}
    for number in sorted({*range(1, len(lines.starts) + 1)} - changed):
        line = lines.line(number)
        if _names_library(line) and (tree is None or line.lstrip().startswith(("%", "!"))):
            yield BehaviorChange(line.strip(), "not Python, and not changed", (FileLine(cell.number, number),))


def _names_library(text: str) -> bool:
    return any(library in text for library in LIBRARIES)


def _reported(report: FileReport, codes: list[_Code], left: list[BehaviorChange]) -> FileReport:
    """The report with the changes and the differences of all pieces of code."""
    uses = Uses([code.tree for code in codes])
    changes = []
    places_by_difference: dict[tuple[str, str], list[FileLine]] = {}
    for code in codes:
        for number in sorted({code.lines.line_at(insertion.at) for insertion in code.insertions}):
            start = code.lines.starts[number - 1]
            line_insertions = [
                insertion._replace(at=insertion.at - start)
                for insertion in code.insertions
                if code.lines.line_at(insertion.at) == number
            ]
            old = code.lines.line(number)
            changes.append(ImportChange(code.place(number), old, inserted(old, line_insertions)))
        for finding in uses.findings(code.tree):
            places_by_difference.setdefault((finding.subject, finding.text), []).append(code.place(finding.line))
    differences = [BehaviorChange(*what, tuple(places)) for what, places in places_by_difference.items()]
    return replace(report, changes=tuple(changes), differences=tuple(sorted([*left, *differences], key=_first)))


def _first(difference: BehaviorChange) -> tuple[int, int]:
    cell, line = difference.places[0]
    return cell or 0, line


def _places(places: tuple[FileLine, ...]) -> str:
    return "; ".join(map(str, places)) if places[0].cell else f"line {', '.join(str(place.line) for place in places)}"


def _write(path: Path, data: bytes) -> None:
    """Replace a file's content, all at once and with its permissions."""
    target = path.resolve()
    if not target.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(target, os.W_OK):
        raise PermissionError("the file is read-only")
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        shutil.copymode(target, name)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _message(error: BaseException) -> str:
    """An error in one line, without the path."""
    match error:
        case SyntaxError(msg=message, lineno=int(line)):
            return f"line {line}: {message}"
        case OSError(strerror=str(message)):
            return message
        case RecursionError():
            return "too deeply nested"
        case MemoryError():
            return "too large for the memory"
    return str(error)
