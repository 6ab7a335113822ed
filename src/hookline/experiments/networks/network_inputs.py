"""NetworkInputs: what a network is called with, a tensor, a tuple of arguments or a dict of keywords, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError, a_type


@dataclass(frozen=True)
class NetworkInputs:
    """The values that a network is called with, in order; `names` are those of a dict."""

    values: tuple[Any, ...]
    names: tuple[str, ...] | None = None
    is_single: bool = False

    @classmethod
    def of(cls, inputs: Any) -> NetworkInputs:
        """The inputs that a user passes; the tensors in them are not in any graph."""
        if isinstance(inputs, Tensor):
            made = cls((inputs,), is_single=True)
        elif isinstance(inputs, Mapping):
            made = cls(tuple(inputs.values()), tuple(inputs))
        elif isinstance(inputs, tuple | list):
            made = cls(tuple(inputs))
        else:
            raise HooklineError(
                f"inputs are a tensor, a tuple of arguments or a dict of keywords, not {a_type(inputs)}; for text pass "
                f"what a tokenizer returns: model.to_tokens(text)"
            )
        if not any(isinstance(value, Tensor) and value.ndim for value in made.values):
            raise HooklineError("inputs need at least one tensor whose first axis is the batch")
        return made.changed(lambda x: x.detach())

    @property
    def rows(self) -> int:
        """The size of the batch: of the first axis of the first tensor."""
        return next(len(value) for value in self.values if isinstance(value, Tensor) and value.ndim)

    @property
    def floating(self) -> list[int]:
        """The indices of the values that have gradients."""
        return [at for at, value in enumerate(self.values) if isinstance(value, Tensor) and value.is_floating_point()]

    def need_floating(self) -> list[int]:
        """The indices of the values that have gradients; an error if there are none."""
        if not self.floating:
            raise HooklineError(
                "these inputs are integers, which have no gradient: pass at=, the point whose activation is meant, "
                "such as the output of the embedding (net.points(type=torch.nn.Embedding) lists them)"
            )
        return self.floating

    def changed(self, change: Callable[[Tensor], Tensor]) -> NetworkInputs:
        """The inputs with every tensor changed."""
        return replace(self, values=tuple(change(x) if isinstance(x, Tensor) else x for x in self.values))

    def with_values(self, places: Sequence[int], values: Sequence[Tensor]) -> NetworkInputs:
        """The inputs with other values at some places."""
        changed = list(self.values)
        for place, value in zip(places, values, strict=True):
            changed[place] = value
        return replace(self, values=tuple(changed))

    def copies(self, count: int) -> NetworkInputs:
        """The batch several times, one after the other; what has no row per input stays as it is."""
        if count == 1:
            return self
        rows = self.rows
        return self.changed(lambda x: torch.cat([x] * count) if x.ndim and len(x) == rows else x)

    def call(self, function: Callable[..., Any], **options: Any) -> Any:
        """Call a function with the inputs as its arguments."""
        if self.names is None:
            return function(*self.values, **options)
        return function(**dict(zip(self.names, self.values, strict=True)), **options)

    def like(self, given: Any, what: str) -> list[Any]:
        """One value for each input: that of a tuple or dict of the same form, or the same for all."""
        is_dict, is_tuple = isinstance(given, Mapping), isinstance(given, tuple | list)
        if self.names is not None and is_dict:
            unknown = [name for name in given if name not in self.names]
            if unknown:
                raise HooklineError(f"{what} has {unknown[0]!r}, but the inputs are {', '.join(map(repr, self.names))}")
            return [given.get(name) for name in self.names]
        if self.names is None and not self.is_single and is_tuple:
            if len(given) != len(self.values):
                raise HooklineError(f"{what} has {len(given)} values for {len(self.values)} inputs: pass one for each")
            return list(given)
        if is_dict:
            raise HooklineError(f"{what} is a dict, but the inputs are not: pass it in the same form as the inputs")
        return [given] * len(self.values)

    def packed(self, results: Mapping[int, Any]) -> Any:
        """Results by place in the form of the inputs, with None for inputs that have no result."""
        if self.is_single:
            return results[0]
        if self.names is None:
            return tuple(results.get(place) for place in range(len(self.values)))
        return {name: results.get(place) for place, name in enumerate(self.names)}
