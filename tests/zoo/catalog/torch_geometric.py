"""The convolutions, poolings, normalizations and models of torch_geometric on a small graph."""

from collections.abc import Iterator
from typing import Any

import torch
import torch_geometric.nn as geometric
from torch import nn
from zoo.network import Built, Network, filled, runs

NODES, EDGES = 20, 60

SIZES = {
    "in_channels": 8,
    "out_channels": 12,
    "hidden_channels": 16,
    "num_layers": 2,
    "edge_dim": 4,
    "heads": 2,
    "channels": 8,
    "K": 2,
    "num_relations": 3,
    "dim": 2,
    "kernel_size": 3,
    "space_dimensions": 4,
    "propagate_dimensions": 4,
    "k": 4,
    "alpha": 0.1,
    "num_layers_": 2,
    "num_nodes": NODES,
    "num_timesteps": 2,
    "num_filters": 16,
    "num_interactions": 2,
    "num_gaussians": 10,
    "cutoff": 5.0,
    "num_blocks": 2,
    "num_bilinear": 4,
    "num_spherical": 3,
    "num_radial": 3,
    "int_emb_size": 8,
    "basis_emb_size": 4,
    "out_emb_channels": 16,
    "depth": 2,
    "embedding_dim": 8,
    "dropout": 0.0,
    "num_heads": 2,
    "aggregators": ["mean", "max"],
    "scalers": ["identity"],
    "deg": torch.ones(4, dtype=torch.long),
    "num_node_types": 2,
    "num_edge_types": 3,
    "node_dim": 8,
    "edge_attr_emb_dim": 4,
    "edge_type_emb_dim": 4,
    "pool_ratios": 0.5,
    "num_types": 2,
    "att_channels": 8,
    "num_classes": 3,
    "lmax": 1,
    "num_rbf": 8,
    "num_seed_points": 2,
    "ratio": 0.5,
    "max_neighbors": 8,
    "feature_dim": 8,
    "edge_channels": 4,
    "max_z": 20,
    "local_attn_type": None,
}
"""Small values of arguments, by their names."""


def inner(size: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, out))


SPECIAL: dict[str, Any] = {
    "EdgeConv": lambda: geometric.EdgeConv(inner(16, 12)),
    "DynamicEdgeConv": None,  # torch_cluster
    "GINConv": lambda: geometric.GINConv(inner(8, 12)),
    "GINEConv": lambda: geometric.GINEConv(inner(8, 12), edge_dim=4),
    "NNConv": lambda: geometric.NNConv(8, 12, inner(4, 96)),
    "CGConv": lambda: geometric.CGConv(8, 4),
    "PointNetConv": lambda: geometric.PointNetConv(inner(11, 12)),
    "PPFConv": lambda: geometric.PPFConv(inner(12, 12)),
    "PointGNNConv": lambda: geometric.PointGNNConv(inner(8, 3), inner(11, 12), inner(12, 8)),
    "MeshCNNConv": None,
    "GPSConv": lambda: geometric.GPSConv(8, geometric.GCNConv(8, 8), heads=2),
    "AntiSymmetricConv": lambda: geometric.AntiSymmetricConv(8),
    "DirGNNConv": lambda: geometric.DirGNNConv(geometric.GCNConv(8, 12)),
    "DeepGCNLayer": lambda: geometric.DeepGCNLayer(geometric.GCNConv(8, 8), nn.LayerNorm(8), nn.ReLU()),
    "GAE": lambda: geometric.Sequential(
        "x, edge_index",
        [(geometric.GCNConv(8, 4), "x, edge_index -> x"), (geometric.InnerProductDecoder(), "x, edge_index -> y")],
    ),
    "PNAConv": lambda: geometric.PNAConv(8, 12, ["mean", "max"], ["identity"], torch.ones(4, dtype=torch.long)),
    "SimpleConv": lambda: geometric.SimpleConv(),
    "DNAConv": lambda: geometric.DNAConv(8, heads=2),
    "FAConv": lambda: geometric.FAConv(8),
    "GCN2Conv": lambda: geometric.GCN2Conv(8, 0.1),
    "MLP": lambda: geometric.MLP([8, 16, 4]),
    "DimeNet": lambda: geometric.DimeNet(16, 1, 1, 2, 3, 3),
    "ResGatedGraphConv": lambda: geometric.ResGatedGraphConv(8, 12, edge_dim=4),
}


def build(name: str) -> Built:
    """The network on the first kind of input that it takes."""
    cls = getattr(geometric, name)
    module = SPECIAL[name]() if SPECIAL.get(name) else cls(**filled(cls, SIZES))
    x, edges = torch.randn(NODES, 8), torch.randint(0, NODES, (2, EDGES))
    edge_attr, edge_type = torch.randn(EDGES, 4), torch.randint(0, 3, (EDGES,))
    position, normal, batch = torch.randn(NODES, 3), torch.randn(NODES, 3), torch.arange(NODES) // 10
    weight = torch.rand(EDGES)
    atoms = torch.randint(1, 10, (NODES,))
    return runs(
        module,
        ((x, edges, edge_attr), {}),
        ((x, edges), {}),
        ((x, edges, weight), {}),
        ((x, edges, torch.rand(EDGES, 2)), {}),
        ((x, edges, edge_type), {}),
        ((x, edges, edge_type, edge_attr), {}),
        ((x, x, edges), {}),
        ((x, position, edges), {}),
        ((x, position, normal, edges), {}),
        ((x[:, None].repeat(1, 3, 1), edges), {}),
        ((x, edges, edge_attr, batch), {}),
        ((x, edges, batch), {}),
        ((x, x, edges, edge_attr), {}),
        ((x, torch.randint(0, 2, (NODES,)), edges, edge_type, edge_attr), {}),
        ((x, batch), {}),
        ((x,), {}),
        ((atoms, position, batch), {}),
        ((edges,), {}),
        ((x, x), {}),
        ((x, edges, position), {}),
        ((torch.randn(2, NODES, 8),), {}),
    )


def networks() -> Iterator[Network]:
    """One row per layer, pooling, aggregation and model."""
    names = [name for name in dir(geometric) if isinstance(getattr(geometric, name), type)]
    for name in names:
        cls = getattr(geometric, name)
        if (
            issubclass(cls, nn.Module)
            and not name.startswith(("CuGraph", "MessagePassing"))
            and SPECIAL.get(name, 0) is not None
        ):
            yield Network(name, lambda name=name: build(name))
