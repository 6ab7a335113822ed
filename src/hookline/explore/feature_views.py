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


def features_view(model: HookedModel, question: Question) -> dict[str, Any]:
    """The features that are active at the marked token and in the whole prompt, and how good the autoencoder is here.

    With edits, `before` is without them. Positions whose norm is outlying (attention sinks) do not decide which
    features are shown.
    """
    saes, attached = _given(question)
    x, before = _clean(model, question, attached)
    after = _edited_features(model, question, attached) if question.active else before
    pos = _position(question, len(before))
    is_out, left_out = outlying(row_norms(x[0].float()), "exclude")
    largest = torch.maximum(before, after)
    ordinary = largest.masked_fill(is_out[:, None], 0.0)
    shown = _active(ordinary.amax(0), MOST_ROWS, question.feature)
    token_features = _active(largest[pos], MOST_BARS, question.feature)
    error = (x - attached.sae(x)).float().norm(dim=-1)[0] / x.float().norm(dim=-1)[0]
    now = (model_versions(model), weight_versions(attached.sae))
    return {
        "sae": attached.name,
        "point": attached.point,
        "pos": pos,
        "features": shown,
        "before": packed_tensor(before[:, shown].T),
        "after": packed_tensor(after[:, shown].T),
        "here": {
            "features": token_features,
            "before": packed_tensor(before[pos, token_features]),
            "after": packed_tensor(after[pos, token_features]),
        },
        "active": packed_tensor((after > 0).sum(1)),
        "relative_error": packed_tensor(error),
        "outlying": {"positions": is_out.nonzero().flatten().tolist(), "text": str(left_out)},
        "quality": saes.kept(
            ("quality", attached.name, question.prompt, question.images, now),
            lambda: _quality(model, question, attached),
        ),
        "spliced": saes.kept(
            ("spliced", attached.name, question.prompt, question.images, pos, now),
            lambda: _spliced(model, question, attached, pos),
        ),
        "labels": _labels(model, saes, attached, sorted({*shown, *token_features})),
    }


def feature_view(model: HookedModel, question: Question) -> dict[str, Any]:
    """One feature: its activation at each token, and the tokens whose logits its decoder direction raises and lowers.

    The logits are those of the direct path to the unembedding, for one unit of activation at the marked token.
    """
    _, attached = _given(question)
    feature = _feature(question, attached)
    x, before = _clean(model, question, attached)
    after = _edited_features(model, question, attached) if question.active else before
    pos = _position(question, len(before))
    data: dict[str, Any] = {
        "sae": attached.name,
        "point": attached.point,
        "feature": feature,
        "pos": pos,
        "before": packed_tensor(before[:, feature]),
        "after": packed_tensor(after[:, feature]),
        "logits": None,
        "why": "",
    }
    try:
        logits = direct_logits(model, question, attached, feature, x[:, pos])
    except HooklineError as error:
        return data | {"why": str(error)}
    order = logits.argsort(descending=True).tolist()
    ids = [*order[:MOST_TOKENS], *order[-MOST_TOKENS:]]
    texts = [model.to_string([token]) for token in ids]
    return data | {"logits": {"ids": ids, "texts": texts, "values": packed_tensor(logits[ids])}}


def contexts_view(model: HookedModel, question: Question) -> dict[str, Any]:
    """The tokens of the store where a feature is most active, with the feature's activation at the tokens around."""
    saes, attached = _given(question)
    feature = _feature(question, attached)
    saes.warn()
    profile = saes.profile(model, attached.name)
    store = saes.store
    assert store is not None
    contexts = []
    for context in profile.top(feature):
        rows = store.example(context.example, [attached.point])
        at = int((rows.position == context.position).nonzero()[0])
        start, stop = max(0, at - _BEFORE), at + _AFTER + 1
        values = attached.sae.encode(rows[attached.point][start:stop].flatten(1).to(attached.sae.device))[:, feature]
        contexts.append(
            {
                "activation": context.activation,
                "example": context.example,
                "position": context.position,
                "texts": model.to_str_tokens(rows.token[start:stop].long()),
                "at": at - start,
                "is_cut": [start > 0, stop < len(rows)],
                "values": packed_tensor(values),
            }
        )
    return {
        "sae": attached.name,
        "feature": feature,
        "contexts": contexts,
        "density": float(profile.density[feature]),
        "rows": profile.rows,
        "store": store.path,
    }


def direct_logits(model: HookedModel, question: Question, attached: AttachedSae, feature: int, x: Tensor) -> Tensor:
    """What one unit of a feature at the marked token adds to each logit on the direct path to the unembedding.

    `x` is the activation there, `[1, d]`, in the run without edits, whose scale of the final norm is used.
    """
    sae = attached.sae
    flat = sae.flattened(x, model.point(attached.point))
    none = torch.zeros(1, sae.d_sae, device=sae.device, dtype=sae.dtype)
    one = none.clone()
    one[0, feature] = 1.0
    direction = (sae.decode(one, flat) - sae.decode(none, flat)).to(x.dtype).view(x.shape)
    needed = re.compile(rf"(?!blocks\.)|blocks\.({layer_of(attached.point)}|{model.cfg.n_layers - 1})\.")
    names = [name for name in model.hook_dict if needed.match(name)]
    cache = model.run_with_cache(**keywords(prompt_of(model, question)), names_filter=names, pos_slice=question.pos)[1]
    return cache.logit_attrs(_in_stream(cache, attached.point, direction), None)[0].float()


