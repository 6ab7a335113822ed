"""Points that no event of a module has, by hand: the stream after attention, the inside of norms and of attention.

At each of them the edits act in order, then backward hooks see the gradient of what they made, then it is read.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fuzz import languages
from fuzz.oracle import Acting, Observed, Pass, clone
from fuzz.program import Gradient, Place, Run
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from zoo.oracle import at, first_path, replaced

ATTENTION = ("rot_q", "rot_k", "scores", "pattern")


class StoppedError(Exception):
    """Ends a pass, with the tensor at which it ended."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


class LanguagePass(Pass):
    """A forward pass of a model of transformers with hooks placed by hand, also where no module begins or ends."""

    def __init__(self, root: nn.Module, edits: list[Acting], run: Run, ignored: set[Any]) -> None:
        super().__init__(root, edits, run, ignored)
        reads = run.reads if isinstance(run.reads, tuple) else ()
        hooked = [acting.hook.place for acting in edits] + [gradient.place for gradient in run.gradients]
        self.inner_reads = [place for place in reads if place.inside]
        self.insides = {(place.module, place.inside) for place in [*hooked, *reads] if place.inside}
        self.changed = {(place.module, place.inside) for place in hooked if place.inside}
        self.entering: tuple[str, Tensor] | None = None
        """A module, and the tensor that it gets instead of its own."""
        self.stops: str | None = None
        """The module before which the run ends."""
        self.prompt: Tensor | None = None
        """The mask of the prompt, if a text is written."""
        self.columns = 0
        """How many tokens have run through the model."""
        self.steps: list[Observed] = []
        """What was read in the passes of a generation that are over."""
        self.name_of = {id(module): name for name, module in root.named_modules()}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on every module, and attention in another function if something is inside it."""
        with super().attached():
            if any(inside in ATTENTION for _, inside in self.insides):
                with self._attending():
                    yield
            else:
                yield

    def _of_module(self, name: str, module: nn.Module) -> list[Any]:
        """Our hooks; what the model itself captures is what leaves them, unless others have hooks there too."""
        before = dict(module._forward_hooks)
        handles = super()._of_module(name, module)
        if all(getattr(hook, "__name__", "") == "output_capturing_hook" for hook in before.values()):
            for key in before:
                module._forward_hooks.move_to_end(key)
        return handles

    def edited(self, module: nn.Module, name: str, side: str, value: Any) -> Any:
        if side == "input" and module is self.root:
            self._begins(value[1])
        if side == "input" and self.stops == name:
            path = first_path(module, side, value)
            assert path is not None
            raise StoppedError(at(value, path))
        if side == "input" and self.entering is not None and self.entering[0] == name:
            path = first_path(module, side, value)
            assert path is not None
            value = replaced(value, path, self.entering[1])
            edited = self._edited(module, name, side, value)
            return value if edited is None else edited
        return self._edited(module, name, side, value)

    def _begins(self, kwargs: dict[str, Any]) -> None:
        """A pass begins: calls are counted anew, and positions are those of its tokens."""
        if self.steps or self.observed:
            self.steps.append(self.ended())
        self.calls = Counter({"": 1})
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        text = None
        if self.prompt is not None and isinstance(ids, Tensor):
            self.columns += ids.shape[1]
            mask = functional.pad(self.prompt, (0, self.columns - self.prompt.shape[1]), value=1)
        if isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.ndim == 2:
            text = languages.text(mask)
        for acting in self.edits:
            acting.text = text

    def ended(self) -> Observed:
        """What the last pass read."""
        reads = {name: x for name, x in self.observed.items() if name.startswith("read ")}
        self.observed = {name: x for name, x in self.observed.items() if name not in reads}
        return reads

    def joined(self) -> Observed:
        """What all passes of a generation read, position after position."""
        steps = [*self.steps, self.ended()]
        return {name: torch.cat([step[name] for step in steps], 1) for name in steps[0]}

    def _edited(self, module: nn.Module, name: str, side: str, value: Any) -> Any:
        new = self._inner(module, name, side, value)
        edited = super().edited(module, name, side, value if new is None else new)
        return new if edited is None else edited

    def _inner(self, module: nn.Module, name: str, side: str, value: Any) -> Any:
        kinds = {inside for path, inside in self.insides if path == name}
        if side == "input" and "stream" in kinds:
            self._stream(module, name, value)
        if side == "output" and kinds & {"scale", "normalized"}:
            return self._norm(module, name, value)
        for kind in kinds:
            if side == "output" and kind.startswith("result"):
                return self._result(module, name, kind, value)
        return None

    def act(self, name: str, kind: str, x: Tensor, keep: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """The value after the edits of a kind of point; it is the same object if nothing acts on it."""
        for acting in self.edits:
            if self._is_of(acting.hook.place, name, kind):
                new = acting(x)
                x = new if keep is None or new is x else keep(x, new)
        gradients = [
            (index, gradient)
            for index, gradient in enumerate(self.run.gradients)
            if self._is_of(gradient.place, name, kind)
        ]
        if gradients and torch.is_grad_enabled():
            x = clone(x if x.requires_grad else x.detach().requires_grad_())
            self.receive(x, name, gradients)
        for place in self.inner_reads:
            if self._is_of(place, name, kind):
                self.observed[f"read {place.name} {self.running[name][-1]}"] = x.detach().clone()
        return x

    def receive(self, x: Tensor, name: str, gradients: list[tuple[int, Gradient]]) -> None:
        for index, gradient in gradients:
            x.register_hook(self.received(f"gradient {index} {self.running[name][-1]}", gradient))

    def _is_of(self, place: Place, name: str, kind: str) -> bool:
        call = self.running[name][-1]
        return (place.module, place.inside) == (name, kind) and place.call in (None, call)

    def _stream(self, module: nn.Module, name: str, value: Any) -> None:
        """What a norm gets is the stream itself, which is also added to later: it is written to in place."""
        path = first_path(module, "input", value)
        assert path is not None
        x = at(value, path)
        new = x
        for acting in self.edits:
            if self._is_of(acting.hook.place, name, "stream"):
                new = acting(new)
        if new is not x:
            x.copy_(new)
        for index, gradient in enumerate(self.run.gradients):
            if self._is_of(gradient.place, name, "stream") and torch.is_grad_enabled():
                self.receive(x, name, [(index, gradient)])
        for place in self.inner_reads:
            if self._is_of(place, name, "stream"):
                self.observed[f"read {place.name} {self.running[name][-1]}"] = x.detach().clone()

    def _norm(self, module: nn.Module, name: str, value: Any) -> Any:
        """A norm written out, from what it got; its own output if nothing inside is changed."""
        path = first_path(module, "input", self.given[name])
        assert path is not None
        x = at(self.given[name], path)
        wide = x if isinstance(module, nn.LayerNorm) and x.dtype == torch.float64 else x.float()  # as the model's code
        kind = type(module).__name__
        is_rms = "RMS" in kind
        centered = wide if is_rms else wide - wide.mean(-1, keepdim=True)
        eps = next(getattr(module, key) for key in ("eps", "variance_epsilon") if hasattr(module, key))
        scale = (centered.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        normalized = centered / self.act(name, "scale", scale.to(x.dtype)).to(wide.dtype)
        normalized = self.act(name, "normalized", normalized.to(x.dtype))
        if not self.changed & {(name, "scale"), (name, "normalized")}:
            return None
        parameters = dict(module.named_parameters())
        if "weight" in parameters:
            normalized = normalized * (parameters["weight"] + (1 if "Gemma" in kind or "1P" in kind else 0))
        if "bias" in parameters:
            normalized = normalized + parameters["bias"]
        return normalized.to(value.dtype)

    def _result(self, module: nn.Module, name: str, kind: str, value: Tensor) -> Any:
        """What each head adds: its part of the projection's input times its rows of the weight."""
        path = first_path(module, "input", self.given[name])
        assert path is not None
        heads = int(kind.rpartition(" ")[2])
        weight: Any = module.weight
        weight = weight if type(module).__name__ == "Conv1D" else weight.T
        z = at(self.given[name], path).unflatten(-1, (heads, -1))
        before = torch.einsum("bphe,hed->bphd", z, weight.unflatten(0, (heads, -1)))
        after = self.act(name, kind, before)
        if after is before:
            return None
        bias: Any = getattr(module, "bias", None)
        summed = after.sum(2)
        return summed if bias is None else summed + bias

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Let attention go through a function of ours, both what is looked up by name and what is called eager."""
        module = next(module for module in self.root.modules() if self.name_of.get(id(module)) in self._paths())
        modeling: Any = sys.modules[type(module).__module__]
        fused, eager = ALL_ATTENTION_FUNCTIONS["sdpa"], modeling.eager_attention_forward
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self._by_hand(fused, is_eager=False)
        modeling.eager_attention_forward = self._by_hand(eager, is_eager=True)
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS["sdpa"], modeling.eager_attention_forward = fused, eager

    def _paths(self) -> set[str]:
        return {path for path, inside in self.insides if inside in ATTENTION}

    def _by_hand(self, original: Callable[..., Any], *, is_eager: bool) -> Callable[..., Any]:
        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
            name = self.name_of[id(module)]
            if name not in self._paths():
                return original(module, query, key, value, mask, **options)
            query = self._turned("rot_q", name, query)
            key = self._turned("rot_k", name, key)
            if not self.insides & {(name, "scores"), (name, "pattern")}:
                return original(module, query, key, value, mask, **options)
            output = self._written_out(module, name, (query, key, value, mask), options, is_eager=is_eager)
            if self.changed & {(name, "scores"), (name, "pattern")}:
                return output, None
            return original(module, query, key, value, mask, **options)

        return attend

    def _turned(self, kind: str, name: str, x: Tensor) -> Tensor:
        """The queries or keys, [batch, head, position, d_head], which points show by position first."""
        shown = x.transpose(1, 2)
        new = self.act(name, kind, shown)
        return x if new is shown else new.transpose(1, 2)

    def _written_out(
        self, module: Any, name: str, given: tuple[Any, ...], options: dict[str, Any], *, is_eager: bool
    ) -> Tensor:
        query, key, value, mask = given
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scaling = options.get("scaling")
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if (cap := options.get("softcap")) is not None:
            scores = (scores / cap).tanh() * cap
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        elif is_causal and query.shape[2] > 1:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        scores = self.act(name, "scores", scores, still_masked)
        wide = torch.float32 if is_eager or scores.dtype != torch.float64 else torch.float64
        pattern = scores.softmax(-1, dtype=wide)
        if not is_eager:  # as fused kernels do, also where all is masked
            pattern = pattern.masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)
        if not is_eager or type(module).__name__ == "GPT2Attention":
            pattern = pattern.to(query.dtype)
        pattern = self.act(name, "pattern", pattern)
        return (pattern.to(query.dtype) @ value).transpose(1, 2).contiguous()


def still_masked(before: Tensor, after: Tensor) -> Tensor:
    """What was masked stays so, if a hook made it infinite, not a number or huge (docs/decisions.md)."""
    info = torch.finfo(before.dtype)
    was_masked = before < info.min / 64
    is_off = ~after.isfinite() | (after > math.sqrt(info.max))
    return torch.where(was_masked & is_off, before, after)
