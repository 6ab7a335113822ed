"""Nodes: heads and MLPs as writers to the stream (senders) and readers of it (receivers)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import Index, index_of

MLP_INPUTS = ("hook_mlp_in", "mlp.hook_in", "mlp.hook_pre")
"""The input of an MLP, which can be changed for it alone: the first of these that a layer has."""


@dataclass(frozen=True, eq=False)
class Node:
    """A point of a model, or one head of it, that writes to the stream or reads from it."""

    label: str
    layer: int
    turn: int
    """The order within its layer: 0 for attention, 1 for the MLP."""
    point: HookPoint
    head: int | None = None

    @property
    def index(self) -> tuple[Index, ...]:
        """Its index in the point's value, without the batch."""
        return index_of(self.point, head=self.head)

    def of(self, base: Baseline) -> Tensor:
        """Its activation in a baseline that keeps the point."""
        return base.kept[self.point.name][self.index]


def sender_node(model: HookedModel, sender: Any) -> Node:
    """The output of a head `(layer, head)` or of an MLP `("mlp", layer)`."""
    match sender:
        case ("mlp", int(layer)):
            prefix = _layer(model, layer, sender)
            return Node(f"mlp{layer}", layer, 1, model._points.find(f"{prefix}.hook_mlp_out"))
        case (int(layer), int(head)):
            prefix = _layer(model, layer, sender)
            _check_head(head, model.cfg.n_heads, sender)
            return Node(f"L{layer}H{head}", layer, 0, model._points.find(f"{prefix}.attn.hook_z"), head)
    raise HooklineError(f'a sender is a head (layer, head) or an MLP ("mlp", layer), got {sender!r}')


def receiver_node(model: HookedModel, receiver: Any) -> Node:
    """The input of a head's queries, keys or values `("q", layer, head)`, or of an MLP `("mlp", layer)`."""
    match receiver:
        case ("mlp", int(layer)):
            prefix = _layer(model, layer, receiver)
            names = [f"{prefix}.{name}" for name in MLP_INPUTS]
            name = next((name for name in names if name in model.hook_dict), names[0])
            return Node(f"mlp{layer}", layer, 1, model._points.find(name))
        case (("q" | "k" | "v") as kind, int(layer), int(head)):
            prefix = _layer(model, layer, receiver)
            _check_head(head, model.cfg.n_heads if kind == "q" else model.cfg.n_kv_heads, receiver)
            return Node(f"L{layer}H{head}.{kind}", layer, 0, model._points.find(f"{prefix}.attn.hook_{kind}"), head)
    raise HooklineError(f'a receiver is ("q", layer, head), ("k", …), ("v", …) or ("mlp", layer), got {receiver!r}')


def _layer(model: HookedModel, layer: int, asked: Any) -> str:
    if layer not in range(model.cfg.n_layers):
        raise HooklineError(f"{asked!r}: there is no layer {layer}, the model has 0 to {model.cfg.n_layers - 1}")
    return model._points.layer(layer)


def _check_head(head: int, count: int, asked: Any) -> None:
    if head not in range(count):
        raise HooklineError(f"{asked!r}: there is no head {head}, the model has 0 to {count - 1}")
