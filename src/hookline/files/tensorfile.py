"""Files: written whole or not at all, read with one kind of error, and tensors with a checksum.

A file of tensors is a safetensors file whose metadata name its kind, and have a checksum of the other metadata and of
the name, dtype, shape and bytes of each tensor. Files of the first format have neither `hookline_format` nor
`hookline_checksum`, and still load.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hookline.errors import HooklineError

FORMAT = "2"
"""The format of files of tensors."""
_OURS = ("hookline", "hookline_format", "hookline_checksum")

BAD_CONTENT = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""The exceptions that Python raises when code reads a file with unexpected contents."""


def write_tensors(path: str | Path, what: str, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors and metadata to a file of the kind `what`. Tensors that share memory are written separately."""
    for key, value in about.items():
        if key in _OURS or not isinstance(key, str) or not isinstance(value, str):
            raise HooklineError(f"the {what} cannot be written to {path}: its metadata have {key!r}: {value!r}")
    own = {name: _plain(f"the {what} cannot be written to {path}: {name}", x) for name, x in tensors.items()}
    metadata = {"hookline": what, "hookline_format": FORMAT, **about}
    with replacing(Path(path), f"the {what}") as unfinished:
        save_file(own, unfinished, metadata | {"hookline_checksum": checksum(own, metadata)})


def read_tensors(
    path: str | Path, what: str, *, called: str, writer: str | None, check: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata that `write_tensors` wrote for the same kind `what`.

    Errors call the contents `called`, and say that `writer` writes them. Without a `writer`, safetensors files of other
    programs are read as well. `check=False` ignores the checksum.
    """
    try:
        check_is_file(Path(path))
        with safe_open(path, "pt") as file:
            about, found = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, *BAD_CONTENT) as error:
        raise HooklineError(f"{path} is not a file of {called}, or is damaged: {reason(error)}") from error
    if about.get("hookline") != what and (writer is not None or any(name in about for name in _OURS)):
        by = f": it was not written by {writer}" if writer is not None else ""
        raise HooklineError(f"{path} is a safetensors file, but not of {called}{by}")
    if check:
        _check_sum(path, found, about)
    return found, {name: value for name, value in about.items() if name not in _OURS}


def _check_sum(path: str | Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    rest = {name: value for name, value in about.items() if name != "hookline_checksum"}
    version, given = about.get("hookline_format"), about.get("hookline_checksum")
    if version is None and given is None:
        return  # the first format
    if given != checksum(tensors, rest):
        raise HooklineError(f"{path} is damaged: its contents do not match their checksum")
    if version != FORMAT:
        raise HooklineError(f"{path} has format {version}, but this hookline reads format {FORMAT}: update it")


def checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Return the checksum of metadata and tensors: of names, dtypes, shapes and all bytes."""
    total = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        total = zlib.crc32(json.dumps([name, str(x.dtype), list(x.shape)]).encode(), total)
        total = zlib.crc32(x.contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return f"crc32:{total:08x}"


def _plain(where: str, x: Tensor) -> Tensor:
    """Return a dense copy on the CPU."""
    if x.layout != torch.strided or x.is_nested or x.is_quantized or x.device.type == "meta":
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else f"{x.layout}, on {x.device}"
        raise HooklineError(f"{where} is not a dense tensor with values ({kind})")
    if x.dtype == torch.complex128:
        raise HooklineError(f"{where} is complex128, which safetensors does not support: convert it to complex64")
    return x.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


@contextmanager
def replacing(path: Path, what: str) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` when the block ends without an error.

    Its name cannot be guessed, and it is created only if nothing is there, so that it never writes through a link.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}") if path.name else path
    try:
        if path.exists() and not path.is_file():
            raise HooklineError(f"{what} cannot be written to {path}: it exists, and is not a file")
        unfinished.open("xb").close()
        try:
            yield unfinished
            with unfinished.open("r+b") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except (SafetensorError, OSError, *BAD_CONTENT) as error:
        raise HooklineError(f"{what} cannot be written to {path}: {reason(error)}") from error


def write_bytes(path: Path, data: bytes, what: str) -> None:
    """Write a file, whole or not at all."""
    with replacing(path, what) as unfinished:
        unfinished.write_bytes(data)


def make_folder(folder: Path, what: str) -> None:
    """Make the folder that something is written to, if it does not exist."""
    try:
        if folder.is_file():
            raise HooklineError(f"{what} is saved to a folder, but {folder} is a file")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise HooklineError(f"{what} cannot be written to {folder}: {reason(error)}") from error


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file. A missing file is a FileNotFoundError, which the caller explains."""
    try:
        check_is_file(path)
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, *BAD_CONTENT) as error:
        raise HooklineError(f"{path} cannot be read as JSON: {reason(error)}") from error


def check_is_file(path: Path) -> None:
    """Raise OSError for a folder or a device, which may block or never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # opening it says what is wrong
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a file", str(path))


@contextmanager
def taking_apart(where: str) -> Iterator[None]:
    """Turn the exceptions of missing or wrong contents of a file into one `HooklineError`."""
    try:
        yield
    except HooklineError:
        raise
    except BAD_CONTENT as error:
        raise HooklineError(f"{where} is damaged, or was not written by hookline: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return the message of an exception in one line; for a KeyError, a sentence about the key."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return " ".join(str(error).split()) or type(error).__name__
