"""Heads by what they look at: the previous token, the same token before, what came after that; or any pattern."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.prompts import Prompt, prompts_of
from hookline.experiments.core.sweep import Places, places
from hookline.experiments.result import Result
from hookline.model import HookedModel

Kind: TypeAlias = Literal["previous_token", "duplicate_token", "induction"]
Measure: TypeAlias = Literal["mul", "abs"]
KINDS: tuple[Kind, ...] = ("previous_token", "duplicate_token", "induction")

_LENGTH, _BATCH = 50, 4


def head_scores(
    model: HookedModel,
    prompts: Prompt | None = None,
    kinds: Kind | Sequence[Kind] = KINDS,
    *,
    length: int | None = None,
    batch: int | None = None,
    seed: int | None = None,
) -> Result:
    """How much of each head's attention goes where such a head looks: `result.values[kind, layer, head]`, from 0 to 1.

        from hookline.experiments import heads
        heads.head_scores(model).sel(kind="induction").top(3, by="value")

    A "previous_token" head looks at the token before, a "duplicate_token" head at the same token earlier in the text,
    an "induction" head at what came after that. The score is the average over all positions from which there is such a
    place. Without `prompts` it is taken on random tokens that come twice: `batch` (4) rows of `length` (50, or what
    there is room for) tokens and again the same, after the token that texts begin with, if there is one. `seed` (0)
    chooses them.
    """
    wanted = [kinds] if isinstance(kinds, str) else list(kinds)
    if not wanted or len({*wanted}) < len(wanted):
        raise HooklineError(f"kinds are some of {', '.join(map(repr, KINDS))}, each once, not {kinds!r}")
    if prompts is not None and (length, batch, seed) != (None, None, None):
        raise HooklineError("length, batch and seed are for random tokens: with prompts leave them out")
    where = _places(model)
    rows = list(_rows(model, prompts if prompts is not None else repeated_tokens(model, length, batch, seed)))
    total: Any = 0.0
    counts = torch.zeros(len(wanted))
    for tokens in rows:
        patterns = torch.stack([detection_pattern(kind, tokens) for kind in wanted])
        counts += patterns.any(-1).sum(-1)
        total = total + _per_head(model, tokens, where, partial(_looked_at, patterns))
    for kind, count in zip(wanted, counts.tolist(), strict=True):
        if not count:
            why = "has a token before it" if kind == "previous_token" else "comes again"
            raise HooklineError(f"no token of these prompts {why}, so nothing is known of {kind}: leave prompts out")
    values = total.permute(2, 0, 1) / counts[:, None, None]
    coords: dict[str, list[Label]] = {"kind": [*wanted], **_coords(where, values)}
    return Result(
        values, ("kind", "layer", "head"), coords, "score", {"texts": len(rows), **about(model, "attention of heads")}
    )


def detect(
    model: HookedModel,
    pattern: Kind | Float[Tensor, "pos pos"],
    prompts: Prompt,
    *,
    measure: Measure = "mul",
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
) -> Result:
    """How alike each head's attention is to a pattern, averaged over prompts: `result.values[layer, head]`, at most 1.

    The pattern is one of the known kinds, or a matrix [from, to]. With "mul" the score is the share of all attention
    that falls on the pattern, weighted by it; with "abs" it is 1 less the mean distance, by row. Attention to the first
    token, or of each token to itself, can be left out of it.
    """
    if measure not in ("mul", "abs"):
        raise HooklineError(f'measure is "mul" or "abs", not {measure!r}')
    where, rows = _places(model), list(_rows(model, prompts))
    total: Any = 0.0
    for tokens in rows:
        wanted = _checked(model, pattern, tokens) if isinstance(pattern, Tensor) else detection_pattern(pattern, tokens)
        score = partial(
            _alike, wanted, measure=measure, exclude_bos=exclude_bos, exclude_current_token=exclude_current_token
        )
        total = total + _per_head(model, tokens, where, score)
    values = total / len(rows)
    info = {
        "pattern": pattern if isinstance(pattern, str) else "given",
        **{"measure": measure, "exclude_bos": exclude_bos, "exclude_current_token": exclude_current_token},
        **about(model, "attention of heads"),
    }
    return Result(values, ("layer", "head"), _coords(where, values), "score", info)


def detection_pattern(kind: Kind, tokens: Int[Tensor, " pos"]) -> Float[Tensor, "pos pos"]:
    """Where a head of that kind looks, [from, to]: 1 there, 0 elsewhere."""
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
    raise HooklineError(f"no kind of head is called {kind!r}: there are {', '.join(map(repr, KINDS))}")


def repeated_tokens(
    model: HookedModel, length: int | None = None, batch: int | None = None, seed: int | None = None
) -> Int[Tensor, "batch pos"]:
    """Random tokens that come twice, in the same order, after the token that texts begin with if there is one."""
    first = [] if model.tokenizer is None else [model.tokenizer.bos_token_id]
    first = [each for each in first if each is not None]
    room = None if model.cfg.n_ctx is None else (model.cfg.n_ctx - len(first)) // 2
    length = length if length is not None else min(_LENGTH, _LENGTH if room is None else room)
    batch = _BATCH if batch is None else batch
    if length < 2 or batch < 1 or (room is not None and length > room):
        most = "" if room is None else f" and at most {room}, for there must be room for it twice"
        raise HooklineError(f"batch is at least 1 and length at least 2{most}, not batch={batch}, length={length}")
    known = _plain_tokens(model)
    generator = torch.Generator().manual_seed(0 if seed is None else seed)
    if len(known) >= length:
        once = torch.stack([known[torch.randperm(len(known), generator=generator)[:length]] for _ in range(batch)])
    else:
        once = known[torch.randint(len(known), (batch, length), generator=generator)]
    return torch.cat([torch.tensor(first, dtype=torch.long).expand(batch, -1), once, once], 1).to(model.cfg.device)


def _plain_tokens(model: HookedModel) -> Int[Tensor, " token"]:
    """The tokens that stand for text."""
    if model.tokenizer is None:
        return torch.arange(model.cfg.d_vocab)
    special = {*model.tokenizer.all_special_ids}
    most = min(model.cfg.d_vocab, len(model.tokenizer))
    return torch.tensor([each for each in range(most) if each not in special])


def _places(model: HookedModel) -> Places:
    if model._points.anatomy.is_encoder_decoder:
        raise HooklineError("heads are scored where a model reads one text: this one has an encoder and a decoder")
    return places(model, "pattern", ("layer", "head"))


def _rows(model: HookedModel, prompts: Prompt) -> Iterator[Int[Tensor, " pos"]]:
    """The tokens of each prompt, without padding."""
    found = prompts_of(model, prompts)
    if found.more:
        raise HooklineError("heads are scored on text: of prompts with pictures, cache hook_pattern and look at it")
    return (found.row(row)[0] for row in range(len(found)))


def _per_head(model: HookedModel, tokens: Tensor, where: Places, score: Any) -> Float[Tensor, "layer head *score"]:
    """What `score` makes of the pattern of each head, [head, from, to], of one text."""
    found: dict[str, Tensor] = {}

    def note(pattern: Tensor, hook: Any) -> None:
        found[hook.name] = score(pattern[0].detach().float().cpu())

    with torch.no_grad():
        model.run_with_hooks(tokens[None], return_type=None, fwd_hooks=[(name, note) for name in where.names])
    if len({len(each) for each in found.values()}) > 1:
        raise HooklineError(f"the layers differ in how many heads they have: {[len(each) for each in found.values()]}")
    return torch.stack([found[name] for name in where.names])


def _looked_at(
    patterns: Float[Tensor, "kind pos pos"], attention: Float[Tensor, "head pos pos"]
) -> Float[Tensor, "head kind"]:
    """The attention that falls on each pattern, summed over the positions that look."""
    return torch.einsum("hpk,tpk->ht", attention, patterns)


def _alike(
    wanted: Float[Tensor, "pos pos"],
    attention: Float[Tensor, "head pos pos"],
    *,
    measure: Measure,
    exclude_bos: bool,
    exclude_current_token: bool,
) -> Float[Tensor, " head"]:
    counts = torch.ones_like(wanted)
    if exclude_bos:
        counts[:, 0] = 0
    if exclude_current_token:
        counts.fill_diagonal_(0)
    if measure == "abs":
        return 1 - ((attention - wanted).abs() * counts).sum((1, 2)) / len(wanted)
    looked = attention * counts
    total = looked.sum((1, 2))
    return (looked * wanted).sum((1, 2)) / total.masked_fill(total == 0, 1.0)


def _checked(model: HookedModel, pattern: Tensor, tokens: Tensor) -> Float[Tensor, "pos pos"]:
    n = len(tokens)
    wanted = pattern.detach().float().cpu()
    if wanted.shape != (n, n):
        raise HooklineError(f"the pattern is {list(pattern.shape)}, but the prompt has {n} tokens: give [{n}, {n}]")
    if model._points.anatomy.main.name != "encoder" and bool(wanted.triu(1).any()):
        raise HooklineError("the pattern looks at later tokens, which this model cannot: use pattern.tril()")
    return wanted


def _coords(where: Places, values: Tensor) -> dict[str, list[Label]]:
    return {"layer": where.coords["layer"], "head": list(range(values.shape[-1]))}
