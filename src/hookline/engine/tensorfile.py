"""Files: written whole or not at all, read with one error of ours, and tensors with a checksum.

A file of tensors is a safetensors file whose metadata say what of ours is in it, and have the sum of all the rest: of
the other metadata, and of each tensor's name, dtype, shape and bytes. Files from before there were checksums have
neither `hookline_format` nor `hookline_checksum`, and load as they did.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
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
"""Of files of tensors. Those of the first format have no checksum."""
_OURS = ("hookline", "hookline_format", "hookline_checksum")

BAD_CONTENT = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""What Python raises when the contents of a file are not what the code that takes them apart expects."""


def write_tensors(path: str | Path, what: str, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors, each as memory of its own (they may share some, and files must not), and what is known of them."""
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
    """What `write_tensors` wrote for the same `what`, tensors and metadata; else an error that says what should have.

    Without a `writer`, files that others wrote, which say nothing of us, are read as well. `check=False` ignores the
    checksum.
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
        return  # from before there were any
    if given != checksum(tensors, rest):
        raise HooklineError(f"{path} is damaged: its contents do not match their checksum")
    if version != FORMAT:
        raise HooklineError(f"{path} has the format {version}, and this version of hookline reads {FORMAT}: update it")


def checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """The sum of metadata and of tensors: of names, dtypes, shapes and all bytes."""
    total = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        total = zlib.crc32(json.dumps([name, str(x.dtype), list(x.shape)]).encode(), total)
        total = zlib.crc32(x.contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return f"crc32:{total:08x}"


def _plain(where: str, x: Tensor) -> Tensor:
    """A dense copy on the CPU."""
    if x.layout != torch.strided or x.is_nested or x.is_quantized or x.device.type == "meta":
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else f"{x.layout}, on {x.device}"
        raise HooklineError(f"{where} is not a dense tensor with values ({kind})")
    if x.dtype == torch.complex128:
        raise HooklineError(f"{where} is of complex128, which safetensors files cannot have: convert it to complex64")
    return x.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


@contextmanager
def replacing(path: Path, what: str) -> Iterator[Path]:
    """A new file beside `path`, which takes its place when the block ends without an error.

    Its name cannot be guessed, and it is opened only if nothing is there: no link that somebody put there is followed.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}") if path.name else path
    try:
        if path.exists() and not path.is_file():
            raise HooklineError(f"{what} cannot be written to {path}: it is there, and is not a file")
        unfinished.open("xb").close()
        try:
            yield unfinished
            _sync(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except (SafetensorError, OSError, *BAD_CONTENT) as error:
        raise HooklineError(f"{what} cannot be written to {path}: {reason(error)}") from error


def _sync(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def write_bytes(path: Path, data: bytes, what: str) -> None:
    """Write a file, whole or not at all."""
    with replacing(path, what) as unfinished:
        unfinished.write_bytes(data)


def make_folder(folder: Path, what: str) -> None:
    """The folder that something is written to, made if it is not there."""
    try:
        if folder.is_file():
            raise HooklineError(f"{what} is saved to a folder, but {folder} is a file")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise HooklineError(f"{what} cannot be written to {folder}: {reason(error)}") from error


def read_json(path: Path) -> Any:
    """What a JSON file holds. That there is none is for the caller to say, who gets the OSError of it."""
    try:
        check_is_file(path)
        return parsed_json(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise HooklineError(f"{path} cannot be read: {reason(error)}") from error


def check_is_file(path: Path) -> None:
    """OSError if it is a folder or a device, which may never end, or block."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))


def parsed_json(text: str | bytes, where: str) -> Any:
    """What JSON stands for; one error for all that can be wrong with it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise HooklineError(f"{where} is nested too deeply to be read") from None
    except ValueError as error:  # also of text that is not UTF-8, and of numbers with thousands of digits
        raise HooklineError(f"{where} is no JSON: {error}") from None


@contextmanager
def taking_apart(where: str) -> Iterator[None]:
    """One error for contents that are not what they should be: fields that are missing, or of the wrong type."""
    try:
        yield
    except HooklineError:
        raise
    except BAD_CONTENT as error:
        raise HooklineError(f"{where} is damaged, or was not written by hookline: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """What an exception says, in one line; of a KeyError, which says only the key, what that means."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return " ".join(str(error).split()) or type(error).__name__
