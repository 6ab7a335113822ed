"""Probe: the runs of a model that the checks use, and what the model reports about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.engine.cache import ActivationCache
from hookline.engine.names import lens_of
from hookline.engine.order import Kind
from hookline.engine.points import HookPoint, Site
from hookline.transformer.architectures import architecture, is_post_norm
from hookline.transformer.contexts import EagerAttention
from hookline.transformer.roles import Block, Stack
from hookline.transformer.vision_towers import tower_of

if TYPE_CHECKING:
    from hookline.transformer.wrapped import WrappedTransformer


@dataclass(frozen=True)
class Layer:
    """A layer under test, with the hidden state and patterns that the model reports for it."""

    name: str
    number: int
    block: Block
    config: Any
    hidden: Tensor | None
    pattern: Tensor | None
    cross_pattern: Tensor | None

    def point(self, rest: str) -> str:
        """The full name of a point of this layer."""
        return f"{self.name}.{rest}"

    def stream_norms(self) -> tuple[nn.Module | None, nn.Module | None, nn.Module | None]:
        """The norms of the stream after attention, cross-attention and MLP (post-norm models)."""
        block, cross = self.block, self.block.cross
        if block.post_norm is not None:
            return block.post_norm, cross.stream_norm if cross is not None else None, block.post_norm_2
        if is_post_norm(self.config):
            return block.ln1, cross.norm if cross is not None else None, block.ln2
        return None, None, None


class Probe:
    """Runs a model on one input, for the checks."""

    def __init__(self, model: WrappedTransformer, inputs: dict[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        self.names = [name for name in model.hook_dict if not self.is_untested(name)]
        self.mixes_otherwise = architecture(model._points.anatomy.kind).gated_values
        anatomy = model._points.anatomy
        own = self._own_report()
        self.logits = own["logits"]
        seen = self._tower_report() if anatomy.towers and self._has_images() else {}
        of_tower = seen if len(anatomy.towers) == 1 else {}
        reports = [(stack, of_tower if stack in anatomy.towers else own) for stack in anatomy.every_stack]
        self.layers = [layer for stack, report in reports for layer in self._layers(stack, report)]

    def is_untested(self, name: str) -> bool:
        """Whether the point needs an image, and the inputs have none."""
        anatomy = self.model._points.anatomy
        if not anatomy.towers or self._has_images():
            return False
        skipped = [f"{anatomy.main.name}.{n}." for n, block in enumerate(anatomy.blocks) if _only_crosses(block)]
        return self.model._points.find(name).stream == "image" or name.startswith(
            tuple(skipped)
        )  # layers with cross-attention only are skipped

    def _has_images(self) -> bool:
        return any(name.startswith(("pixel_values", "input_features")) for name in self.inputs)

    def _layers(self, stack: Stack, own: dict[str, Any]) -> Iterator[Layer]:
        prefix = f"{stack.name}_" if self.model._points.anatomy.is_encoder_decoder else ""
        hidden, cross = own.get(f"{prefix}hidden_states"), own.get("cross_attentions")
        with_attention = [index for index, block in enumerate(stack.blocks) if block.attn is not None]
        patterns = dict(zip(with_attention, own.get(f"{prefix}attentions") or (), strict=False))
        for index, block in enumerate(stack.blocks):
            yield Layer(
                f"{stack.name}.{index}",
                index,
                block,
                stack.config,
                _batched(hidden[index]) if hidden is not None and index < len(hidden) else None,
                patterns.get(index),
                cross[index] if cross and block.cross is not None else None,
            )

    def run(self, **options: Any) -> Tensor:
        """The logits of a run with hooks."""
        with torch.no_grad():
            return self.model.run_with_hooks(**self.inputs, **options)

    def cache(self, names: list[str], **options: Any) -> tuple[Tensor, ActivationCache]:
        """The logits and activations of a run; an empty cache without names."""
        if not names:
            return self.logits, ActivationCache({}, self.model._points)
        return self.model.run_with_cache(**self.inputs, names_filter=names, **options)

    def values(self, names: list[str], *ends: str) -> ActivationCache:
        """The activations at the names with one of these endings."""
        with torch.no_grad():
            return self.cache([name for name in names if name.endswith(ends)])[1]

    def observe(self, points: list[HookPoint], edits: list[tuple[Any, Any]] | None = None) -> list[Tensor]:
        """The values at points, which need no name, in a run with edits."""
        if not points:
            return []
        seen: dict[int, Tensor] = {}

        def look(place: int) -> Callable[[Tensor], None]:
            return lambda x: seen.update({place: x.clone()})

        self.run(fwd_hooks=[*(edits or []), *((point, look(place)) for place, point in enumerate(points))])
        return [seen[place] for place in range(len(points))]

    def observe_groups(
        self, points: Sequence[tuple[HookPoint, ...]], edits: list[tuple[Any, Any]] | None = None
    ) -> list[list[Tensor]]:
        """The values at groups of points, all in one run."""
        seen = iter(self.observe([each for group in points for each in group], edits))
        return [[next(seen) for _ in group] for group in points]

    def ends(self, module: nn.Module) -> tuple[HookPoint, HookPoint]:
        """A module's input and output."""
        return self.at(module, Kind.INPUT), self.at(module, Kind.OUTPUT)

    def at(self, module: nn.Module, kind: Kind) -> HookPoint:
        """A module's input or output."""
        return self.model._points.at(kind.value, Site(module, kind, lens_of(module, kind)))

    def each(self, names: list[str], point: str) -> Iterator[tuple[str, Layer]]:
        """The names of this point in all layers, among `names`, with the layer."""
        for layer in self.layers:
            if layer.point(point) in names:
                yield layer.point(point), layer

    def _own_report(self) -> dict[str, Any]:
        """The hidden states and attentions that the model reports, and the logits."""
        module: Any = self.model.module
        with torch.no_grad():
            return {**_reported(module, module, (), self.inputs), "logits": outcome(module(**self.inputs))}

    def _tower_report(self) -> dict[str, Any]:
        """The hidden states and attentions that the vision tower reports, run on its input in the model."""
        module: Any = self.model.module
        tower: Any = tower_of(module)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handle = tower.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append((args, dict(kwargs))), with_kwargs=True
        )
        try:
            with torch.no_grad():
                module(**self.inputs)
        finally:
            handle.remove()
        ((args, kwargs),) = calls
        given = {name: value for name, value in kwargs.items() if not name.startswith("output_")}
        with torch.no_grad():
            return _reported(module, tower, args, given)


def _only_crosses(block: Block) -> bool:
    return block.attn is None and block.cross is not None


def _batched(hidden: Tensor) -> Tensor:
    """The hidden state with a batch axis."""
    return hidden[None] if hidden.ndim == 2 else hidden


def _reported(model: Any, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The hidden states and attentions that a submodel reports; attentions only under eager attention."""
    hidden = dict(part(*args, **kwargs, output_hidden_states=True).items())
    with EagerAttention(model):
        attentions = dict(part(*args, **kwargs, output_attentions=True).items())
    reported = {name: value for name, value in hidden.items() if name.endswith("hidden_states")}
    return reported | {name: value for name, value in attentions.items() if name.endswith("attentions")}


def outcome(output: Any) -> Tensor:
    """The logits; image-text similarities of CLIP-like models; else the last hidden state."""
    if isinstance(output, Tensor):  # a wrapped model inside another wrapper, such as peft
        return output
    return next(output[name] for name in ("logits", "logits_per_image", "last_hidden_state") if name in output)
