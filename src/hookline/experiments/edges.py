"""Edge attribution patching: the effect of each head and MLP on each later one, from one gradient for all pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError, warn_deprecated
from hookline.experiments.attribution import agreement, check_gradients, checked_options, sampled
from hookline.experiments.core.continuations import prompt_pair
from hookline.experiments.core.integration import Line, ran
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.measure import (
    BatchOptions,
    Metrics,
    Options,
    Reader,
    is_one_for_all,
    measure,
    metric_values,
)
from hookline.experiments.core.prompts import Prompt, Prompts, baselines, warn_of_dropout
from hookline.experiments.metrics import as_metric
from hookline.experiments.patching import Direction, into
from hookline.experiments.paths import Node
from hookline.experiments.result import Result, TopCells
from hookline.experiments.results.statistics import BASELINES
from hookline.functions.listed_options import lists
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import Variant
from hookline.values.rows import drawn_once

__all__ = ["EdgeScores", "edge_scores"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "edges":
        warn_deprecated("edges.edges", "edges.edge_scores", since="0.1")
        return edge_scores
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


@lists(BatchOptions, Options)
def edge_scores(
    model: HookedModel,
    clean: Prompt,
    corrupted: Prompt,
    metric: Any,
    *,
    direction: Direction = "denoise",
    steps: int | None = None,
    by_position: bool = False,
    check: int = 32,
    seed: int = 0,
    **options: Unpack[BatchOptions],
) -> EdgeScores:
    """Estimate the effect of every edge: a sender's output of one run, given to a single receiver in the other.

        >>> edges.edge_scores(model, clean, corrupted, metrics.logit_diff(" Mary", " John")).top(2)
        sender  receiver  value
        mlp3    logits    7.785
        L3H4    mlp3      5.789

    Senders are the embeddings (`embed`), heads (`L2H3`) and MLPs (`mlp2`); receivers the queries, keys and values of
    heads (`L3H4.q`; `L3KV1.k` where heads share them), MLPs and `logits`. A score is the change of the metric if
    only the receiver got the sender's output of the clean run ("denoise"). `steps` averages the gradient over that many
    points on the line between the inputs of the two runs, at least 2. `by_position` has a score for each position at
    which the receiver reads the sender, instead of their sum. `check` edges are actually patched, half of them
    those with the largest scores, half drawn at random from the others, and `info` reports the agreement of each half:
    see `attribution.attribution_patching`. Options: batch_size, progress.
    """
    along = "inputs" if steps is not None else "activations"
    how = checked_options(direction, steps, along, check, options, "per_example")
    metric, pair = prompt_pair(model, clean, corrupted, metric)
    source, target = (0, 1) if direction == "denoise" else (1, 0)
    receivers = edge_receivers(model)
    runs = [sender_outputs(model, prompts) for prompts in pair]
    metrics = as_metric(metric, model, runs[0][0], runs[1][0], pair[0].tokens, pair[0].mask)
    if len(metrics) > 1:
        raise HooklineError(f"edges needs one metric, got {len(metrics)}: {', '.join(metrics)}")
    changes = {name: runs[source][1][name] - part for name, part in runs[target][1].items()}
    changes = {name: x.float() * pair[0].mask[..., None] for name, x in changes.items()}
    gradients = _gradients(model, pair[source], pair[target], receivers, metrics, steps)
    check_gradients(dict.fromkeys(metrics, gradients), [metric_values(metrics, run[0]) for run in runs], steps)
    rows = 1 if is_one_for_all(next(iter(metrics.values())), runs[0][0]) else len(pair[0])
    senders, every = list(changes), torch.stack(list(changes.values()))
    by_receiver = [torch.einsum("sbpd,bpd->sp", every, _of_head(gradients, receiver)) for receiver in receivers]
    matrix = torch.stack(by_receiver, 1) / rows
    matrix = matrix if by_position else matrix.sum(-1, keepdim=True)
    at = [(u, v, place) for u, v in _pairs(senders, receivers) for place in range(matrix.shape[-1])]
    values, places = matrix[tuple(torch.tensor(at).T)], pair[0].labels(model) if by_position else None
    info: dict[str, Any] = {"direction": direction, **({} if steps is None else {"steps": steps})}
    info |= about(model, f"edge attribution, {into(direction)}")
    for key, (logits, *_) in zip(("clean", "corrupted"), runs, strict=True):
        info[key] = float(metric_values(metrics, logits).mean())
    if check:
        cells, n_top = sampled(values, _is_sent(every, at, by_position), check, seed)
        chosen = [(senders[u], receivers[v], place if by_position else None) for u, v, place in (at[x] for x in cells)]
        sent = [(_at_place(changes[sender], place), receiver) for sender, receiver, place in chosen]
        true = true_effects(model, pair[target], metrics, sent, how)
        labels = [_edge_label(*edge, places) for edge in chosen]
        info |= agreement(values[None, cells], true, n_top, labels, list(metrics))
    else:
        warn_of_dropout(model)
    names = [senders[u] for u, _, _ in at], [receivers[v].label for _, v, _ in at]
    return EdgeScores(
        values, *names, next(iter(metrics)), info, None if places is None else [places[x] for *_, x in at]
    )


def _pairs(senders: Sequence[str], receivers: Sequence[Node]) -> list[tuple[int, int]]:
    """The senders and receivers between which there is an edge, by their numbers."""
    turns = [(to.layer, to.turn) for to in receivers]
    return [(u, v) for u, name in enumerate(senders) for v, turn in enumerate(turns) if sender_turn(name) < turn]


def _is_sent(changes: Tensor, edges: Sequence[tuple[int, int, int]], by_position: bool) -> Tensor:
    """Whether the output of the sender of each edge changes: its score may be 0 all the same, as a gradient may be."""
    is_sent = changes.abs().sum((1, 3)) > 0
    is_sent = is_sent if by_position else is_sent.any(-1, keepdim=True)
    return is_sent[tuple(torch.tensor([(sender, place) for sender, _, place in edges]).T)]


def _edge_label(sender: str, receiver: Node, place: int | None, places: Sequence[Label] | None) -> dict[str, Label]:
    label: dict[str, Label] = {"sender": sender, "receiver": receiver.label}
    return label if place is None or places is None else label | {"pos": places[place]}


@dataclass(frozen=True, eq=False, repr=False)
class EdgeScores:
    """The effect of each edge on a metric.

    scores.top(5)                          # the edges with the largest effect
    scores.of("L2H3", "L3H4.q")            # one of them
    scores.of("L2H3"), scores.of(to="mlp3")
    scores.matrix.plot()                   # a Result, sender × receiver, 0 where there is no edge
    scores.to_dataframe()                  # columns sender, receiver, value
    """

    values: Float[Tensor, " edge"]
    senders: Sequence[str]
    receivers: Sequence[str]
    name: str = "value"
    info: dict[str, Any] = field(default_factory=dict)
    positions: Sequence[Label] | None = None
    """The position of each edge, if edges are scored at each position."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.values.detach().cpu())
        if not len(self.values) == len(self.senders) == len(self.receivers):
            raise HooklineError("values, senders and receivers must have the same length")

    def __len__(self) -> int:
        return len(self.values)

    def of(self, sender: str | None = None, to: str | None = None) -> Any:
        """The score of one edge; or with only a sender, or only a receiver, the `EdgeScores` of that one's edges."""
        for label, labels in ((sender, self.senders), (to, self.receivers)):
            if label is not None and label not in labels:
                raise HooklineError(f"there is no {label!r}: use one of {', '.join(dict.fromkeys(labels))}")
        pairs = enumerate(zip(self.senders, self.receivers, strict=True))
        at = [n for n, (u, v) in pairs if sender in (None, u) and to in (None, v)]
        if not at:
            raise HooklineError(f"there is no edge from {sender} to {to}: {to} comes before {sender}")
        if sender is not None and to is not None and self.positions is None:
            return float(self.values[at[0]])
        return self._picked(at)

    def _picked(self, at: Sequence[int]) -> EdgeScores:
        """Some of the edges."""
        names = [self.senders[n] for n in at], [self.receivers[n] for n in at]
        places = None if self.positions is None else [self.positions[n] for n in at]
        return EdgeScores(self.values[list(at)], *names, self.name, self.info, places)

    def top(self, k: int = 10, by: Literal["abs", "value", "lowest"] = "abs") -> TopCells:
        """The `k` edges of largest size, largest value or lowest value, in order."""
        cells = TopCells()
        for cell in Result(self.values, ("edge",), {"edge": list(range(len(self)))}).top(k, by):
            at = int(cell.labels["edge"])
            place: dict[str, Label] = {} if self.positions is None else {"pos": self.positions[at]}
            cells.append(cell._replace(labels={"sender": self.senders[at], "receiver": self.receivers[at], **place}))
        return cells

    @property
    def matrix(self) -> Result:
        """The scores as a Result over senders and receivers, summed over positions; 0 where there is no edge."""
        rows, columns = (list(dict.fromkeys(names)) for names in (self.senders, self.receivers))
        values = torch.zeros(len(rows), len(columns))
        where = [[rows.index(name) for name in self.senders], [columns.index(name) for name in self.receivers]]
        values.index_put_(tuple(map(torch.tensor, where)), self.values.float(), accumulate=True)
        # The scores are changes of the metric, so a plot of them is centered on 0, not on a run's value.
        info = {key: value for key, value in self.info.items() if key not in BASELINES}
        return Result(values, ("sender", "receiver"), {"sender": [*rows], "receiver": [*columns]}, self.name, info)

    def to_dataframe(self) -> Any:
        """A pandas table with one row per edge."""
        cells = Result(self.values, ("edge",), {"edge": list(range(len(self)))}).to_dataframe()
        cells.insert(0, "sender", list(self.senders))
        cells.insert(1, "receiver", list(self.receivers))
        if self.positions is not None:
            cells.insert(2, "pos", list(self.positions))
        return cells.drop(columns="edge")

    def __repr__(self) -> str:
        said = {key: value for key, value in self.info.items() if isinstance(value, bool | int | float | str)}
        about = ", ".join(f"{key} {f'{x:.4g}' if isinstance(x, float) else x}" for key, x in said.items())
        return f"EdgeScores {self.name}: {len(self)} edges\n  {about}\n{self.top(5)!r}"


