"""Head detectors by TransformerLens's names; `hookline.experiments.head_detectors` returns labeled results."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.compat.transformer_lens._impl.hooked_transformer import HookedTransformer
from hookline.compat.transformer_lens._impl.lens_errors import check
from hookline.compat.transformer_lens.cache import ActivationCache
from hookline.compat.transformer_lens.utils import is_lower_triangular, is_square
from hookline.errors import warn
from hookline.experiments.head_detectors import Kind, detection_pattern

HeadName = Literal["previous_token_head", "duplicate_token_head", "induction_head"]
HEAD_NAMES: list[HeadName] = list(get_args(HeadName))
ErrorMeasure = Literal["abs", "mul"]
LayerHeadTuple: TypeAlias = tuple[int, int]
LayerToHead: TypeAlias = dict[int, list[int]]

INVALID_HEAD_NAME_ERR = f"detection_pattern must be a matrix or one of {HEAD_NAMES}, not %r"
SEQ_LEN_ERR = "the sequence must have at least two tokens, and fewer than fit into the model's context"
DET_PAT_NOT_SQUARE_ERR = (
    "detection_pattern must be a lower triangular matrix with a row for each of %d tokens, not of shape %s"
)


def detect_head(
    model: HookedTransformer,
    seq: str | list[str],
    detection_pattern: Tensor | HeadName,
    heads: list[LayerHeadTuple] | LayerToHead | None = None,
    cache: ActivationCache | None = None,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: ErrorMeasure = "mul",
) -> Float[Tensor, "layer head"]:
    """The similarity of each head's attention to a pattern, or to a kind of head; -1 for heads that are not asked for.

    For several texts and a kind of head, the mean over texts.
    """
    check(error_measure in get_args(ErrorMeasure), f"error_measure must be one of {get_args(ErrorMeasure)}")
    options: dict[str, Any] = {"exclude_bos": exclude_bos, "exclude_current_token": exclude_current_token}
    options["error_measure"] = error_measure
    if isinstance(detection_pattern, str):
        check(detection_pattern in HEAD_NAMES, INVALID_HEAD_NAME_ERR % detection_pattern)
        if isinstance(seq, list):
            return torch.stack([detect_head(model, text, detection_pattern, heads, **options) for text in seq]).mean(0)
    tokens = model.to_tokens(seq)
    check(1 < tokens.shape[-1] < model.cfg.n_ctx, SEQ_LEN_ERR)
    pattern = (
        _pattern(detection_pattern, tokens.cpu()) if isinstance(detection_pattern, str) else detection_pattern.cpu()
    )
    is_fit = is_lower_triangular(pattern) and len(pattern) == tokens.shape[-1]
    check(is_fit, DET_PAT_NOT_SQUARE_ERR % (tokens.shape[-1], list(pattern.shape)))
    if error_measure == "mul" and not set(pattern.unique().tolist()) <= {0, 1}:
        warn('detection_pattern has values other than 0 and 1, which error_measure="mul" takes as weights')
    if cache is None:
        _, cache = model.run_with_cache(tokens, remove_batch_dim=True, names_filter=lambda name: "pattern" in name)
    scores = -torch.ones(model.cfg.n_layers, model.cfg.n_heads, dtype=model.cfg.dtype)
    for layer, head in _chosen(model, heads):
        attention = cache["pattern", layer, "attn"][head].detach().cpu().clone()
        scores[layer, head] = compute_head_attention_similarity_score(attention, pattern, **options)
    return scores


def _chosen(model: HookedTransformer, heads: list[LayerHeadTuple] | LayerToHead | None) -> list[LayerHeadTuple]:
    if heads is None:
        return [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    if isinstance(heads, list):
        return heads
    return [(layer, head) for layer, of_layer in heads.items() for head in of_layer]


def _pattern(name: HeadName, tokens: Int[Tensor, "*batch pos"]) -> Float[Tensor, "pos pos"]:
    return detection_pattern(cast(Kind, name.removesuffix("_head")), tokens.reshape(-1))


def get_previous_token_head_detection_pattern(tokens: Int[Tensor, "*batch pos"]) -> Float[Tensor, "pos pos"]:
    """1 at the previous token of each."""
    return _pattern("previous_token_head", tokens)


def get_duplicate_token_head_detection_pattern(tokens: Int[Tensor, "*batch pos"]) -> Float[Tensor, "pos pos"]:
    """1 at earlier occurrences of each token."""
    return _pattern("duplicate_token_head", tokens)


def get_induction_head_detection_pattern(tokens: Int[Tensor, "*batch pos"]) -> Float[Tensor, "pos pos"]:
    """1 at the tokens after earlier occurrences of each token."""
    return _pattern("induction_head", tokens)


def get_supported_heads() -> None:
    """Print the kinds of heads."""
    print(f"Supported heads: {HEAD_NAMES}")


def compute_head_attention_similarity_score(
    attention_pattern: Float[Tensor, "pos pos"],
    detection_pattern: Float[Tensor, "pos pos"],
    *,
    exclude_bos: bool,
    exclude_current_token: bool,
    error_measure: ErrorMeasure,
) -> float:
    """The share of attention on the pattern ("mul"), or 1 minus the mean distance per row ("abs")."""
    check(is_square(attention_pattern), f"the attention is not square, but of shape {list(attention_pattern.shape)}")
    is_scored = torch.ones_like(attention_pattern)
    is_scored[:, 0] *= not exclude_bos
    is_scored.diagonal().mul_(not exclude_current_token)
    if error_measure == "mul":
        looked = attention_pattern * is_scored
        return float((looked * detection_pattern).sum() / looked.sum())
    distance = (attention_pattern - detection_pattern).abs()
    check(not bool(distance.triu(1).any()), "the attention or the pattern reaches later tokens")
    return 1 - round(float((distance * is_scored).mean()) * len(distance), 3)


__getattr__ = refusing("transformer_lens.head_detector")
