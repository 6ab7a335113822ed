"""The options of a harvest: validated, and as recorded in the manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.store.identity import tensor_checksum
from hookline.text.token_positions import Positions, canonical, new_tokens

Chosen = Positions | Callable[[Tensor], Tensor]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """Which rows are stored, and how: see `harvest`."""

    positions: Chosen = None
    dtype: torch.dtype | None = None
    batch_size: int = 16
    max_rows: int | None = None
    sample: float = 1.0
    seed: int = 0
    max_tokens: int | None = None
    prepend_bos: bool | None = None
    shard_rows: int | None = None
    shard_bytes: int = 128 * 2**20
    flush_every: float = 60.0
    hooks_tag: str | None = None
    warned: set[str] = field(default_factory=set, compare=False, repr=False)
    """What this harvest has already warned about."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_rows", "max_tokens", "shard_rows", "shard_bytes"):
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        object.__setattr__(self, "positions", _checked(self.positions))
        if not 0 < self.sample <= 1:
            raise HooklineError(f"sample is the fraction of rows to keep, above 0 and at most 1, not {self.sample!r}")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise HooklineError(f"dtype must be one of {', '.join(map(str, FLOATS))}, not {self.dtype!r}")
        is_number = isinstance(self.flush_every, int | float) and not isinstance(self.flush_every, bool)
        if not (is_number and self.flush_every >= 0):
            raise HooklineError(f"flush_every is a nonnegative number of seconds, not {self.flush_every!r}")
        if self.hooks_tag is not None and not (isinstance(self.hooks_tag, str) and self.hooks_tag):
            raise HooklineError(f"hooks_tag must be a non-empty string, such as 'v1', not {self.hooks_tag!r}")

    def recorded(self) -> dict[str, Any]:
        """The options as the manifest records them; a harvest resumes only if they are equal."""
        apart = ("positions", "dtype", "flush_every", "warned")  # when rows are written does not change them
        others = [name for name in self.__dataclass_fields__ if name not in apart]
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return {"positions": _described(self.positions), "dtype": dtype} | {
            name: getattr(self, name) for name in others
        }


def _count(name: str, value: Any) -> int | None:
    try:
        found = 1 if value is None else index(value)  # also of NumPy
    except TypeError:
        found = 0
    if found < 1:
        raise HooklineError(f"{name} must be a positive integer, not {value!r}")
    return None if value is None else found


def _checked(positions: Any) -> Any:
    """Positions in one form; HooklineError if a harvest does not accept them."""
    if callable(positions):
        return positions
    try:
        found = canonical(positions)
    except HooklineError:
        raise HooklineError(
            "positions are None (all), an index, a slice, a list of indices, last, token(…), image_tokens, a mask "
            f"[example, position], or a function from a text's tokens to a mask; not {positions!r}"
        ) from None
    if type(found) is type(new_tokens):
        raise HooklineError(f"{found!r} refers to generated tokens, but a harvest does not generate")
    if isinstance(found, Tensor) and (found.dtype != torch.bool or found.ndim != 2):
        raise HooklineError(
            "positions given as a tensor must be a boolean mask [example, position], not "
            f"{list(found.shape)} of {found.dtype}"
        )
    return found


def _described(positions: Any) -> Any:
    if positions is None:
        return "all"
    if isinstance(positions, Tensor):
        return f"a mask {list(positions.shape)} with the checksum {tensor_checksum(positions)}"
    if callable(positions):
        return f"the function {getattr(positions, '__qualname__', type(positions).__qualname__)}"
    return repr(list(positions) if isinstance(positions, tuple) else positions)
