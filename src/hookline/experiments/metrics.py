"""Metrics: functions of the logits that return one number per row.

    metrics.logit_diff(" Mary", " John")      logit of the answer minus logit of the wrong answer
    metrics.prob(" Mary")                     also log_prob, rank (0 is the most likely token) and accuracy
    metrics.kl(clean_logits)                  KL divergence from other logits; "kl" uses those of the clean run
    metrics.loss(tokens)                      next-token cross-entropy; "loss" uses the clean tokens

An answer is a token id or a text, one for all rows or one per row. `pos` is the position that is read, by default the
last: an index, or one per row. In an experiment, positions count within each text; padding is not counted.

In an experiment, an answer may have several tokens: a longer text, or a list of ids. It is read as a continuation of
the prompt, and the metric uses its log-probability (see `continuations.py`). For one prompt, `[12, 345]` is one answer
of two tokens; for several prompts it is one token per prompt, `[[12, 345]]` is one answer of two tokens for all of
them, and `[[12, 345], [6, 78]]` is one answer of two tokens for each of two prompts.

To add a metric, subclass `Metric` and give it a `name`; experiments then accept the name as `metric=`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hookline.engine.snapshots import snapshot
from hookline.errors import HooklineError

__all__ = ["Metric", "accuracy", "kl", "log_prob", "logit_diff", "loss", "prob", "rank"]

MetricFunction: TypeAlias = Callable[[Tensor], Tensor]
Tokens: TypeAlias = int | str | Sequence[int | str | Sequence[int]] | Int[Tensor, " batch"] | Int[Tensor, "batch token"]
Read: TypeAlias = Sequence[tuple[Float[Tensor, "token vocab"], Int[Tensor, " token"]]]
"""For each row, the logits before every token of an answer, and the tokens."""
Position: TypeAlias = int | Sequence[int] | Int[Tensor, " batch"]

METRICS: dict[str, type[Metric]] = {}
"""Every metric by its name. A subclass of `Metric` that sets `name` adds itself."""


ANSWER = MappingProxyType({"kind": "answer"})
"""Marks a field that holds an answer: `answer: Tokens = field(metadata=ANSWER)`."""
POSITION = MappingProxyType({"kind": "position"})
"""Marks a field that holds a position: `pos: Position = field(default=-1, metadata=POSITION)`."""


@dataclass(frozen=True, eq=False, repr=False)
class Metric:
    """A named metric: called with logits [batch, pos, vocab], it returns one number per row.

    A subclass sets `name` and implements `__call__`. Fields marked as `ANSWER` or `POSITION` are checked when the
    metric is created, and turned into token ids and columns of the batch when an experiment runs.
    """

    name: ClassVar[str] = "metric"
    example: ClassVar[str] = ""
    """What to type to create it, for error messages."""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            METRICS[cls.name] = cls

    def __post_init__(self) -> None:
        for kind, check in (("answer", _checked_tokens), ("position", _checked_position)):
            for name in self.fields_of(kind):
                object.__setattr__(self, name, check(getattr(self, name)))

    @classmethod
    def fields_of(cls, kind: str) -> list[str]:
        """The names of the fields of one kind, "answer" or "position"."""
        return [each.name for each in fields(cls) if each.metadata.get("kind") == kind]

    @classmethod
    def from_clean_run(
        cls,
        logits: Float[Tensor, "batch pos vocab"],  # noqa: ARG003
        tokens: Int[Tensor, "batch pos"],  # noqa: ARG003
        mask: Tensor | None,  # noqa: ARG003
    ) -> Metric:
        """The metric when only its name is given, `metric="kl"`: created with what the clean run has."""
        if any(each.default is MISSING and each.default_factory is MISSING for each in fields(cls)):
            example = f": use {cls.example}" if cls.example else f": create it, {cls.__name__}(…)"
            raise HooklineError(f"the metric {cls.name!r} needs arguments{example}")
        return cls()

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """One number per row."""
        raise NotImplementedError

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:  # noqa: ARG002
        """One number per row, for answers of several tokens; `read` is by the name of the answer's field."""
        raise HooklineError(
            f"{self.name} supports answers of one token, but this answer has several: use log_prob, prob or logit_diff"
        )

    def resolved(self, model: Any, tokens: Int[Tensor, "batch pos"], mask: Tensor | None) -> Self:
        """The metric with texts turned into token ids, and positions into columns of these prompts."""
        changes: dict[str, Any] = {
            name: _ids(getattr(self, name), model, len(tokens)) for name in self.fields_of("answer")
        }
        for name in self.fields_of("position"):
            if getattr(self, name) is not None:
                changes[name] = _columns(getattr(self, name), tokens, mask)
        return replace(self, **changes)

    def __repr__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return f"{self.name}({', '.join(f'{key}={_short(x)}' for key, x in given.items() if x is not None)})"


