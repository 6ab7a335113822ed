"""Path patching: the direct effect of a head or an MLP on others, with the attention in between frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, TypeAlias, Unpack

import torch
from torch import Tensor

from hookline.engine import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.continuations import prompt_pair
from hookline.experiments.core.labels import Label, about, said_points
from hookline.experiments.core.measure import CellOptions, Options, measured
from hookline.experiments.core.prompts import Prompt
from hookline.experiments.core.sweep import Grid, Values, sweep_points
from hookline.experiments.patching import Direction, both_runs, check_patch_direction, into
from hookline.experiments.result import Result
from hookline.functions.listed_options import lists
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import RowChange, Variant, index_of, write_all
from hookline.rerun.strategy import Strategy
from hookline.values.rows import drawn_once

__all__ = ["path_patch"]

Sender: TypeAlias = tuple[int, int] | tuple[str, int]
Receiver: TypeAlias = tuple[str, int, int] | tuple[str, int]

_SENDERS = {"mlp": ("hook_mlp_out",), "head": ("attn.hook_z",)}
"""The points of senders, by kind."""
_RECEIVERS = {
    "mlp": ("hook_mlp_in", "mlp.hook_in", "mlp.hook_pre"),
    "q": ("attn.hook_q",),
    "k": ("attn.hook_k",),
    "v": ("attn.hook_v",),
}
"""The points of receivers: for an MLP, the first of these that a layer has, which is an input of the MLP alone."""


@dataclass(frozen=True, eq=False)
class Node:
    """A point of a model, or one head of it, that writes to the stream or reads from it."""

    label: str
    layer: int
    turn: int
    """The order within its layer: 0 for attention, 1 for the MLP."""
    point: HookPoint
    head: int | None = None

    def of(self, values: Values) -> Tensor:
        """Its activation in a run."""
        return values[self.point.name][index_of(self.point, head=self.head)]


def __dir__() -> list[str]:
    return __all__


@lists(CellOptions, Options)
def path_patch(
    model: HookedModel,
    clean: Prompt,
    corrupted: Prompt,
    metric: Any,
    *,
    senders: Literal["heads", "mlps"] | Sequence[Sender] = "heads",
    receivers: Literal["logits"] | Sequence[Receiver] = "logits",
    direction: Direction = "denoise",
    through_mlps: bool = True,
    **options: Unpack[CellOptions],
) -> Result:
    """Patch each sender's output for the receivers only, and measure: `result.values[layer, head]`.

        >>> paths.path_patch(model, clean, corrupted, metric).normalized.top(1)        # heads → logits
        layer  head  value
        3      4     0.9678
        >>> to_queries = paths.path_patch(model, clean, corrupted, metric, receivers=[("q", 3, 4)])
        >>> to_queries.axes
        ('layer', 'head')

    A sender is a head `(layer, head)` or an MLP `("mlp", layer)`; a receiver the queries, keys or values of a head
    `("q", layer, head)`, an MLP, or all together the logits. Keys and values that heads share are numbered by group.
    The sender's output of one run is written into the other, with all later attention frozen, and all later MLPs too
    with `through_mlps=False`. The values that the receivers get in that run are then patched into another run, in which
    everything after them is free. Without a path to a receiver nothing changes. `direction` and `options` are those of
    `patching.sweep`.
    """
    check_patch_direction(direction)
    how = Options.of(options)
    coords, nodes = _senders(model, senders)
    goals = _receivers(model, receivers)
    last = model.cfg.n_layers - 1 if goals is None else max(goal.layer for goal in goals)
    frozen = _frozen(model, min(node.layer for node in nodes), last, with_mlps=not through_mlps)
    keep = {node.point.name for node in [*nodes, *frozen, *(goals or ())]}
    metric, pair = prompt_pair(model, clean, corrupted, metric)
    both = both_runs(model, pair, metric, sorted(keep), direction)
    by_row = [
        _variants(base, source_values, nodes, goals, frozen, how)
        for base, source_values in zip(both.reader.bases, both.given, strict=True)
    ]
    said = "logits" if goals is None else [goal.label for goal in goals]
    info = both.info | {"receivers": said, "through_mlps": through_mlps}
    info |= about(model, f"paths to {said_points(said)} patched, {into(direction)}")
    grid = Grid(tuple(coords), coords, [list(cell) for cell in zip(*by_row, strict=True)])
    return measured(both.reader, grid, info, how)


def _senders(model: HookedModel, senders: Any) -> tuple[dict[str, list[Label]], list[Node]]:
    """The axes of the result with their labels, and the sender of each cell."""
    coords: dict[str, list[Label]] = {}
    if senders == "heads":
        coords["layer"] = sweep_points(model, "z", "layer").coords["layer"]
        coords["head"] = list(range(model.cfg.n_heads))
        senders = list(product(*coords.values()))
    elif senders == "mlps":
        coords["layer"] = sweep_points(model, "mlp_out", "layer").coords["layer"]
        senders = [("mlp", layer) for layer in coords["layer"]]
    if not isinstance(senders, list | tuple) or not senders:
        raise HooklineError(f'senders is "heads", "mlps" or a list such as [(2, 3), ("mlp", 1)], got {senders!r}')
    needs = 'a sender is a head (layer, head) or an MLP ("mlp", layer)'
    nodes = [_node(model, sender, _SENDERS, needs) for sender in senders]
    return coords or {"sender": [node.label for node in nodes]}, nodes


def _receivers(model: HookedModel, receivers: Any) -> list[Node] | None:
    """The receivers; None for the logits."""
    if receivers == "logits" or receivers == ["logits"]:
        return None
    if not isinstance(receivers, list | tuple) or not receivers or "logits" in receivers:
        raise HooklineError(
            f'receivers is "logits", or a list without it such as [("q", 3, 4), ("mlp", 3)], got {receivers!r}'
        )
    needs = 'a receiver is ("q", layer, head), ("k", …), ("v", …) or ("mlp", layer)'
    return [_node(model, receiver, _RECEIVERS, needs) for receiver in receivers]


def _node(model: HookedModel, spec: Any, points: Mapping[str, Sequence[str]], needs: str) -> Node:
    """A sender or receiver as the user named it; `points` are the points of each kind."""
    match spec:
        case ("mlp", int(layer)):
            kind, head, label = "mlp", None, f"mlp{layer}"
        case (int(layer), int(head)) if "head" in points:
            kind, label = "head", f"L{layer}H{head}"
        case (str(kind), int(layer), int(head)) if kind in points:
            label = f"L{layer}H{head}.{kind}"
        case _:
            raise HooklineError(f"{needs}, got {spec!r}")
    n_heads = model.cfg.n_kv_heads if kind in ("k", "v") else model.cfg.n_heads
    for what, number, n in (("layer", layer, model.cfg.n_layers), ("head", head or 0, n_heads)):
        if number not in range(n):
            raise HooklineError(f"{spec!r}: there is no {what} {number}, the model has 0 to {n - 1}")
    names = [f"{model.index.layer(layer)}.{name}" for name in points[kind]]
    point = model.index.find(next((name for name in names if name in model.hook_dict), names[0]))
    return Node(label, layer, int(kind == "mlp"), point, head)


def _frozen(model: HookedModel, first: int, last: int, *, with_mlps: bool) -> list[Node]:
    """What is frozen: attention after the sender, and MLPs unless effects may pass through them."""
    points, nodes = model.index, []
    for layer in range(first, last + 1):
        if layer > first:
            nodes.append(Node("attn", layer, 0, points.find(f"{points.layer(layer)}.hook_attn_out")))
        if with_mlps and f"{points.layer(layer)}.hook_mlp_out" in points.hook_dict:
            nodes.append(Node("mlp", layer, 1, points.find(f"{points.layer(layer)}.hook_mlp_out")))
    return nodes


def _variants(
    base: Baseline,
    source_values: Values,
    nodes: Sequence[Node],
    goals: Sequence[Node] | None,
    frozen: Sequence[Node],
    how: Options,
) -> list[Variant]:
    """For each sender, the changes of one prompt that give the receivers the sender's direct effect."""
    direct = [_sent(base, source_values, node, frozen) for node in nodes]
    if goals is None:
        return direct
    variants: list[Variant] = [()] * len(nodes)
    room = max(1, base.budget.tokens // base.tokens.shape[1])
    size = room if how.batch_size == "auto" else how.batch_size
    for layer in dict.fromkeys(node.layer for node in nodes):
        numbers = [number for number, node in enumerate(nodes) if node.layer == layer and direct[number]]
        reached = [goal for goal in goals if goal.layer >= layer]
        for at in range(0, len(numbers) if reached else 0, size):
            part = numbers[at : at + size]
            got = _received(base, [direct[number] for number in part], layer, reached)
            for number, values in zip(part, got, strict=True):
                changed = [goal for goal in reached if not torch.equal(goal.of(values), goal.of(base.kept))]
                variants[number] = [base.change(goal.point, goal.of(values), head=goal.head) for goal in changed]
    return variants


def _sent(base: Baseline, source_values: Values, node: Node, frozen: Sequence[Node]) -> Variant:
    """The sender's output of the other run, with everything after it frozen."""
    if torch.equal(node.of(source_values), node.of(base.kept)):
        return ()
    sent = base.change(node.point, node.of(source_values), head=node.head)
    held = [frozen_node for frozen_node in frozen if (frozen_node.layer, frozen_node.turn) > (node.layer, node.turn)]
    return [
        sent,
        *(base.change(frozen_node.point, frozen_node.of(base.kept), first=sent.first) for frozen_node in held),
    ]


def _received(base: Baseline, variants: Sequence[Variant], layer: int, goals: Sequence[Node]) -> list[Values]:
    """The activations at the receivers in variants of a run that all start at one layer."""
    placed: dict[str, list[RowChange]] = {}
    for row, variant in enumerate(variants):
        for change in variant:
            placed.setdefault(change.point.name, []).append((row, change))
    span, n = range(base.tokens.shape[1]), len(variants)
    hooks = [(name, partial(write_all, placed=changes, span=span)) for name, changes in placed.items()]
    names = list(dict.fromkeys(goal.point.name for goal in goals))
    tokens = base.tokens.expand(n, -1)
    inputs: dict[str, Any] = {"input": tokens}
    if base.images:
        inputs = {"input_ids": tokens, **base.images.repeated(n)}
    elif base.strategy != Strategy.FULL:
        inputs = {"input": base.streams[layer].expand(n, -1, -1), "start_at_layer": layer, "tokens": tokens}
    with torch.no_grad(), drawn_once(n):
        _, cache = base.model.run_with_cache(**inputs, names_filter=names, fwd_hooks=hooks)
    return [{name: cache[name][row] for name in names} for row in range(n)]
