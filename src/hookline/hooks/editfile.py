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

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from hookline.engine import HookPoint
from hookline.errors import HooklineError, InvalidHookError
from hookline.files.tensorfile import BAD_CONTENT, check_is_file, make_folder, read_json, reason, write_bytes
from hookline.hooks.data_edits import EDITS, DataEdit
from hookline.text.score_positions import Crossed
from hookline.text.token_positions import Meaning, Steps, TokenMeaning, image_tokens, last, new_tokens, step, token
from hookline.text.turn_positions import TextMeaning, as_json, from_json

FORMAT, VERSION = "hookline.edits", 2
TABLE, TENSORS = "edits.json", "tensors.safetensors"
_WORDS: dict[str, Meaning] = {repr(meaning): meaning for meaning in (last, image_tokens, new_tokens)}


def save(path: str | os.PathLike[str], edits: Iterable[tuple[Any, DataEdit]]) -> None:
    """Save `(name, edit)` pairs to a folder, which is created if needed.

    Examples:
        >>> edits.save("my-edits", [("blocks.3.attn.hook_z", edits.zero(head=4))])
        >>> edits.load("my-edits")
        [('blocks.3.attn.hook_z', zero(head=4))]
    """
    tensors: dict[str, Tensor] = {}
    table = {"format": FORMAT, "version": VERSION, "tensors": None}
    table["edits"] = [_encoded(index, pair, tensors) for index, pair in enumerate(edits)]
    try:
        data = save_tensors(tensors) if tensors else None
        if data is not None:
            table["tensors"] = hashlib.sha256(data).hexdigest()
        text = json.dumps(table | {"sum": _sum(table)}, indent=1, allow_nan=False).encode()
    except KeyError as error:
        raise HooklineError(f"a safetensors file cannot have tensors of {error}") from None
    except ValueError as error:  # an integer with thousands of digits
        raise HooklineError(f"the edits cannot be written as JSON: {error}") from None
    folder = Path(path)
    make_folder(folder, "a list of edits")
    if data is not None:
        write_bytes(folder / TENSORS, data, "the edits")
    write_bytes(folder / TABLE, text, "the edits")


def load_edits(path: str | os.PathLike[str]) -> list[tuple[Any, DataEdit]]:
    """Load the `(name, edit)` pairs that `save` wrote to a folder, for `run_with_hooks(fwd_hooks=…)`."""
    folder = Path(path)
    table = _table(folder)
    tensors = {} if table["tensors"] is None else _tensors(folder / TENSORS, table["tensors"])
    rows = table["edits"]
    pairs = [_decoded(f"edit {index} in {folder / TABLE}", row, tensors) for index, row in enumerate(rows)]
    if tensors:
        raise HooklineError(f"{folder / TENSORS} has tensors that no edit uses: {sorted(tensors)}")
    return pairs


def _sum(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _encoded(number: int, pair: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], DataEdit):
        raise InvalidHookError(f"expected pairs (name, edit), with an edit from {', '.join(EDITS)}; got {pair!r}")
    name, edit = pair
    if type(edit) is not EDITS.get(edit.kind):
        raise InvalidHookError(
            f"{type(edit).__name__} cannot be saved: it would load as {edit.kind}. Give the class its own kind"
        )
    values = {field.name: getattr(edit, field.name) for field in fields(edit)}
    values = {key: _encoded_value(f"{number}.{key}", x, tensors) for key, x in values.items() if x is not None}
    return {"point": _encoded_name(name), "edit": edit.kind, **values}


def _encoded_name(name: Any) -> Any:
    if isinstance(name, HookPoint):
        return name.name
    parts = name if isinstance(name, tuple | list) else [name]
    if not parts or not all(map(_is_word_or_int, parts)):
        raise HooklineError(f"a point is saved as a name, a glob, a shorthand or a list of names; got {name!r}")
    return {"shorthand": list(name)} if isinstance(name, tuple) else name


