"""Which rows are stored: the options of a harvest, and a batch of examples as inputs of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hookline.errors import HooklineError, warn
from hookline.functions.signatures import parameters_of
from hookline.model import HookedModel
from hookline.store.examples import BatchSize, Example, Tokens
from hookline.store.identity import tensor_checksum
from hookline.text.given_texts import columns_in
from hookline.text.token_positions import Positions, canonical, new_tokens
from hookline.text.tokenizer import Text

Chosen = Positions | Callable[[Tensor], Tensor]

_TYPES = "token_type_ids"

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HarvestOptions:
    """Which rows are stored, and how: see `harvest`."""

    positions: Chosen = None
    dtype: torch.dtype | None = None
    batch_size: BatchSize = "auto"
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
        if self.batch_size is None or (isinstance(self.batch_size, str) and self.batch_size != "auto"):
            raise HooklineError(f"batch_size is a number of examples per pass or 'auto', not {self.batch_size!r}")
        counts = ("max_rows", "max_tokens", "shard_rows", "shard_bytes")
        for name in counts if self.batch_size == "auto" else ("batch_size", *counts):
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        object.__setattr__(self, "positions", _canonical_positions(self.positions))
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
        return {"positions": _recorded_positions(self.positions), "dtype": dtype} | {
            name: getattr(self, name) for name in others
        }


def checked_seed(seed: int | None, sample: float) -> int:
    """The seed of a random sample of the rows; an error if all are kept."""
    if seed is not None and sample == 1:
        raise HooklineError(f"seed={seed!r} has no effect without sample=, which keeps a random fraction of the rows")
    return seed or 0


def _count(name: str, value: Any) -> int | None:
    try:
        count = 1 if value is None else index(value)  # also of NumPy
    except TypeError:
        count = 0
    if count < 1:
        raise HooklineError(f"{name} must be a positive integer, not {value!r}")
    return None if value is None else count


def _canonical_positions(positions: Any) -> Any:
    """Positions in one form; HooklineError if a harvest does not accept them."""
    if callable(positions):
        return positions
    try:
        canonical_form = canonical(positions)
    except HooklineError:
        raise HooklineError(
            "positions are None (all), an index, a slice, a list of indices, last, token(…), image_tokens, a mask "
            f"[example, position], or a function from a text's tokens to a mask; not {positions!r}"
        ) from None
    if type(canonical_form) is type(new_tokens):
        raise HooklineError(f"{canonical_form!r} refers to generated tokens, but a harvest does not generate")
    if isinstance(canonical_form, Tensor) and (canonical_form.dtype != torch.bool or canonical_form.ndim != 2):
        raise HooklineError(
            "positions given as a tensor must be a boolean mask [example, position], not "
            f"{list(canonical_form.shape)} of {canonical_form.dtype}"
        )
    return canonical_form


def _recorded_positions(positions: Any) -> Any:
    if positions is None:
        return "all"
    if isinstance(positions, Tensor):
        return f"a mask {list(positions.shape)} with the checksum {tensor_checksum(positions)}"
    if callable(positions):
        return f"the function {getattr(positions, '__qualname__', type(positions).__qualname__)}"
    return repr(list(positions) if isinstance(positions, tuple) else positions)


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

    def part(self, start: int, stop: int) -> Batch:
        """The inputs of the examples `start:stop`, for a forward pass; the stored rows stay as they are."""
        kwargs = {name: x[start:stop] for name, x in self.kwargs.items()}
        args, shape = tuple(x[start:stop] for x in self.args), (stop - start, *self.shape[1:])
        return replace(self, args=args, kwargs=kwargs, shape=shape)

    def first(self, rows: int) -> Batch:
        """A copy that stores only the first rows."""
        index = self.index if self.index is not None else torch.arange(self.rows)
        example, position, token = self.example[:rows], self.position[:rows], self.token[:rows]
        return replace(self, index=index[:rows], example=example, position=position, token=token)


def text_batch(model: HookedModel, examples: Sequence[Example], first: int, options: HarvestOptions) -> Batch:
    """A batch of texts or tokens, padded on the right; padding is never a row."""
    text = model.text
    texts = [_ids(text, example, first + number, options) for number, example in enumerate(examples)]
    ids = pad_sequence(texts, batch_first=True, padding_value=_pad(model))
    real = torch.arange(ids.shape[1]) < torch.tensor([[len(text)] for text in texts])
    _warn_of_padding(model, examples, texts, first, options.warned)
    stored_mask = _chosen(model, ids, real, first, options) & _sampled(real, first, options)
    nonempty = real.any(1)  # an empty text has no rows, and the model is not run on it
    run, rows = _at(real, nonempty), _at(stored_mask, nonempty)
    kwargs = {"input_ids": _at(ids, nonempty)}
    kwargs |= {name: _at(x, nonempty) for name, x in _extra_columns(model, examples, texts, first).items()}
    if not bool(run.all()):
        kwargs["attention_mask"] = run.long()
    number, position = stored_mask.nonzero(as_tuple=True)
    return Batch(
        args=(),
        kwargs=kwargs,
        shape=(len(run), ids.shape[1]),
        index=None if bool(rows.all()) else rows.flatten().nonzero().flatten(),
        example=number + first,
        position=position.int(),
        token=_at(ids, stored_mask).int(),
    )


def _at(x: Tensor, mask: Tensor) -> Tensor:
    """`x[mask]`, in NumPy: torch would use its thread pool even for this, and wait for cores that are writing."""
    return torch.from_numpy(x.numpy()[mask.numpy()])


def sample_batch(examples: Sequence[Example], first: int, options: HarvestOptions) -> Batch:
    """A batch of tensors for a network that is not a language model: a row is a sample."""
    samples = [example for example in examples if isinstance(example, Tensor)]
    shapes = {tuple(sample.shape) for sample in samples}
    if len(shapes) != 1:
        raise HooklineError(f"examples {first} to {first + len(samples) - 1} have different shapes: {sorted(shapes)}")
    stored_mask = _sampled(torch.ones(len(samples), 1, dtype=torch.bool), first, options).flatten()
    number = stored_mask.nonzero().flatten()
    none = torch.full((len(number),), -1, dtype=torch.int32)
    index = None if bool(stored_mask.all()) else number
    return Batch((torch.stack(samples),), {}, (len(samples),), index, number + first, none, none)


def _ids(text: Text, example: Example, number: int, options: HarvestOptions) -> Tensor:
    ids = example.ids if isinstance(example, Tokens) else torch.empty(0, dtype=torch.long)
    try:
        if isinstance(example, Tokens) and options.prepend_bos is not None:
            raise HooklineError("prepend_bos applies to text; token ids are used as they are")
        if isinstance(example, str) and example:
            ids = torch.tensor(text.ids(example, options.prepend_bos), dtype=torch.long)
        ids = ids[: options.max_tokens]
        if len(ids):
            text.check_ids(ids)
    except HooklineError as error:
        room = text.n_ctx
        hint = f"; max_tokens={room} cuts long texts" if room is not None and len(ids) > room else ""
        raise HooklineError(f"example {number}: {error}{hint}") from error
    return ids


def _pad(model: HookedModel) -> int:
    """The token for padding. It is masked, but some models derive positions from the padding token."""
    pad = getattr(model.tokenizer, "pad_token_id", None)
    pad = pad if pad is not None else getattr(model.module.config, "pad_token_id", None)
    return pad if isinstance(pad, int) and 0 <= pad < model.cfg.d_vocab else 0


def _chosen(
    model: HookedModel, ids: Tensor, real: Tensor, first: int, options: HarvestOptions
) -> Bool[Tensor, "row pos"]:
    """A mask of the requested positions. A position that a text does not have gives no row."""
    positions: Any = options.positions
    if positions is None:
        return real
    if not isinstance(positions, Tensor) and not callable(positions):
        return columns_in(positions, model.module, ids, real)[0]
    mask = torch.zeros_like(real)
    for row, length in enumerate(real.sum(1).tolist()):
        if isinstance(positions, Tensor):
            mask[row, :length] = _of_mask(positions, first + row, length)
        else:
            mask[row, :length] = _of_function(positions, ids[row, :length], first + row)
    return mask


def _of_mask(mask: Tensor, number: int, length: int) -> Tensor:
    if number >= len(mask) or length > mask.shape[1]:
        raise HooklineError(
            f"positions is a mask {list(mask.shape)}, which does not cover example {number} with {length} tokens"
        )
    return mask[number, :length].cpu()


def _of_function(choose: Any, ids: Tensor, number: int) -> Tensor:
    mask = choose(ids.clone()) if len(ids) else []
    if isinstance(mask, list | tuple) and all(type(value) is bool for value in mask):
        mask = torch.tensor(mask, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape:
        raise HooklineError(f"positions must return a mask of {len(ids)} booleans for example {number}, not {mask!r}")
    return mask.cpu()


def _sampled(real: Bool[Tensor, "row pos"], first: int, options: HarvestOptions) -> Bool[Tensor, "row pos"]:
    """A random selection of the rows, determined by the seed and the example's number."""
    if options.sample == 1:
        return real
    mask = torch.zeros_like(real)
    for row, length in enumerate(real.sum(1).tolist()):
        seed = hashlib.blake2b(f"{options.seed} {first + row}".encode(), digest_size=7).digest()
        random = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
        mask[row, :length] = torch.rand(length, generator=random) < options.sample
    return mask


