"""Scores of a graph: the influence of nodes on the logits, what may be pruned, and how much goes through errors."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hookline.errors import HooklineError

_MOST = 4096
"""Steps after which an influence that still grows means that the edges have a cycle."""


def shares(rows: Float[Tensor, "target node"]) -> Float[Tensor, "target node"]:
    """The absolute edges into each target, as fractions of their sum."""
    sizes = rows.double().abs()
    return sizes / sizes.sum(1, keepdim=True).clamp(min=1e-10)


def influences(
    rows: Float[Tensor, "target node"], weights: Float[Tensor, " node"], into: Int[Tensor, " target"] | None = None
) -> Float[Tensor, " node"]:
    """The influence of each node on the weighted logits, over all paths: products of the fractions along each path.

    `into` are the nodes that the rows go into, if there are rows for some nodes only.
    """
    fractions = shares(rows)
    step, total = weights.double(), torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for _ in range(_MOST):
        step = (step if into is None else step[into]) @ fractions
        if not bool(step.any()):
            return total
        total = total + step
    raise HooklineError(
        "the edges have a cycle, so influences do not converge: edges go from earlier nodes to later ones"
    )


def influence_shares(scores: Float[Tensor, " node"]) -> Float[Tensor, " node"]:
    """For each node, the fraction of the total influence that it and all nodes with more of it have."""
    order = scores.argsort(descending=True, stable=True)
    fractions = torch.zeros_like(scores)
    fractions[order] = scores[order].cumsum(0) / scores.sum().clamp(min=1e-30)
    return fractions


def _enough(scores: Tensor, fraction: float) -> Tensor:
    """A mask of the largest scores that together have this fraction of the total."""
    ordered = scores.flatten().sort(descending=True).values
    sums = ordered.cumsum(0) / ordered.sum().clamp(min=1e-30)
    at = min(int(torch.searchsorted(sums, torch.tensor(fraction, dtype=sums.dtype))), len(sums) - 1)
    return scores >= ordered[at]


def surviving(
    edges: Float[Tensor, "node node"],
    weights: Float[Tensor, " node"],
    is_target: Bool[Tensor, " node"],
    is_fixed: Bool[Tensor, " node"],
    node_fraction: float,
    edge_fraction: float,
) -> tuple[Bool[Tensor, " node"], Bool[Tensor, "node node"]]:
    """The nodes and edges that stay: those that have these fractions of the influence, without loose ends.

    Nodes in `is_fixed`, the tokens and logits, stay in any case. A node stays only if an edge that stays leaves it and,
    if it `is_target` at all, one enters it.
    """
    nodes = _enough(influences(edges, weights), node_fraction) | is_fixed
    inner = edges * nodes[:, None] * nodes
    fractions = shares(inner)
    flows = fractions * (influences(inner, weights) + weights.double())[:, None]
    links = _enough(flows, edge_fraction) & (flows > 0)
    while True:
        links &= nodes[:, None] & nodes
        stays = nodes & (is_fixed | (links.any(0) & (links.any(1) | ~is_target)))
        if bool((stays == nodes).all()):
            return nodes, links
        nodes = stays


def replacement(edges: Tensor, weights: Tensor, is_error: Tensor, is_token: Tensor) -> float:
    """The influence of tokens, as a fraction of that of tokens and errors: what reaches the logits without errors."""
    influence = influences(edges, weights)
    tokens, errors = float(influence[is_token].sum()), float(influence[is_error].sum())
    return tokens / (tokens + errors) if tokens + errors else float("nan")


def completeness(edges: Tensor, weights: Tensor, is_error: Tensor) -> float:
    """The fraction of incoming edges that are not from errors, averaged over nodes by their influence."""
    through = influences(edges, weights) + weights.double()
    explained = 1 - shares(edges)[:, is_error].sum(1)
    return float((explained * through).sum() / through.sum())
