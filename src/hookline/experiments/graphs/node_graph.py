"""AttributionGraph: the nodes of a prompt and the edges between them, with what can be asked of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label, number_text, token_labels
from hookline.experiments.graphs import graph_files, graph_runs, graph_scores
from hookline.experiments.graphs.graph_edges import Edges, GraphNode, NodeKind
from hookline.experiments.result import Result, TopCells
from hookline.pages.html_page import HtmlPage, graph_page
from hookline.pages.tensors import packed_tensor

_MOST_NODES, _MOST_EDGES = 2000, 40_000
"""Of a page."""


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
        coords: dict[str, list[Label]] = {"target": [*self.ids], "source": [*self.ids]}
        return Result(self.edges, ("target", "source"), coords, "edge", dict(self.info))

    def node(self, id: str | GraphNode) -> GraphNode:
        """The node with an id."""
        return self.nodes[self._at(id)]

    def of(self, kind: str) -> list[GraphNode]:
        """The nodes of one kind: "feature", "mlp", "error", "token" or "logit"."""
        if kind not in get_args(NodeKind):
            raise HooklineError(f"kind is one of {', '.join(map(repr, get_args(NodeKind)))}, got {kind!r}")
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

        Its bias, and what nodes outside the graph add, count as edges. The pre-activation is that of the model's own
        run, and the bias that of a run without any node, so a model that is not linear between its MLPs shows here.
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
        values = graph_scores.influences(self.edges, self._weights)
        return self._by_node(values, torch.ones(len(self), dtype=torch.bool), "influence")

    @property
    def scores(self) -> dict[str, float]:
        """The replacement and the completeness score, 1 if nothing goes through errors.

        Replacement is the influence of tokens as a fraction of that of tokens and errors; completeness is the fraction
        of incoming edges that are not from errors, averaged over nodes by their influence on the logits.
        """
        is_error, is_token = self._is(lambda node: node.kind == "error"), self._is(lambda node: node.kind == "token")
        return {
            "replacement": graph_scores.replacement(self.edges, self._weights, is_error, is_token),
            "completeness": graph_scores.completeness(self.edges, self._weights, is_error),
        }

    def prune(self, nodes: float = 0.8, edges: float = 0.98) -> AttributionGraph:
        """The part of the graph with these fractions of the influence on the logits, without loose ends.

        The influence of an edge is its absolute value as a fraction of all edges into its target, times the influence
        of that target; logits are weighted by their probabilities. Tokens and logits stay.
        """
        for name, value in (("nodes", nodes), ("edges", edges)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise HooklineError(
                    f"{name} is the fraction of the influence that stays, over 0 up to 1, got {value!r}"
                )
        is_target = self._is(lambda node: node.is_target)
        is_fixed = self._is(lambda node: node.kind in ("token", "logit"))
        stays, links = graph_scores.surviving(self.edges, self._weights, is_target, is_fixed, nodes, edges)
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
        turn on, and where an MLP that is a node is not linear. "model" is measured in the model itself: the only change
        is what the nodes write. Of tokens and errors, the new activation is a factor.
        """
        factors = graph_runs.factors_of(self, changes)
        edges = graph_runs.run_behind(self)
        clamp = graph_runs.Clamp.of(self, factors)
        rows = [graph_runs.predicted_changes(self, factors)]
        for is_frozen in (True, False):
            measured_changes = graph_runs.measured_changes(edges, clamp, is_frozen=is_frozen)
            rows.append(torch.tensor([measured_changes[node_id] for node_id in self.ids], dtype=torch.float64))
        at = self._is(lambda node: node.is_target)
        ids = [node.id for node in self.nodes if node.is_target]
        info = {"changes": ", ".join(f"{node_id} to {number_text(value)}" for node_id, value in changes.items())}
        coords: dict[str, list[Label]] = {"run": [*graph_runs.RUNS], "node": [*ids]}
        return Result(torch.stack(rows)[:, at], ("run", "node"), coords, "change", info)

    def heads(self, source: str | GraphNode, target: str | GraphNode) -> Result:
        """How much of an edge each head carries, from each key position to each query position.

        The edge may pass several heads in turn, or none, so the values need not sum to it.
        """
        u, v = self._at(source), self._at(target)
        values = graph_runs.through_heads(self, u, v)
        places: list[Label] = [*token_labels(self.tokens)]
        counts: list[list[Label]] = [[*range(size)] for size in values.shape[:2]]
        coords = {"layer": counts[0], "head": counts[1], "query": places, "key": places}
        info = {"edge": float(self.edges[v, u]), "source": self.ids[u], "target": self.ids[v]}
        return Result(values, tuple(coords), coords, "share", info)

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

        The head and its positions are those that carry most of the edge, unless they are given. A cell is what the
        query side's node adds to the query, times what the key side's adds to the key. The rows and columns "other" and
        "bias" are what is not in the graph. The cells sum to the score before the softmax, `info["score"]`.
        """
        requested = {"layer": layer, "head": head, "query": query, "key": key}
        shares = self.heads(source, target)
        selection = shares.isel(**{axis: [at] for axis, at in requested.items() if at is not None})
        best = selection.top(1, by="abs")
        if not best or not best[0].value:
            raise HooklineError(
                f"no head carries the edge from {shares.info['source']} to {shares.info['target']}: it is direct"
            )
        place = {axis: shares.coords[axis].index(best[0].labels[axis]) for axis in shares.axes}
        parts = graph_runs.score_parts(self, *place.values())
        names = [*self.ids, "other", "bias"]
        info = {"score": parts.score, "scale": parts.scale, "share": best[0].value, **place}
        return Result(
            parts.pairs, ("query_node", "key_node"), {"query_node": [*names], "key_node": [*names]}, "score", info
        )

    def save(self, path: str | Path, *, slug: str | None = None, scan: str | None = None) -> None:
        """Write the graph as JSON, which Neuronpedia and circuit-tracer read: metadata, qParams, nodes and links.

        `slug` is the name of the graph there, `scan` that of the model and its transcoders.
        """
        graph_files.write_graph(Path(path), self, slug, scan)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a graph in the JSON of Neuronpedia and circuit-tracer, written by `save` or by others.

        It has the edges that the file has. `intervene`, `heads` and `qk` run the model, so they need a new graph.
        """
        return cls(**graph_files.read_graph(Path(path)))

    def plot_html(self, *, title: str | None = None, theme: Literal["light", "dark"] | None = None) -> HtmlPage:
        """The graph as a page that needs nothing else: nodes by token and layer, to look into, pin and group.

        Prune a large graph first. `pinned` and `groups` of the graph are those that the page begins with; it writes its
        own to the JSON that it saves, which `load` reads.
        """
        links = int((self.edges != 0).sum())
        if len(self) > _MOST_NODES or links > _MOST_EDGES:
            raise HooklineError(
                f"this graph has {len(self):,} nodes and {links:,} edges; a page shows up to {_MOST_NODES:,} and "
                f"{_MOST_EDGES:,}: graph.prune().plot_html()"
            )
        shown = title if title is not None else "".join(self.tokens)
        into, out = self.edges.nonzero(as_tuple=True)
        places = packed_tensor(torch.stack([out.float(), into.float(), self.edges[into, out]]))
        scores = {} if not self.of("error") else self.scores
        content = graph_files.graph_content(self, "graph")
        about = {"scores": scores, "links": places, "file": content | {"links": []}}
        return graph_page({**about, "title": shown, "tokens": list(self.tokens)}, theme)

    def __repr__(self) -> str:
        kinds = [(kind, len(self.of(kind))) for kind in ("feature", "mlp", "error", "token", "logit")]
        count = ", ".join(f"{n} {'MLP' if kind == 'mlp' else kind}s" for kind, n in kinds if n)
        scores = ", ".join(f"{name} {number_text(value)}" for name, value in self.scores.items())
        logits = ", ".join(f"{node.text!r} {node.probability:.2f}" for node in self.of("logit")[:5])
        links = int((self.edges != 0).sum())
        return f"AttributionGraph of {''.join(self.tokens)!r}: {count}, {links} edges\n  {logits}; {scores}{self._fit}"

    @property
    def _fit(self) -> str:
        """How well transcoders reconstruct, if there are any."""
        explained: dict[str, float] = self.info.get("explained") or {}
        if not explained:
            return ""
        poor = [layer for layer, value in explained.items() if value < 0]
        said = f"\n  MLP outputs explained: {number_text(sum(explained.values()) / len(explained))} on average"
        why = "attention sinks (errors_only=…), or transcoders of another layer or model?"
        return f"{said}; worse than by zeros in layers {', '.join(poor)}: {why}" if poor else said

    @property
    def _weights(self) -> Float[Tensor, " node"]:
        """The probabilities of the logits, and 0 for other nodes."""
        return torch.tensor([node.probability or 0.0 if node.kind == "logit" else 0.0 for node in self.nodes]).double()

    def _is(self, holds: Callable[[GraphNode], bool]) -> Bool[Tensor, " node"]:
        return torch.tensor([holds(node) for node in self.nodes])

    def _at(self, id: str | GraphNode) -> int:
        node_id = id.id if isinstance(id, GraphNode) else id
        if node_id not in self._places:
            examples = ", ".join(self.ids[:8])
            raise HooklineError(
                f"the graph has no node {node_id!r}: it has {len(self)}, such as {examples}; see graph.nodes"
            )
        return self._places[node_id]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {node_id: at for at, node_id in enumerate(self.ids)}

    def _by_node(self, values: Tensor, chosen: Tensor, name: str, info: dict[str, Any] | None = None) -> Result:
        ids = [node_id for node_id, is_chosen in zip(self.ids, chosen.tolist(), strict=True) if is_chosen]
        if not ids:
            raise HooklineError(f"no node has an {name}")
        shown = values if len(values) == len(ids) else values[chosen]
        return Result(shown, ("node",), {"node": [*ids]}, name, info or {})
