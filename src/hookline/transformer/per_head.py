"""Derived points per head, of width d_model: the output of each head, and each head's own input.

Models do not compute these. They are computed only when hooked, and re-projected only for the heads that an edit
changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import FIRST, Derived, Lens, Site, pass_state, saved_at, sharding
from hookline.errors import HooklineError, UnavailablePointError
from hookline.transformer.norms import Normalized, NormScale, norm_of
from hookline.transformer.shard_lenses import whole_parameter


@dataclass(frozen=True)
class HeadResult(Derived):
    """`hook_result`, the contribution of each head to the output projection. `b p h d`."""

    projection: nn.Module
    needs: tuple[Site] = field()
    """`hook_z`."""

    def source(self, value: Any) -> Tensor:  # noqa: ARG002
        """`hook_z`."""
        return saved_at(self.needs[0]).x

    def computed(self, value: Any) -> Tensor:  # noqa: ARG002
        """The projection of each head's `z`."""
        z = saved_at(self.needs[0])
        if self.projection not in sharding.sharing:
            return self.of(z.x)
        # Only once for each call: a process whose hook has edited the result needs it no more, and if the others
        # collected the weight again, they would wait for this one.
        with_grad = torch.is_grad_enabled()
        had_grad, result = z.parts.get(HeadResult, (None, None))
        if had_grad is None or with_grad > had_grad:
            result = self.of(z.x)
            z.parts[HeadResult] = with_grad, result
        return result if with_grad else result.detach()

    def of(self, z: Tensor) -> Tensor:
        """The projection of each head's `z` alone, without the bias."""
        heads = z.shape[-2]
        weight = self.weight()
        if weight is not None:
            return torch.einsum("...he,dhe->...hd", z, weight.unflatten(1, (heads, -1)))
        alone = torch.diag_embed(z.transpose(-1, -2)).movedim(-3, -1)  # [..., head, head, e], zero off the diagonal
        nothing = self.projection.forward(torch.zeros_like(z.flatten(-2)))
        return self.projection.forward(alone.flatten(-2)) - nothing.unsqueeze(-2)

    def weight(self) -> Tensor | None:
        """The weight of the projection; None if it is not a plain one."""
        return linear_weight(self.projection)

    def changed(self, value: Any, before: Tensor, after: Tensor) -> Any:
        """Add the change, summed over heads, to the projection's output."""
        return FIRST.put(value, FIRST.get(value) + (after - before).sum(-2))

    def own_part(self, rest: tuple[Lens, ...]) -> tuple[tuple[Lens, ...], sharding.Spans | None]:
        """The lens for the heads that this process has, and their indices."""
        z, spans = sharding.own_site(self.needs[0])
        if spans is None:
            return (self, *rest), None
        if not hasattr(self.projection.weight, "to_local"):
            raise UnavailablePointError("the weight of the output projection is not a plain sharded one")
        return (_OwnHeadResult(self.projection, (z,), self, spans[0]), *rest), spans


@dataclass(frozen=True)
class _OwnHeadResult(HeadResult):
    """The results of the heads that this process has, as they are after edits of the results of all heads."""

    whole: HeadResult
    heads: range

    def weight(self) -> Tensor | None:
        """The columns of the weight for these heads."""
        return self.projection.weight.to_local()  # type: ignore[operator, union-attr]

    def get(self, value: Any) -> Tensor:
        """The results of these heads."""
        whole = pass_state.saved.get(self.whole.needs[0])
        edited = None if whole is None else self.whole.edited(whole.x)
        return self.computed(value) if edited is None else edited[..., self.heads.start : self.heads.stop, :]


def linear_weight(module: nn.Module) -> Tensor | None:
    """The weight `[out, in]` of a plain linear module; None for any other class, subclasses included.

    Also None if the weight is quantized, or offloaded until the module runs.
    """
    weight: Any = getattr(module, "weight", None)
    if not (type(weight) is nn.Parameter or hasattr(weight, "full_tensor")) or weight.is_meta:
        return None
    weight = whole_parameter(weight)
    if type(module) is nn.Linear:
        return weight
    return weight.T if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


@dataclass(frozen=True)
class PerHeadInput(Derived):
    """`hook_attn_in`, `hook_q_input` and so on: the input of attention, repeated per head. `b p n d`.

    An edit takes effect at the outputs of the projections: see `ReprojectHeads`.
    """

    needs: tuple[Site] = field()
    """The input of attention, for the effects."""
    n: int
    of: PerHeadInput | None = None
    """The input that this one is derived from: `hook_attn_in` for `hook_q_input`."""
    what: str = "qkv"
    """Which projections read it."""

    def source(self, value: Any) -> Tensor:
        """The input of attention."""
        return self.needs[0].lens.get(value)

    def computed(self, value: Any) -> Tensor:
        """The stream repeated per head, or the edited input that this one is derived from."""
        stream = self.source(value)
        edited = self.of.edited(stream) if self.of is not None else None
        return stream.unsqueeze(-2).repeat_interleave(self.n, -2) if edited is None else edited

    def changed(self, value: Any, before: Tensor, after: Tensor) -> Any:  # noqa: ARG002
        """Unchanged: the edit takes effect at the projections."""
        return value


