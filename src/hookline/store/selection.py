"""Selection: a batch of examples as inputs of the model, and which of its rows are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.store.examples import Example
from hookline.store.extra_columns import beside
from hookline.store.options import Options
from hookline.store.padding import warn_of_padding
from hookline.store.token_rows import Tokens
from hookline.text.forward_pass import ForwardPass, Span
from hookline.text.token_positions import Meaning


@dataclass(frozen=True)
class Batch:
    """What goes into the model, and where the rows are that come out of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    """What rows there are: [examples, positions], or [examples] of a network without positions."""
    index: Int[Tensor, " row"] | None
    """Which of them are stored, counted through; None for all."""
    example: Int[Tensor, " row"]
    position: Int[Tensor, " row"]
    token: Int[Tensor, " row"]

    @property
    def rows(self) -> int:
        """How many are stored."""
        return len(self.example)

    @property
    def can_be_split(self) -> bool:
        """Whether everything that goes in has a row for each example."""
        return all(len(x) == self.shape[0] for x in (*self.args, *self.kwargs.values()))

    def part(self, start: int, stop: int) -> Batch:
        """The inputs of the examples from `start` to before `stop`. It is for running only: rows stay as they are."""
        kwargs = {name: x[start:stop] for name, x in self.kwargs.items()}
        args, shape = tuple(x[start:stop] for x in self.args), (stop - start, *self.shape[1:])
        return replace(self, args=args, kwargs=kwargs, shape=shape)

    def first(self, rows: int) -> Batch:
        """Only the first so many of the rows."""
        if rows >= self.rows:
            return self
        index = self.index if self.index is not None else torch.arange(self.rows)
        return replace(
            self,
            index=index[:rows],
            example=self.example[:rows],
            position=self.position[:rows],
            token=self.token[:rows],
        )


def text_batch(model: HookedModel, examples: Sequence[Example], first: int, options: Options) -> Batch:
    """A batch of texts or token ids, padded on the right; padding is never a row."""
    texts = [_ids(model, example, first + number, options) for number, example in enumerate(examples)]
    width = max(map(len, texts))
    ids = torch.full((len(texts), width), _pad(model), dtype=torch.long)
    real = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text)], real[row, : len(text)] = text, True
    warn_of_padding(model, examples, texts, first, options.told)
    kept = _chosen(model, ids, real, first, options) & real
    kept &= _sampled(first, list(map(len, texts)), width, options)
    some = real.any(1)  # an empty text has no rows, and the model is not run on it
    run, rows = _at(real, some), _at(kept, some)
    kwargs = {"input_ids": _at(ids, some)}
    kwargs |= {name: _at(x, some) for name, x in beside(model, examples, texts, first).items()}
    if not bool(run.all()):
        kwargs["attention_mask"] = run.long()
    number, position = kept.nonzero(as_tuple=True)
    return Batch(
        args=(),
        kwargs=kwargs,
        shape=(len(run), width),
        index=None if bool(rows.all()) else rows.flatten().nonzero().flatten(),
        example=number + first,
        position=position.int(),
        token=_at(ids, kept).int(),
    )


def _at(x: Tensor, mask: Tensor) -> Tensor:
    """`x[mask]`, by numpy: torch calls threads together even for this little, and waits for cores that write."""
    return torch.from_numpy(x.numpy()[mask.numpy()])


def sample_batch(examples: Sequence[Example], first: int, options: Options) -> Batch:
    """A batch of tensors for a network that is no language model: a row is a sample."""
    samples = [example for example in examples if isinstance(example, Tensor)]
    shapes = {tuple(sample.shape) for sample in samples}
    if len(shapes) != 1:
        raise HooklineError(f"examples {first} to {first + len(samples) - 1} have several shapes: {sorted(shapes)}")
    kept = _sampled(first, [1] * len(samples), 1, options).flatten()
    number = kept.nonzero().flatten()
    none = torch.full((len(number),), -1, dtype=torch.int32)
    index = None if bool(kept.all()) else number
    return Batch((torch.stack(samples),), {}, (len(samples),), index, number + first, none, none)


