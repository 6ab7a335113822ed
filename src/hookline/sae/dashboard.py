"""The dashboard of a feature: how often and how much it is active, in which texts, and which tokens it promotes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.pages.html_page import HtmlPage, figure
from hookline.pages.tensors import packed_tensor
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.sae_config import check_count
from hookline.sae.splice import check_feature
from hookline.sae.texts import point_of, text_batches
from hookline.text.outliers import Outliers, outlying, row_norms

_BINS, _TOKENS, _WINDOW = 12, 10, 24


@dataclass
class _Activity:
    """A feature at every token of some texts."""

    tokens: dict[int, Tensor] = field(default_factory=dict)
    """The tokens of each text, and the activation at each."""
    values: dict[int, Float[Tensor, " pos"]] = field(default_factory=dict)
    left_out: int = 0
    """The number of outlying tokens, where it does not count, and is shown as 0."""

    @property
    def every(self) -> Float[Tensor, " token"]:
        """The activation at all tokens of all texts."""
        return torch.cat(list(self.values.values()))

    def active(self) -> list[int]:
        """The texts where the feature is active, the most active first."""
        most = {number: float(activations.max()) for number, activations in self.values.items()}
        return sorted((number for number, value in most.items() if value > 0), key=lambda number: -most[number])


@torch.no_grad()
def dashboard(
    sae: SparseAutoencoder,
    model: HookedModel,
    texts: Iterable[str],
    feature: int,
    *,
    k: int = 6,
    point: str | None = None,
    batch_size: int = 16,
    outliers: Outliers = "exclude",
    seed: int = 0,
    theme: Literal["light", "dark"] | None = None,
) -> HtmlPage:
    """One self-contained page about a feature: shown by a notebook, written by `.save(path)`.

        hookline.sae.dashboard(sae, model, texts, 42).save("feature-42.html")

    It has a histogram of the activations, the tokens whose logits the decoder direction raises and lowers most, the `k`
    texts where the feature is most active, and `k` random ones of all where it is active, if these are more. Tokens are
    colored by their activation. The logits are those of the direction itself, without the layers after it and the final
    norm. Tokens with outlying norms, such as attention sinks, are left out, as in `profile`.
    """
    check_feature(sae, feature)
    check_count("k", k)
    feature %= sae.d_sae
    where, activity = point_of(sae, point), _Activity()
    for rows, _, _ in text_batches(sae, model, texts, where, batch_size):
        values = sae.encode(rows[where])[:, feature].float().cpu()
        is_out, left_out = outlying(row_norms(rows[where]), outliers)
        values[is_out.cpu()], activity.left_out = 0.0, activity.left_out + left_out.count
        for number in rows.example.unique().tolist():
            is_here = rows.example == number
            activity.tokens[number], activity.values[number] = rows.token[is_here], values[is_here]
    if not activity.values:
        raise HooklineError("there are no texts: a dashboard needs texts of at least one token")
    active = activity.active()
    order = torch.randperm(len(active), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = {f"top {at + 1}": number for at, number in enumerate(active[:k])}
    random = {f"random {at + 1}": active[place] for at, place in enumerate(order[:k])} if len(active) > k else {}
    panels = [_histogram(activity), *_logits(sae, model, feature)]
    panels += [_context(model, activity, *title_and_number) for title_and_number in (chosen | random).items()]
    return figure(panels, f"Feature {feature} of {sae.d_sae:,} at {where}", theme)


def _histogram(activity: _Activity) -> dict[str, Any]:
    """The positive activations by size."""
    positive, total = activity.every[activity.every > 0], len(activity.every) - activity.left_out
    caption = f"active at {len(positive):,} of {total:,} tokens ({len(positive) / total:.2%})"
    caption += f" without {activity.left_out:,} attention sinks" if activity.left_out else ""
    if not len(positive):
        return _bars("Activations", f"{caption}: no text activates this feature", ["0"], torch.zeros(1))
    most = float(positive.max())
    counts = torch.histc(positive, _BINS, 0, most)
    labels = [f"≤ {most * (at + 1) / _BINS:.3g}" for at in range(_BINS)]
    return _bars("Activations", f"{caption}, up to {most:.3g}; tokens by activation", labels, counts)


def _logits(sae: SparseAutoencoder, model: HookedModel, feature: int) -> list[dict[str, Any]]:
    """The tokens that the direction promotes and suppresses; none where it is not in the residual stream."""
    if sae.d_in != model.cfg.d_model or model.tokenizer is None:
        return []
    direction = sae.W_dec[feature].detach().float()
    logits = direction @ model.W_U.to(direction)
    logits = logits - logits.mean()
    panels = []
    for title, is_up in (("Logits up", True), ("Logits down", False)):
        best, places = logits.topk(min(_TOKENS, len(logits)), largest=is_up)
        labels = [repr(model.to_string(place[None])) for place in places]
        panels.append(_bars(title, "", labels, best) | {"narrow": True})
    return panels


def _bars(title: str, caption: str, labels: list[str], values: Tensor) -> dict[str, Any]:
    numbers = {"values": packed_tensor(values), "origin": 0.0, "marks": {}}
    return {"kind": "bars", "title": title, "caption": caption, "axis": "", "labels": labels, **numbers}


def _context(model: HookedModel, activity: _Activity, title: str, number: int) -> dict[str, Any]:
    """A text around its most active token, colored by activation."""
    values = activity.values[number]
    at = int(values.argmax())
    part = slice(max(0, at - _WINDOW), at + _WINDOW // 2)
    words = model.to_str_tokens(activity.tokens[number][part])
    most = float(activity.every.max()) or 1.0
    return {
        "kind": "tokens",
        "title": f"{title}: {float(values[at]):.3g}",
        "tokens": words,
        "names": [""],
        "most": [most],
        "scales": ["one"],
        "values": packed_tensor(values[part][None]),
    }
