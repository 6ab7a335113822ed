"""The edges of an attribution graph: what each node of a prompt's linear model reads from every earlier one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.graphs.graph_scores import influences
from hookline.experiments.graphs.linear_runs import EMBEDDING, LOGITS, Cut, LinearRun, Reader, mlp_cuts
from hookline.model import HookedModel
from hookline.progress import progress_bar
from hookline.sae.transcoders import Transcoders

NodeKind: TypeAlias = Literal["feature", "mlp", "error", "token", "logit"]
WHOLE = -1
"""In place of a feature: the whole MLP."""


@dataclass(frozen=True)
class GraphNode:
    """A node: a feature or an MLP (what it writes at a position), an MLP's error, a token's embedding, or a logit."""

    id: str
    kind: NodeKind
    pos: int
    layer: int | None = None
    feature: int | None = None
    """The index of a feature; the token id of a token or a logit."""
    text: str = ""
    activation: float | None = None
    """Of a feature its activation, of an MLP the norm of what it writes."""
    pre_activation: float | None = None
    """What its incoming edges and its bias sum to; None for errors and tokens, which have no incoming edges."""
    probability: float | None = None
    """Of a logit: the probability of its token."""

    @property
    def is_target(self) -> bool:
        """Whether it has incoming edges."""
        return self.kind in ("feature", "mlp", "logit")


class LocalModel:
    """A model on one prompt, as a sum of features and errors around frozen attention and norms."""

    def __init__(
        self,
        model: HookedModel,
        inputs: Mapping[str, Any],
        transcoders: Transcoders | None,
        errors_only: Sequence[int],
        watch: Sequence[str] = (),
    ) -> None:
        self.model, self.transcoders, self.errors_only = model, transcoders, list(errors_only)
        cuts = mlp_cuts(model)
        skips: dict[int, Callable[[Tensor], Tensor]] = {}
        for transcoder in transcoders or ():
            reads, writes = transcoders.points(model, transcoder.layer)  # type: ignore[union-attr]
            cuts[transcoder.layer] = Cut(reads, writes)
            if transcoder.W_skip is not None:
                skips[transcoder.layer] = transcoder.skip
        if not cuts:
            raise HooklineError(
                f"no layer of {model.cfg.architecture} has an MLP whose input and output are points: mlp.hook_in or "
                f"hook_mlp_in, and hook_mlp_out"
            )
        self.run = LinearRun(model, inputs, dict(sorted(cuts.items())), skips, watch)
        with torch.no_grad():
            self.features = {layer: self.active(layer, self.run.inputs) for layer in self.coded}
            self.errors = {
                layer: self.run.outputs[layer] - self.reconstructed(layer, self.run.inputs, self.features)
                for layer in self.coded
            }
        whole = {layer: x for layer, x in self.run.outputs.items() if layer not in self.features}
        self.directions = {layer: torch.nn.functional.normalize(x, dim=-1) for layer, x in whole.items()}
        self.encoders = {layer: self.run.encoders(layer, x) for layer, x in self.directions.items()}

    @property
    def coded(self) -> list[int]:
        """The layers that have a transcoder."""
        return self.transcoders.layers if self.transcoders is not None else []

    def explained(self) -> dict[str, float]:
        """The part of each MLP's output that its transcoder reconstructs, by layer; negative if zeros were better."""
        positions = [pos for pos in range(self.run.n_pos) if pos not in self.errors_only]
        sizes = {layer: float(self.run.outputs[layer][positions].float().square().sum()) for layer in self.errors}
        missed = {layer: float(x[positions].float().square().sum()) for layer, x in self.errors.items()}
        return {str(layer): 1 - missed[layer] / size for layer, size in sizes.items() if size}

    def active(self, layer: int, inputs: Mapping[Reader, Tensor]) -> Float[Tensor, "pos d_sae"]:
        """The activations of a layer's features; 0 at positions that have an error only."""
        assert self.transcoders is not None
        activations = self.transcoders[layer].encode(inputs[layer])
        activations[self.errors_only] = 0
        return activations

    def constant(self, layer: int, inputs: Mapping[Reader, Tensor], _made: Any = None) -> Float[Tensor, "pos d_model"]:
        """What is written in place of an MLP without any node: the bias and the skip connection of a transcoder."""
        if self.transcoders is None or layer not in self.transcoders:
            return torch.zeros_like(self.run.outputs[layer])
        return self.transcoders.constant(layer, inputs[layer]).to(self.run.outputs[layer])

    def reconstructed(
        self, layer: int, inputs: Mapping[Reader, Tensor], features: Mapping[int, Tensor]
    ) -> Float[Tensor, "pos d_model"]:
        """What features write to a layer's output, with the constant."""
        total = self.constant(layer, inputs)
        for transcoder in self.transcoders or ():
            if layer in transcoder.writes:
                total = total + transcoder.decode(features[transcoder.layer])[layer].to(total)
        return total

    @cached_property
    def without_nodes(self) -> tuple[dict[Reader, Tensor], Float[Tensor, " vocab"]]:
        """The readers and logits in a run of the frozen model in which no node writes: what biases contribute."""
        return self.run.forward(torch.zeros_like(self.run.embedding), self.constant)


