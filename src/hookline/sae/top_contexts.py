"""Contexts: where in texts a feature is strongest, which is what it is named after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.sae_config import is_count
from hookline.sae.splice import check_feature
from hookline.sae.texts import batches_of, rows_of
from hookline.store import Store

_WINDOW = 12
"""How many tokens are shown before a token; half as many after it."""


class Context(NamedTuple):
    """A place where a feature is active: how strongly, and the text around the token, which is in «»."""

    activation: float
    token: str
    text: str
    example: int
    position: int


class Contexts(list[Context]):
    """Where a feature is strongest, the strongest first; prints as a table."""

    def __repr__(self) -> str:
        width = max((len(repr(each.token)) for each in self), default=0)
        return "\n".join(f"{each.activation:8.3f}  {each.token!r:<{width}}  {each.text}" for each in self)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{each.activation:.3f}</td><td><code>{escape(each.token)}</code></td><td>{escape(each.text)}</td></tr>"
            for each in self
        )
        return f"<table>{rows}</table>"


@dataclass(frozen=True, repr=False)
class Profile:
    """Where each feature is strongest in some texts. The k places of feature i are in row i of the tables."""

    features: list[int]
    """Which features; by default all."""
    rows: int
    """At how many tokens they were looked at."""
    density: Float[Tensor, " feature"]
    """The share of the tokens at which each is active."""
    activation: Float[Tensor, "feature k"]
    """How strong it is there, the strongest first; 0 where there are fewer places."""
    token: Int[Tensor, "feature k"]
    example: Int[Tensor, "feature k"]
    position: Int[Tensor, "feature k"]
    model: HookedModel
    tokens_of: Callable[[int], tuple[Tensor, Tensor]]
    """The tokens of an example, and their positions."""

    def top(self, feature: int, k: int | None = None) -> Contexts:
        """Where a feature is strongest."""
        row, places = self._row(feature), self.activation.shape[1]
        if k is not None and k not in range(1, places + 1):
            raise HooklineError(f"the profile has {places} places for each feature, not {k}: profile(…, k={k})")
        count = int((self.activation[row, :k] > 0).sum())
        return Contexts(self._context(row, place) for place in range(count))

    def about(self, token: str | int, k: int = 5) -> list[tuple[int, float]]:
        """The features that are strong at a token and little elsewhere, with the share of their strength that is there.

        What counts are the places of the profile. The best come first: strength there, times that share.
        """
        wanted = token if isinstance(token, int) else self.model.to_single_token(token)
        there = (self.activation * (self.token == wanted)).sum(1)
        share = there / self.activation.sum(1).clamp_min(1e-30)
        best = [row for row in (there * share).argsort(descending=True).tolist() if there[row] > 0]
        return [(self.features[row], float(share[row])) for row in best[:k]]

    def _row(self, feature: int) -> int:
        if feature not in self.features:
            raise HooklineError(f"feature {feature!r} is not in this profile of {len(self.features)} features")
        return self.features.index(feature)

    def _context(self, row: int, place: int) -> Context:
        example, position = int(self.example[row, place]), int(self.position[row, place])
        tokens, positions = self.tokens_of(example)
        here = int((positions == position).nonzero()[0])
        words = self.model.to_str_tokens(tokens)
        first, stop = max(0, here - _WINDOW), here + _WINDOW // 2 + 1
        text = "".join([*words[first:here], "«", words[here], "»", *words[here + 1 : stop]])
        whole = ("…" if first else "") + text + ("…" if stop < len(words) else "")
        return Context(float(self.activation[row, place]), words[here], whole.replace("\n", "⏎"), example, position)

    def __repr__(self) -> str:
        active = int((self.density > 0).sum())
        return f"Profile of {len(self.features)} features at {self.rows:,} tokens: {active} are active somewhere"


def top_contexts(
    sae: SparseAutoencoder,
    model: HookedModel,
    texts: Iterable[str] | Store,
    feature: int,
    k: int = 10,
    *,
    point: str | None = None,
    batch_size: int = 16,
) -> Contexts:
    """The places in texts, or in a store of activations, where a feature is strongest: see `profile`.

    top_contexts(sae, model, texts, 42)     #    9.204  ' France'  The capital of« France» is Paris.
    """
    return profile(sae, model, texts, features=[feature], k=k, point=point, batch_size=batch_size).top(feature)


@torch.no_grad()
def profile(
    sae: SparseAutoencoder,
    model: HookedModel,
    texts: Iterable[str] | Store,
    *,
    features: Sequence[int] | None = None,
    k: int = 10,
    point: str | None = None,
    batch_size: int = 16,
) -> Profile:
    """Where each feature is strongest, found in one pass over texts, or over a store of activations.

        found = profile(sae, model, texts)
        found.about(" France")      # [(42, 1.0), …]: the features that are strongest at that token
        found.top(42)               # the texts

    Of a store the model is not run: it gives the tokens their text. Memory: k places for each feature.
    """
    if not is_count(k):
        raise HooklineError(f"k is a whole number from 1 on, not {k!r}")
    where = point if point is not None else sae.cfg.hook_name
    if where is None:
        raise HooklineError("the autoencoder does not say where it belongs: name the point")
    chosen = (
        list(range(sae.d_sae)) if features is None else [feature % sae.d_sae for feature in _checked(sae, features)]
    )
    best = _Best(len(chosen), k)
    if isinstance(texts, Store):
        rows, tokens_of = _of_store(sae, texts, where), _reader(texts)
    else:
        seen = _Seen(best)
        rows, tokens_of = seen.rows(sae, model, texts, where, batch_size), seen.tokens_of
    for found, places in rows:
        best.see(found if features is None else found[:, chosen], places)
    if not best.rows:
        raise HooklineError("there are no texts to look at")
    density = best.active / best.rows
    token, example, position = best.places
    return Profile(chosen, best.rows, density, best.activation, token, example, position, model, tokens_of)


class _Best:
    """The k strongest places of each feature so far; a place is a token, an example and a position."""

    def __init__(self, features: int, k: int) -> None:
        self.rows, self.k = 0, k
        self.active = torch.zeros(features, dtype=torch.float64)
        self.activation = torch.zeros(features, k)
        self.places = torch.full((3, features, k), -1)

    def see(self, found: Float[Tensor, "row feature"], places: Int[Tensor, "place row"]) -> None:
        """Some rows more."""
        self.rows += len(found)
        self.active += (found > 0).sum(0).double().cpu()
        values, index = found.T.float().topk(min(self.k, len(found)), dim=1)
        activation = torch.cat([self.activation, values.cpu()], 1)
        candidates = torch.cat([self.places, places[:, index.cpu()]], 2)
        self.activation, kept = activation.topk(self.k, dim=1)
        self.places = candidates.gather(2, kept.expand(3, -1, -1))


class _Seen:
    """Texts on the way, of which those are kept that a place is in."""

    def __init__(self, best: _Best) -> None:
        self.best = best
        self.tokens: dict[int, Tensor] = {}

    def rows(
        self, sae: SparseAutoencoder, model: HookedModel, texts: Iterable[str], point: str, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The features at every token, and the places of those."""
        for batch in batches_of(model, texts, batch_size):
            ids, real = batch.ids.cpu(), batch.mask.bool().cpu()
            self.tokens |= {number: ids[row][real[row]] for row, number in enumerate(batch.numbers.tolist())}
            row, position = real.nonzero(as_tuple=True)
            places = torch.stack([ids[real], batch.numbers[row], position])
            yield sae.encode(rows_of(model, sae, point, batch)), places
            kept = set(self.best.places[1].unique().tolist())
            self.tokens = {example: tokens for example, tokens in self.tokens.items() if example in kept}

    def tokens_of(self, example: int) -> tuple[Tensor, Tensor]:
        """The tokens of a text, and their positions."""
        tokens = self.tokens[example]
        return tokens, torch.arange(len(tokens))


def _of_store(sae: SparseAutoencoder, store: Store, point: str) -> Iterator[tuple[Tensor, Tensor]]:
    (name,) = store.select([point])
    for rows in store.batches(4096, [name]):
        x = rows[name].flatten(1).to(sae.device)
        places = torch.stack([each.long() for each in (rows.token, rows.example, rows.position)])
        yield sae.encode(x), places


def _reader(store: Store) -> Callable[[int], tuple[Tensor, Tensor]]:
    def tokens_of(example: int) -> tuple[Tensor, Tensor]:
        rows = store.example(example, [])
        return rows.token.long(), rows.position

    return tokens_of


def _checked(sae: SparseAutoencoder, features: Sequence[int]) -> Sequence[int]:
    for feature in features:
        check_feature(sae, feature)
    return features
