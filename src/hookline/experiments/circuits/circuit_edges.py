"""Circuits: some of the edges of a model, in the order in which they are chosen."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hookline.experiments.circuits.circuit_drawing import circuit_html, draw_circuit
from hookline.experiments.edges import EdgeScores
from hookline.pages.html_page import HtmlPage

Method: TypeAlias = Literal["top", "greedy"]
By: TypeAlias = Literal["abs", "value"]


def by_size(values: Float[Tensor, " cell"], by: By) -> Int[Tensor, " cell"]:
    """The cells from the largest to the smallest."""
    return (values.abs() if by == "abs" else values).argsort(descending=True, stable=True)


def edge_order(scores: EdgeScores, method: Method, by: By) -> Int[Tensor, " edge"]:
    """The edges from the first to the last that a circuit gets."""
    order = by_size(scores.values, by)
    if method == "top":
        return order
    rank = order.argsort().tolist()
    into: dict[str, list[int]] = {}
    groups = group_size(scores.senders, scores.receivers)
    for number, receiver in enumerate(scores.receivers):
        for node in nodes_of(receiver, groups):
            into.setdefault(node, []).append(rank[number])
    waiting, reached, chosen_edges = list(into["logits"]), {"logits"}, []
    heapq.heapify(waiting)
    taken: set[int] = set()
    while waiting:
        best = heapq.heappop(waiting)
        number = int(order[best])
        if number in taken:
            continue
        taken.add(number)
        chosen_edges.append(number)
        sender = scores.senders[number]
        if sender not in reached:
            reached.add(sender)
            for edge_rank in into.get(sender, ()):
                heapq.heappush(waiting, edge_rank)
    return torch.tensor(chosen_edges)


def group_size(senders: Sequence[str], receivers: Sequence[str]) -> int:
    """How many heads share keys and values."""
    heads = {sender for sender in senders if sender.startswith("L0H")}
    shared = {receiver for receiver in receivers if receiver.startswith("L0KV") and receiver.endswith(".k")}
    return len(heads) // len(shared) if shared else 1


def nodes_of(receiver: str, group: int) -> list[str]:
    """The senders that a receiver is a part of."""
    match = re.fullmatch(r"L(\d+)(H|KV)(\d+)\.[qkv]", receiver)
    if match is None:
        return [receiver]
    layer, kind, number = match[1], match[2], int(match[3])
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
        ends = [node for receiver in edges.receivers for node in nodes_of(receiver, group)]
        circuit_nodes = set(edges.senders) | set(ends)
        return [node for node in (*dict.fromkeys(self.scores.senders), "logits") if node in circuit_nodes]

    @property
    def links(self) -> list[tuple[str, str, str, float]]:
        """For each edge its sender, the node that receives it, what of that node, and where, and the score.

        An edge into keys or values that heads share is one for each of these heads, with an equal part of the score.
        """
        edges, group = self.edges, group_size(self.scores.senders, self.scores.receivers)
        links = []
        for at, (sender, receiver) in enumerate(zip(edges.senders, edges.receivers, strict=True)):
            nodes = nodes_of(receiver, group)
            part = receiver.rpartition(".")[2] if receiver != nodes[0] else ""
            note = " ".join(str(word) for word in (part, *([edges.positions[at]] if edges.positions else [])) if word)
            links += [(sender, node, note, float(edges.values[at]) / len(nodes)) for node in nodes]
        return links

    def plot(self, ax: Any = None) -> Any:
        """Draw the nodes by layer, with a line for each edge, as wide as its score; returns the matplotlib Axes."""
        return draw_circuit(self, ax)

    def plot_html(self, *, title: str | None = None, theme: Literal["light", "dark"] | None = None) -> HtmlPage:
        """The same as a page that needs nothing else: choose the number of edges, and click nodes for theirs."""
        return circuit_html(self, title, theme)

    def __repr__(self) -> str:
        best = f"\n{self.edges.top(5)!r}" if len(self) else ""
        return f"Circuit: {len(self)} of {len(self.scores)} edges, {len(self.nodes)} nodes{best}"
