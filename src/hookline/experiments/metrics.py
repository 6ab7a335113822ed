"""Metrics: functions of the logits that return one number per row.

    metrics.logit_diff(" Mary", " John")      logit of the answer minus logit of the wrong answer
    metrics.prob(" Mary")                     also log_prob, rank (0 is the most likely token) and accuracy
    metrics.kl(clean_logits)                  KL divergence from other logits; "kl" uses those of the clean run
    metrics.loss(tokens)                      next-token cross-entropy; "loss" uses the clean tokens
    metrics.in_context_loss(tokens)           the loss late in the text minus the loss early in it

An answer is a token id or a text, one for all rows or one per row. `pos` is the position that is read, by default the
last: an index, or one per row. In an experiment, positions count within each text; padding is not counted.

In an experiment, an answer may have several tokens: a longer text, or a list of ids. It is read as a continuation of
the prompt, and the metric uses its log-probability. For one prompt, `[12, 345]` is one answer of two tokens; for
several prompts it is one token per prompt, and `[[12, 345]]` is one answer of two tokens for all of them.

To add a metric, subclass `Metric`: experiments then accept its class name, in snake case, as `metric=`, and it is an
attribute of this module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hookline.engine import snapshot
from hookline.errors import HooklineError
from hookline.experiments.core.logit_reads import (
    Read,
    at_position,
    checked_answers,
    checked_position,
    columns_meant,
    columns_of,
    divergence,
    log_probs,
    of_answer,
    short,
    single_ids,
    warn_of_missing_space,
    weighted_mean,
)
from hookline.text.token_positions import Meaning
from hookline.transformer.precision import upcast

MetricFunction: TypeAlias = Callable[[Tensor], Tensor]
Tokens: TypeAlias = int | str | Sequence[int | str | Sequence[int]] | Int[Tensor, " batch"] | Int[Tensor, "batch token"]
Position: TypeAlias = int | Sequence[int] | Int[Tensor, " batch"] | Meaning

METRICS: dict[str, type[Metric]] = {}
"""Every metric by its name. A subclass of `Metric` adds itself."""

ANSWER = MappingProxyType({"kind": "answer"})
"""Marks a field that holds an answer: `answer: Tokens = field(metadata=ANSWER)`."""
POSITION = MappingProxyType({"kind": "position"})
"""Marks a field that holds a position: `pos: Position = field(default=-1, metadata=POSITION)`."""


@dataclass(frozen=True, eq=False, repr=False)
class Metric:
    """A named metric: called with logits [batch, pos, vocab], it returns one number per row.

    A subclass implements `__call__`. Fields marked as `ANSWER` or `POSITION` are checked when the metric is created,
    and turned into token ids and columns of the batch when an experiment runs.
    """

    name: ClassVar[str] = "metric"
    example: ClassVar[str] = ""
    """What to type to create it, for error messages."""
    from_clean: ClassVar[tuple[str, ...]] = ()
    """What of the clean run it is created with if only its name is given, `metric="kl"`: "logits", "tokens", "mask"."""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        if not cls.name.startswith("_"):
            METRICS[cls.name] = cls

    def __post_init__(self) -> None:
        for kind, check in (("answer", checked_answers), ("position", checked_position)):
            for name in self.fields_of(kind):
                object.__setattr__(self, name, check(getattr(self, name)))

    @classmethod
    def fields_of(cls, kind: str) -> list[str]:
        """The names of the fields of one kind, "answer" or "position"."""
        return [metric_field.name for metric_field in fields(cls) if metric_field.metadata.get("kind") == kind]

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """One number per row."""
        raise NotImplementedError

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:  # noqa: ARG002
        """One number per row, for answers of several tokens; `read` is by the name of the answer's field."""
        raise HooklineError(
            f"{self.name} supports answers of one token, but this answer has several: use log_prob, prob or logit_diff"
        )

    def resolved(self, model: Any, tokens: Int[Tensor, "batch pos"], mask: Tensor | None = None) -> Self:
        """The metric with texts turned into token ids, and positions into columns of these prompts."""
        check_vocabulary(self.name, model)
        changes: dict[str, Any] = {
            name: single_ids(getattr(self, name), model, len(tokens)) for name in self.fields_of("answer")
        }
        for name in self.fields_of("position"):
            if getattr(self, name) is not None:
                pos, real = getattr(self, name), torch.ones_like(tokens) if mask is None else mask
                is_meaning = isinstance(pos, Meaning)
                changes[name] = columns_meant(pos, model, tokens, real) if is_meaning else columns_of(pos, real)
        for name in self.fields_of("answer") if isinstance(changes.get("pos"), int | Tensor) else ():
            warn_of_missing_space(getattr(self, name), model, tokens, changes["pos"])
        return replace(self, **changes)

    def __repr__(self) -> str:
        values = {metric_field.name: getattr(self, metric_field.name) for metric_field in fields(self)}
        return f"{self.name}({', '.join(f'{key}={short(x)}' for key, x in values.items() if x is not None)})"


