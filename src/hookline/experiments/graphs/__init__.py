"""Attribution graphs: how the tokens of a prompt, through features or MLPs, lead to the logits of the next token."""

from hookline.experiments.graphs.graph_attribution import attribution_graph
from hookline.experiments.graphs.graph_edges import GraphNode
from hookline.experiments.graphs.node_graph import AttributionGraph

__all__ = ["AttributionGraph", "GraphNode", "attribution_graph"]


def __dir__() -> list[str]:
    return __all__
