"""Edge attribution patching: the effect of each head and MLP on each later one, from one gradient for all pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.engine.batch_index import drawn_once
from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.attribution import checked_options, is_one_for_all
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.edge_scores import EdgeScores
from hookline.experiments.core.integration import Line, ran
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.measure import Metrics, Options, Reader, measure
from hookline.experiments.core.prompts import (
    Prompt,
    Prompts,
    baselines,
    check_pair,
    prompts_of,
    unpadded,
    warn_of_dropout,
)
from hookline.experiments.core.sampling import agreement, sampled
from hookline.experiments.metrics import as_metric, value_of
from hookline.experiments.patching import Direction, into
from hookline.model import HookedModel
from hookline.rerun.changes import index_of
from hookline.transformer.architectures import is_parallel

__all__ = ["EdgeScores", "edges"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True, eq=False)
class Receiver:
    """A reader of the stream: a head's queries, keys or values, an MLP, or the logits."""

    label: str
    point: HookPoint
    head: int | None
    reads: tuple[int, int]
    """It reads everything written before this layer and turn: attention has turn 0, MLPs have 1."""


def edges(
    model: HookedModel,
    clean: Prompt,
    corrupted: Prompt,
    metric: Any,
    *,
    direction: Direction = "denoise",
    steps: int | None = None,
    check: int = 32,
    seed: int = 0,
    **options: Any,
) -> EdgeScores:
    """Estimate the effect of every edge: a sender's output of one run, given to a single receiver in the other.

        scores = edges.edges(model, clean, corrupted, metrics.logit_diff(" Mary", " John"))
        scores.top(10)                        # sender, receiver, and the change of the metric

    Senders are the embeddings (`embed`), heads (`L2H3`) and MLPs (`mlp2`); receivers the queries, keys and values of
    heads (`L3H4.q`; `L3KV1.k` where heads share them), MLPs and `logits`. A score is the change of the metric if
    only the receiver got the sender's output of the clean run ("denoise"). `steps` averages the gradient over that many
    points on the line between the inputs of the two runs, at least 2. `check` edges are actually patched, half of them
    those with the largest scores, half drawn at random from the others, and `info` reports the agreement of each half:
    see `attribution.attribution_patching`. Options: batch_size, progress.
    """
    how = _options(direction, steps, check, options)
    pair = [prompts_of(model, clean), prompts_of(model, corrupted)]
    check_pair(model, *pair)
    metric, pair = continued(model, metric, *pair)
    source, target = (0, 1) if direction == "denoise" else (1, 0)
    receivers = receivers_of(model)
    runs = [decomposed(model, prompts) for prompts in pair]
    found = as_metric(metric, model, runs[0][0], runs[1][0], pair[0].tokens, pair[0].mask)
    if len(found) > 1:
        raise HooklineError(f"edges needs one metric, got {len(found)}: {', '.join(found)}")
    changes = {name: runs[source][1][name] - part for name, part in runs[target][1].items()}
    changes = {name: x.float() * pair[0].mask[..., None] for name, x in changes.items()}
    gradients = _gradients(model, pair[source], pair[target], receivers, found, steps)
    rows = 1 if is_one_for_all(next(iter(found.values())), runs[0][0]) else len(pair[0])
    matrix = torch.stack([_scores(changes, gradients, each) for each in receivers], 1) / rows
    at = [(u, v) for u, name in enumerate(changes) for v, each in enumerate(receivers) if wrote(name) < each.reads]
    values = matrix[tuple(torch.tensor(at).T)]
    info: dict[str, Any] = {"direction": direction, **({} if steps is None else {"steps": steps})}
    info |= about(model, f"edge attribution, {into(direction)}")
    info |= {"clean": _mean(found, runs[0][0]), "corrupted": _mean(found, runs[1][0])}
    if check:
        sample = sampled(values, values != 0, check, seed)
        true = _true(model, pair[target], found, receivers, changes, [at[cell] for (cell,) in sample.cells], how)
        named: list[dict[str, Label]] = [
            {"sender": list(changes)[at[cell][0]], "receiver": receivers[at[cell][1]].label} for (cell,) in sample.cells
        ]
        info |= agreement(values[None, :, None], true, sample, named, list(found))
    else:
        warn_of_dropout(model)
    senders = [list(changes)[u] for u, _ in at]
    return EdgeScores(values, senders, [receivers[v].label for _, v in at], next(iter(found)), info)


def _options(direction: str, steps: Any, check: Any, options: dict[str, Any]) -> Options:
    for name in ("resume", "per_example"):
        if name in options:
            raise HooklineError(f"edges has no option {name!r}: all edges are scored at once")
    return checked_options(direction, steps, "inputs" if steps is not None else "activations", check, options)


