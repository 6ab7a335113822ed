"""Feature circuits: the effect of each feature of autoencoders on a metric, and of features on each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.attribution import agreement, check_gradients, checked_options, sampled
from hookline.experiments.circuits.feature_runs import (
    Dictionary,
    FeatureChanges,
    FeatureNode,
    check_ablation,
    dictionaries,
    feature_nodes,
    without_features,
)
from hookline.experiments.core.continuations import prompt_pair
from hookline.experiments.core.integration import Along, Line, gradients_of, ran, traced_run
from hookline.experiments.core.labels import about
from hookline.experiments.core.measure import BatchOptions, Metrics, Options, is_one_for_all, metric_values
from hookline.experiments.core.prompts import Prompt, Prompts, warn_of_dropout
from hookline.experiments.core.sweep import Values
from hookline.experiments.edges import EdgeScores, true_effects
from hookline.experiments.metrics import as_metric
from hookline.experiments.patching import Direction, check_patch_direction, into
from hookline.experiments.paths import Node
from hookline.experiments.result import Result
from hookline.functions.listed_options import lists
from hookline.model import HookedModel
from hookline.sae.splice import Autoencoders

__all__ = ["feature_edges", "feature_scores"]


def __dir__() -> list[str]:
    return __all__


@lists(BatchOptions, Options)
def feature_scores(
    model: HookedModel,
    clean: Prompt,
    corrupted: Prompt | None,
    metric: Any,
    saes: Autoencoders,
    *,
    direction: Direction = "denoise",
    steps: int | None = None,
    along: Along = "activations",
    by_position: bool = False,
    check: int = 32,
    seed: int = 0,
    **options: Unpack[BatchOptions],
) -> Result:
    """Estimate the effect of each feature: its value of one run, given to the other.

    Examples:
        >>> scores = feature_circuits.feature_scores(model, clean, corrupted, metric, [sae])
        >>> scores.axes
        ('node',)
        >>> curve = circuits.faithfulness(model, clean, corrupted, metric, scores, saes=[sae])

    `saes` are autoencoders, each at the point where it was trained, or a mapping from points to autoencoders. Nodes are
    the features that differ between the two runs, and the error of each autoencoder, which is what it misses. A
    score is the change of the feature times its gradient, summed over positions, or one for each with `by_position`.
    The scores at a point sum to what `attribution_patching` estimates for all of it. `steps` averages the gradient on
    the line between the two runs, as there: `along` the activations of each point, or the inputs.

    With `corrupted=None`, features and errors are set to 0 instead, for prompts that have no counterpart: nodes are the
    features that are active, and a score is what the metric loses without the feature, to first order.

    `check` nodes are actually patched, and `info` reports the agreement, see `attribution.attribution_patching`.
    `info["errors"]` is the part of the effects, in absolute values, that is due to errors. Options: batch_size,
    progress.
    """
    how = checked_options(direction, steps, along, check, options, "per_example")
    if corrupted is None and (direction, along) != ("denoise", "activations"):
        raise HooklineError("corrupted=None sets features to 0: it has no direction, and no inputs to go along")
    both = _Both.of(model, clean, corrupted, metric, saes, direction, steps, along)
    gradients = both.line.gradients(both.metrics, both.given, both.there)
    check_gradients(gradients, [metric_values(both.metrics, logits) for logits in both.logits], steps)
    node_scores = both.scored(next(iter(gradients.values())), by_position=by_position)
    if not node_scores:
        what = "is active" if corrupted is None else "differs between the two runs"
        raise HooklineError(f"no feature {what}: use other prompts, or autoencoders at other points")
    values, labels = torch.tensor(list(node_scores.values())), [node.label for node in node_scores]
    errors = values.abs()[torch.tensor([node.feature < 0 for node in node_scores])].sum()
    info: dict[str, Any] = {"direction": direction, "errors": float(errors / values.abs().sum().clamp(min=1e-30))}
    info |= {} if steps is None else {"steps": steps, "along": along}
    if corrupted is None:
        info |= {"ablation": "zero"}
    info |= about(model, "features set to 0" if corrupted is None else f"features, {into(direction)}")
    if check:
        cells, n_top = sampled(values, torch.ones_like(values, dtype=torch.bool), check, seed)
        true = both.true([list(node_scores)[cell] for cell in cells], how)
        info |= agreement(values[None, cells], true, n_top, [{"node": labels[x]} for x in cells], list(both.metrics))
    else:
        warn_of_dropout(model)
    return Result(values, ("node",), {"node": [*labels]}, next(iter(both.metrics)), info)


def feature_edges(
    model: HookedModel,
    clean: Prompt,
    corrupted: Prompt | None,
    metric: Any,
    scores: Result,
    saes: Autoencoders,
    *,
    most: int = 40,
) -> EdgeScores:
    """Estimate the effect of each of the `most` best nodes of `scores` on the metric through each of the others.

    Examples:
        >>> scores = feature_circuits.feature_scores(model, clean, corrupted, metric, [sae])
        >>> found = feature_circuits.feature_edges(model, clean, corrupted, metric, scores, [sae], most=3)
        >>> len(found)
        3
        >>> page = circuits.circuit(found, 0.5).plot_html()

    An edge is the effect that goes from one feature to another past all other features, to first order; one to "logits"
    goes past all of them. With all nodes and without `steps`, the edges from a node sum to its score. The cost is a
    backward pass for each node.
    """
    if not isinstance(scores, Result) or scores.axes != ("node",):
        raise HooklineError(f"scores are those of feature_scores(…), got {scores!r}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise HooklineError(f"most is the number of nodes, at least 1, got {most!r}")
    direction: Direction = scores.info.get("direction", "denoise")
    check_patch_direction(direction)
    check_ablation(scores, corrupted)
    both = _Both.of(model, clean, corrupted, metric, saes, direction, None, "activations")
    best = set(scores.values.abs().argsort(descending=True, stable=True)[:most].tolist())
    nodes = [node for at, node in enumerate(feature_nodes(scores, both.known)) if at in best]
    total = next(iter(both.line.gradients(both.metrics, both.given, both.there).values()))
    edges = _Direct(both, total).edges(nodes)
    values = torch.tensor(list(edges.values()))
    how = "set to 0" if corrupted is None else into(direction)
    info = {"direction": direction, **about(model, f"edges between features, {how}")}
    return EdgeScores(values, [u for u, _ in edges], [v for _, v in edges], next(iter(both.metrics)), info)


@dataclass(frozen=True, eq=False)
class _Both:
    """The two runs of an estimate, and how far the features of one are from those of the other."""

    line: Line
    known: Mapping[str, Dictionary]
    pair: Sequence[Prompts]
    metrics: Metrics
    logits: Sequence[Tensor]
    given: Values
    there: Values
    changes: Mapping[str, FeatureChanges]
    sign: float = 1.0
    """-1 if a score is what the metric loses."""

    @classmethod
    def of(
        cls, model: HookedModel, clean: Prompt, corrupted: Prompt | None, metric: Any, saes: Autoencoders,
        direction: Direction, steps: int | None, along: Along,
    ) -> _Both:  # fmt: skip
        autoencoders = dictionaries(model, saes)
        metric, pair = prompt_pair(model, clean, clean if corrupted is None else corrupted, metric)
        if pair[0].more:
            raise HooklineError("features are nodes of prompts of text, not of images")
        source, target = (0, 1) if direction == "denoise" and corrupted is not None else (1, 0)
        line = Line(model, pair[target], [dictionary.point.name for dictionary in autoencoders.values()], steps, along)
        logits = {}
        logits[target], target_values = line.start()
        with torch.no_grad():
            zeroed = {} if corrupted is not None else {
                name: FeatureChanges.to_zero(dictionary, target_values[dictionary.point.name], pair[0].mask)
                for name, dictionary in autoencoders.items()
            }  # fmt: skip
        if corrupted is None:
            logits[source] = without_features(model, autoencoders, pair[0])
            source_values: Values = {
                change.at.point.name: change.end(target_values[change.at.point.name]) for change in zeroed.values()
            }
        else:
            logits[source], source_values = ran(model, pair[source], line.names)
        metrics = as_metric(metric, model, logits[0], logits[1], pair[0].tokens, pair[0].mask)
        if len(metrics) > 1:
            raise HooklineError(f"features need one metric, got {len(metrics)}: {', '.join(metrics)}")
        with torch.no_grad():
            changes = zeroed or {
                name: FeatureChanges.between(
                    dictionary, target_values[dictionary.point.name], source_values[dictionary.point.name], pair[0].mask
                )
                for name, dictionary in autoencoders.items()
            }
        sign = -1.0 if zeroed else 1.0
        return cls(
            line, autoencoders, pair, metrics, [logits[0], logits[1]], source_values, target_values, changes, sign
        )

    @property
    def rows(self) -> int:
        """How many prompts the metric is averaged over."""
        return 1 if is_one_for_all(next(iter(self.metrics.values())), self.logits[0]) else len(self.pair[0])

    def scored(self, gradients: Mapping[str, Tensor], *, by_position: bool) -> dict[FeatureNode, float]:
        """The score of each node."""
        scores = {}
        labels = self.pair[0].labels(self.line.model)
        for name, change in self.changes.items():
            effects = change.effects(gradients[change.at.point.name]).sum(0) * self.sign / self.rows
            is_node = change.is_node.any(0)
            if not by_position:
                effects, is_node = effects.sum(0, keepdim=True), is_node.any(0, keepdim=True)
            for place, feature in is_node.nonzero().tolist():
                number = feature if feature < change.at.sae.d_sae else -1
                node = FeatureNode(name, number, labels[place] if by_position else None)
                scores[node] = float(effects[place, feature])
        return scores

    def place(self, node: FeatureNode) -> slice:
        """The columns of a node."""
        if node.place is None:
            return slice(None)
        labels = [str(label) for label in self.pair[0].labels(self.line.model)]
        if str(node.place) not in labels:
            raise HooklineError(
                f"the scores have {node.label!r}, but the prompts have the positions {labels[0]!r} to {labels[-1]!r}"
            )
        at = labels.index(str(node.place))
        return slice(at, at + 1)

    def true(self, nodes: Sequence[FeatureNode], how: Options) -> Float[Tensor, "metric node"]:
        """The actual change of the metric when each of these nodes is patched."""
        sent = []
        for node in nodes:
            change, at = self.changes[node.point], self.place(node)
            moved = torch.zeros_like(change.error)
            moved[:, at] = change.change(node.feature)[:, at].to(moved)
            point = change.at.point
            sent.append((moved.view(self.there[point.name].shape), Node(node.label, 0, 0, point)))
        return true_effects(self.line.model, self.line.prompts, self.metrics, sent, how) * self.sign


class _Direct:
    """A run in which the gradient at each autoencoder stops there, so that it is that of what lies between them."""

    def __init__(self, both: _Both, total: Mapping[str, Tensor]) -> None:
        self.both, self.total = both, total
        self.reached: dict[str, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}

    def _cut(self, name: str) -> Any:
        def cut(x: Tensor) -> Tensor:
            self.reached[name], self.leaves[name] = x, x.detach().requires_grad_()
            return self.leaves[name]

        return cut

    def edges(self, nodes: Sequence[FeatureNode]) -> dict[tuple[str, str], float]:
        """The edges between these nodes, and to the logits."""
        both = self.both
        model, prompts = both.line.model, both.line.prompts
        hooks = [(dictionary.point.name, self._cut(name)) for name, dictionary in both.known.items()]
        call = prompts.call(model)
        logits, _ = traced_run(
            lambda every: model.run_with_hooks(**call, fwd_hooks=every), len(prompts), (), hooks, with_grad=True
        )
        edges: dict[tuple[str, str], float] = {}
        order, metric = list(both.known), next(iter(both.metrics.items()))
        for to in nodes:
            before = {name: self.leaves[name] for name in order[: order.index(to.point)]}
            if before and (value := self._value(to)).requires_grad:
                gradients = torch.autograd.grad(value, list(before.values()), retain_graph=True, allow_unused=True)
                self._add(edges, nodes, dict(zip(before, gradients, strict=True)), to.label)
        self._add(edges, nodes, gradients_of(metric[1], metric[0], logits, self.leaves), "logits")
        return edges

    def _value(self, node: FeatureNode) -> Float[Tensor, ""]:
        """The node times its total gradient, which is a constant."""
        change, at = self.both.changes[node.point], self.both.place(node)
        weights, flat = change.weights(self.total[change.at.point.name])
        with torch.enable_grad():
            x, features = change.at.split(self.reached[node.point])
            error = x - change.at.sae.decode(features, x)
            product = (error * flat).sum(-1) if node.feature < 0 else (features * weights)[..., node.feature]
            return (product * change.mask)[:, at].sum()

    def _add(
        self, edges: dict[tuple[str, str], float], nodes: Sequence[FeatureNode], gradients: Mapping[str, Any], to: str
    ) -> None:
        for name, gradient in gradients.items():
            if gradient is not None:
                effects = self.both.changes[name].effects(gradient).sum(0) * self.both.sign / self.both.rows
                for node in nodes:
                    if node.point == name:
                        edges[node.label, to] = float(effects[self.both.place(node), node.feature].sum())
