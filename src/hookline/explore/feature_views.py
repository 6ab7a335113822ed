"""The views of the features of an autoencoder: which are active, what one of them does, and where it is most active."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.explore.attached_saes import AttachedSae, AttachedSaes, model_versions, weight_versions
from hookline.explore.feature_edits import edit_groups
from hookline.explore.live_edits import applied, library_edits
from hookline.explore.prompt_inputs import keywords, prompt_of
from hookline.explore.question import Question
from hookline.model import HookedModel
from hookline.pages.tensors import packed_tensor
from hookline.residual import ModelCache
from hookline.sae import Splice, evaluate
from hookline.sae.splice import check_feature
from hookline.text.outliers import outlying, row_norms

MOST_ROWS = 40
"""Features in the map of features by positions."""
MOST_BARS = 15
"""Features of one token."""
MOST_TOKENS = 8
"""Tokens that a feature raises, and that it lowers."""
_BEFORE, _AFTER = 12, 8
"""Tokens of a context around the one where the feature is most active."""
_WRITES = re.compile(r"blocks\.(\d+)\.hook_(resid_pre|resid_mid|resid_post|attn_out|mlp_out)|hook_(pos_)?embed")
_INSIDE = re.compile(r"blocks\.(\d+)\.(attn\.hook_z|mlp\.hook_post)")


def features_view(model: HookedModel, asked: Question) -> dict[str, Any]:
    """The features that are active at the marked token and in the whole prompt, and how good the autoencoder is here.

    With edits, `before` is without them. Positions whose norm is outlying (attention sinks) do not decide which
    features are shown.
    """
    saes, found = _given(asked)
    x, before = _clean(model, asked, found)
    after = _edited_features(model, asked, found) if asked.active else before
    pos = _position(asked, len(before))
    is_out, left_out = outlying(row_norms(x[0].float()), "exclude")
    largest = torch.maximum(before, after)
    ordinary = largest.masked_fill(is_out[:, None], 0.0)
    shown = _active(ordinary.amax(0), MOST_ROWS, asked.feature)
    here = _active(largest[pos], MOST_BARS, asked.feature)
    error = (x - found.sae(x)).float().norm(dim=-1)[0] / x.float().norm(dim=-1)[0]
    now = (model_versions(model), weight_versions(found.sae))
    return {
        "sae": found.name,
        "point": found.point,
        "pos": pos,
        "features": shown,
        "before": packed_tensor(before[:, shown].T),
        "after": packed_tensor(after[:, shown].T),
        "here": {
            "features": here,
            "before": packed_tensor(before[pos, here]),
            "after": packed_tensor(after[pos, here]),
        },
        "active": packed_tensor((after > 0).sum(1)),
        "relative_error": packed_tensor(error),
        "outlying": {"positions": is_out.nonzero().flatten().tolist(), "text": str(left_out)},
        "quality": saes.kept(
            ("quality", found.name, asked.prompt, asked.images, now), lambda: _quality(model, asked, found)
        ),
        "spliced": saes.kept(
            ("spliced", found.name, asked.prompt, asked.images, pos, now), lambda: _spliced(model, asked, found, pos)
        ),
        "labels": _labels(model, saes, found, sorted({*shown, *here})),
    }


def feature_view(model: HookedModel, asked: Question) -> dict[str, Any]:
    """One feature: its activation at each token, and the tokens whose logits its decoder direction raises and lowers.

    The logits are those of the direct path to the unembedding, for one unit of activation at the marked token.
    """
    _, found = _given(asked)
    feature = _feature(asked, found)
    x, before = _clean(model, asked, found)
    after = _edited_features(model, asked, found) if asked.active else before
    pos = _position(asked, len(before))
    data: dict[str, Any] = {
        "sae": found.name,
        "point": found.point,
        "feature": feature,
        "pos": pos,
        "before": packed_tensor(before[:, feature]),
        "after": packed_tensor(after[:, feature]),
        "logits": None,
        "why": "",
    }
    try:
        logits = direct_logits(model, asked, found, feature, x[:, pos])
    except HooklineError as error:
        return data | {"why": str(error)}
    order = logits.argsort(descending=True).tolist()
    ids = [*order[:MOST_TOKENS], *order[-MOST_TOKENS:]]
    texts = [model.to_string([token]) for token in ids]
    return data | {"logits": {"ids": ids, "texts": texts, "values": packed_tensor(logits[ids])}}


def contexts_view(model: HookedModel, asked: Question) -> dict[str, Any]:
    """The tokens of the store where a feature is most active, with the feature's activation at the tokens around."""
    saes, found = _given(asked)
    feature = _feature(asked, found)
    saes.warn()
    known = saes.profile(model, found.name)
    store = saes.store
    assert store is not None
    contexts = []
    for each in known.top(feature):
        rows = store.example(each.example, [found.point])
        at = int((rows.position == each.position).nonzero()[0])
        start, stop = max(0, at - _BEFORE), at + _AFTER + 1
        values = found.sae.encode(rows[found.point][start:stop].flatten(1).to(found.sae.device))[:, feature]
        contexts.append(
            {
                "activation": each.activation,
                "example": each.example,
                "position": each.position,
                "texts": model.to_str_tokens(rows.token[start:stop].long()),
                "at": at - start,
                "is_cut": [start > 0, stop < len(rows)],
                "values": packed_tensor(values),
            }
        )
    return {
        "sae": found.name,
        "feature": feature,
        "contexts": contexts,
        "density": float(known.density[feature]),
        "rows": known.rows,
        "store": store.path,
    }