@dataclass(frozen=True, eq=False, repr=False)
class LogitDiff(Metric):
    """The logit of the answer minus the logit of the wrong answer."""

    example = 'metrics.logit_diff(" Mary", " John")'
    answer: Tokens = field(metadata=ANSWER)
    wrong: Tokens = field(metadata=ANSWER)
    pos: Position = field(default=-1, metadata=POSITION)

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        position_logits = at_position(logits, self.pos)
        return of_answer(position_logits, self.answer) - of_answer(position_logits, self.wrong)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """The log-probability of the answer minus that of the wrong answer."""
        return log_probs(read["answer"]) - log_probs(read["wrong"])

    def resolved(self, model: Any, tokens: Int[Tensor, "batch pos"], mask: Tensor | None = None) -> Self:
        """As for every metric; the two answers must differ."""
        metric = super().resolved(model, tokens, mask)
        if bool((torch.as_tensor(metric.answer) == torch.as_tensor(metric.wrong)).any()):
            raise HooklineError(f"the answer and the wrong answer are the same token in a row: {self!r} is 0 there")
        return metric


@dataclass(frozen=True, eq=False, repr=False)
class _OfAnswer(Metric):
    """A metric of one answer at one position."""

    answer: Tokens = field(metadata=ANSWER)
    pos: Position = field(default=-1, metadata=POSITION)


@dataclass(frozen=True, eq=False, repr=False)
class LogProb(_OfAnswer):
    """The log-probability of the answer."""

    example = 'metrics.log_prob(" Mary")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        return of_answer(at_position(logits, self.pos).log_softmax(-1), self.answer)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """The sum of the log-probabilities of its tokens, each given the tokens before it."""
        return log_probs(read["answer"])


@dataclass(frozen=True, eq=False, repr=False)
class Prob(_OfAnswer):
    """The probability of the answer."""

    example = 'metrics.prob(" Mary")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        return of_answer(at_position(logits, self.pos).softmax(-1), self.answer)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """The product of the probabilities of its tokens, each given the tokens before it."""
        return log_probs(read["answer"]).exp()


@dataclass(frozen=True, eq=False, repr=False)
class Rank(_OfAnswer):
    """How many tokens are more likely than the answer; NaN where a logit is NaN."""

    example = 'metrics.rank(" Mary")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        position_logits = at_position(logits, self.pos)
        above = (position_logits > of_answer(position_logits, self.answer)[:, None]).sum(-1).to(position_logits.dtype)
        return above.masked_fill(position_logits.isnan().any(-1), math.nan)  # comparisons with NaN are false


@dataclass(frozen=True, eq=False, repr=False)
class Accuracy(Rank):
    """Whether the answer is the most likely token: 1 or 0, so that the mean is the share of correct answers."""

    example = 'metrics.accuracy(" Paris")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        rank = super().__call__(logits)
        return (rank == 0).to(rank).masked_fill(rank.isnan(), math.nan)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """Whether greedy generation would produce the answer: each token is the most likely after those before it."""
        flags = []
        for answer_logits, ids in read["answer"]:
            is_right = (answer_logits.argmax(-1) == ids).all().to(answer_logits.dtype)
            flags.append(is_right.masked_fill(answer_logits.isnan().any(), math.nan))
        return torch.stack(flags)


@dataclass(frozen=True, eq=False, repr=False)
class KL(Metric):
    """KL(reference ‖ logits), in nats; with pos=None the average over all positions that are not padding."""

    from_clean = ("logits",)
    reference: Float[Tensor, "batch pos vocab"]
    pos: Position | None = field(default=-1, metadata=POSITION)
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.reference, Tensor) or self.reference.ndim != 3:
            raise HooklineError(f"kl(reference) needs logits [batch, pos, vocab], got {short(self.reference)}")
        if self.mask is not None and self.pos is not None:
            raise HooklineError("the mask selects the positions that kl averages over, so it needs pos=None")

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        _check_shape("the reference", self.reference.shape, logits.shape)
        reference = self.reference.detach().to(logits.device)
        if self.pos is not None:
            return divergence(at_position(reference, self.pos), at_position(logits, self.pos))
        by_position = divergence(upcast(reference), upcast(logits))
        return weighted_mean(by_position, torch.ones_like(by_position) if self.mask is None else self.mask)

    def resolved(self, model: Any, tokens: Int[Tensor, "batch pos"], mask: Tensor | None = None) -> Self:
        """As for every metric; over all positions, padding is masked out."""
        metric = super().resolved(model, tokens, mask)
        return replace(metric, mask=mask) if metric.pos is None and metric.mask is None else metric