def _encoded_value(key: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value of a field as JSON; a tensor goes to `tensors` under `key`."""
    match value:
        case Tensor():
            tensors[key] = value.cpu()
            return {"tensor": key}
        case slice():
            return {"slice": [value.start, value.stop, value.step]}
        case TokenMeaning():
            return {"token": value.what, "nth": value.nth}
        case Steps(only=int()):
            return {"step": value.only}
        case TextMeaning():
            return as_json(value)
        case Crossed():
            raise HooklineError(f"{key.partition('.')[2]}={value!r} is of a monitor that runs, and cannot be saved")
        case Meaning():
            return {"meaning": repr(value)}
    return value


def _table(folder: Path) -> dict[str, Any]:
    path = folder / TABLE
    try:
        table = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise HooklineError(f"there are no edits in {folder}: it has no {TABLE}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise HooklineError(f"{path} is not a file of edits saved by hookline")
    version = table.get("version")
    if version not in (1, VERSION) or isinstance(version, bool):
        raise HooklineError(f"{path} has version {version!r}; this version of hookline reads {VERSION}")
    if version == VERSION and not _has_its_sum(table):
        raise HooklineError(
            f"{path} was changed or damaged after it was saved. To load a table that you changed yourself, set "
            f'"version": 1 in it and remove "sum"'
        )
    if set(table) != {"format", "version", "tensors", "edits"} or not isinstance(table["edits"], list):
        raise HooklineError(f"{path} must have format, version, tensors and a list of edits")
    return table


def _has_its_sum(table: dict[str, Any]) -> bool:
    stored_sum = table.pop("sum", None)
    try:
        return stored_sum == _sum(table)
    except ValueError:  # NaN, which `save` does not write
        return False


def _tensors(path: Path, checksum: Any) -> dict[str, Tensor]:
    try:
        check_is_file(path)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != checksum:
            raise HooklineError(f"{path} was changed or damaged after it was saved with {TABLE}")
        return load_tensors(data)
    except FileNotFoundError:
        raise HooklineError(f"{path.parent} lacks {TENSORS}, which its edits need") from None
    except (SafetensorError, OSError, *BAD_CONTENT) as error:
        raise HooklineError(f"{path} cannot be read: {reason(error)}") from error


def _decoded(where: str, row: Any, tensors: dict[str, Tensor]) -> tuple[Any, DataEdit]:
    if not isinstance(row, dict) or row.get("edit") not in list(EDITS):
        kind_name = row.get("edit") if isinstance(row, dict) else row
        raise HooklineError(f"{where} has kind {kind_name!r}; known kinds are {', '.join(EDITS)}")
    kind = EDITS[row["edit"]]
    arguments = {key: value for key, value in row.items() if key not in ("point", "edit")}
    field_names = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    if "point" not in row or not needed <= set(arguments) <= field_names:
        raise HooklineError(f"{where}: {kind.kind} has {sorted(field_names)} and a point, but there are {list(row)}")
    try:
        values = {key: _decoded_value(key, value, tensors) for key, value in arguments.items()}
        return _decoded_name(row["point"]), kind(**values)
    except HooklineError as error:
        raise HooklineError(f"{where}: {error}") from None


def _decoded_value(name: str, saved: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that `_encoded_value` saved; the edit checks whether it fits the field."""
    match saved:
        case {"tensor": str(key)} if key in tensors:
            return tensors.pop(key)
        case {"slice": [start, stop, every]}:
            return slice(start, stop, every)
        case {"token": what, "nth": nth}:
            return token(what, nth)
        case {"step": k}:
            return step(k)
        case {"meaning": str(word)} if word in _WORDS:
            return _WORDS[word]
        case dict() if (meaning := from_json(saved)) is not None:
            return meaning
        case dict():
            raise HooklineError(f"{name}: {saved!r} is neither a position nor a tensor of the file")
    return saved


def _decoded_name(name: Any) -> Any:
    is_shorthand = isinstance(name, dict) and list(name) == ["shorthand"]
    parts = name["shorthand"] if is_shorthand else name if isinstance(name, list) else [name]
    if not isinstance(parts, list) or not parts or not all(map(_is_word_or_int, parts)):
        raise HooklineError(f"{name!r} is not the name of a point")
    return tuple(parts) if is_shorthand else name


def _is_word_or_int(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)
