"""What a graph predicts beside what runs measure: interventions on nodes, and why heads attend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.graphs.graph_edges import Edges, LocalModel
from hookline.experiments.graphs.linear_runs import Reader

if TYPE_CHECKING:
    from hookline.experiments.graphs.node_graph import AttributionGraph

RUNS = ("predicted", "frozen", "model")
"""By the graph; in the model with attention and norms frozen and MLPs replaced; and in the model itself."""


def predicted_changes(graph: AttributionGraph, factors: Mapping[int, float]) -> Float[Tensor, " node"]:
    """The change of every pre-activation if nodes write `factors` times as much, along all paths of the graph.

    Features stay on their side of the threshold unless the change takes them over it; MLPs change to first order.
    """
    changes = torch.zeros(len(graph), dtype=torch.float64)
    written = torch.zeros(len(graph), dtype=torch.float64)
    for at, factor in factors.items():
        written[at] = factor - 1
    edges = graph.edges.double()
    layers = sorted({node.layer for node in graph.nodes if node.layer is not None and node.is_target})
    for layer in layers:
        indices = [nth for nth, node in enumerate(graph.nodes) if node.is_target and node.layer == layer]
        changes[indices] = edges[indices] @ written
        for nth in indices:
            if nth not in factors:
                written[nth] = _share(graph, nth, float(changes[nth]))
    last = [nth for nth, node in enumerate(graph.nodes) if node.kind == "logit"]
    changes[last] = edges[last] @ written
    return changes


def _share(graph: AttributionGraph, at: int, change: float) -> float:
    """The relative change of what a node writes, given that of its pre-activation."""
    node = graph.nodes[at]
    if not node.activation or node.pre_activation is None:
        return 0.0
    if node.kind == "mlp" or graph.local is None or node.layer is None or node.feature is None:
        return change / node.activation
    transcoders = graph.local.local.transcoders
    assert transcoders is not None
    threshold = transcoders[node.layer].threshold
    least = 0.0 if threshold is None else float(threshold.detach()[node.feature])
    pre = node.pre_activation + change
    new = pre if pre > max(least, 0.0) else 0.0
    return new / node.activation - 1


@dataclass(frozen=True)
class Clamp:
    """Nodes that write other amounts, by what they are."""

    features: Mapping[tuple[int, int, int], float]
    """New activations, by layer, position and feature."""
    mlps: Mapping[tuple[int, int], float]
    errors: Mapping[tuple[int, int], float]
    tokens: Mapping[int, float]
    """Factors, by layer and position."""

    @classmethod
    def of(cls, graph: AttributionGraph, factors: Mapping[int, float]) -> Clamp:
        """The clamp of nodes of a graph."""
        fields: tuple[dict, dict, dict, dict] = ({}, {}, {}, {})
        for at, factor in factors.items():
            node = graph.nodes[at]
            if node.kind == "feature":
                fields[0][node.layer, node.pos, node.feature] = factor * (node.activation or 0.0)
            elif node.kind == "token":
                fields[3][node.pos] = factor
            else:
                fields[1 if node.kind == "mlp" else 2][node.layer, node.pos] = factor
        return cls(*fields)

    def features_of(self, layer: int, active: Float[Tensor, "pos d_sae"]) -> Float[Tensor, "pos d_sae"]:
        """The activations of a layer's features, with the clamped ones."""
        new = active.clone()
        for (at, pos, feature), value in self.features.items():
            if at == layer:
                new[pos, feature] = value
        return new


@torch.no_grad()
def measured_changes(edges: Edges, clamp: Clamp, *, is_frozen: bool) -> dict[str, float]:
    """The change of every node's pre-activation in a run with clamped nodes.

    If it `is_frozen`, attention and norms are, MLPs with a transcoder are replaced by features and their errors, and
    other MLPs are the model's. Otherwise only what the clamped nodes write is changed.
    """
    local = edges.local
    run = local.run
    embedding = run.embedding.clone()
    for pos, factor in clamp.tokens.items():
        embedding[pos] *= factor

    def written(layer: int, inputs: Mapping[Reader, Tensor], made: Tensor) -> Tensor:
        if layer not in local.features:
            new = made.clone()
            for (at, pos), factor in clamp.mlps.items():
                if at == layer:
                    new[pos] = factor * run.outputs[layer][pos]
            return new
        active = {at: local.active(at, inputs) for at in local.coded if at <= layer}
        error = local.errors[layer].clone()
        for (at, pos), factor in clamp.errors.items():
            if at == layer:
                error[pos] *= factor
        clamped = {at: clamp.features_of(at, x) for at, x in active.items()}
        if is_frozen:
            return local.reconstructed(layer, inputs, clamped) + error
        changed = {at: clamped[at] - active[at] for at in active}
        zero = local.constant(layer, inputs)
        return made + (local.reconstructed(layer, inputs, changed) - zero) + (error - local.errors[layer])

    new = edges.read(*run.forward(embedding, written, is_frozen=is_frozen))
    return dict(zip(edges.ids, (new - edges.read(run.inputs, run.logits)).tolist(), strict=True))