@dataclass(frozen=True)
class _Targets:
    """Nodes that read at one point: their columns, positions, what they read, and the sums to be explained."""

    reader: Reader
    columns: Int[Tensor, " node"]
    positions: Int[Tensor, " node"]
    vectors: Float[Tensor, "node d"]
    pre: Float[Tensor, " node"]
    bias: Float[Tensor, " node"]

    def some(self, chosen: Tensor) -> _Targets:
        fields = (x[chosen] for x in (self.columns, self.positions, self.vectors, self.pre, self.bias))
        return _Targets(self.reader, *fields)


class _Writers:
    """What nodes write: vectors by layer and position, and the column of each."""

    def __init__(self) -> None:
        self.parts: dict[int, list[tuple[int, Tensor, Tensor]]] = {}

    def add(self, layer: int, pos: int, columns: Tensor, vectors: Float[Tensor, "node d_model"]) -> None:
        """Nodes that write at a position in place of a layer's MLP, or as embeddings."""
        self.parts.setdefault(layer, []).append((pos, columns, vectors))

    def of(self, column: int) -> list[tuple[int, int, Float[Tensor, " d_model"]]]:
        """What one node writes: layers, positions and vectors."""
        every = ((layer, *part) for layer, parts in self.parts.items() for part in parts)
        return [
            (layer, pos, x[columns == column][0]) for layer, pos, columns, x in every if bool((columns == column).any())
        ]

    def contract(
        self, gradients: Mapping[int, Float[Tensor, "row pos d_model"]], rows: Float[Tensor, "row node"]
    ) -> None:
        """Add, for each row, its gradient at every node's position times what the node writes there."""
        for layer, gradient in gradients.items():
            for pos, columns, vectors in self.parts.get(layer, ()):
                rows.index_add_(1, columns, (gradient[:, pos] @ vectors.T.to(gradient)).to(rows))


