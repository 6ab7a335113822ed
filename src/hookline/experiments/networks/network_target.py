"""NetworkTarget: one number for each row of what a network returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HooklineError, a_type, how_many
from hookline.values.structures import map_tensors, tensors_in

Target: TypeAlias = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None
"""An index of the output's last axis, one index per row, a function of the output, or None: the largest output."""


class NetworkTarget:
    """What is explained, read from the output of a batch of `rows`."""

    def __init__(self, target: Target, output: Any, rows: int) -> None:
        self.rows = rows
        self.function = target if callable(target) and not isinstance(target, Tensor) else None
        self.index: Tensor | None = None
        if self.function is None:
            logits = self._logits(output)
            if logits.ndim == 2:
                self.index = self._largest(logits) if target is None else self._checked(target, logits)
            elif target is not None:
                raise HooklineError("the output is one number per row, which has no index: leave target out")

    def per_group(self, output: Any, groups: int = 1) -> Tensor:
        """The target of each row of each group: the output is that of `groups` batches, one after the other.

        A function that returns one number for the whole batch gives one per group.
        """
        if self.function is not None:
            return torch.stack([self._called(group) for group in split(output, self.rows, groups)])
        logits = self._logits(output, groups).reshape(groups, self.rows, -1)
        if self.index is None:
            return logits[..., 0]
        index = self.index.to(logits.device)
        return logits.gather(-1, index.expand(groups, -1)[..., None])[..., 0]

    def per_row(self, output: Any, groups: int = 1) -> Tensor:
        """The target of each row of each group; an error if there is only one number for all rows."""
        values = self.per_group(output, groups)
        if values.ndim == 1 and self.rows > 1:
            raise HooklineError(
                f"the target function returned one number for {how_many(self.rows, 'row')}, and each row has its own "
                f"effect here: return one per row, as lambda output: output[:, 3]"
            )
        return values.reshape(groups, self.rows)

    @property
    def text(self) -> Any:
        """What is explained, for `info`."""
        if self.function is not None:
            return getattr(self.function, "__name__", type(self.function).__name__)
        return None if self.index is None else self.index.tolist()

    def _called(self, output: Any) -> Tensor:
        assert self.function is not None
        value = self.function(output)
        if (
            not isinstance(value, Tensor)
            or not value.is_floating_point()
            or (value.ndim and value.numel() != self.rows)
        ):
            got = f"the shape {list(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else a_type(value)
            raise HooklineError(
                f"a target function returns one floating-point number per row ({self.rows}), or one for all, not {got}"
            )
        return value.reshape(self.rows) if value.ndim else value

    def _logits(self, output: Any, groups: int = 1) -> Tensor:
        """The numbers of each row, as [row] or [row, index]."""
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise HooklineError(
                f"the network returns {a_type(output)}: pass a function as target, such as "
                f"lambda output: output[0][:, 3]"
            )
        if logits.ndim not in (1, 2):
            raise HooklineError(
                f"the network's output has the shape {list(logits.shape)}, so an index is not one number per row: "
                f"pass a function as target, such as lambda output: output[:, -1, 3]"
            )
        if len(logits) != self.rows * groups:
            raise HooklineError(
                f"the output has {how_many(len(logits), 'row')}, and the inputs {self.rows * groups}: the first axis "
                f"of both must be the batch. Otherwise pass a target function that returns one number"
            )
        return logits

    def _largest(self, logits: Tensor) -> Tensor:
        return logits.detach().argmax(-1)

    def _checked(self, target: Any, logits: Tensor) -> Tensor:
        classes = logits.shape[-1]
        try:
            index = torch.as_tensor(target)
        except (TypeError, ValueError, RuntimeError) as error:
            raise HooklineError(
                f"target is an index, one per row, or a function of the output, not {target!r}"
            ) from error
        if index.dtype is torch.bool or index.is_floating_point() or index.is_complex():
            raise HooklineError(f"target is an index, one per row, or a function of the output, not {target!r}")
        if index.ndim > 1 or (index.ndim == 1 and len(index) != self.rows):
            raise HooklineError(
                f"target has the shape {list(index.shape)} for {how_many(self.rows, 'row')}: pass one each"
            )
        index = index.to(logits.device, torch.long)
        if ((index < -classes) | (index >= classes)).any():
            raise HooklineError(f"target {target!r} is out of range: the output has {classes} values per row")
        return (index % classes).expand(self.rows)


def split(output: Any, rows: int, groups: int) -> list[Any]:
    """The outputs of some batches that ran as one."""
    if groups == 1:
        return [output]
    return [map_tensors(output, lambda x, at=at: x[at * rows : (at + 1) * rows]) for at in range(groups)]  # type: ignore[misc]


def is_per_row(output: Any, rows: int) -> bool:
    """Whether every tensor of an output has one row per input."""
    return all(x.ndim > 0 and len(x) == rows for x in tensors_in(output))
