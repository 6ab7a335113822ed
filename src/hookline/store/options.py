"""The options of a harvest, checked, and as a manifest tells of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.store.checksums import tensor_sum
from hookline.store.fingerprint import fingerprint
from hookline.text.token_positions import Meaning, Positions, canonical, new_tokens

Chosen = Positions | Callable[[Tensor], Tensor]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """Which rows are stored, and how; see `harvest`."""

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
    told: set[str] = field(default_factory=set, compare=False, repr=False)
    """What this harvest has warned of already."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_rows", "max_tokens", "shard_rows", "shard_bytes"):
            value = _plain(getattr(self, name))
            if value is not None and (not isinstance(value, int) or value < 1):
                raise HooklineError(f"{name} must be a whole number from 1 on, not {value!r}")
            object.__setattr__(self, name, value)
        positions = canonical(self.positions) if isinstance(self.positions, slice) else _plain(self.positions)
        object.__setattr__(self, "positions", positions)
        if not 0 < self.sample <= 1:
            raise HooklineError(f"sample is the share of rows that is kept: above 0 and up to 1, not {self.sample!r}")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise HooklineError(f"dtype must be one of {', '.join(map(str, FLOATS))}, not {self.dtype!r}")
        is_number = isinstance(self.flush_every, int | float) and not isinstance(self.flush_every, bool)
        if not (is_number and self.flush_every >= 0):
            raise HooklineError(f"flush_every is a number of seconds, from 0 on, not {self.flush_every!r}")
        _check_positions(self.positions)

    def recorded(self) -> dict[str, Any]:
        """As the manifest has them. Another harvest goes on with a store only if they are the same."""
        apart = ("positions", "dtype", "flush_every", "told")  # when rows are written does not change them
        others = [name for name in self.__dataclass_fields__ if name not in apart]
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return {"positions": _described(self.positions), "dtype": dtype} | {
            name: getattr(self, name) for name in others
        }


def _plain(value: Any) -> Any:
    """A whole number of numpy's as Python's; all else as it is."""
    is_other_number = (
        hasattr(value, "__index__") and not isinstance(value, int | Tensor) and not getattr(value, "ndim", 0)
    )
    return int(value) if is_other_number else value


def _check_positions(positions: Any) -> None:
    if isinstance(positions, Meaning) and type(positions) is type(new_tokens):
        raise HooklineError(f"{positions!r} is about a generation, but a harvest runs each text once")
    if isinstance(positions, Tensor) and (positions.dtype != torch.bool or positions.ndim != 2):
        raise HooklineError(
            "positions given as a tensor are a mask of booleans, [example, position], not "
            f"{list(positions.shape)} of {positions.dtype}"
        )
    is_list = isinstance(positions, list | tuple | range) and all(type(each) is int for each in positions)
    if not (
        positions is None
        or type(positions) is int
        or isinstance(positions, slice | Meaning | Tensor)
        or is_list
        or callable(positions)
    ):
        raise HooklineError(
            "positions are None (all), an index, a slice, a list of indices, last, token(…), image_tokens, a mask "
            f"[example, position], or a function from a text's tokens to a mask; not {positions!r}"
        )


def _described(positions: Any) -> Any:
    if positions is None:
        return "all"
    if isinstance(positions, Tensor):
        return f"a mask {list(positions.shape)} with the sum {tensor_sum(positions)}"
    if callable(positions):
        name = getattr(positions, "__qualname__", type(positions).__qualname__)
        return f"the function {name} ({fingerprint(positions)})"
    return repr(list(positions) if isinstance(positions, tuple | range) else positions)
