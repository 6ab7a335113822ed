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


def graph() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(NODES, 8), torch.randint(0, NODES, (2, EDGES))


def groups() -> torch.Tensor:
    return torch.arange(NODES) // 10


def atoms() -> tuple[torch.Tensor, ...]:
    return torch.randint(1, 10, (NODES,)), torch.randn(NODES, 3), groups()


def near(position: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of a group with their distances; without pyg-lib there is no search for neighbors."""
    pairs = (batch[:, None] == batch) & ~torch.eye(len(batch), dtype=torch.bool)
    edges = pairs.nonzero().t()
    return edges, (position[edges[0]] - position[edges[1]]).norm(dim=1)


def dense() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, NODES, 8), (torch.rand(2, NODES, NODES) < 0.3).float()


def two_kinds() -> tuple[dict[str, torch.Tensor], dict[tuple[str, str, str], torch.Tensor]]:
    edges = {kinds: torch.randint(0, NODES, (2, EDGES)) for kinds in KINDS[1]}
    return {name: torch.randn(NODES, 8) for name in KINDS[0]}, edges


def triples() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, NODES, (6,)), torch.randint(0, 3, (6,)), torch.randint(0, NODES, (6,))


KINDS = (["a", "b"], [("a", "to", "b"), ("b", "back", "a")])

MORE: dict[str, tuple[Any, Any]] = {
    "AttentionalAggregation": (
        lambda: geometric.AttentionalAggregation(inner(8, 1)),
        lambda: (torch.randn(NODES, 8), groups()),
    ),
    "ComplEx": (lambda: geometric.ComplEx(NODES, 3, 8), triples),
    "DMoNPooling": (lambda: geometric.DMoNPooling(8, 4), dense),
    "DenseGATConv": (lambda: geometric.DenseGATConv(8, 12, heads=2), dense),
    "DenseGCNConv": (lambda: geometric.DenseGCNConv(8, 12), dense),
    "DenseGINConv": (lambda: geometric.DenseGINConv(inner(8, 12)), dense),
    "DenseGraphConv": (lambda: geometric.DenseGraphConv(8, 12), dense),
    "DenseSAGEConv": (lambda: geometric.DenseSAGEConv(8, 12), dense),
    "DegreeScalerAggregation": (
        lambda: geometric.DegreeScalerAggregation(["mean", "max"], ["identity", "amplification"], torch.ones(4).long()),
        lambda: (torch.randn(NODES, 8), groups()),
    ),
    "DiffGroupNorm": (lambda: geometric.DiffGroupNorm(8, 2), lambda: (torch.randn(NODES, 8),)),
    "DistMult": (lambda: geometric.DistMult(NODES, 3, 8), triples),
    "EquilibriumAggregation": (
        lambda: geometric.EquilibriumAggregation(8, 12, [8]),
        lambda: (torch.randn(NODES, 8), groups()),
    ),
    "GroupAddRev": (lambda: geometric.GroupAddRev(geometric.GCNConv(4, 4)), graph),
    "HANConv": (lambda: geometric.HANConv(8, 12, KINDS), two_kinds),
    "HEATConv": (
        lambda: geometric.HEATConv(8, 12, 2, 3, 4, 4, 4),
        lambda: (
            *graph(),
            torch.randint(0, 2, (NODES,)),
            torch.randint(0, 3, (EDGES,)),
            torch.randn(EDGES, 4),
        ),
    ),
    "HGTConv": (lambda: geometric.HGTConv(8, 12, KINDS, heads=2), two_kinds),
    "HeteroConv": (
        lambda: geometric.HeteroConv({kinds: geometric.SAGEConv((8, 8), 12) for kinds in KINDS[1]}),
        two_kinds,
    ),
    "HeteroDictLinear": (lambda: geometric.HeteroDictLinear({"a": 8, "b": 8}, 12), lambda: two_kinds()[:1]),
    "HypergraphConv": (lambda: geometric.HypergraphConv(8, 12), graph),
    "JumpingKnowledge": (
        lambda: geometric.JumpingKnowledge("lstm", 8, 2),
        lambda: ([torch.randn(NODES, 8), torch.randn(NODES, 8)],),
    ),
    "MLPAggregation": (
        lambda: geometric.MLPAggregation(8, 12, 10, num_layers=1),
        lambda: (torch.randn(NODES, 8), groups()),
    ),
    "MaskLabel": (
        lambda: geometric.MaskLabel(3, 8),
        lambda: (torch.randn(NODES, 8), torch.randint(0, 3, (NODES,)), torch.rand(NODES) < 0.5),
    ),
    "MemPooling": (lambda: geometric.MemPooling(8, 12, 2, 3), lambda: (torch.randn(NODES, 8), groups())),
    "MultiAggregation": (
        lambda: geometric.MultiAggregation(["mean", "std", "softmax"]),
        lambda: (torch.randn(NODES, 8), groups()),
    ),
    "PNA": (
        lambda: geometric.PNA(8, 16, 2, 4, aggregators=["mean"], scalers=["identity"], deg=torch.ones(4).long()),
        graph,
    ),
    "PatchTransformerAggregation": (
        lambda: geometric.PatchTransformerAggregation(8, 12, 2, 8),
        lambda: (torch.randn(NODES, 8), groups()),
    ),
    "QFormer": (lambda: geometric.QFormer(8, 16, 4, 2, 2), lambda: (torch.randn(2, 5, 8),)),
    "QuantileAggregation": (
        lambda: geometric.QuantileAggregation([0.25, 0.5]),
        lambda: (torch.randn(NODES, 8), groups()),
    ),
    "RGATConv": (
        lambda: geometric.RGATConv(8, 12, 3),
        lambda: (*graph(), torch.randint(0, 3, (EDGES,))),
    ),
    "RotatE": (lambda: geometric.RotatE(NODES, 3, 8), triples),
    "SchNet": (lambda: geometric.SchNet(16, 16, 2, 10, interaction_graph=near), atoms),
    "Set2Set": (lambda: geometric.Set2Set(8, 2), lambda: (torch.randn(NODES, 8), groups())),
    "SignedConv": (lambda: geometric.SignedConv(8, 12, True), lambda: (*graph(), graph()[1])),
    "SignedGCN": (lambda: geometric.SignedGCN(8, 12, 2), lambda: (*graph(), graph()[1])),
    "TransE": (lambda: geometric.TransE(NODES, 3, 8), triples),
    "WLConv": (geometric.WLConv, lambda: (torch.randint(0, 4, (NODES,)), graph()[1])),
}
"""Those with inputs of their own, and these inputs."""


def build(name: str) -> Built:
    """The network on its inputs, or on the first kind of input that it takes."""
    if name in MORE:
        make, inputs = MORE[name]
        return make(), inputs(), {}
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
