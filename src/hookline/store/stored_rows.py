"""Rows: activations read from a store, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from hookline.errors import unknown_point


@dataclass(frozen=True)
class Rows:
    """The activations of some tokens: `rows["blocks.0.hook_resid_post"]` is [row, d_model].

    Row `i` belongs to the token `token[i]` at `position[i]` of the example `example[i]`. Positions count from the
    text's first token, without padding. For networks without tokens, a row is a sample, and `position` and `token` are
    -1.
    """

    example: Int[Tensor, " row"]
    position: Int[Tensor, " row"]
    token: Int[Tensor, " row"]
    activations: Mapping[str, Tensor]
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Other names of points, and the names in `activations` they refer to."""

    def __len__(self) -> int:
        return len(self.example)

    def __getitem__(self, point: str) -> Tensor:
        name = point if point in self.activations else self.names.get(point, "")
        if name not in self.activations:
            raise unknown_point(point, self.activations)
        return self.activations[name]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Rows:
        """Returns a copy on another device."""
        return self._each(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Rows:
        """Returns a copy in pinned memory; a DataLoader calls this."""
        return self._each(Tensor.pin_memory)

    def pick(self, which: Tensor | slice) -> Rows:
        """Returns some of the rows, in that order."""
        return self._each(lambda x: x[which])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Rows:
        points = {name: change(x) for name, x in self.activations.items()}
        return Rows(change(self.example), change(self.position), change(self.token), points, self.names)

    def __repr__(self) -> str:
        shapes = (
            f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in self.activations.items()
        )
        return f"Rows: {len(self)} of examples {_span(self.example)}; {', '.join(shapes)}"


def joined(parts: Sequence[Rows]) -> Rows:
    """Concatenate several."""
    if len(parts) == 1:
        return parts[0]
    points = {name: torch.cat([part.activations[name] for part in parts]) for name in parts[0].activations}
    example, position, token = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("example", "position", "token")
    )
    return Rows(example, position, token, points, parts[0].names)


def _span(example: Tensor) -> str:
    return f"{int(example.min())} to {int(example.max())}" if len(example) else "none"
