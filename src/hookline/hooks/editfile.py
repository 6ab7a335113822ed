"""Edits in files: a folder with `edits.json` and, where there are tensors, `tensors.safetensors`.

A file cannot name code to run: only the kinds of `edits.py` and the positions of `positions.py` are known, every field
is checked, and the JSON has the checksum of the tensors that belong to it, and of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.engine.tensorfile import BAD_CONTENT, check_is_file, make_folder, read_json, write_bytes
from hookline.errors import HooklineError, InvalidHookError
from hookline.hooks.data_edits import KINDS, DataEdit
from hookline.text.token_positions import Meaning, image_tokens, last, new_tokens, step, token

FORMAT, VERSION = "hookline.edits", 2
TABLE, TENSORS = "edits.json", "tensors.safetensors"
_WORDS: dict[str, Meaning] = {"last": last, "image_tokens": image_tokens, "new_tokens": new_tokens}


def save(path: str | os.PathLike[str], edits: Iterable[tuple[Any, DataEdit]]) -> None:
    """Write `(name, edit)` pairs to a folder, which is made if it is not there."""
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
    """The `(name, edit)` pairs that were saved to a folder, as `run_with_hooks(fwd_hooks=…)` takes them."""
    folder = Path(path)
    table = _table(folder)
    tensors = _tensors(folder, table["tensors"])
    rows = table["edits"]
    pairs = [_decoded(f"edit {index} in {folder / TABLE}", row, tensors) for index, row in enumerate(rows)]
    if tensors:
        raise HooklineError(f"{folder / TENSORS} has tensors that no edit names: {sorted(tensors)}")
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
            f"what can be saved are pairs (name, edit), with an edit of {', '.join(KINDS)}; not {pair!r}"
        )
    name, edit = pair
    row: dict[str, Any] = {"point": _encoded_name(name), "edit": edit.kind}
    for field in fields(edit):
        value = getattr(edit, field.name)
        if value is None:
            continue
        key = f"{index}.{field.name}"
        row[field.name] = _encoded_position(value, key, tensors) if field.name == "pos" else _plain(value, key, tensors)
    return row


def _encoded_name(name: Any) -> Any:
    if isinstance(name, HookPoint):
        return name.name
    if _is_word_or_int(name):
        return name
    if isinstance(name, tuple | list) and name and all(map(_is_word_or_int, name)):
        return {"shorthand": list(name)} if isinstance(name, tuple) else list(name)
    raise HooklineError(f"a point is saved by its name, a glob, a shorthand or a list of names, not as {name!r}")


def _plain(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[key] = value.detach().cpu().contiguous()
        return {"tensor": key}
    return list(value) if isinstance(value, tuple) else value


def _encoded_position(pos: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(pos, Meaning):
        for word, meaning in _WORDS.items():
            if pos == meaning:
                return {"meaning": word}
        only, what = getattr(pos, "only", None), getattr(pos, "what", None)
        if only is not None and pos == step(only):
            return {"step": only}
        if what is not None:
            return {"token": what, "nth": getattr(pos, "nth", -1)}
        raise HooklineError(f"the position {pos!r} cannot be saved")
    if isinstance(pos, slice):
        return {"slice": [pos.start, pos.stop, pos.step]}
    if isinstance(pos, Tensor) and pos.ndim:
        return _plain(pos, key, tensors)
    return [int(each) for each in pos] if isinstance(pos, list | tuple | range) else int(pos)


def _table(folder: Path) -> dict[str, Any]:
    try:
        table = read_json(folder / TABLE)
    except (FileNotFoundError, NotADirectoryError):
        raise HooklineError(f"there are no edits in {folder}: it has no {TABLE}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise HooklineError(f"{folder / TABLE} does not hold edits of hookline")
    if table.get("version") not in (1, VERSION) or isinstance(table["version"], bool):
        raise HooklineError(f"{folder / TABLE} is of version {table.get('version')!r}; this hookline reads {VERSION}")
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
    if not isinstance(row, dict) or row.get("edit") not in list(KINDS):
        kind = row.get("edit") if isinstance(row, dict) else row
        raise HooklineError(f"{where} is of the kind {kind!r}; the kinds are {', '.join(KINDS)}")
    kind = KINDS[row["edit"]]
    known = {field.name: field for field in fields(kind)}
    given = {key: value for key, value in row.items() if key not in ("point", "edit")}
    unknown = [key for key in given if key not in known]
    missing = [name for name, field in known.items() if field.default is MISSING and name not in given]
    if unknown or missing or "point" not in row:
        raise HooklineError(f"{where}: {kind.kind} has {list(known)} and a point, but there are {list(row)}")
    try:
        values = {key: _READERS[key](key, value, tensors) for key, value in given.items()}
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


def _read_tensor(where: str, value: Any, tensors: dict[str, Tensor]) -> Tensor:
    if isinstance(value, dict) and list(value) == ["tensor"] and value["tensor"] in list(tensors):
        return tensors.pop(value["tensor"])
    raise HooklineError(f"{where}: {value!r} names no tensor of the file")


def _read_number(where: str, value: Any, _: dict[str, Tensor]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise HooklineError(f"{where}: {value!r} is no number")
    return value


def _read_units(where: str, value: Any, _: dict[str, Tensor]) -> Any:
    parts = value if isinstance(value, list) else [value]
    if not parts or not all(isinstance(each, int) and not isinstance(each, bool) for each in parts):
        raise HooklineError(f"{where}: {value!r} is no index, and no list of them")
    return value


def _read_position(where: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return _read_units(where, value, tensors)
    match list(value.items()):
        case [("tensor", _)]:
            return _read_tensor(where, value, tensors)
        case [("meaning", str() as word)] if word in _WORDS:
            return _WORDS[word]
        case [("step", k)]:
            return step(k)
        case [("token", what), ("nth", nth)]:
            return token(what, nth)
        case [("slice", [start, stop, every])]:
            return slice(start, stop, every)
    raise HooklineError(f"{where}: {value!r} is no position")


_READERS: dict[str, Callable[[str, Any, dict[str, Tensor]], Any]] = {
    "pos": _read_position,
    "head": _read_units,
    "neuron": _read_units,
    "mask": _read_tensor,
    "over": _read_tensor,
    "outliers": lambda _, value, __: value,  # the edit checks it
    "value": _read_tensor,
    "direction": _read_tensor,
    "vector": _read_tensor,
    "coefficient": _read_number,
    "factor": _read_number,
    "std": _read_number,
    "seed": _read_number,
}
