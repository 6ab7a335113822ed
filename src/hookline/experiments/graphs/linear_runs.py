"""A model on one prompt as a linear map: attention patterns and norm denominators are frozen, and MLPs are cut off.

What a layer's attention adds to the stream is then linear in the stream, so the input of every MLP and the logits are
linear (plus a constant) in the embeddings and in what the MLPs wrote. Nothing here knows an architecture: the frozen
values are those of points, and whether the map is linear is measured by `LinearRun.forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.engine import HookPoint, compiling
from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.residual.readout import factor_and_cap

EMBEDDING, LOGITS = -1, -2
"""In place of a layer: the embeddings as a source, and the unembedding as a reader."""
_FROZEN = (".hook_scale", ".hook_pattern")
_READS = ("mlp.hook_in", "hook_mlp_in", "hook_resid_mid")
_ROOM = 2**25
"""Numbers in the gradients that are computed together, at one point."""

Reader: TypeAlias = int | str
"""A layer, `LOGITS`, or the name of another point that is watched."""
ByLayer: TypeAlias = dict[int, Tensor]
Written: TypeAlias = Callable[[int, Mapping[Reader, Tensor], Tensor], Tensor]
"""Returns what is written in place of a layer's MLP, [pos, d_model], given the inputs of the layers up to it, and the
output that the MLP computes from its input."""


@dataclass(frozen=True)
class Cut:
    """Where the MLP of a layer is cut off: the point that its nodes read, and the point where they write."""

    reads: str
    writes: str


def mlp_cuts(model: HookedModel) -> dict[int, Cut]:
    """The MLP of each layer that has one, with its input after the norm, or the stream if that is not a point."""
    cuts: dict[int, Cut] = {}
    for layer in range(model.cfg.n_layers):
        prefix = model.index.layer(layer)
        reads = [f"{prefix}.{kind}" for kind in _READS if f"{prefix}.{kind}" in model.hook_dict]
        if reads and f"{prefix}.hook_mlp_out" in model.hook_dict:
            cuts[layer] = Cut(reads[0], f"{prefix}.hook_mlp_out")
    return cuts


class LinearRun:
    """The linear map of one prompt, and the values of the run that it was frozen in."""

    def __init__(
        self,
        model: HookedModel,
        inputs: Mapping[str, Any],
        cuts: Mapping[int, Cut],
        skips: Mapping[int, Callable[[Tensor], Tensor]],
        watch: Sequence[str] = (),
    ) -> None:
        self.model, self.call, self.cuts, self.skips = model, dict(inputs), dict(cuts), dict(skips)
        self.watch = tuple(watch)
        self.start = f"{model.index.layer(0)}.hook_resid_pre"
        self.frozen: dict[str, Tensor] = {}
        self.inputs: dict[Reader, Tensor] = {}
        """The input of each MLP and of the unembedding, and the value at each watched point, [pos, d]."""
        self.outputs: ByLayer = {}
        """The output of each MLP, [pos, d_model]."""
        self._read: dict[Reader, Tensor] = {}  # inputs with their autograd graph
        self._leaves: ByLayer = {}  # zeros that are added to the sources
        self._made: ByLayer = {}  # outputs of the MLPs and of the unembedding, with their autograd graph
        self._run()

    @property
    def n_pos(self) -> int:
        """The number of positions of the prompt."""
        return len(self.embedding)

    def _run(self) -> None:
        """Run the model once, with gradients from the sources to the readers."""
        if torch.is_inference_mode_enabled():
            raise HooklineError("graphs need gradients, which torch.inference_mode() disables: use torch.no_grad()")
        place = "hook_pos_embed" if self.model.anatomy.main.pos_embed is not None else None
        positions: list[Tensor] = []
        names = [name for name in self.model.hook_dict if name.endswith(_FROZEN)]
        hooks: list[Any] = [(names, self._freeze)] if names else []
        hooks += [(place, lambda x: positions.append(x.detach()[0]))] if place else []
        hooks += [(self.start, self._source(EMBEDDING))]
        for layer, cut in self.cuts.items():
            hooks += [(cut.reads, self._reader(layer)), (cut.writes, self._source(layer))]
        hooks += [(name, self._reader(name)) for name in self.watch]
        hooks += [("unembed.hook_in", self._reader(LOGITS)), ("unembed.hook_out", self._last)]
        with torch.enable_grad(), compiling.left_out("graphs need gradients"):
            logits = self.model.run_with_hooks(**self.call, fwd_hooks=hooks)
        started = self.outputs.pop(EMBEDDING)
        is_added = bool(positions) and positions[0].shape == started.shape
        self.positions = positions[0] if is_added else torch.zeros_like(started)
        self.embedding = started - self.positions
        out, last_logits = self._made[LOGITS], logits.detach()[0, -1]
        self.factor, cap = factor_and_cap(out.detach(), last_logits, self.model.anatomy.config)
        """By what the model multiplies what its unembedding returns."""
        self._made[LOGITS] = out * self.factor
        self.logits: Float[Tensor, " vocab"] = out.detach() if cap is not None else last_logits
        """The model's logits at the last position, before a soft cap if there is one."""
        self.probabilities = last_logits.float().softmax(-1)

    def _freeze(self, x: Tensor, hook: HookPoint) -> Tensor:
        self.frozen[hook.name] = x.detach()
        return x.detach()

    def _source(self, layer: int) -> Callable[[Tensor], Tensor]:
        def cut_off(x: Tensor) -> Tensor:
            self._made[layer], self.outputs[layer] = x, x.detach()[0]
            self._leaves[layer] = torch.zeros_like(x).requires_grad_()
            output = x.detach()
            if layer in self.skips:  # linear in the layer's input, so it stays a part of the map
                skip = self.skips[layer](self._read[layer])
                output = skip + (output - skip.detach())
            return output + self._leaves[layer]

        return cut_off

    def _reader(self, reader: Reader) -> Callable[[Tensor], Tensor]:
        def read(x: Tensor) -> Tensor:
            self._read[reader], self.inputs[reader] = x, x.detach()[0].flatten(1)
            return x

        return read

    def _last(self, x: Tensor) -> None:
        self._made[LOGITS] = x[0, -1]

    def encoders(self, layer: int, towards: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos d"]:
        """The derivative of an MLP's output along a direction at each position, in its input at that position."""
        return torch.autograd.grad(self._made[layer], self._read[layer], towards[None], retain_graph=True)[0][0]

    def readouts(self, weights: Float[Tensor, "target vocab"]) -> Float[Tensor, "target d"]:
        """The derivative of weighted sums of the last position's logits in the input of the unembedding there."""
        gradients = torch.autograd.grad(
            self._made[LOGITS], self._read[LOGITS], weights, retain_graph=True, is_grads_batched=True
        )
        return gradients[0][:, 0, -1]

    def back(
        self, reader: Reader, positions: Int[Tensor, " target"], vectors: Float[Tensor, "target d"]
    ) -> list[tuple[slice, dict[int, Float[Tensor, "some pos d_model"]]]]:
        """The gradients of vectors · the value at a reader's positions, in every source before it, in batches."""
        read = self._read[reader]
        size = max(1, _ROOM // self.inputs[reader].numel())
        batches = []
        for first in range(0, len(vectors), size):
            batch = slice(first, min(first + size, len(vectors)))
            seeds = torch.zeros(len(vectors[batch]), *self.inputs[reader].shape, dtype=read.dtype, device=read.device)
            seeds[torch.arange(len(seeds)), positions[batch]] = vectors[batch].to(seeds)
            batches.append((batch, self._gradients(read, seeds.reshape(len(seeds), *read.shape))))
        return batches

    def _gradients(self, read: Tensor, seeds: Tensor) -> ByLayer:
        if not read.requires_grad:
            return {}
        leaves = list(self._leaves)
        gradients = torch.autograd.grad(
            read, [self._leaves[layer] for layer in leaves], seeds, retain_graph=True, allow_unused=True,
            is_grads_batched=True,
        )  # fmt: skip
        return {layer: x[:, 0] for layer, x in zip(leaves, gradients, strict=True) if x is not None}

    def back_to(
        self, reader: Reader, pos: int, vector: Float[Tensor, " d"], names: Sequence[str]
    ) -> dict[str, Float[Tensor, "pos _"]]:
        """The gradient of a vector · the value at a reader's position, at watched points that it depends on."""
        read = self._read[reader]
        seed = torch.zeros_like(read)
        seed[0, pos] = vector.to(seed).view(seed.shape[2:])
        points = [self._read[name] for name in names]
        gradients = torch.autograd.grad(read, points, seed, retain_graph=True, allow_unused=True)
        return {name: x[0].flatten(1) for name, x in zip(names, gradients, strict=True) if x is not None}

    @torch.no_grad()
    def forward(
        self, embedding: Float[Tensor, "pos d_model"], written: Written, *, is_frozen: bool = True
    ) -> tuple[dict[Reader, Tensor], Float[Tensor, " vocab"]]:
        """Run the frozen model with other embeddings and MLP outputs; returns the values of its readers, and logits.

        Without `is_frozen`, attention and norms are those of the model.
        This is a forward pass of the model itself, so comparing it with the gradients shows whether the map is linear.
        """
        inputs: dict[Reader, Tensor] = {}
        logits: list[Tensor] = []

        def note(reader: Reader) -> Callable[[Tensor], None]:
            return lambda x: inputs.update({reader: x[0].flatten(1).clone()})

        def put(layer: int) -> Callable[[Tensor], Tensor]:
            return lambda x: written(layer, inputs, x[0])[None].to(x)

        frozen = list(self.frozen) if is_frozen else []
        hooks: list[Any] = [(frozen, lambda _, hook: self.frozen[hook.name])] if frozen else []
        hooks += [(self.start, lambda x: (embedding + self.positions)[None].to(x))]
        for layer, cut in self.cuts.items():
            hooks += [(cut.reads, note(layer)), (cut.writes, put(layer))]
        hooks += [(name, note(name)) for name in self.watch]
        hooks += [("unembed.hook_in", note(LOGITS)), ("unembed.hook_out", lambda x: logits.append(x[0, -1].clone()))]
        with compiling.left_out("the run is edited at every layer"):
            self.model.run_with_hooks(**self.call, fwd_hooks=hooks)
        return inputs, logits[0] * self.factor