def _ids(model: HookedModel, example: Example, number: int, options: Options) -> Tensor:
    if not isinstance(example, str) and options.prepend_bos is not None:
        raise HooklineError("prepend_bos is for text: tokens are taken as they are")
    ids = torch.empty(0, dtype=torch.long)
    try:
        if not isinstance(example, str):
            ids = example.ids if isinstance(example, Tokens) else example
        elif example:
            ids = torch.tensor(model.text.ids(example, options.prepend_bos), dtype=torch.long)
        ids = ids[: options.max_tokens]
        if len(ids):
            model.text.check_ids(ids)
    except HooklineError as error:
        room = model.text.n_ctx
        hint = f"; max_tokens={room} cuts long texts" if room is not None and len(ids) > room else ""
        raise HooklineError(f"example {number}: {error}{hint}") from error
    return ids


def _pad(model: HookedModel) -> int:
    """Any token will do, since it is masked; but some models tell positions by the one that is for padding."""
    pad = getattr(model.tokenizer, "pad_token_id", None)
    pad = pad if pad is not None else getattr(model.module.config, "pad_token_id", None)
    return pad if isinstance(pad, int) and 0 <= pad < model.cfg.d_vocab else 0


def _chosen(model: HookedModel, ids: Tensor, real: Tensor, first: int, options: Options) -> Bool[Tensor, "row pos"]:
    """Where the positions asked for are. What is not there in a text gives no row of it."""
    positions: Any = options.positions
    if positions is None:
        return real
    if isinstance(positions, Meaning):
        span = Span(range(ids.shape[1]), len(ids), ids, real)
        # As in a later step of a generation: a token that is not in this text may be in another.
        return positions.mask(ForwardPass(1, span, None, ref(model.module), False), span)
    found = torch.zeros_like(real)
    for row, length in enumerate(real.sum(1).tolist()):
        if isinstance(positions, Tensor):
            found[row, :length] = _of_mask(positions, first + row, length)
        elif callable(positions):
            found[row, :length] = _of_function(positions, ids[row, :length], first + row)
        else:
            found[row, _columns(positions, length)] = True
    return found


def _columns(positions: int | slice | Sequence[int], length: int) -> list[int]:
    if isinstance(positions, slice):
        return [*range(length)[positions]]
    wanted = [positions] if isinstance(positions, int) else positions
    return [each % length for each in wanted if each in range(-length, length)]


def _of_mask(mask: Tensor, number: int, length: int) -> Tensor:
    if number >= len(mask) or length > mask.shape[1]:
        raise HooklineError(
            f"positions are a mask {list(mask.shape)}, but example {number} has {length} tokens: it has no mask there"
        )
    return mask[number, :length].cpu()


def _of_function(choose: Any, ids: Tensor, number: int) -> Tensor:
    if not len(ids):
        return torch.zeros(0, dtype=torch.bool)
    found = choose(ids.clone())
    if isinstance(found, list | tuple) and all(type(each) is bool for each in found):
        found = torch.tensor(found, dtype=torch.bool)
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != ids.shape:
        raise HooklineError(
            f"positions is a function, and must give a mask of {len(ids)} booleans for example {number}, not {found!r}"
        )
    return found.cpu()


def _sampled(first: int, lengths: Sequence[int], width: int, options: Options) -> Bool[Tensor, "row pos"]:
    """Which rows the dice keep: the same for an example whenever it comes."""
    if options.sample == 1:
        return torch.ones(len(lengths), width, dtype=torch.bool)
    kept = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        kept[row, :length] = torch.rand(length, generator=_dice(options.seed, first + row)) < options.sample
    return kept


def _dice(seed: int, number: int) -> torch.Generator:
    raw = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(raw, "little"))
