"""Metrics: functions of the logits that give one number per row, by name, and which positions they look at.

    metrics.logit_diff(" Mary", " John")      answer against wrong answer
    metrics.prob(" Mary")                     also log_prob, and rank (0 is the likeliest)
    metrics.kl(clean_logits)                  how far from other logits; as "kl", from those of the clean run
    metrics.loss(tokens)                      of the next token; as "loss", on the clean tokens

An answer is an id or a text, one for all rows or one for each. `pos` is where it is read, -1 unless told: an index, or
one for each row. In an experiment it counts in the text of each row, where padding does not count.

In an experiment an answer may be several tokens: a longer text, or a list of ids. It is read as a continuation of the
prompt, and the metric is that of its log-probability (see `continuations.py`). For one prompt, `[12, 345]` is one
answer of two tokens; for several prompts it is one token for each, and `[[12, 345]]` is an answer of two tokens for all
of them, `[[12, 345], [6, 78]]` one for each of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hookline.engine.snapshots import snapshot
from hookline.errors import HooklineError

MetricFunction: TypeAlias = Callable[[Tensor], Tensor]
Tokens: TypeAlias = int | str | Sequence[int | str | Sequence[int]] | Int[Tensor, " batch"] | Int[Tensor, "batch token"]
Read: TypeAlias = Sequence[tuple[Float[Tensor, "token vocab"], Int[Tensor, " token"]]]
"""Of each row: the logits before every token of an answer, and the tokens."""
Position: TypeAlias = int | Sequence[int] | Int[Tensor, " batch"]


@dataclass(frozen=True, eq=False, repr=False)
class Metric:
    """A metric with a name: called with logits [batch, pos, vocab], it gives a number for each row."""

    name: ClassVar[str] = "metric"
    example: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            check = {"answer": _checked_tokens, "wrong": _checked_tokens, "pos": _checked_position}.get(field.name)
            if check is not None:
                object.__setattr__(self, field.name, check(getattr(self, field.name)))

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """A number for each row."""
        raise NotImplementedError

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:  # noqa: ARG002
        """A number for each row, of answers of several tokens, by the names of the fields that have them."""
        raise HooklineError(
            f"{self.name} is of an answer of one token, but this one has several: use log_prob, prob or logit_diff"
        )

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return f"{self.name}({', '.join(f'{key}={_short(x)}' for key, x in given.items() if x is not None)})"


@dataclass(frozen=True, eq=False, repr=False)
class LogitDiff(Metric):
    """The logit of the answer less that of the wrong one."""

    name = "logit_diff"
    example = 'metrics.logit_diff(" Mary", " John")'
    answer: Tokens
    wrong: Tokens
    pos: Position = -1

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The difference in each row."""
        there = _at(logits, self.pos)
        return _of_token(there, self.answer) - _of_token(there, self.wrong)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """By how much the answer is more likely: the difference of the logarithms."""
        return _log_probs(read["answer"]) - _log_probs(read["wrong"])


@dataclass(frozen=True, eq=False, repr=False)
class OfAnswer(Metric):
    """A metric of one answer at one position."""

    answer: Tokens
    pos: Position = -1


@dataclass(frozen=True, eq=False, repr=False)
class LogProb(OfAnswer):
    """The logarithm of the answer's probability."""

    name = "log_prob"
    example = 'metrics.log_prob(" Mary")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The logarithm in each row."""
        return _of_token(_at(logits, self.pos).log_softmax(-1), self.answer)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """The sum of the logarithms of its tokens, each after those before it."""
        return _log_probs(read["answer"])


@dataclass(frozen=True, eq=False, repr=False)
class Prob(OfAnswer):
    """The answer's probability."""

    name = "prob"
    example = 'metrics.prob(" Mary")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The probability in each row."""
        return _of_token(_at(logits, self.pos).softmax(-1), self.answer)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """The product of the probabilities of its tokens, each after those before it."""
        return _log_probs(read["answer"]).exp()


@dataclass(frozen=True, eq=False, repr=False)
class Rank(OfAnswer):
    """How many tokens are likelier than the answer."""

    name = "rank"
    example = 'metrics.rank(" Mary")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The rank in each row; NaN where a logit is."""
        there = _at(logits, self.pos)
        above = (there > _of_token(there, self.answer)[:, None]).sum(-1).to(there.dtype)
        return above.masked_fill(there.isnan().any(-1), math.nan)  # of NaN nothing is above


