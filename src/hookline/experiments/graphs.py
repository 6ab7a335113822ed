"""Attribution graphs: how the tokens of a prompt, through features or MLPs, lead to the logits of the next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core import graph_files, graph_runs, graph_scores
from hookline.experiments.core.graph_edges import WHOLE, Computed, Edges, GraphNode, LocalModel
from hookline.experiments.core.labels import about, number_text
from hookline.experiments.core.prompts import Prompt, Prompts, prompts_of, warn_of_dropout
from hookline.experiments.result import Result, TopCells
from hookline.model import HookedModel
from hookline.sae.transcoders import Transcoders

__all__ = ["AttributionGraph", "GraphNode", "attribution_graph", "load"]

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""How far sums may be off, relative to what is summed; in other dtypes 0.1."""


def __dir__() -> list[str]:
    return __all__


def attribution_graph(
    model: HookedModel,
    prompt: Prompt,
    transcoders: Transcoders | str | Path | None = None,
    target: str | int | Sequence[str] | Sequence[int] | Tensor | None = None,
    *,
    max_features: int | None = None,
    errors_only: Sequence[int] | None = None,
    max_logits: int = 10,
    logit_share: float = 0.95,
    progress: bool = True,
) -> AttributionGraph:
    """Find what each feature and logit of a prompt reads from every earlier one, with attention and norms frozen.

        graph = graphs.attribution_graph(model, "The capital of Italy is", target=" Rome")
        graph.top(5)                       # the largest edges
        graph.prune().plot_html().save("graph.html")

    Nodes are the active features of `transcoders` (see `sae.Transcoders`; a path loads them) with an error for each of
    their MLPs, tokens, and logits at the last position. Layers without a transcoder have their MLP as one node for each
    position. An edge is what its source writes to the stream, carried by frozen attention patterns and norm denominators
    past all other MLPs, times what its target reads. Edges into a node sum, with its bias, to its pre-activation.

    `target` are the tokens whose logits are nodes, by default the most likely ones: as many as have `logit_share` of the
    probability together, up to `max_logits`. `max_features` keeps the features and MLPs that influence them most, which
    are found on the way. Positions in `errors_only`, by default a first token that begins texts (BOS), have no features,
    as transcoders do not reconstruct them. A model whose parts between the MLPs are not linear once attention and norms
    are frozen is refused.
    """
    if transcoders is not None and not isinstance(transcoders, Transcoders):
        transcoders = Transcoders.load(transcoders)
    if max_features is not None and (isinstance(max_features, bool) or max_features < 1):
        raise HooklineError(f"max_features must be a positive integer or None, got {max_features!r}")
    text = _one_prompt(model, prompt)
    if transcoders is not None:
        transcoders.check_fit(model)
    warn_of_dropout(model)
    local = LocalModel(model, text.call(model), transcoders, _without_features(model, text, errors_only))
    ids = _targets(model, local.run.probabilities, target, max_logits, logit_share)
    probabilities = local.run.probabilities[ids]
    edges = Edges(local, _demeaned(ids, len(local.run.logits)), probabilities)
    found = edges.compute(max_features, progress)
    graph = _graph(model, text, edges, found, ids.tolist(), probabilities.tolist())
    _refuse_unless_linear(model, graph)
    return graph


def load(path: str | Path) -> AttributionGraph:
    """Read a graph in the JSON of Neuronpedia and circuit-tracer, written by `AttributionGraph.save` or by others.

    It has the edges that the file has. `intervene` and `heads` need the model, so they need a new graph.
    """
    content = graph_files.read(Path(path))
    return AttributionGraph(**content)