@dataclass(frozen=True)
class ReprojectHeads:
    """At the output of a projection: replace the slices of heads whose inputs were edited."""

    module: nn.Module
    part: Lens
    inputs: PerHeadInput
    stream: Site
    norm: nn.Module | None
    norm_points: tuple[Derived, ...] = ()

    def __call__(self, output: Any) -> Any:
        """The output, re-projected for each head with an edited input."""
        saved = pass_state.saved.get(self.stream)
        if saved is None:
            return output
        stream = saved.x
        inputs = self._edited(stream)
        if saved.parts.get(self, self) is inputs:  # done by another run
            return output
        saved.parts[self] = inputs
        if inputs is not None:
            self._check_norm(stream)
        heads = sharding.changed_in_any(self.module, [] if inputs is None else self._changed_heads(inputs, stream))
        if not heads:
            return output
        if inputs is None:  # edited in another process only: what both computed is compared when the pass ends
            inputs = stream.unsqueeze(-2).repeat_interleave(self.inputs.n, -2)
        before, parts = self._projected(stream), list(self.part.get(output).unbind(-2))
        for head, after in zip(heads, self._of_each(inputs, heads), strict=True):
            parts[head] = parts[head] + (after - before[..., head, :])
        return self.part.put(output, torch.stack(parts, -2))

    def _edited(self, stream: Tensor) -> Tensor | None:
        """The edited inputs of heads, of these projections or of all."""
        edited = self.inputs.edited(stream)
        return edited if edited is not None or self.inputs.of is None else self.inputs.of.edited(stream)

    def _changed_heads(self, inputs: Tensor, stream: Tensor) -> list[int]:
        if inputs.requires_grad or stream.requires_grad:  # a detached input has no gradient, whatever its value
            return list(range(inputs.shape[-2]))
        differs = (inputs != stream.unsqueeze(-2)).any(-1).flatten(0, -2).any(0)
        return differs.nonzero().flatten().tolist()

    def _of_each(self, inputs: Tensor, heads: list[int]) -> list[Tensor]:
        stacked = torch.cat([inputs[..., head, :] for head in heads])
        projected = self._projected(stacked).unflatten(0, (len(heads), -1))
        return [projected[row][..., head, :] for row, head in enumerate(heads)]

    def _projected(self, stream: Tensor) -> Tensor:
        normed = stream if self.norm is None else self.norm.forward(stream)
        return self.part.get(self.module.forward(normed))

    def _check_norm(self, stream: Tensor) -> None:
        """Raise if points of the norm were changed too."""
        for point in self.norm_points:
            edited = point.edited(stream)
            if edited is not None and not torch.equal(edited, point.computed(None)):
                raise HooklineError(
                    "a norm (hook_scale, hook_normalized) and a per-head input (hook_attn_in, hook_q_input, …) are "
                    "edited in the same layer, where each head would need its own norm: edit only one of them"
                )


def per_head_inputs(
    stream: Site, norm: nn.Module | None, parts: dict[str, Site], heads: int, groups: int
) -> dict[str, Site]:
    """The sites of `hook_attn_in`, `hook_q_input`, `hook_k_input` and `hook_v_input`."""
    if set(parts) != {"q", "k", "v"}:
        return {}
    counts = {"q": heads, "k": groups, "v": groups}
    formula = norm_of(norm)
    inside = (NormScale(formula, stream), Normalized(formula, stream)) if formula is not None else ()
    together = PerHeadInput((stream,), heads) if heads == groups else None
    sites, effects = {}, []
    for name, n in counts.items():
        head_input = PerHeadInput((stream,), n, together, name)
        effects.append(ReprojectHeads(parts[name].module, parts[name].lens, head_input, stream, norm, inside))
        sites[f"hook_{name}_input"] = Site(stream.module, stream.kind, head_input, (effects[-1],), stage=2)
    if together is not None:
        sites["hook_attn_in"] = Site(stream.module, stream.kind, together, tuple(effects), stage=1)
    return sites


@dataclass(frozen=True)
class ThroughNorm(Derived):
    """`hook_mlp_in` where attention and MLP share one norm: the stream as only the MLP reads it. `b p d`."""

    norm: nn.Module
    needs: tuple[Site] = field()
    """The input of the norm."""
    input: Lens

    def source(self, value: Any) -> Tensor:  # noqa: ARG002
        """The input of the norm."""
        return saved_at(self.needs[0]).x

    def computed(self, value: Any) -> Tensor:
        """The input of the norm."""
        return self.source(value)

    def changed(self, value: Any, before: Tensor, after: Tensor) -> Any:
        """Add the change of the norm's output to the MLP's input."""
        change = self.norm.forward(after) - self.norm.forward(before)
        return self.input.put(value, self.input.get(value) + change)
