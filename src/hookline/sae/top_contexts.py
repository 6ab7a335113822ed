"""Top contexts: the tokens where a feature is most active, for naming it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.pages.text_tables import html_table, table
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.sae_config import check_count
from hookline.sae.splice import check_feature
from hookline.sae.texts import point_of, text_batches
from hookline.store import Rows, Store
from hookline.text.outliers import Outliers, outlying, row_norms

_WINDOW = 12
"""The number of tokens shown before a token; half as many are shown after it."""


class Context(NamedTuple):
    """A token where a feature is active: its activation, and the text around it, with the token in «»."""

    activation: float
    token: str
    text: str
    example: int
    position: int


class Contexts(list[Context]):
    """The contexts of a feature, the most active first; prints as a table."""

    def _rows(self) -> list[list[str]]:
        return [[f"{context.activation:8.3f}", repr(context.token), context.text] for context in self]

    def __repr__(self) -> str:
        return table(self._rows())

    def _repr_html_(self) -> str:
        return html_table([["activation", "token", "text"], *self._rows()])


@dataclass(frozen=True, repr=False)
class Profile:
    """The top contexts of each feature in some texts. Row i of the tables has the k contexts of feature i."""

    features: list[int]
    """The features; by default all."""
    rows: int
    """The number of tokens examined."""
    density: Float[Tensor, " feature"]
    """The fraction of tokens at which each feature is active."""
    activation: Float[Tensor, "feature k"]
    """The activations, largest first; 0 where there are fewer than k contexts."""
    token: Int[Tensor, "feature k"]
    example: Int[Tensor, "feature k"]
    position: Int[Tensor, "feature k"]
    model: HookedModel
    tokens_of: Callable[[int], tuple[Tensor, Tensor]]
    """The tokens of an example, and their positions."""

    def top(self, feature: int, k: int | None = None) -> Contexts:
        """The top contexts of a feature."""
        if feature not in self.features:
            raise HooklineError(f"feature {feature!r} is not in this profile of {len(self.features)} features")
        row, places = self.features.index(feature), self.activation.shape[1]
        if k is not None and k not in range(1, places + 1):
            raise HooklineError(f"the profile has {places} contexts per feature, not {k}: use profile(…, k={k})")
        count = int((self.activation[row, :k] > 0).sum())
        return Contexts(self._context(row, place) for place in range(count))

    def about(self, token: str | int, k: int = 5) -> list[tuple[int, float]]:
        """The features that are active mostly at a token, with the fraction of their activation that is there.

        Both are computed over the contexts of the profile. Sorted by activation at the token times that fraction.
        """
        token_id = self._token(token)
        at_token = (self.activation * (self.token == token_id)).sum(1)
        share = at_token / self.activation.sum(1).clamp_min(1e-30)
        best = [row for row in (at_token * share).argsort(descending=True).tolist() if at_token[row] > 0]
        return [(self.features[row], float(share[row])) for row in best[:k]]

    def _token(self, token: str | int) -> int:
        """The id of a token; an error if only the same word with a space before it is in the contexts."""
        if isinstance(token, int):
            self.model.text.check_ids(torch.tensor([token]))
            return token
        token_id = self.model.to_single_token(token)
        if self._has(token_id) or token.startswith(" "):
            return token_id
        spaced = self.model.to_tokens(f" {token}", prepend_bos=False)[0].tolist()
        if len(spaced) == 1 and self._has(spaced[0]):
            raise HooklineError(
                f"no feature is active at {token!r}, but some are at {f' {token}'!r}: inside a text, the token of a "
                f"word includes the space before it"
            )
        return token_id

    def _has(self, token: int) -> bool:
        return bool(((self.activation > 0) & (self.token == token)).any())

    def _context(self, row: int, place: int) -> Context:
        example, position = int(self.example[row, place]), int(self.position[row, place])
        tokens, positions = self.tokens_of(example)
        index = int((positions == position).nonzero()[0])
        words = self.model.to_str_tokens(tokens)
        first, stop = max(0, index - _WINDOW), index + _WINDOW // 2 + 1
        text = "".join([*words[first:index], "«", words[index], "»", *words[index + 1 : stop]])
        whole = ("…" if first else "") + text + ("…" if stop < len(words) else "")
        return Context(float(self.activation[row, place]), words[index], whole.replace("\n", "⏎"), example, position)

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
    outliers: Outliers = "exclude",
) -> Contexts:
    """The tokens in texts, or in a store of activations, where a feature is most active: see `profile`.

    top_contexts(sae, model, texts, 42)     #    9.204  ' France'  The capital of« France» is Paris.
    """
    options: dict[str, Any] = {"point": point, "batch_size": batch_size, "outliers": outliers}
    return profile(sae, model, texts, features=[feature], k=k, **options).top(feature)


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
    outliers: Outliers = "exclude",
) -> Profile:
    """Find the top contexts of each feature in one pass over texts or a store of activations.

        >>> found = hookline.sae.profile(sae, model, texts)
        >>> (feature, share), *_ = found.about(" France")      # the feature that is most active at that token
        >>> found.top(feature, 1)[0].token
        ' France'

    With a store the model is not run, only used to decode tokens. Memory: k contexts per feature. Tokens whose norm is
    over 10 times the median of their batch, such as attention sinks, are left out, as in `train`: most features would
    be most active there. `outliers="include"` keeps them.
    """
    check_count("k", k)
    where = point_of(sae, point)
    for feature in features or ():
        check_feature(sae, feature)
    chosen = list(range(sae.d_sae)) if features is None else [feature % sae.d_sae for feature in features]
    best, tokens = _Best(len(chosen), k), dict[int, Tensor]()
    store = texts if isinstance(texts, Store) else None
    batches: Iterable[Rows]
    if isinstance(texts, Store):
        batches = texts.batches(4096, [where])
    else:
        batches = (rows for rows, _, _ in text_batches(sae, model, texts, where, batch_size))
    for rows in batches:
        x = rows[where].flatten(1).to(sae.device)
        is_ordinary = ~outlying(row_norms(x), outliers)[0]
        encoded = sae.encode(x[is_ordinary])
        best.update(encoded if features is None else encoded[:, chosen], rows, is_ordinary.cpu())
        if store is None:  # keep the tokens of texts that appear in a context
            tokens |= {number: rows.token[rows.example == number] for number in rows.example.unique().tolist()}
            tokens = {number: tokens[number] for number in best.examples() if number in tokens}
    if not best.rows:
        raise HooklineError("there are no texts to profile")

    def tokens_of(example: int) -> tuple[Tensor, Tensor]:
        if store is None:
            return tokens[example], torch.arange(len(tokens[example]))
        rows = store.example(example, [])
        return rows.token.long(), rows.position

    density = best.active / best.rows
    token, example, position = best.places
    return Profile(chosen, best.rows, density, best.activation, token, example, position, model, tokens_of)


class _Best:
    """The k largest activations of each feature so far, with their token, example and position."""

    def __init__(self, features: int, k: int) -> None:
        self.rows, self.k = 0, k
        self.active = torch.zeros(features, dtype=torch.float64)
        self.activation = torch.zeros(features, k)
        self.places = torch.full((3, features, k), -1)

    def update(self, features: Float[Tensor, "kept feature"], rows: Rows, mask: Bool[Tensor, " row"]) -> None:
        """Add the features of those rows that are kept."""
        self.rows += len(features)
        self.active += (features > 0).sum(0).double().cpu()
        values, index = features.T.float().topk(min(self.k, len(features)), dim=1)
        places = torch.stack([column.long()[mask] for column in (rows.token, rows.example, rows.position)])
        activation = torch.cat([self.activation, values.cpu()], 1)
        candidates = torch.cat([self.places, places[:, index.cpu()]], 2)
        self.activation, order = activation.topk(self.k, dim=1)
        self.places = candidates.gather(2, order.expand(3, -1, -1))

    def examples(self) -> list[int]:
        """The examples that appear; -1 for places that are still free."""
        return self.places[1].unique().tolist()
