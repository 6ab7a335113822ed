"""Faithfulness: how much of the model's behavior the edges or nodes with the largest scores account for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, Unpack

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.circuits.circuit_edges import By, Circuit, Method, by_size, edge_order
from hookline.experiments.circuits.feature_runs import (
    FeatureRuns,
    check_ablation,
    dictionaries,
    feature_nodes,
    without_features,
)
from hookline.experiments.circuits.masked_runs import MaskedRuns
from hookline.experiments.core.continuations import prompt_pair
from hookline.experiments.core.labels import about
from hookline.experiments.core.measure import (
    ExampleOptions,
    Options,
    Reader,
    check_per_example,
    is_one_for_all,
    metric_values,
    packed,
)
from hookline.experiments.core.prompts import Prompt, Prompts, baselines
from hookline.experiments.edges import EdgeScores
from hookline.experiments.metrics import as_metric
from hookline.experiments.result import Result
from hookline.functions.listed_options import lists
from hookline.model import HookedModel
from hookline.progress import progress_bar
from hookline.sae.splice import Autoencoders

SIZES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
Scores: TypeAlias = EdgeScores | Result | Sequence[Result]
Mask: TypeAlias = Bool[Tensor, "*unit place"]
"""Which edges (receiver, sender) or features are in a circuit, at each position or at all."""


@lists(ExampleOptions, Options)
def faithfulness(
    model: HookedModel,
    clean: Prompt,
    corrupted: Prompt | None,
    metric: Any,
    scores: Scores,
    sizes: Sequence[float] | None = None,
    *,
    method: Method = "top",
    by: By = "abs",
    saes: Autoencoders | None = None,
    **options: Unpack[ExampleOptions],
) -> Result:
    """The metric of circuits of several sizes, between that of the corrupted run (0) and of the clean run (1).

        >>> scores = edges.edge_scores(model, clean, corrupted, metric, steps=5)
        >>> circuits.faithfulness(model, clean, corrupted, metric, scores, sizes=[0, 0.1, 1]).values
        tensor([0.0000, 0.9938, 1.0000])

    `sizes` are shares of all edges, from 0 to 1. The edges of a circuit carry what their senders compute in it; every
    other edge carries what its sender computed in the corrupted run. All sizes run as rows of a batch, and are exact: 0
    is the corrupted run, 1 the clean run. `method` "top" takes the edges with the largest scores; "greedy" goes from
    the logits to the input, and takes only edges to receivers that are already reached. `by` is "abs" or "value".

    Instead of edges, `scores` may be of nodes: a result over layers and heads, over layers (MLPs), or a list of both,
    each perhaps with positions. A node outside the circuit is replaced for all receivers; what has no score stays.
    With `saes`, they are of features, from `feature_circuits.feature_scores`: features and errors outside the circuit
    are those of the corrupted run, or 0 if `corrupted` is None, as in the scores.

    `info` has `cpr`, the area under the curve, `cmd`, the area between the curve and 1, both over the range of the
    sizes, and `counts`, the number of edges or nodes at each size. Options: per_example, batch_size (sizes at
    once), progress.
    """
    how = Options.of(options, "resume")
    shares = _checked_sizes(SIZES if sizes is None else sizes)
    _check_choice(method, by)
    if corrupted is None and saes is None:
        raise HooklineError("corrupted=None sets features to 0: it needs saes=…, and scores of feature_scores")
    metric, pair = prompt_pair(model, clean, clean if corrupted is None else corrupted, metric)
    if pair[0].more:
        raise HooklineError("faithfulness supports prompts of text, not of images")
    runs, masks, counts = _runs(model, scores, shares, pair, method, by, saes, is_zero=corrupted is None)
    bases = [baselines(model, prompts) for prompts in pair[: 1 if corrupted is None else 2]]
    logits = [
        prompts.padded([base.logits for base in prompt_bases])
        for prompts, prompt_bases in zip(pair, bases, strict=False)
    ]
    if corrupted is None:
        logits.append(without_features(model, dictionaries(model, saes or ()), pair[0]))
    metrics = as_metric(metric, model, logits[0], logits[1], pair[0].tokens, pair[0].mask)
    if how.per_example:
        check_per_example(metrics, logits[0])
    values = _measured(Reader(bases[0], pair[0], metrics), runs, masks, pair[0], how)
    if bool(values.isnan().any()):  # a metric that reads other positions when edges are masked
        values = _measured(Reader(bases[0], pair[0], metrics, read=range(pair[0].width)), runs, masks, pair[0], how)
    keep = not any(is_one_for_all(metric, logits[0]) for metric in metrics.values())
    shown: dict[str, Any] = {"per_example": how.per_example, "copies": pair[0].copies, "keep": keep}
    info: dict[str, Any] = {"direction": "denoise", "counts": counts, "method": method, "by": by}
    for key, run_logits in zip(("clean", "corrupted"), logits, strict=True):
        info[key] = metric_values(metrics, run_logits).cpu()
    info["prompts"] = pair[0].checksums
    kind = "edges" if isinstance(scores, EdgeScores) else "nodes" if saes is None else "features"
    info |= about(model, f"circuits of the best {kind}")
    curve = packed(values, {"size": [*shares]}, list(metrics), **shown, info=info).normalized
    return _with_areas(curve)


def _runs(
    model: HookedModel, scores: Scores, sizes: list[float], pair: Sequence[Prompts], method: Method, by: By, saes: Any,
    *, is_zero: bool,
) -> tuple[Sequence[MaskedRuns | FeatureRuns], list[Mask], list[int]]:  # fmt: skip
    """The runs of each prompt, the masks of each size, and how many edges or nodes they have."""
    pairs = [[_alone(prompts, row) for prompts in pair] for row in range(len(pair[0]))]
    is_of_features = isinstance(scores, Result) and scores.axes == ("node",)
    if is_of_features != (saes is not None):
        what = "the scores are of features: pass saes=…, the autoencoders" if is_of_features else "saes=… needs scores"
        raise HooklineError(f"{what} that feature_circuits.feature_scores was called with")
    if not isinstance(scores, Result) or saes is None:
        runs = [MaskedRuns(model, *prompts) for prompts in pairs]
        return runs, *_masks(model, scores, sizes, runs[0], method, by, pair[0])
    if method == "greedy":
        raise HooklineError("method='greedy' follows edges: use method='top' for features")
    check_ablation(scores, None if is_zero else pair[1])
    autoencoders = dictionaries(model, saes)
    nodes = feature_nodes(scores, autoencoders)
    units = list(dict.fromkeys((node.point, node.feature) for node in nodes))
    at = dict(zip(units, range(len(units)), strict=True))
    columns = _columns(model, [node.place for node in nodes], pair[0])
    index = torch.tensor([(at[node.point, node.feature], x) for node, x in zip(nodes, columns, strict=True)])
    width = pair[0].width if nodes[0].place is not None else 1
    masks, counts = _nested(index[by_size(scores.values, by)], (len(units), width), sizes)
    ends = [(a, None if is_zero else b) for a, b in pairs]
    return [FeatureRuns(model, autoencoders, units, *prompts) for prompts in ends], masks, counts


def _nested(
    index: Int[Tensor, "cell axis"], shape: tuple[int, ...], sizes: list[float]
) -> tuple[list[Mask], list[int]]:
    """Masks of these cells, from the first to the last, for each size, and how many cells they have."""
    counts, masks = [round(size * len(index)) for size in sizes], []
    for count in counts:
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[tuple(index[:count].T)] = True
        masks.append(mask)
    return masks, counts


def _with_areas(curve: Result) -> Result:
    """The curve, with the areas under it and between it and 1 in `info`."""
    at = torch.tensor(curve.coords["size"], dtype=torch.float64)
    along = curve.values.double().movedim(curve.axes.index("size"), -1)
    if len(at) > 1:
        axes = tuple(axis for axis in curve.axes if axis != "size")
        coords = {axis: curve.coords[axis] for axis in axes}
        for key, x in (("cpr", along), ("cmd", (1 - along).abs())):
            area = torch.trapezoid(x, at)
            curve.info[key] = Result(area, axes, coords, key) if axes else float(area)
    return curve


def _checked_sizes(sizes: Any) -> list[float]:
    requested = [] if isinstance(sizes, str | int | float) else list(sizes)
    if not requested:
        raise HooklineError(f"sizes are shares of all edges, such as [0, 0.01, 0.1, 1], got {sizes!r}")
    for size in requested:
        is_number = isinstance(size, int | float | np.number) and not isinstance(size, bool)
        if not is_number or not 0 <= size <= 1:
            raise HooklineError(f"size {size!r} is out of range: a size is a share of all edges, from 0 to 1")
    shares = [float(size) for size in requested]
    if shares != sorted(set(shares)):
        raise HooklineError(f"sizes must be in increasing order, without duplicates, got {shares}")
    return shares


def _check_choice(method: str, by: str) -> None:
    for name, value, choices in (("method", method, ("top", "greedy")), ("by", by, ("abs", "value"))):
        if value not in choices:
            raise HooklineError(f"{name} is {' or '.join(map(repr, choices))}, got {value!r}")


def _alone(prompts: Prompts, row: int) -> Prompts:
    """One prompt without its padding."""
    return Prompts.of_rows([prompts.row(row)[0]])


def _measured(
    reader: Reader, runs: Sequence[MaskedRuns | FeatureRuns], masks: Sequence[Tensor], prompts: Prompts, how: Options
) -> Float[Tensor, "metric size example"]:
    by_prompt, most = [], None if how.batch_size == "auto" else how.batch_size
    with progress_bar(how.progress, len(runs), "prompt") as bar:
        for row, (run, span) in enumerate(zip(runs, prompts.spans, strict=True)):
            span_masks = [mask if mask.shape[-1] == 1 else mask[..., span.start : span.stop] for mask in masks]
            got = {
                n: x
                for numbers, logits in run.logits(span_masks, reader.positions[row], most)
                for n, x in zip(numbers, logits, strict=True)
            }
            by_prompt.append([got[number] for number in range(len(masks))])
            bar.update()
    return torch.stack([reader.value(logits) for logits in zip(*by_prompt, strict=True)], 1).cpu()


def _masks(
    model: HookedModel, scores: Scores, sizes: list[float], run: MaskedRuns, method: Method, by: By, prompts: Prompts
) -> tuple[list[Mask], list[int]]:
    """The edges of the circuit of each size, and how many edges or nodes it has."""
    receivers = [receiver.label for receiver in run.receivers]
    if isinstance(scores, EdgeScores):
        model_edges = {(u, v) for v in receivers for u in run.senders[: run.seen_by[v]]}
        _check_edges(scores, model_edges, model)
        order = edge_order(scores, method, by)
        rows, others = ({name: at for at, name in enumerate(labels)} for labels in (receivers, run.senders))
        at = [(rows[v], others[u]) for u, v in zip(scores.senders, scores.receivers, strict=True)]
        places = scores.positions
        shape = (len(receivers), len(run.senders), 1 if places is None else prompts.width)
        columns = _columns(model, [None] * len(at) if places is None else places, prompts)
        index = torch.cat([torch.tensor(at), torch.tensor(columns)[:, None]], 1)[order]
        return _nested(index, shape, sizes)
    if method == "greedy":
        raise HooklineError("method='greedy' follows edges: use it with the scores of edges, or method='top' for nodes")
    return _node_masks(model, scores, sizes, run, by, prompts)


def _columns(model: HookedModel, places: Sequence[Any], prompts: Prompts) -> list[int]:
    """The column of each position; 0 if none has a position."""
    if all(place is None for place in places):
        return [0] * len(places)
    labels = prompts.labels(model)
    number = {str(label): at for at, label in enumerate(labels)}
    wrong = next((place for place in places if str(place) not in number), None)
    if wrong is not None:
        raise HooklineError(
            f"the scores have the position {wrong!r}, but the prompts have {labels[0]!r} to {labels[-1]!r}"
        )
    return [number[str(place)] for place in places]


def _check_edges(scores: EdgeScores, model_edges: set[tuple[str, str]], model: HookedModel) -> None:
    scored_edges = set(zip(scores.senders, scores.receivers, strict=True))
    if bool(scores.values.isnan().any()):
        raise HooklineError("the scores have NaN, so that edges cannot be ordered")
    if scores.positions is None and len(scored_edges) < len(scores):
        raise HooklineError("the scores have an edge twice")
    if wrong := sorted(scored_edges - model_edges):
        raise HooklineError(
            f"the scores have an edge from {wrong[0][0]} to {wrong[0][1]}, which {model.cfg.model_name} does not have: "
            f"they are of another model. Compute them with edges.edge_scores(model, …)"
        )
    if missing := sorted(model_edges - scored_edges):
        raise HooklineError(
            f"the scores have {len(scored_edges)} of the {len(model_edges)} edges of this model, not the one from "
            f"{missing[0][0]} to {missing[0][1]}: use all of them, as edges.edge_scores(model, …) returns them"
        )


def _node_masks(
    model: HookedModel, scores: Result | Sequence[Result], sizes: list[float], run: MaskedRuns, by: By, prompts: Prompts
) -> tuple[list[Mask], list[int]]:
    results = [scores] if isinstance(scores, Result) else list(scores)
    if not results or not all(isinstance(result, Result) for result in results):
        raise HooklineError(
            f"scores are EdgeScores, a Result over layers and heads, or a list of these, got {scores!r}"
        )
    nodes: dict[tuple[str, Any], float] = {}
    for result in results:
        nodes |= _node_values(result)
    for label, _ in nodes:
        if label not in run.senders:
            raise HooklineError(
                f"the scores have {label}, which {model.cfg.model_name} does not have: they are of another model"
            )
    order = by_size(torch.tensor(list(nodes.values())), by).tolist()
    has_positions = any(place is not None for _, place in nodes)
    columns = _columns(model, [place for _, place in nodes], prompts)
    number = {label: at for at, label in enumerate(run.senders)}
    at = [(number[label], column) for (label, _), column in zip(nodes, columns, strict=True)]
    counts = [round(size * len(order)) for size in sizes]
    masks = []
    for count in counts:
        mask = torch.ones(len(run.senders), prompts.width if has_positions else 1, dtype=torch.bool)
        for number in order[count:]:
            mask[at[number]] = False
        masks.append(mask.expand(len(run.receivers), -1, -1))
    return masks, counts


def _node_values(result: Result) -> dict[tuple[str, Any], float]:
    """The effect of each node, by its label and position; a result over layers without heads is of MLPs."""
    if not {"layer"} <= set(result.axes) <= {"layer", "head", "pos"}:
        raise HooklineError(
            f"scores of nodes are over ('layer', 'head') for heads or 'layer' for MLPs, each perhaps with 'pos', got "
            f"{result.axes}"
        )
    if not result.complete:
        raise HooklineError("the scores are of an interrupted experiment: finish it with resume=…")
    effects = result if result.info.get("clean") is None else result - result.info[result._origin()]
    values = {}
    for cell in effects.top(effects.values.numel(), by="value"):
        layer, head = cell.labels["layer"], cell.labels.get("head")
        values[(f"mlp{layer}" if head is None else f"L{layer}H{head}", cell.labels.get("pos"))] = cell.value
    return values


def circuit(scores: EdgeScores, size: float, *, method: Method = "top", by: By = "abs") -> Circuit:
    """The circuit of the best edges: a share of all edges.

    Examples:
        >>> found = circuits.circuit(edges.edge_scores(model, clean, corrupted, metric), 0.1)
        >>> int(found.included.sum()), len(found.scores)
        (152, 1519)
    """
    if not isinstance(scores, EdgeScores):
        raise HooklineError(f"a circuit is of EdgeScores, as edges.edge_scores(…) returns them, got {scores!r}")
    _check_choice(method, by)
    (share,) = _checked_sizes([size])
    order = edge_order(scores, method, by)
    included = torch.zeros(len(scores), dtype=torch.bool)
    included[order[: round(share * len(order))]] = True
    return Circuit(scores, included)
