"""Graph files: the JSON of attribution graphs that Neuronpedia and circuit-tracer read.

    {"metadata": …, "qParams": …, "nodes": [{"node_id": "3_120_5", …}], "links": [{"source", "target", "weight"}]}

Ids are those of circuit-tracer (layer_feature_position; E_token_position; a layer past the last for logits), except for
errors, whose ids there can be those of features. MLPs have a type of their own, which other readers show as features.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import HooklineError
from hookline.experiments.graphs.graph_edges import GraphNode, NodeKind
from hookline.experiments.graphs.graph_scores import influence_shares
from hookline.files.tensorfile import read_json, taking_apart, write_bytes

if TYPE_CHECKING:
    from hookline.experiments.graphs.node_graph import AttributionGraph

_TYPES: dict[NodeKind, str] = {
    "feature": "cross layer transcoder",
    "mlp": "mlp",
    "error": "mlp reconstruction error",
    "token": "embedding",
    "logit": "logit",
}
_LARGEST = torch.finfo(torch.float32).max
_MOST_NODES = 20_000
_KINDS: dict[str, NodeKind] = {text: kind for kind, text in _TYPES.items()}


def write_graph(path: Path, graph: AttributionGraph, slug: str | None = None, scan: str | None = None) -> None:
    """Write a graph, whole or not at all."""
    write_bytes(path, json.dumps(graph_content(graph, slug or path.stem, scan), allow_nan=False).encode(), "the graph")


def graph_content(graph: AttributionGraph, slug: str, scan: str | None = None) -> dict[str, Any]:
    """The graph as plain lists, numbers and strings."""
    from hookline import __version__

    shares = influence_shares(graph.influence.values.double()).tolist()
    last = max(node.layer or 0 for node in graph.nodes)
    into, out = graph.edges.nonzero(as_tuple=True)
    weights = graph.edges[into, out].tolist()
    ids = graph.ids
    return {
        "metadata": {
            "slug": slug,
            "scan": scan or str(graph.info.get("model", "custom")),
            "transcoder_list": [],
            "prompt_tokens": list(graph.tokens),
            "prompt": "".join(graph.tokens),
            "node_threshold": graph.info.get("pruned", [1.0])[0],
            "schema_version": 1,
            "info": {"generator": {"name": "hookline", "version": __version__}},
            "hookline": {key: value for key, value in graph.info.items() if not isinstance(value, torch.Tensor)},
        },
        "qParams": {
            "pinnedIds": list(graph.pinned),
            "supernodes": [[name, *members] for name, members in graph.groups.items()],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": [
            _written(node, last, share, float(graph.bias[at]), float(graph.rest[at]))
            for at, (node, share) in enumerate(zip(graph.nodes, shares, strict=True))
        ],
        "links": [
            {"source": ids[u], "target": ids[v], "weight": weight}
            for u, v, weight in zip(out.tolist(), into.tolist(), weights, strict=True)
        ],
    }


def _written(node: GraphNode, last: int, influence: float, bias: float, rest: float) -> dict[str, Any]:
    """A node as it is in the file; `last` is the last layer."""
    layer = {"token": "E", "logit": str(last + 1)}.get(node.kind, str(node.layer))
    feature = {"token": node.pos, "error": -1, "mlp": -1}.get(node.kind, node.feature)
    if node.kind == "feature" and node.layer is not None and node.feature is not None:
        total = node.layer + node.feature
        feature = total * (total + 1) // 2 + node.feature  # Cantor's pairing of layer and feature
    label = {"logit": f'Output "{node.text}" (p={node.probability or 0:.3f})', "mlp": f"MLP {node.layer}"}
    sums = {"pre_activation": node.pre_activation, "bias": bias, "rest": rest} if node.is_target else {}
    return {
        "node_id": node.id,
        "feature": feature,
        "layer": layer,
        "ctx_idx": node.pos,
        "feature_type": _TYPES[node.kind],
        "token_prob": node.probability or 0.0,
        "is_target_logit": node.kind == "logit",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": f"{node.id}-0",
        "clerp": label.get(node.kind, ""),
        "influence": influence,
        "activation": node.activation,
        **sums,
    }


def read_graph(path: Path) -> dict[str, Any]:
    """The fields of a graph in a file."""
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise HooklineError(f"there is no graph at {path}") from None
    if not isinstance(content, dict) or not {"metadata", "nodes", "links"} <= set(content):
        raise HooklineError(f"{path} is not an attribution graph: it needs metadata, qParams, nodes and links")
    with taking_apart(str(path)):
        return _fields(path, content)


def _fields(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    about, query_params = content["metadata"], content.get("qParams") or {}
    tokens = tuple(map(str, about["prompt_tokens"]))
    if len(content["nodes"]) > _MOST_NODES:
        raise HooklineError(
            f"{path} has {len(content['nodes']):,} nodes; a graph has up to {_MOST_NODES:,}: prune it first"
        )
    nodes = tuple(_read(path, node, tokens) for node in content["nodes"])
    places = {node.id: at for at, node in enumerate(nodes)}
    if len(places) != len(nodes):
        twice = next(node.id for at, node in enumerate(nodes) if places[node.id] != at)
        raise HooklineError(f"{path} has two nodes with the id {twice!r}, so its links are ambiguous")
    edges = torch.zeros(len(nodes), len(nodes))
    for link in content["links"]:
        source, target, weight = places.get(link["source"]), places.get(link["target"]), float(link["weight"])
        if source is None or target is None or not abs(weight) <= _LARGEST:
            raise HooklineError(f"{path} has a link that cannot be used: {link}")
        if _depth(nodes[source]) >= _depth(nodes[target]):
            raise HooklineError(f"{path} has a link to a node that is not after its source: {link}")
        edges[target, source] = weight
    sums = [[float(node.get(name) or 0.0) for node in content["nodes"]] for name in ("bias", "rest")]
    info = {"model": about.get("scan", ""), **(about.get("hookline") or {})}
    groups = {str(name): tuple(map(str, members)) for name, *members in query_params.get("supernodes") or []}
    return {
        "nodes": nodes,
        "edges": edges,
        "bias": torch.tensor(sums[0], dtype=torch.float64),
        "rest": torch.tensor(sums[1], dtype=torch.float64),
        "tokens": tokens,
        "info": info,
        "pinned": tuple(map(str, query_params.get("pinnedIds") or ())),
        "groups": groups,
    }


def _number(x: Any) -> float | None:
    return None if x is None else float(x)


def _depth(node: GraphNode) -> float:
    """Where a node is on the way from tokens to logits."""
    return {"token": -1, "logit": math.inf}.get(node.kind, node.layer or 0)


def _read(path: Path, node: dict[str, Any], tokens: tuple[str, ...]) -> GraphNode:
    """A node of a file."""
    kind = _KINDS.get(node["feature_type"], "feature")
    pos, name = int(node["ctx_idx"]), str(node["node_id"])
    if pos not in range(len(tokens)):
        raise HooklineError(f"{path} has the node {name!r} at position {pos}, but its prompt has {len(tokens)} tokens")
    parts = name.split("_")
    layer = int(node["layer"]) if kind in ("feature", "mlp", "error") else None
    feature = int(parts[1]) if kind in ("feature", "token", "logit") and len(parts) == 3 else None
    word = re.fullmatch(r'Output "(.*)" \(p=.*\)', str(node.get("clerp") or ""), re.DOTALL)
    text = (word[1] if word else str(node.get("clerp") or "")) if kind == "logit" else tokens[pos]
    return GraphNode(
        name,
        kind,
        pos,
        layer,
        feature,
        text,
        _number(node.get("activation")),
        _number(node.get("pre_activation")),
        float(node["token_prob"]) if kind == "logit" else None,
    )
