"""`start_at_layer` and `stop_at_layer`: runs from a given residual stream, and runs up to a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import (
    Action,
    PointAction,
    Record,
    Recorder,
    Run,
    Site,
    Skipping,
    StopForward,
    Turn,
    open_runs,
    snapshot,
)
from hookline.errors import HooklineError
from hookline.text.image_tokens import image_token_id
from hookline.transformer.anatomy import Anatomy
from hookline.transformer.index import ModelPoints
from hookline.types import ModuleCall


def resumed(
    points: ModelPoints, layer: int, stream: object, tokens: Tensor | None, others: Mapping[str, Any]
) -> tuple[Skipping, Run, dict[str, Any]]:
    """The contexts that skip earlier layers and insert `stream` at this one, and the inputs to call the model with.

    `others` are further keyword inputs of that call.
    """
    anatomy = points.anatomy
    n_layers = len(anatomy.blocks)
    layer = _in_range("start_at_layer", layer, n_layers)
    if anatomy.is_encoder_decoder:
        raise HooklineError("start_at_layer is not supported for encoder-decoder models")
    if anatomy.architecture.more_than_stream:
        raise HooklineError(f"start_at_layer is not supported for {anatomy.kind}: layers pass on more than the stream")
    if tokens is None and anatomy.architecture.rereads_embeddings:
        raise HooklineError(f"later layers of {anatomy.kind} read the embeddings again: also pass tokens=")
    if anatomy.towers:
        _check_images(points.root, tokens, others)
    first = layer + n_layers if layer < 0 else layer
    resid = _checked(stream, anatomy.width)
    if hooks := hooks_before(points, first):
        raise HooklineError(f"{hooks[0].point.name!r} is before layer {first}, where this run starts")
    skipped = dict.fromkeys(points.blocks()[:first], pass_through(anatomy))
    if first:
        skipped[anatomy.blocks[first - 1].module] = pass_through(anatomy, resid)
    inputs = {"input_ids": tokens}
    if tokens is None:  # zeros of the right shape, from which the model computes masks and positions
        width = getattr(anatomy.main.embed, "embedding_dim", resid.shape[-1])
        inputs = {"inputs_embeds": resid.new_zeros(*resid.shape[:2], width)}
    entering: list[Action] = []
    if first < n_layers:
        entering = [Enter(points.find(f"{points.layer(first)}.hook_resid_pre").site, resid, is_first=first == 0)]
    return Skipping(points.root, skipped), Run(points.root, entering, is_one_pass=True), inputs


def _in_range(argument: str, layer: Any, n_layers: int) -> int:
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):
        raise HooklineError(f"{argument}={layer!r} must be the number of a layer, from 0 to {n_layers}")
    if (number := index(layer)) not in range(-n_layers, n_layers + 1):
        raise HooklineError(f"{argument}={number} is out of range: the model has {n_layers} layers")
    return number


def _check_images(root: nn.Module, tokens: Tensor | None, others: Mapping[str, Any]) -> None:
    """Raise if inputs that positions, masks or later layers need for images are missing."""
    token = image_token_id(root.config)
    if tokens is None:
        raise HooklineError(
            "start_at_layer of a vision-language model also needs tokens= and all other inputs of that run: "
            "inputs = model.to_inputs(text, images=…); model(stream, start_at_layer=…, tokens=inputs.pop("
            "'input_ids'), **inputs)"
        )
    if token is not None and bool((tokens == token).any()) and "pixel_values" not in others:
        raise HooklineError(
            f"these tokens include image tokens ({token}), so the other inputs are needed too: "
            f"model(stream, start_at_layer=…, tokens=…, **inputs) with the rest of model.to_inputs(text, images=…)"
        )


def _checked(stream: object, width: int) -> Tensor:
    if not isinstance(stream, Tensor) or not stream.is_floating_point() or stream.ndim not in (2, 3):
        what = f"{list(stream.shape)} {stream.dtype}" if isinstance(stream, Tensor) else type(stream).__name__
        raise HooklineError(f"start_at_layer takes the residual stream, [batch, pos, {width}], not {what}")
    if stream.shape[-1] != width:
        raise HooklineError(f"the residual stream has width {width}, not {stream.shape[-1]}")
    return stream[None] if stream.ndim == 2 else stream


def pass_through(anatomy: Anatomy, stream: Tensor | None = None) -> ModuleCall:
    """What a skipped layer returns: the stream that is given here, or else its own input."""
    returns_tuple = anatomy.architecture.returns_tuple

    def give(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = stream if stream is not None else args[0] if args else kwargs["hidden_states"]
        return (out, None) if returns_tuple else out

    return give


class Enter(Action):
    """At the input of the first layer that runs: insert the stream, or check that it arrives unchanged."""

    turn = Turn.ENTER

    def __init__(self, site: Site, resid: Tensor, *, is_first: bool) -> None:
        super().__init__()
        self.module, self.tap, self.lens = site.module, site.tap, site.lens
        self.resid, self.is_first = resid, is_first

    def __call__(self, value: Any) -> Any:
        """The arguments of the layer, with the stream in place."""
        if self.is_first:
            return self.lens.put(value, self.resid)
        x = self.lens.get(value)
        if x is not self.resid and (x.shape != self.resid.shape or not torch.equal(x, self.resid)):
            raise HooklineError("start_at_layer is not supported: this model changes the stream between layers")
        return value


def hooks_before(points: ModelPoints, layer: int) -> list[PointAction]:
    """The active hooks in the part of the model that a run from this layer skips, and that must fire."""
    anatomy = points.anatomy
    first = layer + len(anatomy.blocks) if layer < 0 else layer
    before: set[nn.Module] = {module for block in anatomy.blocks[:first] for module in block.module.modules()}
    entry = (anatomy.main.embed, anatomy.main.embed_norm, anatomy.main.pos_embed)
    before |= {module for module in entry if module is not None}
    actions = [action for routes in (*open_runs(), points.permanent) for action in routes.actions]
    return [
        action for action in actions if isinstance(action, PointAction) and action.must_fire and action.module in before
    ]


def stream_at(points: ModelPoints, layer: int, forward: Callable[[], Any]) -> Tensor:
    """The residual stream that enters a layer, or leaves the last one, in a forward pass; later layers do not run."""
    n_layers = len(points.anatomy.blocks)
    layer = _in_range("stop_at_layer", layer, n_layers)
    name = f"{layer % n_layers}.hook_resid_pre" if layer < n_layers else f"{layer - 1}.hook_resid_post"
    point = points.find(f"{points.anatomy.main.name}.{name}")
    recorder = Recorder([point], stops=True)  # which can be in a graph, but drops gradients
    stop = _Stop(point) if torch.is_grad_enabled() else Record(point, recorder)
    with Run(points.root, [stop], is_one_pass=True), suppress(StopForward):
        forward()
    stream = stop.stream if isinstance(stop, _Stop) else next(iter(recorder.by_point().get(point.name, ())), None)
    if stream is None:
        raise HooklineError(f"stop_at_layer={layer} is before start_at_layer")
    return stream


class _Stop(PointAction):
    """Keeps the stream with its graph, after all hooks and records at the point, and ends the pass."""

    phase = Record.phase
    must_fire = False
    only_reads = True
    stream: Tensor | None = None

    def __call__(self, value: Any) -> Any:
        """Keep the stream."""
        self.stream = snapshot(self.lens.get(value))
        raise StopForward
