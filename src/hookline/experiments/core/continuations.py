"""Continuations: answers of several tokens, appended to the prompt so that each token is read after those before.

An example is run with each continuation that its answers need, in adjacent rows, which all have the value of the
example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError, how_many
from hookline.experiments.core.prompts import Prompts, check_pair, has_same_shape, prompts_of
from hookline.experiments.metrics import (
    LogitDiff,
    Metric,
    MetricFunction,
    as_metric,
    check_vocabulary,
    name_of,
    several,
)
from hookline.model import HookedModel
from hookline.rerun.strategy import is_close
from hookline.transformer.precision import upcast

Ids: TypeAlias = tuple[int, ...]
Slot: TypeAlias = list[Ids]
"""The answer of each example."""


_BY_POSITION = ". Prompts of other lengths need positions=…, such as positions=[-2, -1] or positions=token(' Mary')"


class BySide(NamedTuple):
    """A metric of clean and corrupted prompts of different lengths, prepared for each."""

    clean: Any
    corrupted: Any


def prompt_pair(
    model: HookedModel, clean: Any, corrupted: Any, metric: Any, *, may_differ: bool | None = None
) -> tuple[Any, list[Prompts]]:
    """The metric and the clean and corrupted prompts, which must have the same shape, prepared as by `continued`.

    With `may_differ`, only as many rows: prompts of other lengths are padded on the left, and have a metric each. It is
    None for experiments without `positions`.
    """
    pair = [prompts_of(model, clean), prompts_of(model, corrupted)]
    if not may_differ or len(pair[0]) != len(pair[1]) or has_same_shape(*pair):
        check_pair(model, *pair, hint="" if may_differ is None else _BY_POSITION)
        return continued(model, metric, *pair)
    width = max(prompts.width for prompts in pair)
    sides = [continued(model, metric, prompts.ending_at(width)) for prompts in pair]
    return BySide(*(spec for spec, _ in sides)), [prompts for _, (prompts,) in sides]


def ready_metrics(
    spec: Any, model: HookedModel, logits: Sequence[Tensor], pair: Sequence[Prompts]
) -> list[dict[str, MetricFunction]]:
    """The metrics of the clean and of the corrupted run, which are the same unless the prompts differ in length."""
    if not isinstance(spec, BySide):
        return [as_metric(spec, model, logits[0], logits[1], pair[0].tokens, pair[0].mask)] * 2
    first = [logits[0] if logits[0].shape == x.shape else x for x in logits]
    sides = zip(spec, first, pair, strict=True)
    return [as_metric(metric, model, x, None, prompts.tokens, prompts.mask) for metric, x, prompts in sides]


def continued(model: HookedModel, spec: Any, *prompts: Prompts, repeats: int = 1) -> tuple[Any, list[Prompts]]:
    """The metrics and prompts, prepared for answers of several tokens; unchanged if every answer is one token.

    With `repeats`, the prompts are repeated that many times, and the answers are given once.
    """
    metrics = [(name or name_of(metric), metric) for name, metric in several(spec)]
    batch = len(prompts[0])
    slots = {
        (name, field): answers_of(model, getattr(metric, field), batch // repeats) * repeats
        for name, metric in metrics
        for field in _answers(metric)
    }
    if all(len(ids) == 1 for slot in slots.values() for ids in slot):
        return spec, list(prompts)
    _check(model, metrics)
    contexts = _contexts(list(slots.values()))
    extended_prompts = [_extended(model, side, contexts) for side in prompts]
    _check_causal(model, prompts[0], extended_prompts[0])
    ready = {}
    for name, metric in metrics:
        if name in ready:
            raise HooklineError(f"two metrics are called {name!r}: pass a dict, {{'name': metric, …}}")
        read = {field: slots[name, field] for field in _answers(metric)}
        if "wrong" in read and any(a == b for a, b in zip(read["answer"], read["wrong"], strict=True)):
            raise HooklineError(f"the answer and the wrong answer are the same in a row: {metric!r} is always 0 there")
        ready[name] = Continued(
            metric, {field: (x, _copy_of(x, contexts)) for field, x in read.items()}, extended_prompts[0]
        )
    return ready, extended_prompts


@dataclass(frozen=True, eq=False)
class Continued:
    """A metric of answers that continue prompts: one number per row, the same for all rows of an example."""

    metric: Metric
    answers: Mapping[str, tuple[Slot, int]]
    """For each field, the answer of each example, and which of its rows has it."""
    prompts: Prompts

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """One number per row."""
        read = {field: self._read(logits, slot, copy) for field, (slot, copy) in self.answers.items()}
        return self.metric.of_tokens(read).repeat_interleave(self.prompts.copies)

    def _read(self, logits: Tensor, slot: Slot, copy: int) -> list[tuple[Tensor, Tensor]]:
        readings = []
        for example, ids in enumerate(slot):
            row = example * self.prompts.copies + copy
            start = self.prompts.spans[row].start + self.prompts.length(row) - 1
            answer_logits = upcast(logits[row, start : start + len(ids)])
            readings.append((answer_logits, torch.tensor(ids, device=logits.device)))
        return readings


def answers_of(model: HookedModel, answers: Any, batch: int) -> Slot:
    """The tokens of the answer of each example."""
    if isinstance(answers, Tensor):
        answers = tuple(answers.tolist())
    elif not isinstance(answers, tuple) or (batch == 1 and all(type(token) is int for token in answers)):
        answers = (answers,)
    slot = [_tokens(model, answer) for answer in answers]
    if len(slot) not in (1, batch):
        raise HooklineError(
            f"{how_many(len(slot), 'answer')} for {how_many(batch, 'prompt')}: pass one for all, or one each"
        )
    return slot * (batch // len(slot))


def _tokens(model: HookedModel, answer: Any) -> Ids:
    ids = tuple(model.text.ids(answer, False)) if isinstance(answer, str) else answer
    ids = (ids,) if isinstance(ids, int) else ids
    wrong = next((token for token in ids if token not in range(model.cfg.d_vocab)), None)
    if wrong is not None:
        raise HooklineError(f"token {wrong} is out of range: the vocabulary has 0 to {model.cfg.d_vocab - 1}")
    return ids


def _answers(metric: Any) -> list[str]:
    """The fields of a metric that are answers."""
    return metric.fields_of("answer") if isinstance(metric, Metric) else []


def _check(model: HookedModel, metrics: Sequence[tuple[str, Any]]) -> None:
    anatomy = model.anatomy
    if anatomy.main.name == "encoder" or anatomy.is_encoder_decoder:
        raise HooklineError("an answer of several tokens needs a decoder-only language model")
    for name, metric in metrics:
        check_vocabulary(name, model)
        if not _answers(metric):
            raise HooklineError(
                f"{name} is measured on the prompt, but another metric has an answer of several tokens, which extends "
                f"the prompt: use two calls"
            )
        if not (isinstance(metric.pos, int) and metric.pos == -1):
            raise HooklineError(f"{metric!r}: an answer of several tokens is read at the end of the prompt: remove pos")
        if type(metric).of_tokens is Metric.of_tokens:
            metric.of_tokens({})  # raises, and says why


@torch.no_grad()
def _check_causal(model: HookedModel, prompts: Prompts, longer: Prompts) -> None:
    """A prompt must not attend to its continuation: some models attend to a prompt in both directions."""
    original_logits, same = (model(**side.one(0))[:, : longer.length(0)] for side in (prompts, longer))
    if not is_close(same, original_logits):
        raise HooklineError(
            "an answer of several tokens extends the prompt, but in this model the prompt attends to later tokens, and "
            "would see the answer: use an answer of one token"
        )


def _contexts(slots: Sequence[Slot]) -> list[Slot]:
    """The fewest continuations of each prompt that contain all but the last token of every answer."""
    contexts: list[Slot] = []
    for slot in slots:
        needed = [ids[:-1] for ids in slot]
        for number, other in enumerate(contexts):
            pairs = [sorted(pair, key=len) for pair in zip(needed, other, strict=True)]
            if all(long[: len(short)] == short for short, long in pairs):
                contexts[number] = [long for _, long in pairs]
                break
        else:
            contexts.append(needed)
    return contexts


def _copy_of(slot: Slot, contexts: Sequence[Slot]) -> int:
    """The index of the continuation that contains the answers."""
    return next(
        number
        for number, other in enumerate(contexts)
        if all(context[: len(ids) - 1] == ids[:-1] for ids, context in zip(slot, other, strict=True))
    )


def _extended(model: HookedModel, prompts: Prompts, contexts: Sequence[Slot]) -> Prompts:
    """The prompts with each of the continuations."""
    rows, more, lengths = [], [], []
    for row in range(len(prompts)):
        text = prompts.row(row)[0]
        for context in contexts:
            rows.append(torch.cat([text, text.new_tensor(context[row])]))
            lengths.append(len(text))
            more += [longer(inputs, len(text), len(context[row])) for inputs in prompts.more[row : row + 1]]
    model.text.check_length(max(map(len, rows)))
    return Prompts.of_rows(rows, more, len(contexts), lengths)


def longer(inputs: Mapping[str, Any], length: int, count: int) -> dict[str, Any]:
    """The inputs of a prompt besides its tokens, extended for `count` more tokens."""
    extended_inputs: dict[str, Any] = {}
    for name, x in inputs.items():
        if not isinstance(x, Tensor) or x.shape[:2] != (1, length) or not count:
            extended_inputs[name] = x
        elif name.endswith("type_ids"):  # which tokens are images: not these
            extended_inputs[name] = torch.cat([x, x.new_zeros(1, count)], 1)
        elif name == "position_ids":
            extended_inputs[name] = torch.cat([x, x[:, -1:] + torch.arange(1, count + 1, device=x.device)], 1)
        elif name == "cross_attention_mask":
            extended_inputs[name] = torch.cat([x, x[:, -1:].expand(-1, count, *x.shape[2:])], 1)
        else:
            raise HooklineError(
                f"{name} has one value per token of the prompt, and the values for an answer of several tokens are "
                f"unknown: use an answer of one token, such as {LogitDiff.example}"
            )
    return extended_inputs
