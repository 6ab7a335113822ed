"""Head detectors: previous-token, duplicate-token and induction heads, or any attention pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.patterns import read_patterns
from hookline.experiments.core.prompts import Prompt, check_language_model, prompts_of
from hookline.experiments.core.sweep import SweepPoints, sweep_points
from hookline.experiments.result import Result
from hookline.model import HookedModel

__all__ = ["detect", "detection_pattern", "head_scores", "repeated_tokens"]

Kind: TypeAlias = Literal["previous_token", "duplicate_token", "induction"]
Measure: TypeAlias = Literal["mul", "abs"]
KINDS: tuple[Kind, ...] = ("previous_token", "duplicate_token", "induction")

_LENGTH, _BATCH = 50, 4


def __dir__() -> list[str]:
    return __all__


def head_scores(
    model: HookedModel,
    prompts: Prompt | None = None,
    kinds: Kind | Sequence[Kind] = KINDS,
    *,
    length: int | None = None,
    batch: int | None = None,
    seed: int | None = None,
) -> Result:
    """The share of attention that each head gives to a kind of pattern: `result.values[kind, layer, head]`, 0 to 1.

        >>> head_detectors.head_scores(model).sel(kind="induction").top(2, by="value")
        layer  head  value
        3      3     0.9167
        3      7     0.9097

    A "previous_token" head attends to the previous token, a "duplicate_token" head to the same token earlier in the
    text, an "induction" head to the token after that. The score is the mean over all positions that have such a token.
    Without `prompts`, random repeated tokens are used: `batch` (4) rows of `length` (50, or as many as fit) tokens and
    the same tokens again, after the BOS token if there is one, drawn with `seed` (0).
    """
    requested = [kinds] if isinstance(kinds, str) else list(kinds)
    if not requested or len({*requested}) < len(requested):
        raise HooklineError(f"kinds are some of {', '.join(map(repr, KINDS))}, without duplicates, got {kinds!r}")
    check_language_model(model)
    if prompts is not None and (length, batch, seed) != (None, None, None):
        raise HooklineError("length, batch and seed are for random tokens: remove them, or remove prompts")
    where, texts = _texts(model, repeated_tokens(model, length, batch, seed) if prompts is None else prompts)
    patterns = [torch.stack([detection_pattern(kind, tokens) for kind in requested]) for tokens in texts]
    counts = torch.stack([pattern.any(-1).sum(-1) for pattern in patterns]).sum(0)
    for kind, count in zip(requested, counts.tolist(), strict=True):
        if not count:
            why = "has a previous token" if kind == "previous_token" else "is repeated"
            raise HooklineError(f"no token of these prompts {why}, so {kind} has no score: remove prompts")
    total = _summed(model, where, texts, lambda x, text: torch.einsum("hpk,tpk->ht", x, patterns[text]))
    values = total.permute(2, 0, 1) / counts[:, None, None]
    coords: dict[str, list[Label]] = {"kind": [*requested], **_coords(where, values)}
    info = {"texts": len(texts), **about(model, "attention of heads")}
    return Result(values, ("kind", "layer", "head"), coords, "score", info)


def detect(
    model: HookedModel,
    pattern: Kind | Float[Tensor, "pos pos"],
    prompts: Prompt,
    *,
    measure: Measure = "mul",
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
) -> Result:
    """The similarity of each head's attention to a pattern, averaged over prompts: `result.values[layer, head]`.

        >>> head_detectors.detect(model, "previous_token", prompt).top(1, by="value")
        layer  head  value
        2      7     0.2901

    The pattern is one of the known kinds, or a matrix [from, to]. With "mul" the score is the share of all attention
    that falls on the pattern, weighted by it; with "abs" it is 1 minus the mean distance per row. Attention to the
    first token (`exclude_bos`), and of each token to itself (`exclude_current_token`), can be excluded.
    """
    if measure not in ("mul", "abs"):
        raise HooklineError(f'measure is "mul" or "abs", got {measure!r}')
    check_language_model(model)
    where, texts = _texts(model, prompts)
    targets = [
        _checked(model, pattern, tokens) if isinstance(pattern, Tensor) else detection_pattern(pattern, tokens)
        for tokens in texts
    ]
    scored = [torch.ones_like(target) for target in targets]
    for mask in scored:
        mask[:, 0] *= not exclude_bos
        mask.diagonal().mul_(not exclude_current_token)

    def score(attention: Tensor, text: int) -> Tensor:
        if measure == "abs":
            return 1 - ((attention - targets[text]).abs() * scored[text]).sum((1, 2)) / len(targets[text])
        looked = attention * scored[text]
        total = looked.sum((1, 2))
        return (looked * targets[text]).sum((1, 2)) / total.masked_fill(total == 0, 1.0)

    values = _summed(model, where, texts, score) / len(texts)
    info: dict[str, Any] = {"pattern": pattern if isinstance(pattern, str) else "given", "measure": measure}
    info |= {"exclude_bos": exclude_bos, "exclude_current_token": exclude_current_token}
    info |= about(model, "attention of heads")
    return Result(values, ("layer", "head"), _coords(where, values), "score", info)


def detection_pattern(kind: Kind, tokens: Int[Tensor, " pos"]) -> Float[Tensor, "pos pos"]:
    """The attention pattern of a kind of head, [from, to]: 1 where it attends, 0 elsewhere.

    Examples:
        >>> head_detectors.detection_pattern("previous_token", torch.tensor([5, 6, 7]))
        tensor([[0., 0., 0.],
                [1., 0., 0.],
                [0., 1., 0.]])
    """
    if kind == "previous_token":
        return torch.eye(len(tokens)).roll(-1, 1).tril(-1)
    ids = tokens.cpu()
    same = (ids[:, None] == ids[None]).float().tril(-1)
    if kind == "duplicate_token":
        return same
    if kind == "induction":
        after = same.roll(1, 1)
        after[:, 0] = 0.0
        return after.tril()
    raise HooklineError(f"there is no kind of head {kind!r}: use one of {', '.join(map(repr, KINDS))}")


def repeated_tokens(
    model: HookedModel, length: int | None = None, batch: int | None = None, seed: int | None = None
) -> Int[Tensor, "batch pos"]:
    """Random tokens, repeated once in the same order, after the BOS token if there is one.

    Examples:
        >>> head_detectors.repeated_tokens(model, length=3, batch=1).shape
        torch.Size([1, 7])
    """
    bos = None if model.tokenizer is None else model.tokenizer.bos_token_id
    first = [] if bos is None else [bos]
    room = None if model.cfg.n_ctx is None else (model.cfg.n_ctx - len(first)) // 2
    length = length if length is not None else min(_LENGTH, _LENGTH if room is None else room)
    batch = _BATCH if batch is None else batch
    if length < 2 or batch < 1 or (room is not None and length > room):
        most = "" if room is None else f" and at most {room}, since the tokens are repeated"
        raise HooklineError(f"batch is at least 1 and length at least 2{most}, got batch={batch}, length={length}")
    vocabulary = _plain_tokens(model)
    generator = torch.Generator().manual_seed(0 if seed is None else seed)
    if len(vocabulary) >= length:
        once = torch.stack(
            [vocabulary[torch.randperm(len(vocabulary), generator=generator)[:length]] for _ in range(batch)]
        )
    else:
        once = vocabulary[torch.randint(len(vocabulary), (batch, length), generator=generator)]
    return torch.cat([torch.tensor(first, dtype=torch.long).expand(batch, -1), once, once], 1).to(model.cfg.device)


def _plain_tokens(model: HookedModel) -> Int[Tensor, " token"]:
    """The tokens that are not special tokens."""
    if model.tokenizer is None:
        return torch.arange(model.cfg.d_vocab)
    special = {*model.tokenizer.all_special_ids}
    most = min(model.cfg.d_vocab, len(model.tokenizer))
    return torch.tensor([token for token in range(most) if token not in special])


def _texts(model: HookedModel, prompts: Prompt) -> tuple[SweepPoints, list[Tensor]]:
    """The points of the attention patterns, and the tokens of each prompt, without padding."""
    if model.anatomy.is_encoder_decoder:
        raise HooklineError("head detectors do not support encoder-decoder models")
    where, texts = sweep_points(model, "pattern", ("layer", "head")), prompts_of(model, prompts)
    if texts.more:
        raise HooklineError("head detectors need text prompts: for prompts with images, cache hook_pattern")
    return where, [texts.row(row)[0] for row in range(len(texts))]


def _summed(
    model: HookedModel, where: SweepPoints, texts: Sequence[Tensor], score: Callable[[Tensor, int], Tensor]
) -> Float[Tensor, "layer head *score"]:
    """The sum over texts of the score of each head's attention, [head, from, to], in the text with that number."""
    total: Any = 0.0
    for text, tokens in enumerate(texts):
        read = partial(_score_first_row, score, text)
        total = total + read_patterns(model, where, read, partial(model, tokens[None], return_type=None))[0]
    return total


def _score_first_row(score: Callable[[Tensor, int], Tensor], text: int, pattern: Tensor, _step: int) -> Tensor:
    return score(pattern[0].float().cpu(), text)


def _checked(model: HookedModel, pattern: Tensor, tokens: Tensor) -> Float[Tensor, "pos pos"]:
    n = len(tokens)
    target = pattern.detach().float().cpu()
    if target.shape != (n, n):
        raise HooklineError(f"the pattern is {list(pattern.shape)}, but the prompt has {n} tokens: pass [{n}, {n}]")
    if model.anatomy.main.name != "encoder" and bool(target.triu(1).any()):
        raise HooklineError("the pattern attends to later tokens, but this model is causal: use pattern.tril()")
    return target


def _coords(where: SweepPoints, values: Tensor) -> dict[str, list[Label]]:
    return {"layer": where.coords["layer"], "head": list(range(values.shape[-1]))}