def receivers_of(model: HookedModel) -> list[Receiver]:
    """Everything that reads the stream, in order; an error if the model does not have these points."""
    points, config = model._points, model._points.anatomy.main.config
    found: list[Receiver] = []
    for layer in range(model.cfg.n_layers):
        prefix = points.layer(layer)
        groups = model.cfg.n_kv_heads != model.cfg.n_heads
        for kind in "qkv":
            point = points.find(f"{prefix}.hook_{kind}_input")
            n = model.cfg.n_heads if kind == "q" else model.cfg.n_kv_heads
            letter = "KV" if groups and kind != "q" else "H"
            found += [Receiver(f"L{layer}{letter}{head}.{kind}", point, head, (layer, 0)) for head in range(n)]
        if f"{prefix}.hook_mlp_out" in points.hook_dict:
            turn = 0 if is_parallel(config) else 1
            found.append(Receiver(f"mlp{layer}", points.find(f"{prefix}.hook_mlp_in"), None, (layer, turn)))
    last = points.find(f"{points.layer(model.cfg.n_layers - 1)}.hook_resid_post")
    return [*found, Receiver("logits", last, None, (model.cfg.n_layers, 0))]


def wrote(sender: str) -> tuple[int, int]:
    """The layer and turn at which a sender writes to the stream."""
    if sender == "embed":
        return (-1, 0)
    layer = sender.removeprefix("mlp").removeprefix("attn").removeprefix("L").partition("H")[0]
    return int(layer), 1 if sender.startswith("mlp") else 0


@torch.no_grad()
def decomposed(model: HookedModel, prompts: Prompts) -> tuple[Tensor, dict[str, Float[Tensor, "batch pos d_model"]]]:
    """The logits, and what every sender writes to the stream."""
    wanted = ("hook_embed", "hook_pos_embed", "resid_pre", "attn.hook_z", "attn_out", "mlp_out", "hook_scale", "_post")
    names = [name for name in model.hook_dict if name.endswith(wanted)]
    with drawn_once(len(prompts)):
        logits, cache = model.run_with_cache(**prompts.call(model), names_filter=names)
    stacked, labels = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    parts: dict[str, Tensor] = {}
    for label, part in zip(labels, stacked, strict=True):
        if label == "bias":
            continue
        name = "embed" if "embed" in label else _short(label)
        parts[name] = parts[name] + part if name in parts else part
    return logits, {name: parts[name] for name in sorted(parts, key=wrote)}


def _short(label: str) -> str:
    """Instead of 3_mlp_out: mlp3."""
    layer, _, kind = label.partition("_")
    return f"{kind.removesuffix('_out')}{layer}" if kind else label


def _gradients(
    model: HookedModel,
    source: Prompts,
    target: Prompts,
    receivers: Sequence[Receiver],
    metrics: Metrics,
    steps: int | None,
) -> dict[str, Tensor]:
    names = list(dict.fromkeys(each.point.name for each in receivers))
    line = Line(model, target, names, steps, "inputs")
    _, start = line.start()
    end = {} if steps is None else ran(model, source, list(line.moved))[1]
    return next(iter(line.gradients(metrics, end, start).values()))


def _scores(changes: dict[str, Tensor], gradients: dict[str, Tensor], to: Receiver) -> Float[Tensor, " sender"]:
    gradient = gradients[to.point.name].float()
    gradient = gradient if to.head is None else gradient[:, :, to.head]
    return torch.stack([(change * gradient).sum() for change in changes.values()])


def _mean(metrics: Metrics, logits: Tensor) -> float:
    with torch.no_grad():
        return float(value_of(next(iter(metrics.values())), logits, "the metric").mean())


def _true(
    model: HookedModel,
    prompts: Prompts,
    metrics: Metrics,
    receivers: Sequence[Receiver],
    changes: dict[str, Tensor],
    chosen: Sequence[tuple[int, int]],
    how: Options,
) -> Float[Tensor, "metric edge"]:
    """The actual change of the metric for some edges."""
    names = dict.fromkeys(receivers[v].point.name for _, v in chosen)
    bases, senders = baselines(model, prompts, keep=names), list(changes.values())
    variants = []
    for u, v in chosen:
        to, each = receivers[v], []
        for row, base in enumerate(bases):
            before = base.kept[to.point.name][index_of(to.point, head=to.head)]
            change = unpadded(senders[u][row], receivers[-1].point, prompts.span(row), prompts.width)
            each.append([base.change(to.point, before + change.to(before), head=to.head)])
        variants.append(each)
    reader = Reader(bases, prompts, metrics)
    return (
        (measure(reader, variants, how)[0] - reader.baseline[:, None].cpu()).mean(-1) if chosen else torch.zeros(1, 0)
    )