def through_heads(graph: AttributionGraph, source: int, target: int) -> Float[Tensor, "layer head query key"]:
    """How much of an edge each head carries, from each key position to each query position.

    An edge may pass several heads in turn, so that the sum over heads may be larger than the edge.
    """
    edges = run_behind(graph)
    model, n_layers = edges.local.model, edges.local.model.cfg.n_layers
    names = [f"{model.index.layer(layer)}.attn.hook_{kind}" for layer in range(n_layers) for kind in "zv"]
    for name in names:
        model.point(name)  # raises if the model does not have it
    local = LocalModel(model, edges.local.run.call, edges.local.transcoders, edges.local.errors_only, names)
    reader, pos, vector = edges.reading(edges.ids.index(graph.ids[target]))
    gradients = local.run.back_to(reader, pos, vector, names[::2])
    writes = edges.writers.of(edges.ids.index(graph.ids[source]))

    def written(layer: int, inputs: Mapping[Reader, Tensor], _made: Tensor) -> Tensor:
        base = local.constant(layer, inputs)
        for at, place, x in writes:
            if at == layer:
                base = base.index_add(0, torch.tensor([place], device=base.device), x[None].to(base))
        return base

    embedding = torch.zeros_like(local.run.embedding)
    for at, place, x in writes:
        if at < 0:
            embedding[place] = x
    values, zero = local.run.forward(embedding, written)[0], local.without_nodes[0]
    contributions = []
    for layer in range(n_layers):
        name = f"{model.index.layer(layer)}.attn.hook_pattern"
        pattern = local.run.frozen[name][0].float()
        z, v = ((values[point_name] - zero[point_name]).float() for point_name in names[2 * layer : 2 * layer + 2])
        heads, length = pattern.shape[:2]
        v = v.view(length, -1, z.shape[1] // heads)
        v = v.repeat_interleave(heads // v.shape[1], 1)
        mixed = torch.einsum("hqk,khe->qhe", pattern, v).flatten(1)
        if float((mixed - z).abs().max()) > 1e-3 * float(z.abs().max() + 1e-9):
            raise HooklineError(f"the output of layer {layer}'s heads is not their pattern times their values")
        gradient = gradients.get(names[2 * layer])
        g = (
            torch.zeros(length, heads, v.shape[2])
            if gradient is None
            else gradient.view(length, heads, -1).float().cpu()
        )
        contributions.append(pattern.cpu() * torch.einsum("qhe,khe->hqk", g, v.cpu()))
    return torch.stack(contributions)


@dataclass(frozen=True)
class ScoreParts:
    """An attention score as a sum over pairs: what a node writes into the query, times what one writes into the key."""

    pairs: Float[Tensor, "query key"]
    score: float
    scale: float


def score_parts(graph: AttributionGraph, layer: int, head: int, query: int, key: int) -> ScoreParts:
    """The parts of one attention score; the last two rows and columns are other nodes and biases."""
    edges = run_behind(graph)
    model = edges.local.model
    prefix = model.index.layer(layer)
    names = [f"{prefix}.attn.hook_{kind}" for kind in ("rot_q", "rot_k")]
    with torch.no_grad():
        cache = model.run_with_cache(**edges.local.run.call, names_filter=[*names, f"{prefix}.attn.hook_attn_scores"])[
            1
        ]
    q, k = (cache[name][0].double() for name in names)
    scores = cache[f"{prefix}.attn.hook_attn_scores"][0, head].double()
    group = head * k.shape[1] // q.shape[1]
    scale = _scale(scores, q[:, head] @ k[:, group].T, model.cfg.architecture, layer)
    local = LocalModel(model, edges.local.run.call, edges.local.transcoders, edges.local.errors_only, names)
    fresh = Edges(local, edges.weights, edges.shares)
    chosen = [edges.ids.index(node_id) for node_id in graph.ids]
    size = q.shape[2]
    sides = []
    for name, pos, nth, value in ((names[0], query, head, q[query, head]), (names[1], key, group, k[key, group])):
        rows, bias = fresh.watched(name, pos, slice(nth * size, (nth + 1) * size))
        rows, bias = rows.double(), bias.double()
        missed = float((rows.sum(1) + bias - value.cpu()).abs().max() / value.abs().max())
        if missed > 1e-3:
            raise HooklineError(
                f"{name!r} is not linear in what nodes write (it misses by {missed:.2g}), probably because queries "
                f"and keys are normalized: its scores cannot be split"
            )
        other = rows.sum(1) - rows[:, chosen].sum(1)
        sides.append(torch.cat([rows[:, chosen], other[:, None], bias[:, None]], 1))
    return ScoreParts(scale * sides[0].T @ sides[1], float(scores[query, key]), scale)


def _scale(scores: Tensor, products: Tensor, architecture: str, layer: int) -> float:
    """The factor from the product of a query and a key to their score; raises if scores are not proportional."""
    is_seen = (scores > -1e30) & torch.ones_like(scores, dtype=torch.bool).tril()
    x, y = products[is_seen], scores[is_seen]
    scale = float((x * y).sum() / (x * x).sum().clamp(min=1e-30))
    if float((y - scale * x).abs().max()) > 1e-3 * float(y.abs().max().clamp(min=1e-9)):
        raise HooklineError(
            f"the attention scores of {architecture} (layer {layer}) are not proportional to query · key (a soft cap, "
            f"or a bias for positions), so they cannot be split"
        )
    return scale


def run_behind(graph: AttributionGraph) -> Edges:
    """The run that a graph was made from; an error if it was read from a file."""
    if graph.local is None:
        raise HooklineError("this graph was read from a file: make it again with attribution_graph, to run the model")
    return graph.local


def factors_of(graph: AttributionGraph, changes: Mapping[str, float]) -> dict[int, float]:
    """How many times as much each changed node writes, by its place in the graph."""
    if not changes:
        raise HooklineError("intervene needs nodes with their new activations, as in {'3_120_5': 0.0}")
    factors = {}
    for name, value in changes.items():
        node = graph.node(name)
        if node.kind == "logit":
            raise HooklineError(f"{node.id} is a logit, which writes nothing: change a feature, MLP, error or token")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise HooklineError(f"the new activation of {node.id} must be a number, got {value!r}")
        old = 1.0 if node.activation is None else node.activation
        if not old:
            raise HooklineError(f"{node.id} writes nothing, so it cannot be changed")
        factors[graph.ids.index(node.id)] = value / old
    return factors