@dataclass(frozen=True, eq=False, repr=False)
class KL(Metric):
    """The divergence KL(reference ‖ logits), in nats; with pos=None the average over all that is no padding."""

    name = "kl"
    reference: Float[Tensor, "batch pos vocab"]
    pos: Position | None = -1
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.reference, Tensor) or self.reference.ndim != 3:
            raise HooklineError(f"kl(reference) needs logits [batch, pos, vocab], not {_short(self.reference)}")
        if self.mask is not None and self.pos is not None:
            raise HooklineError("the mask says what kl averages over: it goes with pos=None")

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The divergence in each row."""
        if self.reference.shape != logits.shape:
            raise HooklineError(f"kl: the reference is {list(self.reference.shape)}, the logits {list(logits.shape)}")
        reference = self.reference.detach().to(logits.device)
        if self.pos is not None:
            return _divergence(_at(reference, self.pos), _at(logits, self.pos))
        by_position = _divergence(upcast(reference), upcast(logits))
        return _mean_of(by_position, torch.ones_like(by_position) if self.mask is None else self.mask)


@dataclass(frozen=True, eq=False, repr=False)
class Loss(Metric):
    """The cross-entropy of each next token, averaged over those of a row that are neither padding nor images.

    `images` is true where a token stands for an image; in an experiment it is found in the tokens.
    """

    name = "loss"
    tokens: Int[Tensor, "batch pos"]
    mask: Tensor | None = None
    images: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor) or self.tokens.ndim != 2 or self.tokens.is_floating_point():
            raise HooklineError(f"loss(tokens) needs token ids [batch, pos], not {_short(self.tokens)}")
        if self.tokens.shape[1] < 2:
            raise HooklineError("the loss is that of the next token: give at least two tokens")

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """The loss of each row."""
        if self.tokens.shape != logits.shape[:2]:
            raise HooklineError(f"loss: the tokens are {list(self.tokens.shape)}, the logits {list(logits.shape)}")
        mask = torch.ones_like(self.tokens) if self.mask is None else self.mask
        counts, targets = mask[:, 1:] * mask[:, :-1], self.tokens[:, 1:]
        if self.images is not None:
            counts = counts * ~self.images[:, 1:].to(counts.device)
            targets = targets.masked_fill(self.images[:, 1:].to(targets.device), 0)  # perhaps outside the vocabulary
        likely = upcast(logits[:, :-1]).log_softmax(-1)
        return _mean_of(-likely.gather(-1, targets[..., None].to(logits.device))[..., 0], counts)


logit_diff, log_prob, prob, rank, kl, loss = LogitDiff, LogProb, Prob, Rank, KL, Loss
NAMED: dict[str, type[Metric]] = {each.name: each for each in (LogitDiff, LogProb, Prob, Rank, KL, Loss)}


def as_metric(
    spec: Any,
    model: Any,
    clean_logits: Float[Tensor, "batch pos vocab"],
    corrupted_logits: Float[Tensor, "batch pos vocab"] | None,
    clean_tokens: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"] | Int[Tensor, "batch pos"] | None = None,
) -> dict[str, MetricFunction]:
    """The metrics that are asked for, by name, ready to be called and tried on the runs there are.

    `spec` is a function of logits, a metric of this file, "kl" or "loss", or a list or dict of such.
    """
    metrics: dict[str, MetricFunction] = {}
    for name, each in several(spec):
        metric = _one(each, clean_logits, clean_tokens, mask)
        name = name or name_of(metric)
        if name in metrics:
            raise HooklineError(f"two metrics are called {name!r}: give a dict, {{'a name': metric, …}}")
        metrics[name] = resolve(metric, model, clean_tokens, mask)
    for name, metric in metrics.items():
        for logits in (clean_logits, corrupted_logits):
            if logits is not None:
                value_of(metric, logits, name)
        if mask is not None and not bool(mask.all()):
            _check_padding(name, metric, clean_logits, mask)
    return metrics


def _check_padding(name: str, metric: MetricFunction, logits: Tensor, mask: Tensor) -> None:
    """What stands at padding must make no difference."""
    other = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits) * 10
    is_text = mask.bool().to(logits.device)[..., None]
    found = [
        upcast(torch.as_tensor(metric(torch.where(is_text, logits, at)))) for at in (torch.zeros_like(other), other)
    ]
    if not torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-5, equal_nan=True):
        rows = (~mask.bool()).any(1).nonzero().flatten().tolist()
        raise HooklineError(
            f"{name} reads padding: texts are of different lengths, and -1 is the last column, which is padding in row "
            f"{rows[0]}. Use a metric that counts in each text ({LogitDiff.example}), pick each text's last position, "
            f'or give tokens padded on the other side: model.to_tokens(texts, padding_side="left")'
        )


def resolve(
    metric: MetricFunction,
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"] | Int[Tensor, "batch pos"] | None = None,
) -> MetricFunction:
    """The metric with text turned into ids and positions into columns of these prompts, all of it checked.

    A function that is no metric of this file is given back as it is.
    """
    if not isinstance(metric, Metric):
        return metric
    check_vocabulary(metric.name, model)
    given = {field.name: getattr(metric, field.name) for field in fields(metric)}
    changes: dict[str, Any] = {key: _ids(given[key], model, len(tokens)) for key in ("answer", "wrong") if key in given}
    if given.get("pos") is not None:
        changes["pos"] = _columns(given["pos"], tokens, mask)
    elif given.get("mask", 0) is None:
        changes["mask"] = mask
    if isinstance(metric, Loss) and metric.images is None:
        changes["images"] = model._image_positions(metric.tokens)
    if "wrong" in changes and bool((torch.as_tensor(changes["answer"]) == torch.as_tensor(changes["wrong"])).any()):
        raise HooklineError(
            f"the answer and the wrong answer are the same token in a row: {metric!r} is always 0 there"
        )
    return replace(metric, **changes)


def check_vocabulary(name: str, model: Any) -> None:
    """Raise if a metric of tokens is asked of a model that has no logits of tokens."""
    if model._anatomy.unembed is None:
        raise HooklineError(
            f"the metric {name} is computed from logits over the vocabulary, but {model.cfg.architecture} has no "
            f"unembedding: its output is the last hidden state. Load the model with its language-model head "
            f"(AutoModelForCausalLM, AutoModelForMaskedLM), or give a function of that output: lambda out: …"
        )


def value_of(metric: MetricFunction, logits: Float[Tensor, "batch pos vocab"], name: str) -> Float[Tensor, "*any"]:
    """The checked value of a metric, which gets a snapshot of the logits: it may write to them."""
    return checked(metric(snapshot(logits, is_ours=True)), len(logits), name)


def checked(value: Any, batch: int, name: str = "the metric") -> Float[Tensor, "*any"]:
    """What a metric gave, as floats: one number for each row, or one for all; else an error that says what it gave."""
    needs = f"a metric gives one number for each of the {batch} rows, a tensor of shape [{batch}], or one, of shape []"
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise HooklineError(f"{name} gave {type(value).__name__} {_short(value)}: {needs}")
    if value.is_complex() or tuple(value.shape) not in ((), (batch,)):
        raise HooklineError(f"{name} gave a {value.dtype} tensor of shape {list(value.shape)}: {needs}")
    bad = value.detach().isnan()
    if bool(bad.any()):
        where = f" in row {int(bad.nonzero()[0])}" if value.ndim else ""
        raise HooklineError(f"{name} gave NaN{where}: {needs}")
    return upcast(value)


def several(spec: Any) -> Iterable[tuple[str, Any]]:
    """Each metric that is asked for, with the name it is given, if any."""
    if isinstance(spec, Mapping):
        if not all(isinstance(name, str) and name for name in spec):
            raise HooklineError(f"the keys of a dict of metrics are their names, not {list(spec)}")
        found = list(spec.items())
    else:
        found = [("", each) for each in (spec if isinstance(spec, list | tuple) else [spec])]
    if not found:
        raise HooklineError("no metric is given: give a function of logits, or for instance " + LogitDiff.example)
    return found


def _one(spec: Any, clean_logits: Tensor, clean_tokens: Tensor, mask: Tensor | None) -> MetricFunction:
    if isinstance(spec, type) and issubclass(spec, Metric):
        spec = spec.name  # metrics.kl itself, not yet called
    if spec == "kl":
        return KL(clean_logits)
    if spec == "loss":
        return Loss(clean_tokens, mask)
    if isinstance(spec, str) and spec in NAMED:
        raise HooklineError(f"the metric {spec!r} needs to know the answer: {NAMED[spec].example}")
    if isinstance(spec, str):
        near = get_close_matches(spec, list(NAMED), n=3, cutoff=0.4) or list(NAMED)
        raise HooklineError(f"no metric is named {spec!r}. Did you mean {', '.join(map(repr, near))}?")
    if not callable(spec):
        raise HooklineError(f'a metric is a function of logits, "kl", "loss" or {LogitDiff.example}, not {spec!r}')
    return spec


def name_of(metric: Any) -> str:
    """What a metric is called in results; a name is its own."""
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
            raise HooklineError(f"answers are one token id, or one for each row [batch], not {_short(tokens)}")
        return tokens.detach().cpu().long() if tokens.ndim else int(tokens)
    if isinstance(tokens, int | str) and not isinstance(tokens, bool):
        return tokens
    if isinstance(tokens, list | tuple) and tokens and all(_is_answer(each) for each in tokens):
        return tuple(tuple(each) if isinstance(each, list | tuple) else each for each in tokens)
    raise HooklineError(
        f"an answer is a text, the id of a token or a list of ids; or a list or tensor with one per row, not {tokens!r}"
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
    raise HooklineError(f"pos is an index, or a list or tensor of one per row, not {_short(pos)}")


def _ids(tokens: Any, model: Any, batch: int) -> int | Tensor:
    """Token ids of what was given as text or ids."""
    if isinstance(tokens, tuple):
        if any(isinstance(each, tuple) for each in tokens):
            raise HooklineError(f"answers of several tokens, {tokens}, are read in experiments only")
        tokens = torch.tensor([_ids(each, model, batch) for each in tokens])
    ids = model.to_single_token(tokens) if isinstance(tokens, str) else tokens
    if isinstance(ids, Tensor) and len(ids) != batch:
        raise HooklineError(f"{len(ids)} answers for {batch} prompts: give one for all, or one for each")
    _check_ids(ids, model.cfg.d_vocab)
    return ids


def _check_ids(ids: int | Tensor, d_vocab: int) -> None:
    low, high = (ids, ids) if isinstance(ids, int) else (int(ids.min()), int(ids.max()))
    if low < 0 or high >= d_vocab:
        raise HooklineError(f"token {low if low < 0 else high} is out of range: there are 0 to {d_vocab - 1}")


def _columns(pos: int | Tensor, tokens: Tensor, mask: Tensor | None) -> int | Tensor:
    """Where the positions are in these prompts, counted in the text of each row: padding does not count."""
    batch, width = tokens.shape
    if isinstance(pos, Tensor) and len(pos) != batch:
        raise HooklineError(f"{len(pos)} positions for {batch} prompts: give one for all, or one for each")
    real = torch.ones(batch, width) if mask is None else mask.cpu()
    found = []
    for row, index in enumerate(pos.tolist() if isinstance(pos, Tensor) else [pos] * batch):
        columns = real[row].nonzero().flatten().tolist()
        if not -len(columns) <= index < len(columns):
            raise HooklineError(f"position {index}, but there are {len(columns)} in row {row} of the prompts")
        found.append(columns[index])
    return found[0] if len(set(found)) == 1 else torch.tensor(found)


def _at(logits: Tensor, pos: Any) -> Float[Tensor, "batch vocab"]:
    """The logits at a position, or at one of each row."""
    if logits.ndim != 3:
        raise HooklineError(f"a metric is given logits [batch, pos, vocab], not a tensor of shape {list(logits.shape)}")
    batch, width = logits.shape[:2]
    lowest, highest = (pos, pos) if isinstance(pos, int) else (int(pos.min()), int(pos.max()))
    if lowest < -width or highest >= width:
        raise HooklineError(f"pos={_short(pos)}, but the logits have {width} positions")
    if isinstance(pos, int):
        return upcast(logits[:, pos])
    if len(pos) != batch:
        raise HooklineError(f"{len(pos)} positions for logits of {batch} rows: give one for all, or one for each")
    return upcast(logits[torch.arange(batch, device=logits.device), pos.to(logits.device)])


def _of_token(there: Float[Tensor, "batch vocab"], ids: Any) -> Float[Tensor, " batch"]:
    """What stands at a token, or at one of each row."""
    if isinstance(ids, tuple) and all(type(each) is int for each in ids):
        ids = torch.tensor(ids)
    if isinstance(ids, str | tuple):
        raise HooklineError(f"the answer {ids!r} is text: give its id, model.to_single_token(…), or resolve(metric, …)")
    _check_ids(ids, there.shape[-1])
    if isinstance(ids, int):
        return there[:, ids]
    if len(ids) != len(there):
        raise HooklineError(f"{len(ids)} answers for logits of {len(there)} rows: give one for all, or one for each")
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
    """The average over what counts; what does not is not looked at."""
    counts = counts.to(values.device)
    return values.masked_fill(counts == 0, 0.0).sum(1) / counts.to(values.dtype).sum(1)


def upcast(x: Tensor) -> Tensor:
    """At 32 bits or more."""
    return x if x.dtype == torch.float64 else x.float()


def _short(x: Any) -> str:
    if isinstance(x, tuple) and all(type(each) is int for each in x):
        return repr(list(x))
    if not isinstance(x, Tensor):
        return repr(x)
    return str(x.tolist()) if x.numel() <= 8 and not x.is_floating_point() else f"<{list(x.shape)} {x.dtype}>"