@dataclass(frozen=True, eq=False, repr=False)
class Loss(Metric):
    """The next-token cross-entropy, averaged over the tokens of a row that are neither padding nor image tokens."""

    from_clean = ("tokens", "mask")
    tokens: Int[Tensor, "batch pos"]
    mask: Tensor | None = None
    images: Tensor | None = None  # true at image tokens; experiments find them

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor) or self.tokens.ndim != 2 or self.tokens.is_floating_point():
            raise HooklineError(f"loss(tokens) needs token ids [batch, pos], got {short(self.tokens)}")
        if self.tokens.shape[1] < 2:
            raise HooklineError("loss is the next-token loss: it needs at least two tokens")

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        _check_shape("the tokens", self.tokens.shape, logits.shape[:2])
        mask = torch.ones_like(self.tokens) if self.mask is None else self.mask
        counts, targets = mask[:, 1:] * mask[:, :-1], self.tokens[:, 1:]
        if self.images is not None:
            counts = counts * ~self.images[:, 1:].to(counts.device)
            targets = targets.masked_fill(self.images[:, 1:].to(targets.device), 0)  # perhaps outside the vocabulary
        likely = upcast(logits[:, :-1]).log_softmax(-1)
        return weighted_mean(-likely.gather(-1, targets[..., None].to(logits.device))[..., 0], counts)

    def resolved(self, model: Any, tokens: Int[Tensor, "batch pos"], mask: Tensor | None = None) -> Self:
        """The loss without padding and image tokens."""
        metric = super().resolved(model, tokens, mask)
        images = model._image_positions(self.tokens) if self.images is None else self.images
        return replace(metric, mask=mask if self.mask is None else self.mask, images=images)


@dataclass(frozen=True, eq=False, repr=False)
class InContextLoss(Metric):
    """The loss at a late token of a row minus that at an early one: below 0 where the context helps.

    By default they are the tokens with the indices 500 and 50, as in the work on induction heads; for shorter texts,
    pass others. Padding does not count.
    """

    example = "metrics.in_context_loss(tokens, early=5, late=50)"
    from_clean = ("tokens", "mask")
    tokens: Int[Tensor, "batch pos"]
    mask: Tensor | None = None
    early: Position = field(default=50, metadata=POSITION)
    late: Position = field(default=500, metadata=POSITION)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tokens, Tensor) or self.tokens.ndim != 2 or self.tokens.is_floating_point():
            raise HooklineError(
                f"in_context_loss(tokens) needs token ids [batch, pos], as model.to_tokens(text) returns, got "
                f"{short(self.tokens)}"
            )

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        _check_shape("the tokens", self.tokens.shape, logits.shape[:2])
        return self._loss_at(logits, self.late) - self._loss_at(logits, self.early)

    def _loss_at(self, logits: Tensor, columns: Position) -> Float[Tensor, " batch"]:
        """The loss of the token in one column of each row, predicted from the one before."""
        at = torch.as_tensor(columns).expand(len(logits))
        starts = torch.zeros(len(logits), dtype=torch.long)
        if self.mask is not None:
            starts = self.mask.bool().int().argmax(1).cpu()
        if bool((at <= starts).any()):
            raise HooklineError("in_context_loss needs a token before each position: early and late count from 1")
        likely = at_position(logits, at - 1).log_softmax(-1)
        ids = self.tokens[torch.arange(len(at)), at.to(self.tokens.device)]
        return -of_answer(likely, ids.cpu())

    def resolved(self, model: Any, tokens: Int[Tensor, "batch pos"], mask: Tensor | None = None) -> Self:
        """As for every metric; padding comes before the text, or after it."""
        return replace(super().resolved(model, tokens, mask), mask=mask if self.mask is None else self.mask)


def _check_shape(what: str, shape: torch.Size, expected: torch.Size) -> None:
    if shape != expected:
        raise HooklineError(f"{what} has shape {list(shape)}, but the logits need {list(expected)}")


