"""Path patching: the direct effect of a head or an MLP on others, with the attention in between frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hookline.engine.batch_index import drawn_once
from hookline.errors import HooklineError
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.labels import Label, about, said_points
from hookline.experiments.core.measure import Options, Reader, measured, padded_logits
from hookline.experiments.core.nodes import Node, receiver_node, sender_node
from hookline.experiments.core.prompts import Prompt, baselines, check_pair, prompts_of
from hookline.experiments.core.sweep import Grid, sweep_points
from hookline.experiments.metrics import as_metric
from hookline.experiments.patching import Direction, into
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import Change, RowChange, Variant, write_all
from hookline.rerun.strategy import Strategy

__all__ = ["path_patch"]

Sender: TypeAlias = tuple[int, int] | tuple[str, int]
Receiver: TypeAlias = tuple[str, int, int] | tuple[str, int]


def __dir__() -> list[str]:
    return __all__


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
    **options: Any,
) -> Result:
    """Patch each sender's output for the receivers only, and measure: `result.values[layer, head]`.

        paths.path_patch(model, clean, corrupted, metric)                                  # heads → logits
        paths.path_patch(model, clean, corrupted, metric, receivers=[("q", 3, 4)])         # heads → queries of L3H4
        paths.path_patch(model, clean, corrupted, metric, senders=[(1, 3), ("mlp", 0)], receivers=[("mlp", 3)])

    A sender is a head `(layer, head)` or an MLP `("mlp", layer)`; a receiver the queries, keys or values of a head
    `("q", layer, head)`, an MLP, or all together the logits. Keys and values that heads share are numbered by group.
    The sender's output of one run is written into the other, with all later attention frozen, and all later MLPs too
    with `through_mlps=False`. The values that the receivers get in that run are then patched into another run, in which
    everything after them is free. Without a path to a receiver nothing changes. `direction` and `options` are those of
    `patching.sweep`.
    """
    if direction not in ("denoise", "noise"):
        raise HooklineError(f'direction is "denoise" (clean into corrupted) or "noise", got {direction!r}')
    how = Options.of(options)
    axes, coords, nodes = _senders(model, senders)
    goals = _receivers(model, receivers)
    last = model.cfg.n_layers - 1 if goals is None else max(goal.layer for goal in goals)
    frozen = _frozen(model, min(node.layer for node in nodes), last, with_mlps=not through_mlps)
    keep = {*(node.point.name for node in [*nodes, *(goals or ())]), *(each.point.name for each in frozen)}
    pair = [prompts_of(model, clean), prompts_of(model, corrupted)]
    check_pair(model, *pair)
    metric, pair = continued(model, metric, *pair)
    runs = [baselines(model, prompts, keep=sorted(keep)) for prompts in pair]
    logits = [padded_logits(bases, prompts) for bases, prompts in zip(runs, pair, strict=True)]
    found = as_metric(metric, model, logits[0], logits[1], pair[0].tokens, pair[0].mask)
    source, target = (0, 1) if direction == "denoise" else (1, 0)
    reader = Reader(runs[target], pair[target], found)
    by_row = [
        _variants(base, given, nodes, goals, frozen, how)
        for base, given in zip(runs[target], runs[source], strict=True)
    ]
    values = {target: reader.baseline, source: reader.values_of(logits[source])}
    said = "logits" if goals is None else [goal.label for goal in goals]
    info: dict[str, Any] = {"direction": direction, "receivers": said, "through_mlps": through_mlps}
    info |= {"clean": values[0], "corrupted": values[1]}
    info |= about(model, f"paths to {said_points(said)} patched, {into(direction)}")
    return measured(reader, Grid(axes, coords, [list(cell) for cell in zip(*by_row, strict=True)]), info, how)


def _senders(model: HookedModel, senders: Any) -> tuple[tuple[str, ...], dict[str, list[Label]], list[Node]]:
    """The axes of the result with their labels, and the sender of each cell."""
    if senders == "heads":
        where = sweep_points(model, "z", ("layer", "head"))
        heads: list[Label] = list(range(model.cfg.n_heads))
        nodes = [sender_node(model, (layer, head)) for layer in where.coords["layer"] for head in heads]
        return ("layer", "head"), {"layer": where.coords["layer"], "head": heads}, nodes
    if senders == "mlps":
        layers = sweep_points(model, "mlp_out", ("layer",)).coords["layer"]
        return ("layer",), {"layer": layers}, [sender_node(model, ("mlp", layer)) for layer in layers]
    if not isinstance(senders, list | tuple) or not senders:
        raise HooklineError(f'senders is "heads", "mlps" or a list such as [(2, 3), ("mlp", 1)], got {senders!r}')
    nodes = [sender_node(model, each) for each in senders]
    return ("sender",), {"sender": [node.label for node in nodes]}, nodes


def _receivers(model: HookedModel, receivers: Any) -> list[Node] | None:
    """The receivers; None for the logits."""
    if receivers == "logits" or receivers == ["logits"]:
        return None
    if not isinstance(receivers, list | tuple) or not receivers or "logits" in receivers:
        raise HooklineError(
            f'receivers is "logits", or a list without it such as [("q", 3, 4), ("mlp", 3)], got {receivers!r}'
        )
    return [receiver_node(model, each) for each in receivers]


def _frozen(model: HookedModel, first: int, last: int, *, with_mlps: bool) -> list[Node]:
    """What is frozen: attention after the sender, and MLPs unless effects may pass through them."""
    points = model._points
    found = [
        Node("attn", layer, 0, points.find(f"{points.layer(layer)}.hook_attn_out"))
        for layer in range(first + 1, last + 1)
    ]
    for layer in range(first, last + 1):
        name = f"{points.layer(layer)}.hook_mlp_out"
        if with_mlps and name in points.hook_dict:
            found.append(Node("mlp", layer, 1, points.find(name)))
    return found


def _variants(
    base: Baseline,
    given: Baseline,
    nodes: Sequence[Node],
    goals: Sequence[Node] | None,
    frozen: Sequence[Node],
    how: Options,
) -> list[Variant]:
    """For each sender, the changes that give the receivers of one prompt what the sender would directly give them."""
    direct = [_sent(base, given, node, frozen) for node in nodes]
    if goals is None:
        return direct
    found: list[Variant] = [()] * len(nodes)
    for layer in dict.fromkeys(node.layer for node in nodes):
        some = [number for number, node in enumerate(nodes) if node.layer == layer and direct[number]]
        reached = [goal for goal in goals if goal.layer >= layer]
        if not some or not reached:
            continue
        room = base.budget.tokens // base.tokens.shape[1]
        size = max(1, room) if how.batch_size == "auto" else how.batch_size
        for at in range(0, len(some), size):
            part = some[at : at + size]
            got = _received(base, [direct[number] for number in part], layer, reached)
            for row, number in enumerate(part):
                found[number] = list(_told(base, reached, [each[row] for each in got]))
    return found


def _sent(base: Baseline, given: Baseline, node: Node, frozen: Sequence[Node]) -> Variant:
    """The sender's output of the other run, with everything after it frozen."""
    value, before = node.of(given), node.of(base)
    if torch.equal(value, before):
        return ()
    held = [each for each in frozen if (each.layer, each.turn) > (node.layer, node.turn)]
    sent = base.change(node.point, value, head=node.head)
    kept = [base.change(each.point, each.of(base), first=sent.first, head=each.head) for each in held]
    return [sent, *kept]