def edge_receivers(model: HookedModel) -> list[Node]:
    """Everything that reads the stream, in order; an error if the model does not have these points.

    A receiver reads everything that is written before its layer and turn.
    """
    points, n_layers = model.index, model.cfg.n_layers
    receivers: list[Node] = []
    for layer in range(n_layers):
        prefix = points.layer(layer)
        for kind in "qkv":
            point = points.find(f"{prefix}.hook_{kind}_input")
            n = model.cfg.n_heads if kind == "q" else model.cfg.n_kv_heads
            letter = "KV" if n != model.cfg.n_heads else "H"
            receivers += [Node(f"L{layer}{letter}{head}.{kind}", layer, 0, point, head) for head in range(n)]
        if f"{prefix}.hook_mlp_out" in points.hook_dict:
            turn = 0 if points.anatomy.main.architecture.parallel else 1
            receivers.append(Node(f"mlp{layer}", layer, turn, points.find(f"{prefix}.hook_mlp_in")))
    last = points.find(f"{points.layer(n_layers - 1)}.hook_resid_post")
    return [*receivers, Node("logits", n_layers, 0, last)]


def sender_turn(sender: str) -> tuple[int, int]:
    """The layer and turn at which a sender writes to the stream."""
    if sender == "embed":
        return (-1, 0)
    layer = sender.removeprefix("mlp").removeprefix("attn").removeprefix("L").partition("H")[0]
    return int(layer), 1 if sender.startswith("mlp") else 0


