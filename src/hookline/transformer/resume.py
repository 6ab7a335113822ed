"""Resuming: a run that starts in the middle of a model, from a given residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.actions import Action, PointAction
from hookline.engine.points import Site
from hookline.engine.runs import Run
from hookline.engine.skipping import Give, Skipping
from hookline.engine.taps import Turn, active
from hookline.errors import HooklineError
from hookline.text.image_tokens import image_token_id
from hookline.transformer.architectures import architecture
from hookline.transformer.index import ModelPoints


def resumed(
    points: ModelPoints, layer: int, stream: object, tokens: Tensor | None, others: Mapping[str, Any]
) -> tuple[Skipping, Run, dict[str, Any]]:
    """The blocks in which layers before this one are skipped and `stream` enters it, and the inputs to call with.

    `others` are keyword inputs that the model is called with as well.
    """
    anatomy = points.anatomy
    n_layers = len(anatomy.blocks)
    if layer not in range(-n_layers, n_layers + 1):
        raise HooklineError(f"start_at_layer={layer}, but the model has {n_layers} layers")
    if anatomy.is_encoder_decoder:
        raise HooklineError("start_at_layer is for models with one stack of layers, not an encoder and a decoder")
    if architecture(anatomy.kind).more_than_stream:
        raise HooklineError(
            f"the layers of {anatomy.kind} hand on more than the stream: it can only start at the input"
        )
    if tokens is None and architecture(anatomy.kind).rereads_embeddings:
        raise HooklineError(
            f"later layers of {anatomy.kind} look at the embeddings again: give tokens= beside the stream"
        )
    if anatomy.towers:
        _check_pictures(points.root, tokens, others)
    first = layer + n_layers if layer < 0 else layer
    resid = _checked(stream, anatomy.width)
    _check_nothing_before(points, first)
    skipped = {block.module: give_on(anatomy.kind) for block in anatomy.blocks[:first]}
    if first:
        skipped[anatomy.blocks[first - 1].module] = _give(anatomy.kind, resid)
    inputs = {"inputs_embeds": _stand_in(anatomy.main.embed, resid)} if tokens is None else {"input_ids": tokens}
    return Skipping(points.root, skipped), _entering(points, first, resid), inputs


def _check_pictures(root: nn.Module, tokens: Tensor | None, others: Mapping[str, Any]) -> None:
    """Positions, masks and what later layers get of pictures go by more than the stream."""
    token = image_token_id(root.config)
    if tokens is None:
        raise HooklineError(
            "a model that takes pictures starts at a layer with tokens= beside the stream, and with all other inputs "
            "of that run: inputs = model.to_inputs(text, images=…); model(stream, start_at_layer=…, tokens=inputs.pop("
            "'input_ids'), **inputs)"
        )
    if token is not None and bool((tokens == token).any()) and "pixel_values" not in others:
        raise HooklineError(
            f"there are pictures in these tokens ({token} stands for them), so the other inputs are needed too: "
            f"model(stream, start_at_layer=…, tokens=…, **inputs) with the rest of model.to_inputs(text, images=…)"
        )


def _checked(stream: object, width: int) -> Tensor:
    if not isinstance(stream, Tensor) or not stream.is_floating_point() or stream.ndim not in (2, 3):
        what = f"{list(stream.shape)} {stream.dtype}" if isinstance(stream, Tensor) else type(stream).__name__
        raise HooklineError(f"start_at_layer takes the residual stream, [batch, pos, {width}], not {what}")
    if stream.shape[-1] != width:
        raise HooklineError(f"the residual stream has {width} numbers a position, not {stream.shape[-1]}")
    return stream[None] if stream.ndim == 2 else stream


def _stand_in(embed: nn.Module, resid: Tensor) -> Tensor:
    """Embeddings that nobody looks at, of the right shape: masks and positions go by them."""
    return resid.new_zeros(*resid.shape[:2], getattr(embed, "embedding_dim", resid.shape[-1]))


def give_on(kind: str) -> Give:
    """A skipped layer gives on what it is given."""
    return lambda args, kwargs: _wrapped(kind, args[0] if args else kwargs["hidden_states"])


def _give(kind: str, resid: Tensor) -> Give:
    return lambda _args, _kwargs: _wrapped(kind, resid)


def _wrapped(kind: str, stream: Tensor) -> Any:
    return (stream, None) if architecture(kind).returns_tuple else stream


class Enter(Action):
    """At the input of the first layer that is run: the stream comes in there, or it is put in."""

    turn = Turn.ENTER

    def __init__(self, site: Site, resid: Tensor, *, is_first: bool) -> None:
        super().__init__()
        self.module, self.tap, self.lens = site.module, site.tap, site.lens
        self.resid, self.is_first = resid, is_first

    def __call__(self, value: Any) -> Any:
        """The arguments of the layer, with the stream among them."""
        if self.is_first:
            return self.lens.put(value, self.resid)
        x = self.lens.get(value)
        if x is not self.resid and (x.shape != self.resid.shape or not torch.equal(x, self.resid)):
            raise HooklineError("this model changes the stream between layers: it can only start at the input")
        return value


def _entering(points: ModelPoints, first: int, resid: Tensor) -> Run:
    if first == len(points.anatomy.blocks):
        return Run(points.root, [], is_one_pass=True)
    site = points.find(f"{points.layer(first)}.hook_resid_pre").site
    return Run(points.root, [Enter(site, resid, is_first=first == 0)], is_one_pass=True)


def _check_nothing_before(points: ModelPoints, first: int) -> None:
    """A hook in a part of the model that is not run would do nothing, in silence."""
    anatomy = points.anatomy
    before: set[nn.Module] = {each for block in anatomy.blocks[:first] for each in block.module.modules()}
    entry = (anatomy.main.embed, anatomy.main.embed_norm, anatomy.main.pos_embed)
    before |= {module for module in entry if module is not None}
    for routes in (*active.get(), points.standing):
        for action in routes.actions:
            if isinstance(action, PointAction) and action.must_fire and action.module in before:
                raise HooklineError(f"{action.point.name!r} comes before layer {first}, where this run starts")