def layer_of(point: str) -> int:
    """The layer of a point; 0 if it is outside of the layers."""
    match = re.match(r"blocks\.(\d+)\.", point)
    return int(match[1]) if match else 0


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


def _given(question: Question) -> tuple[AttachedSaes, AttachedSae]:
    if question.saes is None:
        raise HooklineError("there is no autoencoder: hookline explore MODEL --sae PATH, or model.explore(saes=…)")
    return question.saes, question.saes.named(question.sae)


def _feature(question: Question, attached: AttachedSae) -> int:
    if question.feature is None:
        raise HooklineError("no feature is pinned: click one")
    check_feature(attached.sae, question.feature)
    return question.feature % attached.sae.d_sae


def _position(question: Question, length: int) -> int:
    if question.pos not in range(-length, length):
        raise HooklineError(f"position {question.pos} is out of range: the prompt has {length} tokens")
    return question.pos % length


def _clean(model: HookedModel, question: Question, attached: AttachedSae) -> tuple[Tensor, Tensor]:
    """The activation without edits, as the autoencoder takes it, and its features [pos, d_sae]."""
    x = model.cache(**keywords(prompt_of(model, question)), names_filter=attached.point)[attached.point]
    return attached.sae.flattened(x, model.point(attached.point)), attached.features(model, x)


def _edited_features(model: HookedModel, question: Question, attached: AttachedSae) -> Tensor:
    """The features with the edits.

    If the last edit at the point is of features of this autoencoder, these are the features that are decoded.
    Otherwise, they are those of the activation that the model continues with.
    """
    hooks = library_edits(model, question, keep_features=True)
    with applied(model, hooks):
        x = model.cache(**keywords(prompt_of(model, question)), names_filter=attached.point, stop_early=False)[
            attached.point
        ]
    hooks_at_point = [
        hook for hook, group in zip(hooks, edit_groups(question), strict=True) if group[0].point == attached.point
    ]
    if hooks_at_point and isinstance(hooks_at_point[-1], Splice) and hooks_at_point[-1].sae is attached.sae:
        assert hooks_at_point[-1].features is not None
        return hooks_at_point[-1].features[0].float()
    return attached.features(model, x)


def _active(values: Tensor, most: int, pinned: int | None) -> list[int]:
    """The features with the largest values above 0, largest first; the pinned one is always among them."""
    top = values.topk(min(most, len(values)))
    features = [feature for feature, value in zip(top.indices.tolist(), top.values.tolist(), strict=True) if value > 0]
    if pinned is not None and pinned in range(len(values)) and pinned not in features:
        features.append(pinned)
    return features


def _quality(model: HookedModel, question: Question, attached: AttachedSae) -> dict[str, Any] | None:
    """How well the prompt is reconstructed, without edits; None if it has only one token."""
    if question.images or model.to_tokens(question.prompt).shape[1] < 2:
        return None
    quality = evaluate(attached.sae, model, [question.prompt], attached.point)
    names = ("l0", "explained_variance", "explained_variance_of_all", "loss", "loss_spliced", "loss_zeroed")
    values = {name: float(getattr(quality, name)) for name in (*names, "loss_recovered")}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _spliced(model: HookedModel, question: Question, attached: AttachedSae, pos: int) -> dict[str, Any]:
    """The next token with the reconstruction in place of the activation, without edits."""
    splice = attached.sae.spliced(attached.point, keep_error=False)
    inputs = keywords(prompt_of(model, question))
    runs = model(**inputs), model.run_with_hooks(**inputs, fwd_hooks=[splice])
    before, after = (logits[0, pos].float().log_softmax(-1) for logits in runs)
    token = int(before.argmax())
    return {
        "text": model.to_string([token]),
        "before": float(before[token].exp()),
        "after": float(after[token].exp()),
        "choice": model.to_string([int(after.argmax())]),
        "kl": float((before.exp() * (before - after)).sum()),
    }


def _labels(model: HookedModel, saes: AttachedSaes, attached: AttachedSae, features: list[int]) -> dict[str, str]:
    """The token where each feature is most active in the store, if the store was read before."""
    profile = saes.known_profile(attached.name)
    if profile is None:
        return {}
    tokens = {feature: int(profile.token[feature, 0]) for feature in features if profile.activation[feature, 0] > 0}
    return {str(feature): model.to_string([token]) for feature, token in tokens.items()}


FEATURE_VIEWS = {"features": features_view, "feature": feature_view, "contexts": contexts_view}