@dataclass(frozen=True, eq=False, repr=False)
class LogitDiff(Metric):
    """The logit of the answer minus the logit of the wrong answer."""

    name = "logit_diff"
    example = 'metrics.logit_diff(" Mary", " John")'
    answer: Tokens = field(metadata=ANSWER)
    wrong: Tokens = field(metadata=ANSWER)
    pos: Position = field(default=-1, metadata=POSITION)

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The difference in each row."""
        there = _at(logits, self.pos)
        return _of_token(there, self.answer) - _of_token(there, self.wrong)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """The log-probability of the answer minus that of the wrong answer."""
        return _log_probs(read["answer"]) - _log_probs(read["wrong"])

    def resolved(self, model: Any, tokens: Int[Tensor, "batch pos"], mask: Tensor | None) -> Self:
        """As for every metric; the two answers must differ."""
        found = super().resolved(model, tokens, mask)
        if bool((torch.as_tensor(found.answer) == torch.as_tensor(found.wrong)).any()):
            raise HooklineError(
                f"the answer and the wrong answer are the same token in a row: {self!r} is always 0 there"
            )
        return found


@dataclass(frozen=True, eq=False, repr=False)
class OfAnswer(Metric):
    """A metric of one answer at one position."""

    answer: Tokens = field(metadata=ANSWER)
    pos: Position = field(default=-1, metadata=POSITION)


@dataclass(frozen=True, eq=False, repr=False)
class LogProb(OfAnswer):
    """The log-probability of the answer."""

    name = "log_prob"
    example = 'metrics.log_prob(" Mary")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The log-probability in each row."""
        return _of_token(_at(logits, self.pos).log_softmax(-1), self.answer)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """The sum of the log-probabilities of its tokens, each given the tokens before it."""
        return _log_probs(read["answer"])


@dataclass(frozen=True, eq=False, repr=False)
class Prob(OfAnswer):
    """The probability of the answer."""

    name = "prob"
    example = 'metrics.prob(" Mary")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The probability in each row."""
        return _of_token(_at(logits, self.pos).softmax(-1), self.answer)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """The product of the probabilities of its tokens, each given the tokens before it."""
        return _log_probs(read["answer"]).exp()


@dataclass(frozen=True, eq=False, repr=False)
class Rank(OfAnswer):
    """How many tokens are more likely than the answer."""

    name = "rank"
    example = 'metrics.rank(" Mary")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The rank in each row; NaN where a logit is NaN."""
        there = _at(logits, self.pos)
        above = (there > _of_token(there, self.answer)[:, None]).sum(-1).to(there.dtype)
        return above.masked_fill(there.isnan().any(-1), math.nan)  # comparisons with NaN are false


@dataclass(frozen=True, eq=False, repr=False)
class Accuracy(Rank):
    """Whether the answer is the most likely token: 1 or 0, so that the mean is the share of correct answers."""

    name = "accuracy"
    example = 'metrics.accuracy(" Paris")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """1 or 0 in each row; NaN where a logit is NaN."""
        rank = super().__call__(logits)
        return (rank == 0).to(rank).masked_fill(rank.isnan(), math.nan)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """Whether greedy generation would produce the answer: each token is the most likely after those before it."""
        found = []
        for there, ids in read["answer"]:
            is_right = (there.argmax(-1) == ids).all().to(there.dtype)
            found.append(is_right.masked_fill(there.isnan().any(), math.nan))
        return torch.stack(found)


