"""Circuits: some of the edges of a model, in the order in which they are chosen, and drawn."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hookline.experiments.core.labels import needed
from hookline.experiments.edges import EdgeScores, sender_turn

Method: TypeAlias = Literal["top", "greedy"]
By: TypeAlias = Literal["abs", "value"]


def edge_order(scores: EdgeScores, method: Method, by: By) -> Int[Tensor, " edge"]:
    """The edges from the first to the last that a circuit gets."""
    sizes = scores.values.abs() if by == "abs" else scores.values
    order = sizes.argsort(descending=True, stable=True)
    if method == "top":
        return order
    rank = order.argsort().tolist()
    into: dict[str, list[int]] = {}
    groups = group_size(scores.senders, scores.receivers)
    for number, receiver in enumerate(scores.receivers):
        for node in nodes_of(receiver, groups):
            into.setdefault(node, []).append(rank[number])
    waiting, reached, found = list(into["logits"]), {"logits"}, []
    heapq.heapify(waiting)
    taken: set[int] = set()
    while waiting:
        best = heapq.heappop(waiting)
        number = int(order[best])
        if number in taken:
            continue
        taken.add(number)
        found.append(number)
        sender = scores.senders[number]
        if sender not in reached:
            reached.add(sender)
            for each in into.get(sender, ()):
                heapq.heappush(waiting, each)
    return torch.tensor(found)


def group_size(senders: Sequence[str], receivers: Sequence[str]) -> int:
    """How many heads share keys and values."""
    heads = {each for each in senders if each.startswith("L0H")}
    shared = {each for each in receivers if each.startswith("L0KV") and each.endswith(".k")}
    return len(heads) // len(shared) if shared else 1


def nodes_of(receiver: str, group: int) -> list[str]:
    """The senders that a receiver is a part of."""
    found = re.fullmatch(r"L(\d+)(H|KV)(\d+)\.[qkv]", receiver)
    if found is None:
        return [receiver]
    layer, kind, number = found[1], found[2], int(found[3])
    return [f"L{layer}H{head}" for head in (range(number * group, (number + 1) * group) if kind == "KV" else [number])]


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """Some of the edges of a model, with the scores of all."""

    scores: EdgeScores
    included: Bool[Tensor, " edge"]

    def __len__(self) -> int:
        return int(self.included.sum())

    @property
    def edges(self) -> EdgeScores:
        """The scores of the edges of the circuit."""
        return self.scores._picked(self.included.nonzero().flatten().tolist())

    @property
    def nodes(self) -> list[str]:
        """The senders and receivers of the circuit, without duplicates."""
        edges, group = self.edges, group_size(self.scores.senders, self.scores.receivers)
        ends = [node for each in edges.receivers for node in nodes_of(each, group)]
        known = set(edges.senders) | set(ends)
        return [each for each in (*dict.fromkeys(self.scores.senders), "logits") if each in known]

    def plot(self, ax: Any = None) -> Any:
        """Draw the nodes by layer, with a line for each edge, as wide as its score; returns the matplotlib Axes."""
        needed("matplotlib", "plot", "plot")
        from matplotlib import pyplot

        edges, group = self.edges, group_size(self.scores.senders, self.scores.receivers)
        nodes = self.nodes
        depth = max((sender_turn(each)[0] for each in nodes if each != "logits"), default=0) + 1
        places = _places(nodes, depth)
        ax = ax if ax is not None else pyplot.subplots(figsize=(8, 1.2 * (depth + 2)))[1]
        most = float(edges.values.abs().max()) if len(edges) else 1.0
        for sender, receiver, value in zip(edges.senders, edges.receivers, edges.values.tolist(), strict=True):
            for node in nodes_of(receiver, group):
                share = abs(value) / (most or 1.0)
                color = "tab:blue" if value >= 0 else "tab:red"
                line = {"color": color, "lw": 0.5 + 4 * share, "alpha": 0.3 + 0.6 * share, "arrowstyle": "-"}
                ax.annotate("", places[node], places[sender], arrowprops=line | {"connectionstyle": "arc3,rad=0.2"})
        for node, (x, y) in places.items():
            box = {"boxstyle": "round", "fc": "white", "ec": "0.4"}
            ax.text(x, y, node, ha="center", va="center", fontsize=8, bbox=box, zorder=5)
        ax.set_title(
            f"{len(self)} of {len(self.scores)} edges: blue raises {self.scores.name}, red lowers it", fontsize=9
        )
        xs, ys = zip(*places.values(), strict=True) if places else ((0,), (0,))
        ax.set(xlim=(min(xs) - 1, max(xs) + 1), ylim=(min(ys) - 0.5, max(ys) + 0.5))
        ax.axis("off")
        return ax

    def __repr__(self) -> str:
        return f"Circuit: {len(self)} of {len(self.scores)} edges, {len(self.nodes)} nodes\n{self.edges.top(5)!r}"


def _places(nodes: Sequence[str], depth: int) -> dict[str, tuple[float, float]]:
    """Where each node is drawn: later layers above earlier ones, MLPs in a column beside the heads."""
    heads = [int(node.partition("H")[2]) for node in nodes if node.startswith("L")]
    columns = {head: at for at, head in enumerate(sorted(set(heads)))}
    found = {}
    for node in nodes:
        layer, turn = (depth, 0) if node == "logits" else sender_turn(node)
        x = columns[int(node.partition("H")[2])] if node.startswith("L") else len(columns) + 0.5 * (node[:3] == "mlp")
        found[node] = (x, layer + 0.4 * turn)
    return found
