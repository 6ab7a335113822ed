"""Runs in which only some edges carry what a run computes; all others carry what the corrupted run computed.

An edge goes from a sender (the embeddings, a head, an MLP) to a receiver (queries, keys or values of a head, an MLP,
the logits). Every row of a batch is one text with its own edges, at each position (`place`) or at all. A receiver reads
the stream of the corrupted run, plus for each of its edges the difference between the sender's output in this row and
in the corrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.engine import compiling
from hookline.experiments.core.prompts import Prompts
from hookline.experiments.edges import edge_receivers, sender_outputs, sender_turn
from hookline.experiments.paths import Node
from hookline.model import HookedModel
from hookline.residual import ModelCache
from hookline.transformer.memory.halving import BatchFitter
from hookline.values.rows import drawn_once

_ROOM = 2**28
"""Bytes of what masks need that are held at a time."""


def in_batches(
    run: Callable[[Tensor], Tensor],
    masks: Sequence[Tensor],
    positions: Sequence[int],
    most: int | None,
    width: int,
    size: int,
) -> Iterator[tuple[Sequence[int], Float[Tensor, "row pos vocab"]]]:
    """Numbers of some masks with the logits of `run` at these positions; a mask has `size` bytes and `width` tokens."""
    fit = BatchFitter("circuits")
    fit.most = most or max(1, _ROOM // size)

    def run_masks(numbers: Sequence[int]) -> Tensor:
        return run(torch.stack([masks[number] for number in numbers]))[:, list(positions)]

    yield from fit.parts(range(len(masks)), run_masks, weight=width)


class MaskedRuns:
    """Runs of one prompt with masked edges, given the corrupted prompt."""

    def __init__(self, model: HookedModel, clean: Prompts, corrupted: Prompts) -> None:
        self.model, self.prompt = model, clean
        self.receivers = edge_receivers(model)
        names = list(dict.fromkeys(receiver.point.name for receiver in self.receivers))
        _, self._parts, self._read = sender_outputs(model, corrupted, names)
        self.senders = list(self._parts)
        self.seen_by = {receiver.label: self._count_before(receiver) for receiver in self.receivers}
        """How many senders, the first ones, each receiver reads."""

    def _count_before(self, to: Node) -> int:
        return sum(sender_turn(name) < (to.layer, to.turn) for name in self.senders)

    def logits(
        self, masks: Sequence[Bool[Tensor, "receiver sender place"]], positions: Sequence[int], most: int | None = None
    ) -> Iterator[tuple[Sequence[int], Float[Tensor, "row pos vocab"]]]:
        """Numbers of some masks, `most` of them at once, with the logits of their runs at these positions."""
        width, d_model = self.prompt.width, next(iter(self._parts.values())).shape[-1]
        return in_batches(self._run, masks, positions, most, width, 4 * width * d_model * len(self.senders))

    @torch.no_grad()
    def _run(self, masks: Bool[Tensor, "row receiver sender place"]) -> Float[Tensor, "row pos vocab"]:
        rows, first = len(masks), next(iter(self._parts.values()))
        changes = first.new_zeros(rows, self.prompt.width, len(self.senders), first.shape[-1])
        hooks = [*self._writers(changes), *self._readers(changes, masks.to(first.device))]
        tokens = self.prompt.tokens.expand(rows, -1)
        with drawn_once(rows), compiling.left_out("its edges are masked"):
            return self.model.run_with_hooks(tokens, fwd_hooks=hooks)

    def _writers(self, changes: Tensor) -> list[Any]:
        """Hooks that note how far the output of each sender is from that of the corrupted run."""
        points = self.model.index
        seen: dict[str, Tensor] = {}
        hooks: list[Any] = []

        def put(name: str, x: Tensor) -> None:
            changes[:, :, self.senders.index(name)] = x - self._parts[name]

        def note(x: Tensor, hook: Any) -> None:
            seen[hook.name] = x

        def embedded(x: Tensor) -> None:
            put("embed", x)

        hooks.append((f"{points.layer(0)}.hook_resid_pre", embedded))
        for layer in range(self.model.cfg.n_layers):
            prefix = points.layer(layer)

            def heads(x: Tensor, hook: Any, layer: int = layer) -> None:  # noqa: ARG001
                for name, part in ModelCache(dict(seen), points).head_parts(layer).items():
                    put(name, part)
                seen.clear()

            def mlp(x: Tensor, hook: Any, layer: int = layer) -> None:  # noqa: ARG001
                put(f"mlp{layer}", x)

            names = [f"{prefix}.attn.hook_z", f"{prefix}.ln1_post.hook_scale"]
            hooks += [(name, note) for name in names if name in points.hook_dict]
            hooks.append((f"{prefix}.hook_attn_out", heads))
            if f"mlp{layer}" in self._parts:
                hooks.append((f"{prefix}.hook_mlp_out", mlp))
        return hooks

    def _readers(self, changes: Tensor, masks: Tensor) -> list[Any]:
        """Hooks that give each receiver what its edges carry."""
        by_point: dict[str, list[int]] = {}
        for number, receiver in enumerate(self.receivers):
            by_point.setdefault(receiver.point.name, []).append(number)
        return [(name, self._reader(name, numbers, changes, masks)) for name, numbers in by_point.items()]

    def _reader(self, name: str, numbers: list[int], changes: Tensor, masks: Tensor) -> Callable[[Tensor], Tensor]:
        count = self.seen_by[self.receivers[numbers[0]].label]
        has_heads = self.receivers[numbers[0]].head is not None

        def read(x: Tensor) -> Tensor:
            edges = masks[:, numbers, :count]  # row, receiver, sender, pos
            inputs = x if has_heads else x[:, :, None]
            # From the nearer of the two runs, so that a receiver with all of its edges, or none, has just its input.
            from_own = (edges.sum(2) * 2 > count).permute(0, 2, 1)[..., None]
            before = self._read[name] if has_heads else self._read[name][:, :, None]
            weights = edges.to(x.dtype) - from_own[..., 0].permute(0, 2, 1)[:, :, None].to(x.dtype)
            moved = torch.einsum("rhsp,rpsd->rphd", weights, changes[:, :, :count].to(x.dtype))
            new_inputs = torch.where(from_own, inputs, before) + moved
            return new_inputs if has_heads else new_inputs[:, :, 0]

        return read