def _warn_of_padding(
    model: HookedModel, examples: Sequence[Example], texts: Sequence[Tensor], first: int, warned: set[str]
) -> None:
    """Warn once per harvest if token ids without a mask look padded: they are stored as they are."""
    bare = [row for row, example in enumerate(examples) if isinstance(example, Tokens) and not example.is_masked]
    if not bare or "padding" in warned:
        return
    suspects = _look_padded(model, bare, texts) or _padded_in_batch(model, bare, texts)
    if suspects:
        warned.add("padding")
        warn(
            f"example {first + suspects[0]} looks padded, and its padding is stored as if it were text: pass examples "
            f"as {{'input_ids': …, 'attention_mask': …}} (with a mask of ones if it is text), or the texts themselves",
        )


def _look_padded(model: HookedModel, rows: Sequence[int], texts: Sequence[Tensor]) -> list[int]:
    """The rows that begin or end with padding. If the padding token also ends texts, it must appear twice."""
    tokenizer = model.tokenizer
    pad = tokenizer.pad_token_id if tokenizer is not None else getattr(model.module.config, "pad_token_id", None)
    if pad is None:
        return []
    is_for_padding_only = tokenizer is not None and pad not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
    least = 1 if is_for_padding_only else 2
    ends = {row: (texts[row][:least].tolist(), texts[row][-least:].tolist()) for row in rows}
    return [row for row in rows if [pad] * least in ends[row]]