class Edges:
    """The nodes of a prompt, and the edges into those that are selected."""

    def __init__(
        self, local: LocalModel, weights: Float[Tensor, "target vocab"], shares: Float[Tensor, " target"]
    ) -> None:
        run = local.run
        self.local, self.weights, self.shares = local, weights.to(run.logits), shares.double().cpu()
        self.units: list[tuple[int, int, int]] = []
        """The layer, position and feature (or `WHOLE`) of each feature and MLP."""
        self.activations: list[float] = []
        for layer in run.cuts:
            self._add_units(layer)
        self.error_layers, self.n_pos = local.coded, run.n_pos
        self.n_units, n_errors = len(self.units), len(local.coded) * run.n_pos
        self.first_error, self.first_token = self.n_units, self.n_units + n_errors
        self.first_logit = self.first_token + run.n_pos
        self.n_nodes = self.first_logit + len(weights)
        self.ids: list[str] = []
        """The ids of all nodes, once they have some."""
        self.writers = self._writers()

    def _add_units(self, layer: int) -> None:
        if layer not in self.local.features:
            norms = self.local.run.outputs[layer].float().norm(dim=-1).tolist()
            self.units += [(layer, pos, WHOLE) for pos in range(self.local.run.n_pos)]
            self.activations += norms
            return
        features = self.local.features[layer]
        places = features.nonzero()
        self.units += [(layer, int(pos), int(feature)) for pos, feature in places.tolist()]
        self.activations += features[places[:, 0], places[:, 1]].tolist()

    def _of_layer(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """The columns, positions and features of the units of each layer that has some."""
        table = torch.tensor(self.units, dtype=torch.long).reshape(-1, 3)
        for layer in self.local.run.cuts:
            columns = (table[:, 0] == layer).nonzero()[:, 0]
            if len(columns):
                yield layer, columns, table[columns, 1], table[columns, 2]

    @torch.no_grad()
    def _writers(self) -> _Writers:
        writers, local, run = _Writers(), self.local, self.local.run
        device = run.embedding.device
        values = torch.tensor(self.activations)
        for layer, columns, positions, features in self._of_layer():
            for pos in positions.unique().tolist():
                at_pos = positions == pos
                if layer not in local.features:
                    writers.add(layer, pos, columns[at_pos].to(device), run.outputs[layer][pos][None])
                    continue
                assert local.transcoders is not None
                decoders = local.transcoders[layer].W_dec[features[at_pos].to(device)]
                scaled = decoders * values[columns[at_pos], None, None].to(decoders)
                for nth, to in enumerate(local.transcoders[layer].writes):
                    writers.add(to, pos, columns[at_pos].to(device), scaled[:, nth])
        for pos in range(self.n_pos):
            for nth, layer in enumerate(self.error_layers):
                column = torch.tensor([self.first_error + nth * self.n_pos + pos], device=device)
                writers.add(layer, pos, column, local.errors[layer][pos][None])
            writers.add(EMBEDDING, pos, torch.tensor([self.first_token + pos], device=device), run.embedding[pos][None])
        return writers

    def _targets(self) -> Iterator[_Targets]:
        """The units that read at each point, in the order of layers."""
        local = self.local
        pre, bias = self.read(local.run.inputs, local.run.logits), self.read(*local.without_nodes)
        for layer, columns, positions, features in self._of_layer():
            at = positions.to(local.run.embedding.device)
            if layer in local.features:
                assert local.transcoders is not None
                vectors = local.transcoders[layer].W_enc.detach().T[features.to(at)]
            else:
                vectors = local.encoders[layer][at]
            yield _Targets(layer, columns, at, vectors, pre[columns], bias[columns])
        last = torch.full((len(self.weights),), self.n_pos - 1, device=local.run.embedding.device)
        columns = torch.arange(self.first_logit, self.n_nodes)
        yield _Targets(LOGITS, columns, last, local.run.readouts(self.weights), pre[columns], bias[columns])

    @torch.no_grad()
    def read(self, inputs: Mapping[Reader, Tensor], logits: Float[Tensor, " vocab"]) -> Float[Tensor, " node"]:
        """The pre-activation of every node in a run; 0 for errors and tokens, which have none."""
        pre_activations = torch.zeros(self.n_nodes, dtype=torch.float64)
        local = self.local
        for layer, columns, positions, features in self._of_layer():
            x, at = inputs[layer], positions.to(inputs[layer].device)
            if layer in local.features:
                assert local.transcoders is not None
                values = local.transcoders[layer].pre_activations(x)[at, features.to(at)]
            else:
                values = (local.encoders[layer][at].float() * x[at].float()).sum(-1)
            pre_activations[columns] = values.double().cpu()
        pre_activations[self.first_logit :] = (self.weights.double() @ logits.double()).cpu()
        return pre_activations

    def reading(self, column: int) -> tuple[Reader, int, Float[Tensor, " d"]]:
        """Where a node reads: the point, the position, and the vector."""
        for targets in self._targets():
            at = (targets.columns == column).nonzero()
            if len(at):
                return targets.reader, int(targets.positions[at[0, 0]]), targets.vectors[at[0, 0]]
        raise HooklineError("only features, MLPs and logits read something")

    def compute(self, most: int | None, progress: bool = False) -> Computed:
        """The edges into the logits, and into all units or the `most` that matter most to them."""
        *targets, logits = self._targets()
        count = self.n_units if most is None else min(most, self.n_units)
        with progress_bar(progress, count, " nodes") as bar:
            parts = [self._into(logits, bar)]
            if count == self.n_units:
                parts += [self._into(group, bar) for group in targets]
            while (left := count - sum(len(part.into) for part in parts[1:])) > 0:
                chosen = self._next(Computed.joined(parts), min(left, max(64, count // 8)))
                masks = [torch.isin(group.columns, chosen) for group in targets]
                groups = [group.some(mask) for group, mask in zip(targets, masks, strict=True) if bool(mask.any())]
                parts += [self._into(group, bar) for group in groups]
        return Computed.joined(parts)

    def _next(self, computed: Computed, count: int) -> Tensor:
        """The units without rows that influence the logits most, through the rows that are known."""
        weights = torch.zeros(self.n_nodes, dtype=torch.float64)
        weights[self.first_logit :] = self.shares
        influence = influences(computed.rows, weights, computed.into)[: self.n_units]
        influence[computed.into[computed.into < self.n_units]] = -1.0
        return influence.topk(count).indices

    def _into(self, targets: _Targets, bar: Any) -> Computed:
        """The edges into some targets."""
        rows = torch.zeros(len(targets.columns), self.n_nodes)
        for batch, gradients in self.local.run.back(targets.reader, targets.positions, targets.vectors):
            part = torch.zeros(len(targets.columns[batch]), self.n_nodes, device=self.local.run.embedding.device)
            self.writers.contract(gradients, part)
            rows[batch] = part.cpu()
            bar.update(len(part) if targets.reader != LOGITS else 0)
        return Computed(targets.columns, rows, targets.pre, targets.bias)

    def watched(
        self, point: str, pos: int, numbers: slice
    ) -> tuple[Float[Tensor, "part node"], Float[Tensor, " part"]]:
        """What each node writes to some numbers of a watched point at a position, and what biases add."""
        width = self.local.run.inputs[point].shape[1]
        vectors = torch.eye(width, device=self.local.run.embedding.device)[numbers]
        rows = torch.zeros(len(vectors), self.n_nodes, device=vectors.device)
        for part, gradients in self.local.run.back(point, torch.full((len(vectors),), pos), vectors):
            self.writers.contract(gradients, rows[part])
        return rows.cpu(), self.local.without_nodes[0][point][pos, numbers].float().cpu()


@dataclass(frozen=True)
class Computed:
    """Rows of edges, with the nodes that they go into, and what each sums to."""

    into: Int[Tensor, " row"]
    rows: Float[Tensor, "row node"]
    pre: Float[Tensor, " row"]
    bias: Float[Tensor, " row"]

    @classmethod
    def joined(cls, several: Sequence[Computed]) -> Computed:
        """Several sets of rows as one."""
        return cls(
            *(torch.cat(parts) for parts in zip(*((x.into, x.rows, x.pre, x.bias) for x in several), strict=True))
        )