def _received(base: Baseline, variants: Sequence[Variant], layer: int, goals: Sequence[Node]) -> list[Tensor]:
    """The input of each receiver in variants of a run that all start at one layer: [variant, pos, …]."""
    placed: dict[str, list[RowChange]] = {}
    for row, variant in enumerate(variants):
        for change in variant:
            placed.setdefault(change.point.name, []).append((row, change))
    span, n = range(base.tokens.shape[1]), len(variants)
    hooks = [(name, partial(_put, placed=each, span=span)) for name, each in placed.items()]
    names = list(dict.fromkeys(goal.point.name for goal in goals))
    how: dict[str, Any] = {"names_filter": names, "fwd_hooks": hooks}
    tokens = base.tokens.expand(n, -1)
    with torch.no_grad(), drawn_once(n):
        if base.images is not None:
            _, cache = base.model.run_with_cache(input_ids=tokens, **base.images.repeated(n), **how)
        elif base.strategy == Strategy.FULL:
            _, cache = base.model.run_with_cache(tokens, **how)
        else:
            stream = base.streams[layer].expand(n, -1, -1)
            _, cache = base.model.run_with_cache(stream, start_at_layer=layer, tokens=tokens, **how)
    return [cache[goal.point.name][(slice(None), *goal.index)] for goal in goals]


def _put(x: Tensor, placed: list[RowChange], span: range) -> None:
    write_all(x, placed, span)


def _told(base: Baseline, goals: Sequence[Node], values: Sequence[Tensor]) -> Iterator[Change]:
    """Changes that give the receivers these values."""
    for goal, value in zip(goals, values, strict=True):
        if not torch.equal(value, goal.of(base)):
            yield base.change(goal.point, value, head=goal.head)
