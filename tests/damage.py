"""What can be wrong with a file: flipped bits, missing parts, and contents that are not what they should be."""

import copy
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hookline import HooklineError

DEEP = "[" * 100_000
HUGE = "9" * 5_000

WRONG: list[Any] = [
    None, True, -1, 1.5, 10**30, 10**400, float("nan"), "", "x", "../../etc/passwd", "/etc/passwd", "a\0b", "\ud800",
    [], [1], ["x"], {}, {"x": 1}, [[[[[[]]]]]],
]  # fmt: skip
"""What a field of JSON can be in place of what it should be."""


def _replace(text: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(text)


def _cut(share: float) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def _instead(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _header(fields: bytes) -> bytes:
    return struct.pack("<Q", len(fields)) + fields


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": _replace(b""),
    "cut to a third": _cut(1 / 3),
    "cut to nine tenths": _cut(0.9),
    "a byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "noise": _replace(bytes(range(256)) * 8),
    "not text": _replace(b"\xff\xfe\x00\x01"),
    "deep JSON": _replace(DEEP.encode()),
    "a number with thousands of digits": _replace(f'{{"d_in": {HUGE}}}'.encode()),
    "a list": _replace(b"[1, 2]"),
    "a number": _replace(b"7"),
    "an object": _replace(b"{}"),
    "a header that is too long": _replace(struct.pack("<Q", 2**62) + b"{}"),
    "a header of deep JSON": _replace(_header(DEEP.encode())),
    "a header of something else": _replace(_header(b'{"x": 3}')),
    "a safetensors file without tensors": _replace(_header(b"{}")),
    "a folder": _instead(Path.mkdir),
    "a link to nowhere": _instead(lambda path: path.symlink_to("nowhere")),
    "a link to itself": _instead(lambda path: path.symlink_to(path)),
    "a link to a device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a pipe": _instead(os.mkfifo),
    "gone": Path.unlink,
}


def forged(value: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a value of JSON in which one field, at any depth, is something else or is missing."""
    for steps in _places(value):
        for wrong in WRONG:
            yield (
                f"{steps} = {json.dumps(wrong):.30}",
                _with(value, steps, lambda part, key, x=wrong: _put(part, key, x)),
            )
        yield f"no {steps}", _with(value, steps, lambda part, key: part.__delitem__(key))
    if isinstance(value, dict):
        yield "one field more", value | {"surprise": 1}


def _places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*before, key)
        yield from _places(each, (*before, key))


def _with(value: Any, steps: tuple[Any, ...], change: Callable[[Any, Any], Any]) -> Any:
    new = copy.deepcopy(value)
    part = new
    for step in steps[:-1]:
        part = part[step]
    change(part, steps[-1])
    return new


def _put(part: Any, key: Any, value: Any) -> None:
    part[key] = value


def flips(path: Path, read: Callable[[], Any], bits: range) -> dict[str, int]:
    """How many flipped bits of a file are refused, change nothing, and change what is read without a word."""
    whole, same = path.read_bytes(), read()
    counts = {"refused": 0, "the same": 0, "other": 0}
    for bit in bits:
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        try:
            counts["the same" if read() == same else "other"] += 1
        except HooklineError:
            counts["refused"] += 1
    path.write_bytes(whole)
    return counts
