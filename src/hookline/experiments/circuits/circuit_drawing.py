"""Circuits drawn: nodes in rows from the input to the logits, with matplotlib and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hookline.errors import HooklineError
from hookline.experiments.core.labels import needed
from hookline.experiments.edges import sender_turn
from hookline.pages.html_page import HtmlPage, circuit_page

if TYPE_CHECKING:
    from hookline.experiments.circuits.circuit_edges import Circuit

_MOST_EDGES = 5000


def node_rows(nodes: list[str]) -> dict[str, list[str]]:
    """The nodes of each row, from the input to the logits: features by their points, others by layer and kind."""
    rows: dict[str, list[str]] = {}
    for node in nodes:
        rows.setdefault(_row_name(node), []).append(node)
    return rows


def _row_name(node: str) -> str:
    if "/" in node:
        return node.partition("/")[0]
    if node in ("embed", "logits"):
        return node
    layer, turn = sender_turn(node)
    return f"L{layer} {'MLP' if turn else 'heads'}"


def _is_side(row: str) -> bool:
    """Whether a row is drawn beside the others: MLPs, past which most edges go."""
    return row.endswith(" MLP")


def _short(node: str) -> str:
    """The label of a node in its row: a feature without its point."""
    return node.partition("/")[2] or node


def draw_circuit(circuit: Circuit, ax: Any = None) -> Any:
    """Draw the nodes by layer, with a line for each edge, as wide as its score; returns the matplotlib Axes."""
    needed("matplotlib", "plot", "plot")
    from matplotlib import pyplot

    rows = node_rows(circuit.nodes)
    width = max((len(nodes) for nodes in rows.values()), default=1)
    places: dict[str, tuple[float, float]] = {}
    for y, (name, nodes) in enumerate(rows.items()):
        first = -(width + 1) / 2 if _is_side(name) else -(len(nodes) - 1) / 2
        places |= {node: (first + x, y) for x, node in enumerate(nodes)}
    ax = ax if ax is not None else pyplot.subplots(figsize=(max(8, 1.1 * width), 0.7 * (len(rows) + 1)))[1]
    edges = circuit.edges
    most = float(edges.values.abs().max()) if len(edges) else 1.0
    for sender, node, _, value in circuit.links:
        share = abs(value) / (most or 1.0)
        color = "tab:orange" if value >= 0 else "tab:blue"
        line = {"color": color, "lw": 0.5 + 4 * share, "alpha": 0.3 + 0.6 * share, "arrowstyle": "-"}
        ax.annotate("", places[node], places[sender], arrowprops=line | {"connectionstyle": "arc3,rad=0.2"})
    for node, (left, height) in places.items():
        box = {"boxstyle": "round", "fc": "white", "ec": "0.4"}
        ax.text(left, height, _short(node), ha="center", va="center", fontsize=8, bbox=box, zorder=5)
    said = f"{len(circuit)} of {len(circuit.scores)} edges: orange raises {circuit.scores.name}, blue lowers it"
    ax.set_title(said, fontsize=9)
    half = (width + 1) / 2
    for y, name in enumerate(rows):
        if "." in name:
            ax.text(-half, y, name, ha="right", va="center", fontsize=8, color="0.4")
    ax.set(xlim=(-half - 0.5, half + 0.5), ylim=(-0.6, max(len(rows) - 0.4, 0.6)))
    ax.axis("off")
    return ax


def circuit_html(circuit: Circuit, title: str | None, theme: Literal["light", "dark"] | None) -> HtmlPage:
    """The circuit as a page: see `Circuit.plot_html`."""
    if len(circuit) > _MOST_EDGES:
        raise HooklineError(
            f"this circuit has {len(circuit):,} edges; a page shows up to {_MOST_EDGES:,}: use a smaller size, as in "
            f"circuits.circuit(scores, {_MOST_EDGES / len(circuit.scores):.2g}).plot_html()"
        )
    rows = node_rows(circuit.nodes)
    number = {node: at for at, node in enumerate(node for nodes in rows.values() for node in nodes)}
    shown = f"{len(circuit)} of {len(circuit.scores)} edges of {circuit.scores.info.get('model', 'the model')}"
    data: dict[str, Any] = {
        "title": shown if title is None else title,
        "metric": circuit.scores.name,
        "rows": [{"name": x, "side": _is_side(x), "nodes": list(map(_short, nodes))} for x, nodes in rows.items()],
        "edges": [[number[sender], number[node], note, value] for sender, node, note, value in circuit.links],
    }
    return circuit_page(data, theme)
