"""Probe: the runs of a model that the checks use, and what the model reports about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.engine import ActivationCache, HookPoint, Kind, Site, lens_of, undo
from hookline.functions.signatures import parameters_of
from hookline.transformer.anatomy import Block, Stack
from hookline.transformer.architectures import Architecture, architecture
from hookline.transformer.contexts import EagerAttention
from hookline.transformer.find_anatomy import tower_of
from hookline.transformer.outputs import outcome

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

    @property
    def architecture(self) -> Architecture:
        """The row of the stack of this layer."""
        return architecture(self.config)

    def stream_norms(self) -> list[Callable[[Tensor], Tensor]]:
        """The norms of the stream after attention, cross-attention and MLP; identities except in post-norm models."""
        block, cross = self.block, self.block.cross
        norms: list[nn.Module | None] = [None, None, None]
        if block.post_norm is not None:
            norms = [block.post_norm, cross.stream_norm if cross is not None else None, block.post_norm_2]
        elif self.architecture.post_norm:
            norms = [block.ln1, cross.norm if cross is not None else None, block.ln2]
        return [norm if norm is not None else nn.Identity() for norm in norms]


class Probe:
    """Runs a model on one input, for the checks."""

    def __init__(self, model: WrappedTransformer, inputs: dict[str, Any]) -> None:
        self.model, self.inputs, self.anatomy = model, inputs, model.anatomy
        self.names = [name for name in model.hook_dict if not self.is_untested(name)]
        with torch.no_grad():
            model_report = _reported(model.module, model.module, (), inputs)
            self.logits = outcome(model.module(**inputs))
            has_own_report = len(self.anatomy.towers) == 1 and self._has_images()
            of_tower = self._tower_report() if has_own_report else {}
        reports = [
            (stack, of_tower if stack in self.anatomy.towers else model_report) for stack in self.anatomy.every_stack
        ]
        self.layers = [layer for stack, report in reports for layer in self._layers(stack, report)]
        self.on_run: Callable[[], object] = lambda: None
        """Called after each run."""

    def is_untested(self, name: str) -> bool:
        """Whether the point needs an image, and the inputs have none."""
        anatomy = self.anatomy
        if not anatomy.towers or self._has_images():
            return False
        # Without images, layers with cross-attention only do not run.
        crossing = [n for n, block in enumerate(anatomy.blocks) if block.attn is None and block.cross is not None]
        skipped = tuple(f"{anatomy.main.name}.{n}." for n in crossing)
        return self.model.index.find(name).stream == "image" or name.startswith(skipped)

    def _has_images(self) -> bool:
        return any(name.startswith(("pixel_values", "input_features")) for name in self.inputs)

    def _layers(self, stack: Stack, report: dict[str, Any]) -> Iterator[Layer]:
        prefix = f"{stack.name}_" if self.anatomy.is_encoder_decoder else ""
        hidden, cross = report.get(f"{prefix}hidden_states"), report.get("cross_attentions")
        with_attention = [index for index, block in enumerate(stack.blocks) if block.attn is not None]
        patterns = dict(zip(with_attention, report.get(f"{prefix}attentions") or (), strict=False))
        for index, block in enumerate(stack.blocks):
            state = hidden[index] if hidden is not None and index < len(hidden) else None
            yield Layer(
                f"{stack.name}.{index}",
                index,
                block,
                stack.config,
                state[None] if state is not None and state.ndim == 2 else state,
                patterns.get(index),
                cross[index] if cross and block.cross is not None else None,
            )

    def run(self, **options: Any) -> Tensor:
        """The logits of a run with hooks."""
        with torch.no_grad():
            logits = self.model.run_with_hooks(**self.inputs, **options)
        self.on_run()
        return logits

    def cache(self, names: list[str], **options: Any) -> tuple[Tensor, ActivationCache]:
        """The logits and activations of a run; an empty cache without names."""
        if not names:
            return self.logits, ActivationCache({}, self.model.index)
        logits_and_cache = self.model.run_with_cache(**self.inputs, names_filter=names, **options)
        self.on_run()
        return logits_and_cache

    def values(self, names: list[str], *ends: str) -> ActivationCache:
        """The activations at the names with one of these endings."""
        with torch.no_grad():
            return self.cache([name for name in names if name.endswith(ends)])[1]

    def unchanged_by_zeroing(self, names: list[str]) -> list[str]:
        """The points that have no effect when zeroed in one row of a batch, or that cannot be tested in this way.

        Each of many equal rows has another point zeroed, in one run. A last row without edits shows whether rows depend
        on each other; then none of the points is tested.
        """
        if not {*self.inputs} <= _BY_ROW:
            return names
        whole = {name: x[:1].expand(_ROWS + 1, *x.shape[1:]) for name, x in self.inputs.items()}
        rest = list[str]()
        for start in range(0, len(names), _ROWS):
            batch_names = names[start : start + _ROWS]
            hooks = [(name, partial(_zero_row, row)) for row, name in enumerate(batch_names)]
            with torch.no_grad():  # the run before also has hooks: an edit of patterns changes the kernel of attention
                before = self.model.run_with_hooks(**whole, fwd_hooks=[(name, torch.clone) for name in batch_names])
                after = self.model.run_with_hooks(**whole, fwd_hooks=hooks)
            self.on_run()
            is_changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            rest += [
                name for name, changed in zip(batch_names, is_changed, strict=False) if not changed or is_changed[-1]
            ]
        return rest

    def padded(self) -> dict[str, Any] | None:
        """The inputs with the first half of the first text masked; None if they have no text to mask.

        None too where the model itself raises an error: some count the places of images in what is not masked.
        """
        ids = self.inputs.get("input_ids")
        if ids is None or ids.ndim != 2 or "attention_mask" not in parameters_of(self.model.module)[0]:
            return None
        mask = torch.ones_like(ids)
        mask[0, : ids.shape[1] // 2] = 0
        inputs = self.inputs | {"attention_mask": mask}
        try:
            with torch.no_grad():
                self.model.module(**inputs)
        except Exception:
            return None
        return inputs

    def zeroing_runs(self) -> int:
        """How often `unchanged_by_zeroing` runs the model for all points."""
        return -(-len(self.names) // _ROWS)

    def observe(self, points: list[HookPoint], edits: list[tuple[Any, Any]] | None = None) -> list[Tensor]:
        """The values at points, which need no name, in a run with edits."""
        if not points:
            return []
        seen: dict[int, Tensor] = {}

        def look(place: int, x: Tensor) -> None:
            seen[place] = x.clone()

        self.run(fwd_hooks=[*(edits or []), *((point, partial(look, place)) for place, point in enumerate(points))])
        return [seen[place] for place in range(len(points))]

    def observe_groups(
        self, points: Sequence[tuple[HookPoint, ...]], edits: list[tuple[Any, Any]] | None = None
    ) -> list[list[Tensor]]:
        """The values at groups of points, all in one run."""
        seen = iter(self.observe([point for group in points for point in group], edits))
        return [[next(seen) for _ in group] for group in points]

    def ends(self, module: nn.Module) -> tuple[HookPoint, HookPoint]:
        """A module's input and output."""
        return self.at(module, Kind.INPUT), self.at(module, Kind.OUTPUT)

    def at(self, module: nn.Module, kind: Kind) -> HookPoint:
        """A module's input or output."""
        return self.model.index.at(kind.value, Site(module, kind, lens_of(module, kind)))

    def each(self, names: list[str], point: str) -> Iterator[tuple[str, Layer]]:
        """The names of this point in all layers, among `names`, with the layer."""
        for layer in self.layers:
            if layer.point(point) in names:
                yield layer.point(point), layer

    def _tower_report(self) -> dict[str, Any]:
        """The hidden states and attentions that the vision tower reports, run on its input in the model."""
        tower: Any = tower_of(self.model.module)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, {name: value for name, value in kwargs.items() if not name.startswith("output_")}))

        with undo.TorchHooks(before=[(tower, note)]):
            self.model.module(**self.inputs)
        ((args, kwargs),) = calls
        return _reported(self.model.module, tower, args, kwargs)


_ROWS = 15
_BY_ROW = {"input_ids", "attention_mask", "decoder_input_ids", "token_type_ids"}
"""Inputs whose first axis counts texts."""


def _zero_row(row: int, x: Tensor) -> Tensor:
    """Zero one row, if the first axis counts texts."""
    if x.ndim < 2 or x.shape[0] != _ROWS + 1:
        return x
    return x.index_fill(0, torch.tensor([row], device=x.device), 0)


def _reported(model: Any, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The hidden states and attentions that a submodel reports; attentions only under eager attention."""
    hidden = dict(part(*args, **kwargs, output_hidden_states=True).items())
    with EagerAttention(model):
        attentions = dict(part(*args, **kwargs, output_attentions=True).items())
    reported = {name: value for name, value in hidden.items() if name.endswith("hidden_states")}
    return reported | {name: value for name, value in attentions.items() if name.endswith("attentions")}