@dataclass(frozen=True, eq=False, repr=False)
class KL(Metric):
    """KL(reference ‖ logits), in nats; with pos=None the average over all positions that are not padding."""

    name = "kl"
    reference: Float[Tensor, "batch pos vocab"]
    pos: Position | None = field(default=-1, metadata=POSITION)
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.reference, Tensor) or self.reference.ndim != 3:
            raise HooklineError(f"kl(reference) needs logits [batch, pos, vocab], got {_short(self.reference)}")
        if self.mask is not None and self.pos is not None:
            raise HooklineError("the mask selects the positions that kl averages over, so it needs pos=None")

    @classmethod
    def from_clean_run(cls, logits: Tensor, tokens: Tensor, mask: Tensor | None) -> Metric:  # noqa: ARG003
        """The divergence from the clean run."""
        return cls(logits)

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The divergence in each row."""
        if self.reference.shape != logits.shape:
            raise HooklineError(
                f"kl: the reference has shape {list(self.reference.shape)}, the logits {list(logits.shape)}"
            )
        reference = self.reference.detach().to(logits.device)
        if self.pos is not None:
            return _divergence(_at(reference, self.pos), _at(logits, self.pos))
        by_position = _divergence(upcast(reference), upcast(logits))
        return _mean_of(by_position, torch.ones_like(by_position) if self.mask is None else self.mask)

    def resolved(self, model: Any, tokens: Int[Tensor, "batch pos"], mask: Tensor | None) -> Self:
        """As for every metric; over all positions, padding is masked out."""
        found = super().resolved(model, tokens, mask)
        return replace(found, mask=mask) if found.pos is None and found.mask is None else found


@dataclass(frozen=True, eq=False, repr=False)
class Loss(Metric):
    """The next-token cross-entropy, averaged over the tokens of a row that are neither padding nor image tokens.

    `images` is true at image tokens; in an experiment they are found in the tokens.
    """

    name = "loss"
    tokens: Int[Tensor, "batch pos"]
    mask: Tensor | None = None
    images: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor) or self.tokens.ndim != 2 or self.tokens.is_floating_point():
            raise HooklineError(f"loss(tokens) needs token ids [batch, pos], got {_short(self.tokens)}")
        if self.tokens.shape[1] < 2:
            raise HooklineError("loss is the next-token loss: it needs at least two tokens")

    @classmethod
    def from_clean_run(cls, logits: Tensor, tokens: Tensor, mask: Tensor | None) -> Metric:  # noqa: ARG003
        """The loss on the clean tokens."""
        return cls(tokens, mask)

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The loss of each row."""
        if self.tokens.shape != logits.shape[:2]:
            raise HooklineError(
                f"loss: the tokens have shape {list(self.tokens.shape)}, the logits {list(logits.shape)}"
            )
        mask = torch.ones_like(self.tokens) if self.mask is None else self.mask
        counts, targets = mask[:, 1:] * mask[:, :-1], self.tokens[:, 1:]
        if self.images is not None:
            counts = counts * ~self.images[:, 1:].to(counts.device)
            targets = targets.masked_fill(self.images[:, 1:].to(targets.device), 0)  # perhaps outside the vocabulary
        likely = upcast(logits[:, :-1]).log_softmax(-1)
        return _mean_of(-likely.gather(-1, targets[..., None].to(logits.device))[..., 0], counts)

    def resolved(self, model: Any, tokens: Int[Tensor, "batch pos"], mask: Tensor | None) -> Self:
        """The loss without padding and image tokens."""
        images = model._image_positions(self.tokens) if self.images is None else self.images
        return replace(
            super().resolved(model, tokens, mask), mask=mask if self.mask is None else self.mask, images=images
        )


logit_diff, log_prob, prob, rank, accuracy, kl, loss = LogitDiff, LogProb, Prob, Rank, Accuracy, KL, Loss


def __dir__() -> list[str]:
    return __all__