if TYPE_CHECKING:  # with their arguments; to a type checker any other metric is Any
    logit_diff, log_prob, prob, rank, accuracy, kl, loss = LogitDiff, LogProb, Prob, Rank, Accuracy, KL, Loss
    in_context_loss = InContextLoss

__all__ = ["Metric", *METRICS]


def __getattr__(name: str) -> Any:
    if name not in METRICS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; the metrics are {', '.join(METRICS)}")
    return METRICS[name]


def __dir__() -> list[str]:
    return ["Metric", *METRICS]


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
    for name, requested in several(spec):
        metric = _one(requested, clean_logits, clean_tokens, mask)
        name = name or name_of(metric)
        if name in metrics:
            raise HooklineError(f"two metrics are called {name!r}: pass a dict, {{'name': metric, …}}")
        metrics[name] = metric.resolved(model, clean_tokens, mask) if isinstance(metric, Metric) else metric
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
    values = [
        upcast(torch.as_tensor(metric(torch.where(is_text, logits, at)))) for at in (torch.zeros_like(other), other)
    ]
    if not torch.allclose(values[0], values[1], rtol=1e-3, atol=1e-5, equal_nan=True):
        rows = (~mask.bool()).any(1).nonzero().flatten().tolist()
        raise HooklineError(
            f"{name} reads padding: the prompts differ in length, and column -1 is padding in row {rows[0]}. Use a "
            f"metric that counts positions within each text ({LogitDiff.example}), select each text's last position, "
            f'or pad on the other side: model.to_tokens(texts, padding_side="left")'
        )


def check_vocabulary(name: str, model: Any) -> None:
    """Raise if a metric of tokens is asked of a model that has no logits of tokens."""
    if model.anatomy.unembed is None:
        raise HooklineError(
            f"the metric {name} is computed from logits over the vocabulary, but {model.cfg.architecture} has no "
            f"unembedding: its output is the last hidden state. Load the model with its language-model head "
            f"(AutoModelForCausalLM, AutoModelForMaskedLM), or give a function of that output: lambda out: …"
        )


def value_of(metric: MetricFunction, logits: Float[Tensor, "batch pos vocab"], name: str) -> Float[Tensor, "..."]:
    """The checked value of a metric, which receives a snapshot of the logits: it may write to them."""
    return checked_value(metric(snapshot(logits, is_ours=True)), len(logits), name)


def checked_value(value: Any, batch: int, name: str = "the metric") -> Float[Tensor, "..."]:
    """The value a metric returned, as floats: one number per row, or one for all; anything else is an error."""
    needs = f"a metric returns one number per row, a tensor of shape [{batch}], or one number, of shape []"
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise HooklineError(f"{name} returned {type(value).__name__} {short(value)}: {needs}")
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
        named_metrics = list(spec.items())
    else:
        named_metrics = [("", metric) for metric in (spec if isinstance(spec, list | tuple) else [spec])]
    if not named_metrics:
        raise HooklineError("no metric was given: pass a function of the logits or, for example, " + LogitDiff.example)
    return named_metrics


def _one(spec: Any, clean_logits: Tensor, clean_tokens: Tensor, mask: Tensor | None) -> MetricFunction:
    if isinstance(spec, str):
        if spec not in METRICS:
            near = get_close_matches(spec, list(METRICS), n=3, cutoff=0.4) or list(METRICS)
            raise HooklineError(f"there is no metric {spec!r}. Did you mean {', '.join(map(repr, near))}?")
        spec = METRICS[spec]
    if isinstance(spec, type) and issubclass(spec, Metric):  # metrics.kl itself, not yet called
        clean_values = {"logits": clean_logits, "tokens": clean_tokens, "mask": mask}
        needed = [
            metric_field
            for metric_field in fields(spec)
            if metric_field.default is MISSING and metric_field.default_factory is MISSING
        ]
        if len(needed) > len(spec.from_clean):
            raise HooklineError(f"the metric {spec.name!r} needs arguments: {spec.example or spec.__name__ + '(…)'}")
        return spec(*(clean_values[name] for name in spec.from_clean))
    if not callable(spec):
        raise HooklineError(f'a metric is a function of logits, "kl", "loss" or {LogitDiff.example}, got {spec!r}')
    return spec


def name_of(metric: Any) -> str:
    """The name of a metric in results."""
    if isinstance(metric, str | Metric):
        return metric if isinstance(metric, str) else metric.name
    while hasattr(metric, "func"):  # functools.partial, however often
        metric = metric.func
    name = getattr(metric, "__name__", type(metric).__name__)
    return "metric" if name == "<lambda>" else name
