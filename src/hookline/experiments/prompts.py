"""Prompts of an experiment: texts or tokens, in pairs of the same shape, and a baseline for each."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from hookline.errors import HooklineError, HooklineWarning
from hookline.experiments.labels import token_labels
from hookline.model import HookedModel
from hookline.points import HookPoint
from hookline.rerun.baseline import Baseline
from hookline.runtime import users_level
from hookline.verbs import HookList

Prompt: TypeAlias = str | Sequence[str] | Tensor


@dataclass(frozen=True, eq=False)
class Prompts:
    """Rows of tokens, perhaps padded to one width."""

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]

    @property
    def width(self) -> int:
        """How many positions there are, padding included."""
        return self.tokens.shape[1]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def span(self, row: int) -> range:
        """The columns that one row's text is in."""
        columns = self.mask[row].nonzero().flatten().tolist()
        return range(columns[0], columns[-1] + 1)

    @property
    def checksum(self) -> str:
        """A few letters that tell these prompts from others."""
        content = torch.where(self.mask, self.tokens, -1).cpu().contiguous().numpy().tobytes()
        return f"{len(self)}×{self.width} {zlib.crc32(content):08x}"

    def row(self, row: int) -> Int[Tensor, "1 pos"]:
        """One row without its padding."""
        span = self.span(row)
        return self.tokens[row : row + 1, span.start : span.stop]

    def labels(self, model: HookedModel) -> list[str | int]:
        """What positions are called: by their tokens if there is one text, else by their numbers."""
        if len(self) > 1 or model.tokenizer is None:
            return list(range(self.width))
        return list(token_labels(model.to_str_tokens(self.tokens[0])))


def prompts_of(model: HookedModel, prompt: Prompt) -> Prompts:
    """Texts or tokens as rows."""
    ids, mask = model._inputs(prompt, None, None)
    return Prompts(ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool())


def check_pair(model: HookedModel, clean: Prompts, corrupted: Prompts) -> None:
    """What is patched from one into the other must be at the same places in both."""
    if clean.tokens.shape == corrupted.tokens.shape and torch.equal(clean.mask, corrupted.mask):
        return
    row = next((row for row in range(min(len(clean), len(corrupted))) if clean.span(row) != corrupted.span(row)), 0)
    shown = [_shown(model, prompts, row) for prompts in (clean, corrupted)]
    raise HooklineError(
        f"clean and corrupted prompts must have as many rows, and as many tokens in each, to be patched into each "
        f"other: clean has {list(clean.tokens.shape)}, corrupted {list(corrupted.tokens.shape)}. "
        f"Row {row}: clean {shown[0]}, corrupted {shown[1]}"
    )


def _shown(model: HookedModel, prompts: Prompts, row: int) -> str:
    tokens = prompts.row(row)[0]
    shown = model.to_str_tokens(tokens) if model.tokenizer is not None else tokens.tolist()
    return f"{len(shown)} tokens {shown}"


def baselines(
    model: HookedModel, prompts: Prompts, *, keep: Iterable[str] = (), fwd_hooks: HookList = ()
) -> list[Baseline]:
    """A run on each row, without padding, that variants can be made of."""
    warn_of_dropout(model)
    keep = list(keep)
    return [Baseline(model, prompts.row(row), fwd_hooks=fwd_hooks, keep=keep) for row in range(len(prompts))]


def warn_of_dropout(model: HookedModel) -> None:
    """What is compared must not differ by chance."""
    if not model.module.training:
        return
    dropouts = [name for name, each in model.module.named_modules() if isinstance(each, nn.Dropout) and each.p > 0]
    if dropouts:
        warnings.warn(
            f"the model is in training mode with dropout ({dropouts[0]}, …): runs differ by chance. Call model.eval()",
            HooklineWarning,
            stacklevel=users_level(),
        )


def unpadded(value: Tensor, point: HookPoint, span: range, width: int) -> Tensor:
    """The value of one row of a batch, without its padding."""
    for place, letter in enumerate(point.axes.split()[1:]):
        if letter in "pk" and value.shape[place] == width:
            value = value.narrow(place, span.start, len(span))
    return value
