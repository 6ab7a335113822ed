"""Files of results: safetensors, with everything but the tensors as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core import labels as check
from hookline.files.tensorfile import read_tensors, taking_apart, write_tensors

if TYPE_CHECKING:
    from hookline.experiments.result import Result

_VERSION = "3"  # of the file format
Kind = TypeVar("Kind", bound="Result")


def save_result(result: Result, path: str | Path) -> None:
    """Write a result, with labels and info."""
    tensors, head = _content(result, "")
    content = json.dumps(head, ensure_ascii=False)
    write_tensors(path, "result", tensors, {"version": _VERSION, "content": content})


def _content(result: Result, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, whose names begin with a prefix, and everything else as JSON has it."""
    plain, inner = result._split_info()
    tensors = {f"{prefix}info.{key}": value.values for key, value in inner.items()}
    tensors[f"{prefix}values"] = result.values
    head = {**result._header(), "info": plain, "results": {key: value._header() for key, value in inner.items()}}
    if result.by_example is not None:
        of_examples, head["by_example"] = _content(result.by_example, f"{prefix}by_example.")
        tensors |= of_examples
    return tensors, head


def load_result(kind: type[Kind], path: str | Path) -> Kind:
    """Read a file that `save` wrote."""
    tensors, metadata = read_tensors(path, "result", called="a result", writer="Result.save")
    version, content = metadata.get("version"), metadata.get("content", "")
    if version not in ("1", "2", _VERSION):
        raise HooklineError(f"{path} has a newer result format: update hookline")
    if version == "1" and metadata.get("sum") != check.first_sum(content, tensors):
        raise HooklineError(f"{path} is damaged: its contents do not match their checksum")
    with taking_apart(str(path)):
        head: dict[str, Any] = json.loads(content)
        return _of_content(kind, tensors, head, "")


def _of_content(kind: type[Kind], tensors: dict[str, Tensor], head: dict[str, Any], prefix: str) -> Kind:
    """The result of what `_content` returned."""
    info, headers = head.pop("info"), head.pop("results")
    info |= {key: kind(tensors[f"{prefix}info.{key}"], **header) for key, header in headers.items()}
    inner = head.pop("by_example", None)
    examples = None if inner is None else _of_content(kind, tensors, inner, f"{prefix}by_example.")
    return kind(tensors[f"{prefix}values"], **head, info=info, by_example=examples)
