"""Prompts of an experiment: texts, tokens, or texts with images; and a baseline for each."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hookline.engine.hooked import HookList
from hookline.engine.points import HookPoint
from hookline.errors import HooklineError, HooklineWarning, users_level
from hookline.experiments.core.labels import token_labels
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline

Prompt: TypeAlias = str | Sequence[str | int | Sequence[int]] | Tensor | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Text, texts, token ids (a tensor, a list, or a list for each text);
or the result of `model.to_inputs(text, images=…)` for one text, or a list of these."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """Rows of tokens, perhaps padded to one width."""

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    more: tuple[Mapping[str, Any], ...] = ()
    """For texts with images: the inputs of each row besides its tokens."""
    copies: int = 1
    """How many adjacent rows are one example: the same text with different continuations."""
    own: tuple[int, ...] = ()
    """How many tokens of each row belong to the prompt, if continuations follow it."""

    @property
    def width(self) -> int:
        """How many positions there are, padding included."""
        return self.tokens.shape[1]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def span(self, row: int) -> range:
        """The columns of the text of one row."""
        columns = self.mask[row].nonzero().flatten().tolist()
        return range(columns[0], columns[-1] + 1)

    def length(self, row: int) -> int:
        """How many tokens the text of one row has, without a continuation."""
        return self.own[row] if self.own else len(self.span(row))

    @property
    def checksum(self) -> str:
        """A checksum of the prompts."""
        content = torch.where(self.mask, self.tokens, -1).cpu().contiguous().numpy().tobytes()
        for inputs in self.more:
            for _, x in sorted(inputs.items()):
                content += (
                    x.double().cpu().contiguous().numpy().tobytes() if isinstance(x, Tensor) else repr(x).encode()
                )
        return f"{len(self)}×{self.width} {zlib.crc32(content):08x}"

    def row(self, row: int) -> Int[Tensor, "1 pos"]:
        """One row without its padding."""
        span = self.span(row)
        return self.tokens[row : row + 1, span.start : span.stop]

    def only(self, row: int) -> Prompts:
        """One row as a batch of its own, without its padding."""
        tokens = self.row(row)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        return Prompts(tokens, mask, self.more[row : row + 1], own=self.own[row : row + 1])

    def one(self, row: int) -> dict[str, Any]:
        """The model inputs for one row."""
        return {"input_ids": self.row(row), **self.more[row]} if self.more else {"input": self.row(row)}

    def part(self, rows: Sequence[int]) -> Prompts:
        """Some of the rows, as wide as all of them."""
        if len(rows) == len(self):
            return self
        some = list(rows)
        return Prompts(self.tokens[some], self.mask[some], tuple(self.more[row] for row in some) if self.more else ())

    def call(self, model: HookedModel) -> dict[str, Any]:
        """The model inputs for all rows at once, with padding."""
        if self.more:
            return {"input_ids": self.tokens, "attention_mask": self.mask.long(), **self._together()}
        if bool(self.mask.all()):
            return {"input": self.tokens}
        mask = self.mask.long()
        return {"input": self.tokens, "attention_mask": mask, **model._positions(mask)}

    def _together(self) -> dict[str, Any]:
        """The inputs of all rows: those with one value per token are padded, the others concatenated."""
        names = list(self.more[0])
        if any(list(inputs) != names for inputs in self.more):
            raise HooklineError("some prompts have images and others have none: run them separately")
        found: dict[str, Any] = {}
        for name in names:
            each = [inputs[name] for inputs in self.more]
            if not all(isinstance(x, Tensor) for x in each):
                found[name] = each[0]
                continue
            if all(x.shape == (1, len(self.span(row))) for row, x in enumerate(each)):
                wide = torch.zeros_like(self.tokens, dtype=each[0].dtype)
                for row, x in enumerate(each):
                    wide[row, self.mask[row]] = x[0]
                found[name] = wide
            elif len({x.shape[1:] for x in each}) > 1:
                raise HooklineError(
                    f"{name} has different shapes for these prompts, {[list(x.shape) for x in each]}, and cannot be "
                    f"batched: run them one by one"
                )
            else:
                found[name] = torch.cat(each)
        return found

    def labels(self, model: HookedModel) -> list[str | int]:
        """The labels of positions: tokens if there is one text, otherwise numbers."""
        if len(self) > self.copies or model.tokenizer is None:
            return list(range(self.width))
        known = self.width if len(self) == 1 else self.length(0)  # continuations differ from there on
        return [*token_labels(model.to_str_tokens(self.tokens[0, :known])), *range(known, self.width)]


def prompts_of(model: HookedModel, prompt: Prompt) -> Prompts:
    """Texts, tokens or inputs with images as rows."""
    if isinstance(prompt, Mapping):
        return _with_images(model, [prompt])
    if not isinstance(prompt, str | Tensor) and len(prompt) and all(isinstance(each, Mapping) for each in prompt):
        return _with_images(model, list(prompt))  # type: ignore[arg-type]
    if isinstance(prompt, list | tuple) and _are_ids(prompt):
        return _of_ids(model, prompt)
    ids, mask = model._inputs(prompt, None, None)  # type: ignore[arg-type]
    return Prompts(ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool())


def _are_ids(given: Any) -> bool:
    """Whether it is a list of token ids, or of such lists."""
    if given and all(isinstance(each, list | tuple) for each in given):
        return all(each and _are_ids(each) for each in given)
    return bool(given) and all(type(each) is int for each in given)


def _of_ids(model: HookedModel, given: Sequence[Any]) -> Prompts:
    """Token ids of one text, or of several of any lengths, as rows."""
    texts = given if isinstance(given[0], list | tuple) else [given]
    rows = [torch.tensor(each, device=model._device) for each in texts]
    for row in rows:
        model.text.check_ids(row)
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    return Prompts(pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True))


def _with_images(model: HookedModel, given: Sequence[Mapping[str, Any]]) -> Prompts:
    """Keyword inputs, of one text each, as rows."""
    rows: list[Tensor] = []
    more: list[Mapping[str, Any]] = []
    for inputs in given:
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[0] != 1:
            raise HooklineError(
                "a prompt with images is the result of model.to_inputs(text, images=…) for one text, or a list of "
                f"these. Here input_ids is {'missing' if ids is None else list(ids.shape)}"
            )
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise HooklineError("a prompt with images must not have padding: create the inputs of each text separately")
        model.text.check_ids(ids)
        rows.append(ids[0].to(model._device))
        more.append(
            {
                name: x.to(model._device) if isinstance(x, Tensor) else x
                for name, x in inputs.items()
                if name not in ("input_ids", "attention_mask")
            }
        )
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    return Prompts(pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True), tuple(more))


def check_pair(model: HookedModel, clean: Prompts, corrupted: Prompts) -> None:
    """Clean and corrupted prompts must have the same shape."""
    if clean.tokens.shape == corrupted.tokens.shape and torch.equal(clean.mask, corrupted.mask):
        return
    row = next((row for row in range(min(len(clean), len(corrupted))) if clean.span(row) != corrupted.span(row)), 0)
    shown = [_shown(model, prompts, row) for prompts in (clean, corrupted)]
    raise HooklineError(
        f"clean and corrupted prompts must have the same number of rows, and of tokens in each row: clean has "
        f"{list(clean.tokens.shape)}, corrupted {list(corrupted.tokens.shape)}. "
        f"Row {row}: clean {shown[0]}, corrupted {shown[1]}"
    )


def _shown(model: HookedModel, prompts: Prompts, row: int) -> str:
    tokens = prompts.row(row)[0]
    shown = model.to_str_tokens(tokens) if model.tokenizer is not None else tokens.tolist()
    return f"{len(shown)} tokens {shown}"


def baselines(
    model: HookedModel, prompts: Prompts, *, keep: Iterable[str] = (), fwd_hooks: HookList = ()
) -> list[Baseline]:
    """A baseline for each row, without padding."""
    warn_of_dropout(model)
    keep = list(keep)
    more = prompts.more or (None,) * len(prompts)
    return [
        Baseline(model, prompts.row(row), inputs=more[row], fwd_hooks=fwd_hooks, keep=keep)
        for row in range(len(prompts))
    ]


def warn_of_dropout(model: HookedModel) -> None:
    """Warn if the model is in training mode with dropout."""
    dropouts = [name for name, each in model.module.named_modules() if each.training and _is_random(each)]
    if dropouts:
        warnings.warn(
            f"the model is in training mode with dropout ({dropouts[0]}, …): runs differ at random. Call model.eval()",
            HooklineWarning,
            stacklevel=users_level(),
        )


_CHANCES = ("dropout", "layerdrop", "drop_path", "jitter")
"""Parts of the attribute names under which modules store dropout or jitter rates."""


def _is_random(module: nn.Module) -> bool:
    """Whether a module is random in training mode, itself or through a function that it calls."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    rates = (x for name, x in vars(module).items() if any(each in name for each in _CHANCES))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def unpadded(value: Tensor, point: HookPoint, span: range, width: int) -> Tensor:
    """The value of one row of a batch, without its padding; that of images has none."""
    if point.stream == "image":
        return value
    for place, letter in enumerate(point.axes.split()[1:]):
        if letter in "pk" and value.shape[place] == width:
            value = value.narrow(place, span.start, len(span))
    return value