def as_metric(
    spec: Any,
    model: Any,
    clean_logits: Float[Tensor, "batch pos vocab"],
    corrupted_logits: Float[Tensor, "batch pos vocab"] | None,
    clean_tokens: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"] | Int[Tensor, "batch pos"] | None = None,
) -> dict[str, MetricFunction]:
    """The requested metrics by name, ready to be called, and tried on the runs given.

    `spec` is a function of logits, a `Metric`, the name of one that needs no arguments ("kl", "loss"), or a list or
    dict of these.
    """
    metrics: dict[str, MetricFunction] = {}
    for name, each in several(spec):
        metric = _one(each, clean_logits, clean_tokens, mask)
        name = name or name_of(metric)
        if name in metrics:
            raise HooklineError(f"two metrics are called {name!r}: pass a dict, {{'name': metric, …}}")
        metrics[name] = resolve(metric, model, clean_tokens, mask)
    for name, metric in metrics.items():
        for logits in (clean_logits, corrupted_logits):
            if logits is not None:
                value_of(metric, logits, name)
        if mask is not None and not bool(mask.all()):
            _check_padding(name, metric, clean_logits, mask)
    return metrics


def _check_padding(name: str, metric: MetricFunction, logits: Tensor, mask: Tensor) -> None:
    """The logits at padding must not affect the metric."""
    other = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits) * 10
    is_text = mask.bool().to(logits.device)[..., None]
    found = [
        upcast(torch.as_tensor(metric(torch.where(is_text, logits, at)))) for at in (torch.zeros_like(other), other)
    ]
    if not torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-5, equal_nan=True):
        rows = (~mask.bool()).any(1).nonzero().flatten().tolist()
        raise HooklineError(
            f"{name} reads padding: the prompts differ in length, and column -1 is padding in row {rows[0]}. Use a "
            f"metric that counts positions within each text ({LogitDiff.example}), select each text's last position, "
            f'or pad on the other side: model.to_tokens(texts, padding_side="left")'
        )


def resolve(
    metric: MetricFunction,
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"] | Int[Tensor, "batch pos"] | None = None,
) -> MetricFunction:
    """The metric with text turned into ids and positions into columns of these prompts; other functions unchanged."""
    if not isinstance(metric, Metric):
        return metric
    check_vocabulary(metric.name, model)
    return metric.resolved(model, tokens, mask)


def check_vocabulary(name: str, model: Any) -> None:
    """Raise if a metric of tokens is asked of a model that has no logits of tokens."""
    if model._anatomy.unembed is None:
        raise HooklineError(
            f"the metric {name} is computed from logits over the vocabulary, but {model.cfg.architecture} has no "
            f"unembedding: its output is the last hidden state. Load the model with its language-model head "
            f"(AutoModelForCausalLM, AutoModelForMaskedLM), or give a function of that output: lambda out: …"
        )


def value_of(metric: MetricFunction, logits: Float[Tensor, "batch pos vocab"], name: str) -> Float[Tensor, "..."]:
    """The checked value of a metric, which receives a snapshot of the logits: it may write to them."""
    return checked(metric(snapshot(logits, is_ours=True)), len(logits), name)


def checked(value: Any, batch: int, name: str = "the metric") -> Float[Tensor, "..."]:
    """The value a metric returned, as floats: one number per row, or one for all; anything else is an error."""
    needs = f"a metric returns one number per row, a tensor of shape [{batch}], or one number, of shape []"
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise HooklineError(f"{name} returned {type(value).__name__} {_short(value)}: {needs}")
    if value.is_complex() or tuple(value.shape) not in ((), (batch,)):
        raise HooklineError(f"{name} returned a {value.dtype} tensor of shape {list(value.shape)}: {needs}")
    bad = value.detach().isnan()
    if bool(bad.any()):
        where = f" in row {int(bad.nonzero()[0])}" if value.ndim else ""
        raise HooklineError(f"{name} returned NaN{where}: {needs}")
    return upcast(value)


