"""A batch of examples as inputs of the model, and which of its rows are stored."""

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
from hookline.store.extra_columns import extra_columns
from hookline.store.options import Options
from hookline.store.padding import warn_of_padding
from hookline.store.token_rows import Tokens
from hookline.text.forward_pass import ForwardPass, Span
from hookline.text.token_positions import Meaning


@dataclass(frozen=True)
class Batch:
    """The inputs of one forward pass, and where each of its rows comes from."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    """The shape of the rows: [examples, positions], or [examples] for a network without positions."""
    index: Int[Tensor, " row"] | None
    """The flat indices of the rows that are stored; None for all."""
    example: Int[Tensor, " row"]
    position: Int[Tensor, " row"]
    token: Int[Tensor, " row"]

    @property
    def rows(self) -> int:
        """The number of stored rows."""
        return len(self.example)

    @property
    def can_be_split(self) -> bool:
        """Whether every input has one row per example."""
        return all(len(x) == self.shape[0] for x in (*self.args, *self.kwargs.values()))

    def part(self, start: int, stop: int) -> Batch:
        """The inputs of the examples `start:stop`, for a forward pass; the stored rows stay as they are."""
        kwargs = {name: x[start:stop] for name, x in self.kwargs.items()}
        args, shape = tuple(x[start:stop] for x in self.args), (stop - start, *self.shape[1:])
        return replace(self, args=args, kwargs=kwargs, shape=shape)

    def first(self, rows: int) -> Batch:
        """A copy that stores only the first rows."""
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
    warn_of_padding(model, examples, texts, first, options.warned)
    kept = _chosen(model, ids, real, first, options) & real
    kept &= _sampled(first, list(map(len, texts)), width, options)
    some = real.any(1)  # an empty text has no rows, and the model is not run on it
    run, rows = _at(real, some), _at(kept, some)
    kwargs = {"input_ids": _at(ids, some)}
    kwargs |= {name: _at(x, some) for name, x in extra_columns(model, examples, texts, first).items()}
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
    """`x[mask]`, in NumPy: torch would use its thread pool even for this, and wait for cores that are writing."""
    return torch.from_numpy(x.numpy()[mask.numpy()])


def sample_batch(examples: Sequence[Example], first: int, options: Options) -> Batch:
    """A batch of tensors for a network that is not a language model: a row is a sample."""
    samples = [example for example in examples if isinstance(example, Tensor)]
    shapes = {tuple(sample.shape) for sample in samples}
    if len(shapes) != 1:
        raise HooklineError(f"examples {first} to {first + len(samples) - 1} have different shapes: {sorted(shapes)}")
    kept = _sampled(first, [1] * len(samples), 1, options).flatten()
    number = kept.nonzero().flatten()
    none = torch.full((len(number),), -1, dtype=torch.int32)
    index = None if bool(kept.all()) else number
    return Batch((torch.stack(samples),), {}, (len(samples),), index, number + first, none, none)


def _ids(model: HookedModel, example: Example, number: int, options: Options) -> Tensor:
    if not isinstance(example, str) and options.prepend_bos is not None:
        raise HooklineError("prepend_bos applies to text; token ids are used as they are")
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
    """The token for padding. It is masked, but some models derive positions from the padding token."""
    pad = getattr(model.tokenizer, "pad_token_id", None)
    pad = pad if pad is not None else getattr(model.module.config, "pad_token_id", None)
    return pad if isinstance(pad, int) and 0 <= pad < model.cfg.d_vocab else 0


def _chosen(model: HookedModel, ids: Tensor, real: Tensor, first: int, options: Options) -> Bool[Tensor, "row pos"]:
    """A mask of the requested positions. A position that a text does not have gives no row."""
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
            f"positions is a mask {list(mask.shape)}, which does not cover example {number} with {length} tokens"
        )
    return mask[number, :length].cpu()


def _of_function(choose: Any, ids: Tensor, number: int) -> Tensor:
    if not len(ids):
        return torch.zeros(0, dtype=torch.bool)
    found = choose(ids.clone())
    if isinstance(found, list | tuple) and all(type(each) is bool for each in found):
        found = torch.tensor(found, dtype=torch.bool)
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != ids.shape:
        raise HooklineError(f"positions must return a mask of {len(ids)} booleans for example {number}, not {found!r}")
    return found.cpu()


def _sampled(first: int, lengths: Sequence[int], width: int, options: Options) -> Bool[Tensor, "row pos"]:
    """A random mask of the rows to keep, determined by the seed and the example's number."""
    if options.sample == 1:
        return torch.ones(len(lengths), width, dtype=torch.bool)
    kept = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        kept[row, :length] = torch.rand(length, generator=_dice(options.seed, first + row)) < options.sample
    return kept


def _dice(seed: int, number: int) -> torch.Generator:
    raw = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(raw, "little"))
