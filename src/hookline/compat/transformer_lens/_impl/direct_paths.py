"""`tools.analysis.direct_path_patching`: the effect of one head's output on the queries, keys or values of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from hookline.errors import warn


def get_act_patch_direct_path(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Any,
    corrupted_cache: Any,
    patching_metric: Callable[[Tensor], Tensor],
    src_layer: int,
    src_head: int,
    component: Literal["q", "k", "v"] = "q",
    verbose: bool = True,
) -> Float[Tensor, "layer head"]:
    """The metric for each head of a later layer, if only that head sees the clean output of the source head.

    The norm before the head is linear here: its scale is that of the corrupted run. Heads that the source cannot reach
    have 0. `hookline.experiments.paths` patches paths without this approximation.
    """
    _check_fold_ln(model)
    name, cfg = f"blocks.{src_layer}.attn.hook_z", model.cfg
    difference = clean_cache[name][:, :, src_head] - corrupted_cache[name][:, :, src_head]
    change = difference @ model.blocks[src_layer].attn.W_O[src_head]
    scores = torch.zeros(cfg.n_layers, cfg.n_heads, device=cfg.device)
    reached = [(layer, head) for layer in range(src_layer + 1, cfg.n_layers) for head in range(cfg.n_heads)]
    for layer, head in tqdm(reached, disable=not verbose):
        matrix = getattr(model.blocks[layer].attn, f"W_{component.upper()}")[head]
        added = change / corrupted_cache[f"blocks.{layer}.ln1.hook_scale"] @ matrix

        def add(x: Tensor, hook: Any, head: int = head, added: Tensor = added) -> Tensor:  # noqa: ARG001
            new = x.clone()
            new[:, :, head] += added
            return new

        hooks = [(f"blocks.{layer}.attn.hook_{component}", add)]
        scores[layer, head] = patching_metric(model.run_with_hooks(corrupted_tokens, fwd_hooks=hooks)).item()
    return scores


def get_act_patch_direct_path_all_sources(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Any,
    corrupted_cache: Any,
    patching_metric: Callable[[Tensor], Tensor],
    component: Literal["q", "k", "v"] = "q",
    verbose: bool = True,
) -> Float[Tensor, "layer head layer head"]:
    """`get_act_patch_direct_path` for every source head: a pass of the model for each pair of heads."""
    layers, heads = range(model.cfg.n_layers), range(model.cfg.n_heads)
    sources: Any = tqdm([(layer, head) for layer in layers for head in heads], disable=not verbose)
    arguments: Any = (model, corrupted_tokens, clean_cache, corrupted_cache, patching_metric)
    scores = [get_act_patch_direct_path(*(*arguments, *source, component, False)) for source in sources]
    return torch.stack(scores).unflatten(0, (len(layers), len(heads)))


def _check_fold_ln(model: Any) -> None:
    """Warn if the gain of the first norm is not folded into the weights that follow."""
    try:
        gain = model.blocks[0].ln1.w
    except (AttributeError, TypeError):  # a model without norms, or of another kind
        return
    if not torch.allclose(gain, torch.ones_like(gain), atol=1e-3):
        warn("direct paths leave out the gain of norms, which is not folded here: call model.process_weights_() first")