def several(spec: Any) -> Iterable[tuple[str, Any]]:
    """Each requested metric, with the name it was given, or an empty one."""
    if isinstance(spec, Mapping):
        if not all(isinstance(name, str) and name for name in spec):
            raise HooklineError(f"the keys of a dict of metrics are their names, got {list(spec)}")
        found = list(spec.items())
    else:
        found = [("", each) for each in (spec if isinstance(spec, list | tuple) else [spec])]
    if not found:
        raise HooklineError("no metric was given: pass a function of the logits or, for example, " + LogitDiff.example)
    return found


def _one(spec: Any, clean_logits: Tensor, clean_tokens: Tensor, mask: Tensor | None) -> MetricFunction:
    if isinstance(spec, str):
        if spec not in METRICS:
            near = get_close_matches(spec, list(METRICS), n=3, cutoff=0.4) or list(METRICS)
            raise HooklineError(f"there is no metric {spec!r}. Did you mean {', '.join(map(repr, near))}?")
        spec = METRICS[spec]
    if isinstance(spec, type) and issubclass(spec, Metric):  # metrics.kl itself, not yet called
        return spec.from_clean_run(clean_logits, clean_tokens, mask)
    if not callable(spec):
        raise HooklineError(f'a metric is a function of logits, "kl", "loss" or {LogitDiff.example}, got {spec!r}')
    return spec


def name_of(metric: Any) -> str:
    """The name of a metric in results."""
    if isinstance(metric, str):
        return metric
    if isinstance(metric, Metric):
        return metric.name
    while hasattr(metric, "func"):  # functools.partial, however often
        metric = metric.func
    name = getattr(metric, "__name__", type(metric).__name__)
    return "metric" if name == "<lambda>" else name


def _checked_tokens(tokens: Any) -> Any:
    """An id, a text, a tuple of either or of tuples of ids, or a tensor of ids."""
    if isinstance(tokens, np.ndarray | np.integer):
        tokens = tokens.tolist()
    if isinstance(tokens, Tensor) and tokens.ndim == 2:
        tokens = tokens.tolist()
    if isinstance(tokens, Tensor):
        if tokens.ndim > 1 or tokens.is_floating_point() or tokens.dtype == torch.bool or not tokens.numel():
            raise HooklineError(f"answers are one token id, or one per row [batch], got {_short(tokens)}")
        return tokens.detach().cpu().long() if tokens.ndim else int(tokens)
    if isinstance(tokens, int | str) and not isinstance(tokens, bool):
        return tokens
    if isinstance(tokens, list | tuple) and tokens and all(_is_answer(each) for each in tokens):
        return tuple(tuple(each) if isinstance(each, list | tuple) else each for each in tokens)
    raise HooklineError(
        f"an answer is a text, a token id or a list of ids; or a list or tensor with one per row, got {tokens!r}"
    )


def _is_answer(given: Any) -> bool:
    if isinstance(given, list | tuple):
        return bool(given) and all(type(each) is int for each in given)
    return type(given) in (int, str)


def _checked_position(pos: Any) -> Any:
    if isinstance(pos, list | tuple) and pos and all(type(each) is int for each in pos):
        return torch.tensor(pos)
    if isinstance(pos, Tensor) and pos.ndim <= 1 and pos.dtype in (torch.int64, torch.int32) and pos.numel():
        return pos.detach().cpu().long() if pos.ndim else int(pos)
    if pos is None or (isinstance(pos, int) and not isinstance(pos, bool)):
        return pos
    raise HooklineError(f"pos is an index, or a list or tensor with one per row, got {_short(pos)}")


def _ids(tokens: Any, model: Any, batch: int) -> int | Tensor:
    """Text or ids as token ids."""
    if isinstance(tokens, tuple):
        if any(isinstance(each, tuple) for each in tokens):
            raise HooklineError(f"answers of several tokens, {tokens}, are supported in experiments only")
        tokens = torch.tensor([_ids(each, model, batch) for each in tokens])
    ids = model.to_single_token(tokens) if isinstance(tokens, str) else tokens
    if isinstance(ids, Tensor) and len(ids) != batch:
        raise HooklineError(f"{len(ids)} answers for {batch} prompts: pass one for all, or one each")
    _check_ids(ids, model.cfg.d_vocab)
    return ids


