"""Edits in files: a folder with `edits.json` and, where there are tensors, `tensors.safetensors`.

A file cannot name code to run: it names kinds of edits (`data_edits.EDITS`) and positions, and every field is checked.
The JSON has a checksum of the tensors that belong to it, and of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.engine.tensorfile import BAD_CONTENT, check_is_file, make_folder, read_json, write_bytes
from hookline.errors import HooklineError, InvalidHookError
from hookline.hooks.data_edits import EDITS, DataEdit
from hookline.hooks.edit_fields import type_of

FORMAT, VERSION = "hookline.edits", 2
TABLE, TENSORS = "edits.json", "tensors.safetensors"


def save(path: str | os.PathLike[str], edits: Iterable[tuple[Any, DataEdit]]) -> None:
    """Save `(name, edit)` pairs to a folder, which is created if needed."""
    tensors: dict[str, Tensor] = {}
    rows = [_encoded(index, pair, tensors) for index, pair in enumerate(edits)]
    data = _serialized(tensors) if tensors else None
    table = {
        "format": FORMAT,
        "version": VERSION,
        "tensors": hashlib.sha256(data).hexdigest() if data is not None else None,
        "edits": rows,
    }
    try:
        text = json.dumps(table | {"sum": _sum(table)}, indent=1, allow_nan=False).encode()
    except ValueError as error:  # a whole number with thousands of digits
        raise HooklineError(f"the edits cannot be written as JSON: {error}") from None
    folder = Path(path)
    make_folder(folder, "a list of edits")
    if data is not None:
        write_bytes(folder / TENSORS, data, "the edits")
    write_bytes(folder / TABLE, text, "the edits")


def load(path: str | os.PathLike[str]) -> list[tuple[Any, DataEdit]]:
    """Load the `(name, edit)` pairs that `save` wrote to a folder, for `run_with_hooks(fwd_hooks=…)`."""
    folder = Path(path)
    table = _table(folder)
    tensors = _tensors(folder, table["tensors"])
    rows = table["edits"]
    pairs = [_decoded(f"edit {index} in {folder / TABLE}", row, tensors) for index, row in enumerate(rows)]
    if tensors:
        raise HooklineError(f"{folder / TENSORS} has tensors that no edit uses: {sorted(tensors)}")
    return pairs


def _serialized(tensors: dict[str, Tensor]) -> bytes:
    from safetensors.torch import save as save_tensors

    try:
        return save_tensors(tensors)
    except KeyError as error:
        raise HooklineError(f"a safetensors file cannot have tensors of {error}") from None


def _sum(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _encoded(index: int, pair: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], DataEdit):
        raise InvalidHookError(
            f"expected pairs (name, edit), where the edit is one of {', '.join(EDITS)}; got {pair!r}"
        )
    name, edit = pair
    if type(edit) is not EDITS.get(edit.kind):
        raise InvalidHookError(
            f"{type(edit).__name__} cannot be saved: it would load as {edit.kind}. Give the class a kind of its own"
        )
    row: dict[str, Any] = {"point": _encoded_name(name), "edit": edit.kind}
    for field in fields(edit):
        value = getattr(edit, field.name)
        if value is not None:
            row[field.name] = type_of(field).save(f"{index}.{field.name}", value, tensors)
    return row


def _encoded_name(name: Any) -> Any:
    if isinstance(name, HookPoint):
        return name.name
    if _is_word_or_int(name):
        return name
    if isinstance(name, tuple | list) and name and all(map(_is_word_or_int, name)):
        return {"shorthand": list(name)} if isinstance(name, tuple) else list(name)
    raise HooklineError(f"a point is saved as a name, a glob, a shorthand or a list of names; got {name!r}")


def _table(folder: Path) -> dict[str, Any]:
    try:
        table = read_json(folder / TABLE)
    except (FileNotFoundError, NotADirectoryError):
        raise HooklineError(f"there are no edits in {folder}: it has no {TABLE}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise HooklineError(f"{folder / TABLE} is not a file of edits saved by hookline")
    if table.get("version") not in (1, VERSION) or isinstance(table["version"], bool):
        raise HooklineError(
            f"{folder / TABLE} has version {table.get('version')!r}; this version of hookline reads {VERSION}"
        )
    if table["version"] == VERSION:
        _check_sum(folder, table)
    if set(table) != {"format", "version", "tensors", "edits"} or not isinstance(table["edits"], list):
        raise HooklineError(f"{folder / TABLE} must have format, version, tensors and a list of edits")
    return table


def _check_sum(folder: Path, table: dict[str, Any]) -> None:
    given = table.pop("sum", None)
    try:
        is_same = given == _sum(table)
    except ValueError:  # a number that no edit has
        is_same = False
    if not is_same:
        raise HooklineError(
            f"{folder / TABLE} is not what was saved: it was changed or damaged. To load a table that you changed "
            f'yourself, put "version": 1 in it and take "sum" out'
        )


def _tensors(folder: Path, checksum: Any) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    if checksum is None:
        return {}
    try:
        check_is_file(folder / TENSORS)
        data = (folder / TENSORS).read_bytes()
    except FileNotFoundError:
        raise HooklineError(f"{folder} lacks {TENSORS}, which its edits need") from None
    except OSError as error:
        raise HooklineError(f"{folder / TENSORS} cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(data).hexdigest() != checksum:
        raise HooklineError(f"{folder / TENSORS} is not what was saved with {TABLE}: it was changed or damaged")
    try:
        return load_tensors(data)
    except (SafetensorError, *BAD_CONTENT) as error:
        raise HooklineError(f"{folder / TENSORS} cannot be read: {error}") from None


def _decoded(where: str, row: Any, tensors: dict[str, Tensor]) -> tuple[Any, DataEdit]:
    if not isinstance(row, dict) or row.get("edit") not in list(EDITS):
        kind = row.get("edit") if isinstance(row, dict) else row
        raise HooklineError(f"{where} has kind {kind!r}; known kinds are {', '.join(EDITS)}")
    kind = EDITS[row["edit"]]
    known = {field.name: field for field in fields(kind)}
    given = {key: value for key, value in row.items() if key not in ("point", "edit")}
    unknown = [key for key in given if key not in known]
    missing = [name for name, field in known.items() if field.default is MISSING and name not in given]
    if unknown or missing or "point" not in row:
        raise HooklineError(f"{where}: {kind.kind} has {list(known)} and a point, but there are {list(row)}")
    try:
        values = {key: type_of(known[key]).load(key, value, tensors) for key, value in given.items()}
        return _decoded_name(row["point"]), kind(**values)
    except HooklineError as error:
        raise HooklineError(f"{where}: {error}") from None


def _decoded_name(name: Any) -> Any:
    is_shorthand = isinstance(name, dict) and list(name) == ["shorthand"]
    parts = name["shorthand"] if is_shorthand else name if isinstance(name, list) else [name]
    if not isinstance(parts, list) or not parts or not all(_is_word_or_int(each) for each in parts):
        raise HooklineError(f"{name!r} is not the name of a point")
    return tuple(parts) if is_shorthand else name


def _is_word_or_int(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)