@dataclass(frozen=True, eq=False, repr=False)
class AttributionGraph:
    """Nodes of one prompt, and the edges between them.

    graph.nodes                        # features or MLPs, errors, tokens, logits
    graph.matrix                       # a Result, target × source
    graph.check().top(3)               # where incoming edges are farthest from the pre-activation
    graph.scores                       # replacement and completeness: what does not go through errors
    graph.prune(0.8, 0.98)             # the part with 80% of the nodes' and 98% of the edges' influence
    graph.save("g.json"), graph.plot_html()
    """

    nodes: tuple[GraphNode, ...]
    edges: Float[Tensor, "target source"]
    bias: Float[Tensor, " target"]
    """What biases (of norms, attention, transcoders and position embeddings) add to each pre-activation."""
    rest: Float[Tensor, " target"]
    """What nodes that are not in the graph add: those over `max_features`, or pruned."""
    tokens: tuple[str, ...]
    info: dict[str, Any] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()
    """Ids of nodes that the page shows in its subgraph."""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of groups in the subgraph, with the ids of their nodes."""
    local: Edges | None = None
    """The run behind the graph; None if it was read from a file."""

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def ids(self) -> list[str]:
        """The ids of the nodes, in the order of the matrix."""
        return [node.id for node in self.nodes]

    @cached_property
    def matrix(self) -> Result:
        """The edges as a Result, target × source: 0 where there is no edge."""
        coords = {"target": [*self.ids], "source": [*self.ids]}
        return Result(self.edges, ("target", "source"), coords, "edge", dict(self.info))

    def node(self, id: str | GraphNode) -> GraphNode:
        """The node with an id."""
        return self.nodes[self._at(id)]

    def of(self, kind: str) -> list[GraphNode]:
        """The nodes of one kind: "feature", "mlp", "error", "token" or "logit"."""
        return [node for node in self.nodes if node.kind == kind]

    def into(self, target: str | GraphNode) -> Result:
        """The edges into a node, by source."""
        at = self._at(target)
        if not self.nodes[at].is_target:
            raise HooklineError(f"{self.nodes[at].id} is a {self.nodes[at].kind} node, which has no incoming edges")
        return self._by_node(self.edges[at], self.edges[at] != 0, f"edge into {self.ids[at]}")

    def out_of(self, source: str | GraphNode) -> Result:
        """The edges out of a node, by target."""
        at = self._at(source)
        return self._by_node(self.edges[:, at], self.edges[:, at] != 0, f"edge out of {self.ids[at]}")

    def top(self, k: int = 10) -> TopCells:
        """The `k` largest edges, with their targets and sources."""
        return self.matrix.top(k, by="abs")

    def check(self) -> Result:
        """How far the edges into each node are from its pre-activation, relative to the sum of their absolute values.

        Its bias, and what nodes outside the graph add, count as edges. The pre-activation is that of the model's own run,
        and the bias that of a run without any node, so that a model that is not linear between its MLPs shows here.
        """
        at = self._is(lambda node: node.pre_activation is not None)
        pre = torch.tensor([node.pre_activation for node in self.nodes if node.pre_activation is not None])
        edges = self.edges[at].double()
        off = edges.sum(1) + self.bias[at] + self.rest[at] - pre.double()
        sizes = edges.abs().sum(1) + self.bias[at].abs() + self.rest[at].abs()
        return self._by_node(off.abs() / sizes.clamp(min=1e-12), at, "difference", {"largest": float(off.abs().max())})

    @property
    def influence(self) -> Result:
        """The influence of each node on the logits, over all paths (see `prune`)."""
        found = graph_scores.influences(self.edges, self._weights)
        return self._by_node(found, torch.ones(len(self), dtype=torch.bool), "influence")

    @property
    def scores(self) -> dict[str, float]:
        """The replacement and the completeness score, 1 if nothing goes through errors.

        Replacement is the influence of tokens as a fraction of that of tokens and errors; completeness is the fraction of
        incoming edges that are not from errors, averaged over nodes by their influence on the logits.
        """
        is_error, is_token = self._is(lambda node: node.kind == "error"), self._is(lambda node: node.kind == "token")
        return {
            "replacement": graph_scores.replacement(self.edges, self._weights, is_error, is_token),
            "completeness": graph_scores.completeness(self.edges, self._weights, is_error),
        }

    def prune(self, nodes: float = 0.8, edges: float = 0.98) -> AttributionGraph:
        """The part of the graph with these fractions of the influence on the logits, without loose ends.

        The influence of an edge is its absolute value as a fraction of all edges into its target, times the influence of
        that target; logits are weighted by their probabilities. Tokens and logits stay.
        """
        for name, value in (("nodes", nodes), ("edges", edges)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise HooklineError(f"{name} is the fraction of the influence that stays, over 0 up to 1, got {value!r}")
        is_target = self._is(lambda node: node.is_target)
        is_fixed = self._is(lambda node: node.kind in ("token", "logit"))
        stays, links = graph_scores.kept(self.edges, self._weights, is_target, is_fixed, nodes, edges)
        gone = (self.edges * ~links).sum(1)
        return replace(
            self,
            nodes=tuple(node for node, is_kept in zip(self.nodes, stays.tolist(), strict=True) if is_kept),
            edges=(self.edges * links)[stays][:, stays],
            bias=self.bias[stays],
            rest=(self.rest + gone)[stays],
            info=self.info | {"pruned": [nodes, edges]},
        )

    def intervene(self, changes: Mapping[str, float]) -> Result:
        """The change of every pre-activation and logit if nodes get other activations: predicted, and measured twice.

            graph.intervene({"2_31_4": 0.0}).sel(node=graph.of("logit")[0].id)

        The run "predicted" follows all paths of the graph. "frozen" is measured in the model with frozen attention and
        norms, in which features and MLPs are computed anew; it differs from the prediction where features that were off
        turn on, and where an MLP that is a node is not linear. "model" is measured in the model itself: the only change is
        what the nodes write. Of tokens and errors, the new activation is a factor.
        """
        factors = graph_runs.factors_of(self, changes)
        edges = graph_runs.run_behind(self)
        clamp = graph_runs.Clamp.of(self, factors)
        rows = [graph_runs.predicted(self, factors)]
        for is_frozen in (True, False):
            found = graph_runs.measured(edges, clamp, is_frozen=is_frozen)
            rows.append(torch.tensor([found[id] for id in self.ids], dtype=torch.float64))
        at = self._is(lambda node: node.is_target)
        ids = [node.id for node in self.nodes if node.is_target]
        info = {"changes": ", ".join(f"{id} to {number_text(value)}" for id, value in changes.items())}
        coords = {"run": [*graph_runs.RUNS], "node": [*ids]}
        return Result(torch.stack(rows)[:, at], ("run", "node"), coords, "change", info)

    def heads(self, source: str | GraphNode, target: str | GraphNode) -> Result:
        """How much of an edge each head carries, from each key position to each query position.

        The edge may pass several heads in turn, or none, so the values need not sum to it.
        """
        u, v = self._at(source), self._at(target)
        values = graph_runs.through_heads(self, u, v)
        coords = {axis: list(range(size)) for axis, size in zip(("layer", "head", "query", "key"), values.shape, strict=True)}
        places = [f"{at}: {text}" for at, text in enumerate(self.tokens)]
        info = {"edge": float(self.edges[v, u]), "source": self.ids[u], "target": self.ids[v]}
        return Result(values, tuple(coords), {**coords, "query": [*places], "key": [*places]}, "share", info)

    def qk(
        self,
        source: str | GraphNode,
        target: str | GraphNode,
        *,
        layer: int | None = None,
        head: int | None = None,
        query: int | None = None,
        key: int | None = None,
    ) -> Result:
        """Why a head attends where an edge needs it: its score as a sum over pairs of nodes, query side × key side.

            graph.qk("E_567_4", "6_632_5").top(5)

        The head and its positions are those that carry most of the edge, unless they are given. A cell is what the query
        side's node adds to the query, times what the key side's adds to the key. The rows and columns "other" and "bias"
        are what is not in the graph. The cells sum to the score before the softmax, `info["score"]`.
        """
        asked = {"layer": layer, "head": head, "query": query, "key": key}
        found = self.heads(source, target)
        some = found.isel(**{axis: [at] for axis, at in asked.items() if at is not None})
        best = some.top(1, by="abs")
        if not best or not best[0].value:
            raise HooklineError(f"no head carries the edge from {found.info['source']} to {found.info['target']}: it is direct")
        place = {axis: found.coords[axis].index(best[0].labels[axis]) for axis in found.axes}
        parts = graph_runs.score_parts(self, *place.values())
        names = [*self.ids, "other", "bias"]
        info = {"score": parts.score, "scale": parts.scale, "share": best[0].value, **place}
        return Result(parts.pairs, ("query_node", "key_node"), {"query_node": [*names], "key_node": [*names]}, "score", info)

    def save(self, path: str | Path, *, slug: str | None = None, scan: str | None = None) -> None:
        """Write the graph as JSON, which Neuronpedia and circuit-tracer read: metadata, qParams, nodes and links.

        `slug` is the name of the graph there, `scan` that of the model and its transcoders.
        """
        graph_files.write(Path(path), self, slug, scan)

    def __repr__(self) -> str:
        kinds = [(kind, len(self.of(kind))) for kind in ("feature", "mlp", "error", "token", "logit")]
        count = ", ".join(f"{n} {'MLP' if kind == 'mlp' else kind}s" for kind, n in kinds if n)
        scores = ", ".join(f"{name} {number_text(value)}" for name, value in self.scores.items())
        logits = ", ".join(f"{node.text!r} {node.probability:.2f}" for node in self.of("logit")[:5])
        links = int((self.edges != 0).sum())
        return f"AttributionGraph of {''.join(self.tokens)!r}: {count}, {links} edges\n  {logits}; {scores}"

    @property
    def _weights(self) -> Float[Tensor, " node"]:
        """The probabilities of the logits, and 0 for other nodes."""
        return torch.tensor([node.probability or 0.0 if node.kind == "logit" else 0.0 for node in self.nodes]).double()

    def _is(self, holds: Any) -> Bool[Tensor, " node"]:
        return torch.tensor([bool(holds(node)) for node in self.nodes])

    def _at(self, id: str | GraphNode) -> int:
        wanted = id.id if isinstance(id, GraphNode) else id
        if wanted not in self._places:
            some = ", ".join(self.ids[:8])
            raise HooklineError(f"the graph has no node {wanted!r}: it has {len(self)}, such as {some}; see graph.nodes")
        return self._places[wanted]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {id: at for at, id in enumerate(self.ids)}

    def _by_node(self, values: Tensor, chosen: Tensor, name: str, info: dict[str, Any] | None = None) -> Result:
        ids = [id for id, is_chosen in zip(self.ids, chosen.tolist(), strict=True) if is_chosen]
        if not ids:
            raise HooklineError(f"no node has an {name}")
        shown = values if len(values) == len(ids) else values[chosen]
        return Result(shown, ("node",), {"node": [*ids]}, name, info or {})


def _one_prompt(model: HookedModel, prompt: Prompt) -> Prompts:
    if not isinstance(model, HookedModel):
        raise HooklineError(f"graphs are of language models with a known anatomy, not of {type(model).__name__}")
    text = prompts_of(model, prompt)
    if len(text) != 1:
        raise HooklineError(f"a graph is of one prompt, got {len(text)}: make one graph for each")
    return text


def _without_features(model: HookedModel, text: Prompts, given: Sequence[int] | None) -> list[int]:
    """The positions that have an error only."""
    if given is None:
        first = getattr(model.tokenizer, "bos_token_id", None)
        return [0] if first is not None and int(text.tokens[0, 0]) == first else []
    for pos in given:
        if isinstance(pos, bool) or not isinstance(pos, int) or pos not in range(-text.width, text.width):
            raise HooklineError(f"errors_only has the position {pos!r}, but the prompt has {text.width} tokens")
    return sorted({pos % text.width for pos in given})


def _targets(model: HookedModel, probabilities: Tensor, target: Any, most: int, share: float) -> Tensor:
    """The token ids of the logits."""
    if target is None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1 or not 0 < share <= 1:
            raise HooklineError(f"max_logits is at least 1 and logit_share at most 1, got {most!r} and {share!r}")
        values, ids = probabilities.topk(min(most, len(probabilities)))
        return ids[: int((values.cumsum(0) < share).sum()) + 1]
    ids = torch.as_tensor(model.token_ids(target)).reshape(-1).to(probabilities.device)
    if not len(ids) or len(ids.unique()) != len(ids):
        raise HooklineError(f"target has no tokens, or the same one twice: {target!r}")
    return ids


def _demeaned(ids: Tensor, n_vocab: int) -> Float[Tensor, "target vocab"]:
    """The weights of each logit minus the mean of all logits, which does not change probabilities."""
    weights = torch.full((len(ids), n_vocab), -1.0 / n_vocab, device=ids.device)
    weights[torch.arange(len(ids)), ids] += 1.0
    return weights


def _word(model: HookedModel, token: int) -> str:
    return f"<{token}>" if model.tokenizer is None else model.tokenizer.decode([token])


def _graph(
    model: HookedModel, text: Prompts, edges: Edges, found: Computed, ids: list[int], probabilities: list[float]
) -> AttributionGraph:
    """The graph of the rows that were computed."""
    texts, words = ([_word(model, token) for token in each] for each in (text.tokens[0].tolist(), ids))
    nodes = _nodes(model, text, edges, texts, list(zip(ids, words, probabilities, strict=True)))
    edges.ids = [node.id for node in nodes]
    is_kept = torch.zeros(edges.n_nodes, dtype=torch.bool)
    is_kept[edges.n_units :] = True
    is_kept[found.into] = True
    full = torch.zeros(edges.n_nodes, edges.n_nodes)
    full[found.into] = found.rows
    pre, bias, rest = torch.zeros(3, edges.n_nodes, dtype=torch.float64)
    pre[found.into], bias[found.into] = found.pre, found.bias
    rest[found.into] = found.rows[:, ~is_kept].double().sum(1)
    sums = [replace(node, pre_activation=float(x)) if node.is_target else node for node, x in zip(nodes, pre, strict=True)]
    return AttributionGraph(
        tuple(node for node, kept in zip(sums, is_kept.tolist(), strict=True) if kept),
        full[is_kept][:, is_kept],
        bias[is_kept],
        rest[is_kept],
        tuple(texts),
        about(model, "attribution graph"),
        local=edges,
    )


def _nodes(
    model: HookedModel, text: Prompts, edges: Edges, texts: Sequence[str], logits: Sequence[tuple[int, str, float]]
) -> list[GraphNode]:
    """All nodes, in the order of columns."""
    nodes = []
    for (layer, pos, feature), value in zip(edges.units, edges.activations, strict=True):
        if feature == WHOLE:
            nodes.append(GraphNode(f"mlp_{layer}_{pos}", "mlp", pos, layer, None, texts[pos], value))
        else:
            nodes.append(GraphNode(f"{layer}_{feature}_{pos}", "feature", pos, layer, feature, texts[pos], value))
    for layer in edges.error_layers:
        nodes += [GraphNode(f"error_{layer}_{p}", "error", p, layer, None, texts[p]) for p in range(edges.n_pos)]
    for pos, token in enumerate(text.tokens[0].tolist()):
        nodes.append(GraphNode(f"E_{token}_{pos}", "token", pos, None, token, texts[pos]))
    top, last = model.cfg.n_layers + 1, edges.n_pos - 1
    return nodes + [GraphNode(f"{top}_{id}_{last}", "logit", last, None, id, word, None, None, p) for id, word, p in logits]


def _refuse_unless_linear(model: HookedModel, graph: AttributionGraph) -> None:
    """Raise if edges do not sum to pre-activations."""
    worst = graph.check().top(1, by="value")[0]
    limit = _TOLERANCE.get(model.cfg.dtype, 0.1)
    if worst.value <= limit:
        return
    whole = range(model.cfg.n_layers)
    missing = [at for at in whole if f"{model._points.layer(at)}.attn.hook_pattern" not in model.hook_dict]
    why = f"layers {missing} have no attention pattern to freeze" if missing else (
        "its layers compute something else that is not linear, such as norms or gates inside attention, or a layer that "
        "is not a sum of attention and MLP"
    )  # fmt: skip
    raise HooklineError(
        f"{model.cfg.architecture} is not linear between its MLPs when attention patterns and norm denominators are "
        f"frozen: the edges into {worst.labels['node']} miss its pre-activation by {worst.value:.2g} of their sum "
        f"(at most {limit:g} is rounding). Probably {why}"
    )
