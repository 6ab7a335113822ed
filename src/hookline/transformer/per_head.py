"""Points of each head, as wide as the model: what a head adds, and the copy of the stream that it alone reads.

No model computes these. They are worked out when somebody hooks them, and only for the heads that an edit changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.derived import Derived
from hookline.engine.lenses import FIRST, Lens
from hookline.engine.points import Site
from hookline.engine.taps import Kind, now
from hookline.errors import HooklineError
from hookline.transformer.norms import Normalized, Scale, norm_of


@dataclass(frozen=True)
class Result(Derived):
    """What each head gives to the output projection's output. `b p h d`."""

    projection: nn.Module
    z: Site

    def source(self, value: Any) -> Tensor:  # noqa: ARG002
        """The heads' mixes of values."""
        return now.kept[self.z]

    def worked_out(self, value: Any) -> Tensor:
        """From the mix that went in."""
        return self.of(self.source(value))

    def of(self, z: Tensor) -> Tensor:
        """Head by head: the projection of that head's mix alone, without the bias."""
        heads = z.shape[-2]
        weight = linear_weight(self.projection)
        if weight is not None:
            return torch.einsum("...he,dhe->...hd", z, weight.unflatten(1, (heads, -1)))
        alone = torch.diag_embed(z.transpose(-1, -2)).movedim(-3, -1)  # [..., head, the heads' places, e]
        nothing = self.projection.forward(torch.zeros_like(z.flatten(-2)))
        return self.projection.forward(alone.flatten(-2)) - nothing.unsqueeze(-2)

    def changed(self, value: Any, before: Tensor, after: Tensor) -> Any:
        """The sum over heads changes as they do."""
        return FIRST.put(value, FIRST.get(value) + (after - before).sum(-2))


def linear_weight(module: nn.Module) -> Tensor | None:
    """The matrix `[out, in]` of a linear map; None for anything else, be it only a class derived from one.

    And None where the weight is quantised, or not there: kept elsewhere until the module runs.
    """
    if type(getattr(module, "weight", None)) is not nn.Parameter or module.weight.is_meta:
        return None
    if type(module) is nn.Linear:
        return module.weight
    return module.weight.T if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None  # type: ignore[return-value]


@dataclass(frozen=True)
class Copies(Derived):
    """The stream as it enters the attention, a copy for each head. `b p n d`.

    An edit changes nothing there; it shows where the projections of those heads come out.
    """

    stream: Lens
    n: int
    of: Copies | None = None
    """Copies that these are copies of."""
    what: str = "qkv"
    """Whose they are."""

    def source(self, value: Any) -> Tensor:
        """The stream."""
        return self.stream.get(value)

    def worked_out(self, value: Any) -> Tensor:
        """The same for each head, unless the copies that they are made from are edited."""
        stream = self.source(value)
        edited = self.of.edited(stream) if self.of is not None else None
        return stream.unsqueeze(-2).repeat_interleave(self.n, -2) if edited is None else edited

    def changed(self, value: Any, before: Tensor, after: Tensor) -> Any:  # noqa: ARG002
        """Nothing, here."""
        return value


@dataclass(frozen=True)
class Split:
    """At the output of a projection: each head's part, from that head's own copy of the stream."""

    module: nn.Module
    part: Lens
    copies: Copies
    stream: Site
    norm: nn.Module | None
    norm_points: tuple[Derived, ...] = ()

    def __call__(self, output: Any) -> Any:
        """The output with the parts of edited copies anew."""
        stream = now.kept.get(self.stream)
        copies = self._edited(stream)
        if stream is None or copies is None or now.kept.get(self) is copies:
            return output
        now.kept[self] = copies  # done: another run that waits here need not do it again
        self._check_norm(stream)
        heads = self._changed_heads(copies, stream)
        if not heads:
            return output
        before, parts = self._projected(stream), list(self.part.get(output).unbind(-2))
        for head, after in zip(heads, self._of_each(copies, heads), strict=True):
            parts[head] = parts[head] + (after - before[..., head, :])
        return self.part.put(output, torch.stack(parts, -2))

    def _edited(self, stream: Tensor | None) -> Tensor | None:
        if stream is None:
            return None
        own = self.copies.edited(stream)
        return own if own is not None or self.copies.of is None else self.copies.of.edited(stream)

    def _changed_heads(self, copies: Tensor, stream: Tensor) -> list[int]:
        if copies.requires_grad:
            return list(range(copies.shape[-2]))
        differs = (copies != stream.unsqueeze(-2)).any(-1).flatten(0, -2).any(0)
        return differs.nonzero().flatten().tolist()

    def _of_each(self, copies: Tensor, heads: list[int]) -> list[Tensor]:
        stacked = torch.cat([copies[..., head, :] for head in heads])
        projected = self._projected(stacked).unflatten(0, (len(heads), -1))
        return [projected[row][..., head, :] for row, head in enumerate(heads)]

    def _projected(self, stream: Tensor) -> Tensor:
        normed = stream if self.norm is None else self.norm.forward(stream)
        return self.part.get(self.module.forward(normed))

    def _check_norm(self, stream: Tensor) -> None:
        if any(_is_changed(point, stream) for point in self.norm_points):
            raise HooklineError(
                "the norm's inside (hook_scale, hook_normalized) and a head's own copy of the stream (hook_attn_in, "
                "hook_q_input, …) are hooked in one layer: each copy would have a norm of its own; hook one of them"
            )


def _is_changed(point: Derived, source: Tensor) -> bool:
    """Whether a hook made it something else; one that only reads puts back what it found."""
    edited = point.edited(source)
    return edited is not None and not torch.equal(edited, point.worked_out(None))


def result_site(projection: nn.Module, z: Site) -> Site:
    """Where the heads' results are."""
    return Site(projection, Kind.OUTPUT, Result(projection, z), (z,), stage=-1)


def splits(stream: Site, norm: nn.Module | None, parts: dict[str, Site], heads: int, groups: int) -> dict[str, Site]:
    """Where the copies of the stream are that feed each head, and each head's queries, keys and values."""
    if set(parts) != {"q", "k", "v"}:
        return {}
    counts = {"q": heads, "k": groups, "v": groups}
    known = norm_of(norm)
    inside = (Scale(known, stream), Normalized(known, stream)) if known is not None else ()
    together = Copies(stream.lens, heads) if heads == groups else None
    copies = {name: Copies(stream.lens, n, together, name) for name, n in counts.items()}
    effects = {name: Split(parts[name].module, parts[name].lens, copies[name], stream, norm, inside) for name in counts}
    sites = {
        f"hook_{name}_input": Site(stream.module, stream.kind, copies[name], (stream,), (effects[name],), stage=2)
        for name in counts
    }
    if together is not None:
        sites["hook_attn_in"] = Site(stream.module, stream.kind, together, (stream,), tuple(effects.values()), stage=1)
    return sites


@dataclass(frozen=True)
class ThroughNorm(Derived):
    """The stream that feeds the MLP alone, where one norm serves the attention and the MLP. `b p d`."""

    norm: nn.Module
    stream: Site
    input: Lens

    def source(self, value: Any) -> Tensor:  # noqa: ARG002
        """What goes into the norm."""
        return now.kept[self.stream]

    def worked_out(self, value: Any) -> Tensor:
        """The stream itself."""
        return self.source(value)

    def changed(self, value: Any, before: Tensor, after: Tensor) -> Any:
        """The MLP's input changes as the norm's output would."""
        change = self.norm.forward(after) - self.norm.forward(before)
        return self.input.put(value, self.input.get(value) + change)