def _check_ids(ids: int | Tensor, d_vocab: int) -> None:
    low, high = (ids, ids) if isinstance(ids, int) else (int(ids.min()), int(ids.max()))
    if low < 0 or high >= d_vocab:
        raise HooklineError(f"token {low if low < 0 else high} is out of range: the vocabulary has 0 to {d_vocab - 1}")


def _columns(pos: int | Tensor, tokens: Tensor, mask: Tensor | None) -> int | Tensor:
    """The columns of positions that are counted within the text of each row, without padding."""
    batch, width = tokens.shape
    if isinstance(pos, Tensor) and len(pos) != batch:
        raise HooklineError(f"{len(pos)} positions for {batch} prompts: pass one for all, or one each")
    real = torch.ones(batch, width) if mask is None else mask.cpu()
    found = []
    for row, index in enumerate(pos.tolist() if isinstance(pos, Tensor) else [pos] * batch):
        columns = real[row].nonzero().flatten().tolist()
        if not -len(columns) <= index < len(columns):
            raise HooklineError(f"position {index} is out of range: prompt {row} has {len(columns)} tokens")
        found.append(columns[index])
    return found[0] if len(set(found)) == 1 else torch.tensor(found)


def _at(logits: Tensor, pos: Any) -> Float[Tensor, "batch vocab"]:
    """The logits at one position, or at one per row."""
    if logits.ndim != 3:
        raise HooklineError(f"a metric takes logits [batch, pos, vocab], got a tensor of shape {list(logits.shape)}")
    batch, width = logits.shape[:2]
    lowest, highest = (pos, pos) if isinstance(pos, int) else (int(pos.min()), int(pos.max()))
    if lowest < -width or highest >= width:
        raise HooklineError(f"pos={_short(pos)} is out of range: the logits have {width} positions")
    if isinstance(pos, int):
        return upcast(logits[:, pos])
    if len(pos) != batch:
        raise HooklineError(f"{len(pos)} positions for logits of {batch} rows: pass one for all, or one each")
    return upcast(logits[torch.arange(batch, device=logits.device), pos.to(logits.device)])


def _of_token(there: Float[Tensor, "batch vocab"], ids: Any) -> Float[Tensor, " batch"]:
    """The value of one token, or of one per row."""
    if isinstance(ids, tuple) and all(type(each) is int for each in ids):
        ids = torch.tensor(ids)
    if isinstance(ids, str | tuple):
        raise HooklineError(
            f"the answer {ids!r} is text: pass its id, model.to_single_token(…), or call resolve(metric, …) first"
        )
    _check_ids(ids, there.shape[-1])
    if isinstance(ids, int):
        return there[:, ids]
    if len(ids) != len(there):
        raise HooklineError(f"{len(ids)} answers for logits of {len(there)} rows: pass one for all, or one each")
    return there.gather(-1, ids[:, None].to(there.device))[:, 0]


def _log_probs(read: Read) -> Float[Tensor, " batch"]:
    """The log-probability of the answer of each row."""
    found = [there.log_softmax(-1).gather(-1, ids[:, None]).sum() for there, ids in read]
    return torch.stack(found)


def _divergence(reference: Tensor, logits: Tensor) -> Tensor:
    expected, given = reference.log_softmax(-1), logits.log_softmax(-1)
    share = expected.exp()
    return (share * (expected - given)).masked_fill(share == 0, 0.0).sum(-1)


def _mean_of(values: Float[Tensor, "batch pos"], counts: Tensor) -> Float[Tensor, " batch"]:
    """The weighted mean; values with weight 0 are ignored, even NaN."""
    counts = counts.to(values.device)
    return values.masked_fill(counts == 0, 0.0).sum(1) / counts.to(values.dtype).sum(1)


def upcast(x: Tensor) -> Tensor:
    """Upcast half precision to float32."""
    return x if x.dtype == torch.float64 else x.float()


def _short(x: Any) -> str:
    if isinstance(x, tuple) and all(type(each) is int for each in x):
        return repr(list(x))
    if not isinstance(x, Tensor):
        return repr(x)
    return str(x.tolist()) if x.numel() <= 8 and not x.is_floating_point() else f"<{list(x.shape)} {x.dtype}>"