@torch.no_grad()
def sender_outputs(
    model: HookedModel, prompts: Prompts, more: Sequence[str] = ()
) -> tuple[Tensor, dict[str, Float[Tensor, "batch pos d_model"]], dict[str, Tensor]]:
    """The logits, what every sender writes to the stream, and the activations at `more` points."""
    ends = ("hook_embed", "hook_pos_embed", "resid_pre", "attn.hook_z", "attn_out", "mlp_out", "hook_scale", "_post")
    names = [name for name in model.hook_dict if name.endswith(ends)]
    with drawn_once(len(prompts)):
        logits, cache = model.run_with_cache(**prompts.call(model), names_filter=[*dict.fromkeys([*names, *more])])
    stacked, labels = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    parts: dict[str, Tensor] = {}
    for label, part in zip(labels, stacked, strict=True):
        layer, _, kind = label.partition("_")
        name = "embed" if "embed" in label else f"{kind.removesuffix('_out')}{layer}" if kind else label
        parts[name] = parts[name] + part if name in parts else part
    parts.pop("bias", None)
    return logits, {name: parts[name] for name in sorted(parts, key=sender_turn)}, {name: cache[name] for name in more}


def _gradients(
    model: HookedModel, source: Prompts, target: Prompts, receivers: Sequence[Node], metrics: Metrics, steps: int | None
) -> dict[str, Tensor]:
    """The gradient of the metric at the points of the receivers."""
    names = list(dict.fromkeys(receiver.point.name for receiver in receivers))
    line = Line(model, target, names, steps, "inputs")
    _, start = line.start()
    end = {} if steps is None else ran(model, source, list(line.moved))[1]
    return next(iter(line.gradients(metrics, end, start).values()))


def _at_place(change: Tensor, place: int | None) -> Float[Tensor, "batch pos d_model"]:
    """A change at one position only."""
    return change if place is None else change * (torch.arange(change.shape[1], device=change.device) == place)[:, None]


def _of_head(gradients: dict[str, Tensor], receiver: Node) -> Float[Tensor, "batch pos d_model"]:
    gradient = gradients[receiver.point.name].float()
    return gradient if receiver.head is None else gradient[:, :, receiver.head]


def true_effects(
    model: HookedModel, prompts: Prompts, metrics: Metrics, edges: Sequence[tuple[Tensor, Node]], how: Options
) -> Float[Tensor, "metric edge"]:
    """The actual change of the metric when the output of a sender changes for one receiver."""
    bases = baselines(model, prompts, keep=dict.fromkeys(to.point.name for _, to in edges))
    rows = list(zip(bases, prompts.spans, strict=True))
    variants = [
        [_received(base, to, change[row, span.start : span.stop]) for row, (base, span) in enumerate(rows)]
        for change, to in edges
    ]
    reader = Reader(bases, prompts, metrics)
    return (measure(reader, variants, how)[0] - reader.baseline[:, None].cpu()).mean(-1)


def _received(base: Baseline, to: Node, change: Tensor) -> Variant:
    before = to.of(base.kept)
    return [base.change(to.point, before + change.to(before), head=to.head)]