def direct_logits(model: HookedModel, asked: Question, found: AttachedSae, feature: int, x: Tensor) -> Tensor:
    """What one unit of a feature at the marked token adds to each logit on the direct path to the unembedding.

    `x` is the activation there, `[1, d]`, in the run without edits, whose scale of the final norm is used.
    """
    sae = found.sae
    flat = sae.flattened(x, model.point(found.point))
    none = torch.zeros(1, sae.d_sae, device=sae.device, dtype=sae.dtype)
    one = none.clone()
    one[0, feature] = 1.0
    direction = (sae.decode(one, flat) - sae.decode(none, flat)).to(x.dtype).view(x.shape)
    needed = re.compile(rf"(?!blocks\.)|blocks\.({layer_of(found.point)}|{model.cfg.n_layers - 1})\.")
    names = [name for name in model.hook_dict if needed.match(name)]
    cache = model.run_with_cache(**keywords(prompt_of(model, asked)), names_filter=names, pos_slice=asked.pos)[1]
    return cache.logit_attrs(_in_stream(cache, found.point, direction), None)[0].float()


def layer_of(point: str) -> int:
    """The layer of a point; 0 if it is outside of the layers."""
    found = re.match(r"blocks\.(\d+)\.", point)
    return int(found[1]) if found else 0


def _in_stream(cache: ModelCache, point: str, direction: Tensor) -> Tensor:
    """A direction at a point as a direction of the residual stream, [1, d_model]."""
    if _WRITES.fullmatch(point):
        return direction
    inside = _INSIDE.fullmatch(point)
    if inside is None:
        raise HooklineError(f"{point} is not added to the residual stream, so it has no direct path to the logits")
    layer, kind = int(inside[1]), inside[2].partition(".")[0]
    if kind == "attn":
        out = cache._results_of(direction, cache._named(layer, "attn.hook_result")).sum(-2)
    else:
        out = direction @ cache._map(layer, kind)[0].to(direction)
    return cache._through(out, layer, kind, None, is_stacked=False)


def _given(asked: Question) -> tuple[AttachedSaes, AttachedSae]:
    if asked.saes is None:
        raise HooklineError("there is no autoencoder: hookline explore MODEL --sae PATH, or model.explore(saes=…)")
    return asked.saes, asked.saes.named(asked.sae)


