"""Prompts of an experiment: texts, tokens, or texts with images; and a baseline for each."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from numpy import generic, ndarray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from hookline.engine import HookPoint, sharding
from hookline.errors import HooklineError, warn
from hookline.experiments.core.labels import token_labels
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.text.given_texts import columns_in
from hookline.text.token_positions import Steps, canonical
from hookline.transformer.empty import check_weights_there
from hookline.types import HookList

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

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[Int[Tensor, " _"]],
        more: Sequence[Mapping[str, Any]] = (),
        copies: int = 1,
        own: Sequence[int] = (),
    ) -> Prompts:
        """Tokens of any lengths, padded on the right."""
        masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
        tokens, mask = (pad_sequence(list(sequences), batch_first=True) for sequences in (rows, masks))
        return cls(tokens, mask, tuple(more), copies, tuple(own))

    def ending_at(self, width: int) -> Prompts:
        """The same rows, whose texts all end at the last of `width` columns."""
        rows = [F.pad(self.row(row)[0], (width - len(span), 0)) for row, span in enumerate(self.spans)]
        masks = [torch.arange(width) >= width - len(span) for span in self.spans]
        return replace(self, tokens=torch.stack(rows), mask=torch.stack(masks).to(self.mask.device))

    @property
    def width(self) -> int:
        """The number of positions, including padding."""
        return self.tokens.shape[1]

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def spans(self) -> list[range]:
        """The columns of the text of each row."""
        columns = [row.nonzero().flatten().tolist() for row in self.mask.cpu()]
        return [range(positions[0], positions[-1] + 1) for positions in columns]

    def length(self, row: int) -> int:
        """The number of tokens of one row, without padding and continuation."""
        return self.own[row] if self.own else len(self.spans[row])

    @property
    def checksum(self) -> str:
        """A checksum of the prompts."""
        content = torch.where(self.mask, self.tokens, -1).cpu().contiguous().numpy().tobytes()
        content += b"".join(map(_content, self.more))
        return f"{len(self)}×{self.width} {zlib.crc32(content):08x}"

    @property
    def checksums(self) -> list[int]:
        """A checksum of each example: equal where the text is, whatever its padding and continuation."""
        rows, tokens = range(0, len(self), self.copies), self.tokens.cpu()
        starts = {row: self.spans[row].start for row in rows}
        texts = [tokens[row, start : start + self.length(row)].numpy().tobytes() for row, start in starts.items()]
        images = [_content(self.more[row]) if self.more and not self.own else b"" for row in rows]
        return [zlib.crc32(text + image) for text, image in zip(texts, images, strict=True)]

    def row(self, row: int) -> Int[Tensor, "1 pos"]:
        """One row without its padding."""
        span = self.spans[row]
        return self.tokens[row : row + 1, span.start : span.stop]

    def only(self, row: int) -> Prompts:
        """One row as a batch of its own, without its padding."""
        return Prompts.of_rows([self.row(row)[0]], self.more[row : row + 1], own=self.own[row : row + 1])

    def one(self, row: int) -> dict[str, Any]:
        """The model inputs for one row."""
        return {"input_ids": self.row(row), **self.more[row]} if self.more else {"input": self.row(row)}

    def part(self, rows: Sequence[int]) -> Prompts:
        """Some of the rows, as wide as all of them."""
        if len(rows) == len(self):
            return self
        more = tuple(self.more[row] for row in rows) if self.more else ()
        lengths = tuple(self.own[row] for row in rows) if self.own else ()
        return replace(self, tokens=self.tokens[list(rows)], mask=self.mask[list(rows)], more=more, own=lengths)

    def padded(self, rows: Sequence[Float[Tensor, "_ vocab"]]) -> Float[Tensor, "batch pos vocab"]:
        """The logits of each prompt in one tensor, with zeros at padding."""
        if len(rows) == 1 and len(rows[0]) == self.width:
            return rows[0][None]
        ends = [(0, 0, span.start, self.width - span.stop) for span in self.spans]
        return torch.stack([F.pad(x, padding) for x, padding in zip(rows, ends, strict=True)])

    def by_row(self, values: Mapping[str, Tensor], points: Iterable[HookPoint]) -> list[dict[str, Tensor]]:
        """The values of each row at some points, without its padding; values of images have none."""
        rows: list[dict[str, Tensor]] = [{} for _ in self.spans]
        for point, (row, span) in product(points, enumerate(self.spans)):
            value = values[point.name][row]
            for place, letter in enumerate(point.axes.split()[1:]):
                if letter in "pk" and value.shape[place] == self.width and point.stream != "image":
                    value = value.narrow(place, span.start, len(span))
            rows[row][point.name] = value
        return rows

    def call(self, model: HookedModel) -> dict[str, Any]:
        """The model inputs for all rows at once, with padding."""
        if self.more:
            return {"input_ids": self.tokens, "attention_mask": self.mask.long(), **self._together()}
        if bool(self.mask.all()):
            return {"input": self.tokens}
        mask = self.mask.long()
        return {"input": self.tokens, "attention_mask": mask, **model._positions(mask)}

    def _together(self) -> dict[str, Any]:
        """The inputs of all rows besides tokens: inputs with one value per token are padded, others concatenated."""
        names = list(self.more[0])
        if any(list(inputs) != names for inputs in self.more):
            raise HooklineError("some prompts have images and others have none: run them separately")
        batch: dict[str, Any] = {}
        for name in names:
            values = [inputs[name] for inputs in self.more]
            if not all(isinstance(x, Tensor) for x in values):
                batch[name] = values[0]
            elif all(x.shape == (1, len(span)) for x, span in zip(values, self.spans, strict=True)):
                batch[name] = torch.zeros_like(self.tokens, dtype=values[0].dtype)
                batch[name][self.mask] = torch.cat([x[0] for x in values])
            elif len({x.shape[1:] for x in values}) > 1:
                raise HooklineError(
                    f"{name} has different shapes for these prompts, {[list(x.shape) for x in values]}, and cannot be "
                    f"batched: run them one by one"
                )
            else:
                batch[name] = torch.cat(values)
        return batch

    def labels(self, model: HookedModel) -> list[str | int]:
        """The labels of positions: tokens if there is one text, otherwise numbers."""
        if len(self) > self.copies or model.tokenizer is None:
            return list(range(self.width))
        common_length = self.width if len(self) == 1 else self.length(0)  # continuations differ from there on
        return [*token_labels(model.to_str_tokens(self.tokens[0, :common_length])), *range(common_length, self.width)]


def _content(inputs: Mapping[str, Any]) -> bytes:
    """The inputs of a row besides its tokens, as bytes."""
    values = [x for _, x in sorted(inputs.items())]
    return b"".join(
        x.double().cpu().contiguous().numpy().tobytes() if isinstance(x, Tensor) else repr(x).encode() for x in values
    )


def prompts_of(model: HookedModel, prompt: Prompt) -> Prompts:
    """Texts, tokens or inputs with images as rows."""
    check_has_weights(model)
    if isinstance(prompt, Mapping):
        return _with_images(model, [prompt])
    prompt, images = model._read(prompt, None)
    if images is not None:
        pairs = [(prompt, images)] if isinstance(prompt, str) else zip(prompt, images, strict=True)
        return _with_images(model, [model.to_inputs(text, images=row or None) for text, row in pairs])
    if not isinstance(prompt, str | Tensor) and len(prompt) and all(isinstance(inputs, Mapping) for inputs in prompt):
        return _with_images(model, list(prompt))  # type: ignore[arg-type]
    if isinstance(prompt, list | tuple) and _are_ids(prompt):
        texts = prompt if isinstance(prompt[0], list | tuple) else [prompt]
        rows = [torch.tensor(ids, device=model.device) for ids in texts]
        for row in rows:
            model.text.check_ids(row)
        return Prompts.of_rows(rows)
    ids, mask = model._inputs(prompt, None, None)  # type: ignore[arg-type]
    return Prompts(ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool())


def check_language_model(model: Any) -> None:
    """Raise for a network that is not a language model."""
    if not isinstance(model, HookedModel):
        raise HooklineError(
            f"this experiment needs a language model, hookline.load(…) or hookline.hook(…) of a transformers model, "
            f"not a {type(model).__name__}. Any network, as hookline.hook(network), has run_with_cache, "
            f"run_with_hooks with edits such as edits.zero(), and hookline.harvest"
        )


def check_has_weights(model: HookedModel) -> None:
    """Raise if the model was loaded without its weights."""
    check_language_model(model)
    check_weights_there(model.anatomy.main.embed)


def check_weights_stay(model: HookedModel, what: str) -> None:
    """Raise if the model is sharded over processes, or if weights are loaded only while their module runs."""
    sharding.check_not_sharded(model.index.root, what)
    if any(weight.is_meta for weight in model.module.parameters()):
        check_has_weights(model)
        raise HooklineError(
            f"{what} is not available on a model whose weights are offloaded by accelerate, and loaded only while a "
            f"module runs: load it without offloading (device_map=None, no cpu_offload), in a smaller dtype if it does "
            f"not fit, or use attribution.attribution_patching, which also works here"
        )


def _are_ids(prompt: Any) -> bool:
    """Whether it is a list of token ids, or of such lists."""
    if prompt and all(isinstance(ids, list | tuple) for ids in prompt):
        return all(ids and _are_ids(ids) for ids in prompt)
    return bool(prompt) and all(type(token) is int for token in prompt)


def _with_images(model: HookedModel, prompts: Sequence[Mapping[str, Any]]) -> Prompts:
    """Keyword inputs, of one text each, as rows."""
    rows, more = [], []
    for inputs in prompts:
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[0] != 1:
            raise HooklineError(
                "a prompt with images is the result of model.to_inputs(text, images=…) for one text, or a list of "
                f"these. Here input_ids is {'missing' if ids is None else list(ids.shape)}"
            )
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise HooklineError("a prompt with images must not have padding: create the inputs of each text separately")
        model.text.check_ids(ids)
        device_inputs = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        rows.append(device_inputs.pop("input_ids")[0])
        device_inputs.pop("attention_mask", None)
        more.append(device_inputs)
    return Prompts.of_rows(rows, more)


def prompt_positions(model: HookedModel, prompts: Prompts, pos: Any, name: str = "pos") -> list[list[int]]:
    """Positions in each prompt, sorted: an index, several, a slice, `last`, `token(…)` or `image_tokens`.

    They are counted within the prompt. `name` is the name of the argument, for error messages.
    """
    if isinstance(pos, list | tuple) and not pos:
        raise HooklineError(f"{name}=[] selects nothing")
    positions = canonical(pos.tolist() if isinstance(pos, Tensor | ndarray | generic) else pos)
    if isinstance(positions, Steps):
        raise HooklineError(f"{name}={positions!r} refers to generated tokens, but an experiment does not generate")
    real = prompts.mask.cpu().clone()
    for row, span in enumerate(prompts.spans):
        real[row, span.start + prompts.length(row) :] = False  # not in a continuation
    mask, missing = columns_in(positions, model.index.root, prompts.tokens, real)
    if missing:
        raise HooklineError(f"{name}={pos!r}: there is no {next(iter(missing.values()))}")
    rows = zip((mask & real).tolist(), prompts.spans, strict=True)
    by_prompt = [[at - span.start for at, is_meant in enumerate(row) if is_meant] for row, span in rows]
    if [] in by_prompt:
        raise HooklineError(f"{name}={pos!r} selects nothing in prompt {by_prompt.index([])}")
    return by_prompt


def has_same_shape(clean: Prompts, corrupted: Prompts) -> bool:
    """Whether two batches have tokens at the same places."""
    return clean.tokens.shape == corrupted.tokens.shape and torch.equal(clean.mask, corrupted.mask)


def check_pair(model: HookedModel, clean: Prompts, corrupted: Prompts, *, hint: str = "") -> None:
    """Clean and corrupted prompts must have the same shape; `hint` ends the message if they do not."""
    if has_same_shape(clean, corrupted):
        return
    row = next((row for row in range(min(len(clean), len(corrupted))) if clean.spans[row] != corrupted.spans[row]), 0)
    shown = []
    for tokens in (clean.row(row)[0], corrupted.row(row)[0]):
        texts = model.to_str_tokens(tokens) if model.tokenizer is not None else tokens.tolist()
        shown.append(f"{len(texts)} tokens {texts}")
    raise HooklineError(
        f"clean and corrupted prompts must have the same number of rows, and of tokens in each row: clean has "
        f"{list(clean.tokens.shape)}, corrupted {list(corrupted.tokens.shape)}. "
        f"Row {row}: clean {shown[0]}, corrupted {shown[1]}{hint}"
    )


def baselines(
    model: HookedModel, prompts: Prompts, *, keep: Iterable[str] = (), fwd_hooks: HookList = ()
) -> list[Baseline]:
    """A baseline for each row, without padding."""
    warn_of_dropout(model)
    rows = zip(range(len(prompts)), prompts.more or (None,) * len(prompts), strict=True)
    keep = list(keep)
    return [Baseline(model, prompts.row(row), inputs=more, fwd_hooks=fwd_hooks, keep=keep) for row, more in rows]


def warn_of_dropout(model: HookedModel) -> None:
    """Warn if the model is in training mode with dropout."""
    dropouts = [name for name, module in model.module.named_modules() if module.training and _is_random(module)]
    if dropouts:
        warn(
            f"the model is in training mode with dropout ({dropouts[0]}, …): runs differ at random. Call model.eval()",
        )


_CHANCES = ("dropout", "layerdrop", "drop_path", "jitter")
"""Parts of the attribute names under which modules store dropout or jitter rates."""


def _is_random(module: nn.Module) -> bool:
    """Whether a module is random in training mode, itself or through a function that it calls."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    rates = (x for name, x in vars(module).items() if any(part in name for part in _CHANCES))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