def _padded_in_batch(model: HookedModel, bare: list[int], texts: Sequence[Tensor]) -> list[int]:
    """The first row that looks padded beside others of the same length, even if its padding also ends texts."""
    rows = [texts[row] for row in bare]
    if model.tokenizer is None or len(rows) < 2 or len({len(row) for row in rows}) != 1 or not len(rows[0]):
        return []
    row = model.text.padded_row(torch.stack(rows))
    return [] if row is None else [bare[row]]


def _extra_columns(
    model: HookedModel, examples: Sequence[Example], texts: Sequence[Tensor], first: int
) -> dict[str, Tensor]:
    """The columns that the model accepts and that have one number per token, as [example, position].

    Other columns that it accepts are refused; columns that it does not accept are ignored.
    """
    takes, extras = {*parameters_of(model.module)[0]}, dict[int, dict[str, Tensor]]()
    for row, example in enumerate(examples):
        if len(texts[row]):
            extras[row] = example.extra if isinstance(example, Tokens) else {}
        if row in extras and isinstance(example, Tokens) and (example.extra or example.others):
            _check_columns(model, example, takes, first + row)
    padded_columns: dict[str, Tensor] = {}
    for name in sorted(takes & {name for extra in extras.values() for name in extra}):
        has = [row for row, extra in extras.items() if name in extra]
        if name == _TYPES and not any(bool(extras[row][name].any()) for row in has):
            continue  # types that are all 0 are the default
        if name != _TYPES and len(has) < len(extras):
            lacks = next(row for row in extras if row not in has)
            raise HooklineError(
                f"example {first + has[0]} has {name}, but example {first + lacks} does not: pass it for all examples "
                f"or for none"
            )
        columns = [extras.get(row, {}).get(name, torch.zeros_like(text))[: len(text)] for row, text in enumerate(texts)]
        padded_columns[name] = pad_sequence(columns, batch_first=True)
    return padded_columns


def _check_columns(model: HookedModel, example: Tokens, takes: set[str], number: int) -> None:
    unfit = {*example.others} | {name for name in example.extra if name.startswith("decoder_")}
    has_types = getattr(model.module.config, "type_vocab_size", None) is not None
    if not has_types and bool(example.extra.get(_TYPES, torch.zeros(1)).any()):  # some add the embedding of a token
        unfit.add(_TYPES)
    if refused := sorted(takes & unfit):
        raise HooklineError(
            f"example {number} has {', '.join(refused)}, which this model accepts but a harvest does not pass on: "
            f"remove it from the data, or use run_with_cache. A harvest passes on columns with one number per token, "
            f"such as position_ids, and token_type_ids if the model has token types"
        )