def _feature(asked: Question, found: AttachedSae) -> int:
    if asked.feature is None:
        raise HooklineError("no feature is pinned: click one")
    check_feature(found.sae, asked.feature)
    return asked.feature % found.sae.d_sae


def _position(asked: Question, length: int) -> int:
    if asked.pos not in range(-length, length):
        raise HooklineError(f"position {asked.pos} is out of range: the prompt has {length} tokens")
    return asked.pos % length


def _clean(model: HookedModel, asked: Question, found: AttachedSae) -> tuple[Tensor, Tensor]:
    """The activation without edits, as the autoencoder takes it, and its features [pos, d_sae]."""
    x = model.cache(**keywords(prompt_of(model, asked)), names_filter=found.point)[found.point]
    return found.sae.flattened(x, model.point(found.point)), found.features(model, x)


def _edited_features(model: HookedModel, asked: Question, found: AttachedSae) -> Tensor:
    """The features with the edits.

    If the last edit at the point is of features of this autoencoder, these are the features that are decoded.
    Otherwise, they are those of the activation that the model continues with.
    """
    hooks = library_edits(model, asked, keep_features=True)
    with applied(model, hooks):
        x = model.cache(**keywords(prompt_of(model, asked)), names_filter=found.point, stop_early=False)[found.point]
    there = [hook for hook, group in zip(hooks, edit_groups(asked), strict=True) if group[0].point == found.point]
    if there and isinstance(there[-1], Splice) and there[-1].sae is found.sae:
        assert there[-1].features is not None
        return there[-1].features[0].float()
    return found.features(model, x)


def _active(values: Tensor, most: int, pinned: int | None) -> list[int]:
    """The features with the largest values above 0, largest first; the pinned one is always among them."""
    top = values.topk(min(most, len(values)))
    found = [feature for feature, value in zip(top.indices.tolist(), top.values.tolist(), strict=True) if value > 0]
    if pinned is not None and pinned in range(len(values)) and pinned not in found:
        found.append(pinned)
    return found


def _quality(model: HookedModel, asked: Question, found: AttachedSae) -> dict[str, Any] | None:
    """How well the prompt is reconstructed, without edits; None if it has only one token."""
    if asked.images or model.to_tokens(asked.prompt).shape[1] < 2:
        return None
    quality = evaluate(found.sae, model, [asked.prompt], found.point)
    names = ("l0", "explained_variance", "explained_variance_of_all", "loss", "loss_spliced", "loss_zeroed")
    values = {name: float(getattr(quality, name)) for name in (*names, "loss_recovered")}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _spliced(model: HookedModel, asked: Question, found: AttachedSae, pos: int) -> dict[str, Any]:
    """The next token with the reconstruction in place of the activation, without edits."""
    splice = found.sae.spliced(found.point, keep_error=False)
    given = keywords(prompt_of(model, asked))
    runs = model(**given), model.run_with_hooks(**given, fwd_hooks=[splice])
    before, after = (logits[0, pos].float().log_softmax(-1) for logits in runs)
    token = int(before.argmax())
    return {
        "text": model.to_string([token]),
        "before": float(before[token].exp()),
        "after": float(after[token].exp()),
        "choice": model.to_string([int(after.argmax())]),
        "kl": float((before.exp() * (before - after)).sum()),
    }


def _labels(model: HookedModel, saes: AttachedSaes, found: AttachedSae, features: list[int]) -> dict[str, str]:
    """The token where each feature is most active in the store, if the store was read before."""
    known = saes.known_profile(found.name)
    if known is None:
        return {}
    tokens = {feature: int(known.token[feature, 0]) for feature in features if known.activation[feature, 0] > 0}
    return {str(feature): model.to_string([token]) for feature, token in tokens.items()}


FEATURE_VIEWS = {"features": features_view, "feature": feature_view, "contexts": contexts_view}
