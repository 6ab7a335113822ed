"""The proof that points are what their names say, on the model at hand.

Nothing here trusts our own reading of an architecture. Every point is checked against the model itself: that it fires
once; that caching it changes no bit of the logits; that an identity edit leaves them and a zeroing edit does not;
that its gradient is autograd's own; that the stream is what the model reports as hidden states and the pattern what
it reports as attentions; that what is added adds up, and the pattern mixes the values into `z`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from hookline.cache import ActivationCache
from hookline.errors import NeverFiredWarning

if TYPE_CHECKING:
    from hookline.model import HookedModel

Status = Literal["proved", "unavailable", "failed"]


@dataclass(frozen=True)
class Verdict:
    """What is known of one point."""

    name: str
    status: Status
    why: str = ""


@dataclass(frozen=True)
class Report:
    """What is known of all points of a model; prints as a table."""

    architecture: str
    verdicts: tuple[Verdict, ...]

    def failed(self) -> list[Verdict]:
        """The points that are not what their names say."""
        return [verdict for verdict in self.verdicts if verdict.status == "failed"]

    def __str__(self) -> str:
        width = max(len(verdict.name) for verdict in self.verdicts)
        rows = [f"{each.name:<{width}}  {each.status:<11}  {each.why}".rstrip() for each in self.verdicts]
        counts = {
            status: sum(v.status == status for v in self.verdicts) for status in ("proved", "unavailable", "failed")
        }
        return "\n".join([*rows, f"{self.architecture}: " + ", ".join(f"{n} {status}" for status, n in counts.items())])


_Check: TypeAlias = Callable[["_Trial", list[str]], Iterator[tuple[str, str]]]


def verify(model: HookedModel, inputs: dict[str, Any]) -> Report:
    """Check every point of `model` on `inputs`, the keyword arguments of its forward."""
    found = dict(_failures(_Trial(model, inputs)))
    verdicts = []
    for name, spec in model._points.specs.items():
        if spec.site is None:
            verdicts.append(Verdict(name, "unavailable", spec.why))
        else:
            verdicts.append(Verdict(name, "failed" if name in found else "proved", found.get(name, "")))
    return Report(model.cfg.architecture, tuple(verdicts))


class _Trial:
    """The runs that the checks look at."""

    def __init__(self, model: HookedModel, inputs: dict[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        self.names = list(model.hook_dict)
        self.n_layers = model.cfg.n_layers
        self.logits, self.hidden, self.attentions = self._own_report()

    def run(self, **options: Any) -> Tensor:
        """Logits of a run with hooks."""
        with torch.no_grad():
            return self.model.run_with_hooks(**self.inputs, **options)

    def cache(self, names: list[str], **options: Any) -> tuple[Tensor, ActivationCache]:
        """Logits and activations; of nothing, an empty cache."""
        if not names:
            return self.logits, ActivationCache({}, self.model._points)
        return self.model.run_with_cache(**self.inputs, names_filter=names, **options)

    def _own_report(self) -> tuple[Tensor, Any, Any]:
        """What the model itself says of its inside. Attentions are reported by its eager implementation only."""
        module: Any = self.model.module
        with torch.no_grad():
            plain = module(**self.inputs)
            hidden = getattr(module(**self.inputs, output_hidden_states=True), "hidden_states", None)
            before = module.config._attn_implementation
            try:
                module.set_attn_implementation("eager")
                attentions = getattr(module(**self.inputs, output_attentions=True), "attentions", None)
            finally:
                module.set_attn_implementation(before)
        return plain.logits, hidden, attentions


def _failures(trial: _Trial) -> Iterator[tuple[str, str]]:
    """Every point that fails a check, with the reason of the first it fails."""
    failed: dict[str, str] = {}
    for check in (_fires_once, _leaves_logits, _identity, _effect, _gradient, _stream, _sums, _pattern, _mix, _queries):
        remaining = [name for name in trial.names if name not in failed]
        for name, why in _each_if_need_be(check, trial, remaining):
            failed.setdefault(name, why)
    yield from failed.items()


def _each_if_need_be(check: _Check, trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """All points at once; if that raises, one by one, so that it is known which raises."""
    try:
        yield from list(check(trial, names))
    except Exception as error:  # whatever goes wrong at a point, it is that point's failure
        if len(names) == 1:
            yield names[0], f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return
        for name in names:
            yield from _each_if_need_be(check, trial, [name])


def _fires_once(trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    seen: dict[str, int] = dict.fromkeys(names, 0)

    def count(_x: Tensor, hook: Any) -> None:
        seen[hook.name] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverFiredWarning)  # that is what is being found out
        trial.run(fwd_hooks=[(name, count) for name in names])
    for name, times in seen.items():
        if times != 1:
            yield name, f"fires {times} times in a forward pass"


def _leaves_logits(trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    with torch.no_grad():
        if torch.equal(trial.cache(names)[0], trial.logits):
            return
        for name in names:
            if not torch.equal(trial.cache([name])[0], trial.logits):
                yield name, "caching it changes the logits"


def _identity(trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    if _close(trial.run(fwd_hooks=[(name, torch.clone) for name in names]), trial.logits):
        return
    for name in names:
        if not _close(trial.run(fwd_hooks=[(name, torch.clone)]), trial.logits):
            yield name, "an identity edit changes the logits"


def _effect(trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if torch.equal(trial.run(fwd_hooks=[(name, torch.zeros_like)]), trial.logits):
            yield name, "a zeroing edit has no effect"


def _gradient(trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """Against the gradient of a number that is added to the activation."""
    added: dict[str, Tensor] = {}

    def add(x: Tensor, hook: Any) -> Tensor | None:
        if not x.is_floating_point():
            return None
        added[hook.name] = torch.zeros_like(x, requires_grad=True)
        return x + added[hook.name]

    def loss(logits: Tensor) -> Tensor:
        return (logits * torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)).sum()

    with torch.enable_grad():
        logits = trial.model.run_with_hooks(**trial.inputs, fwd_hooks=[(name, add) for name in names])
        own = torch.autograd.grad(loss(logits), list(added.values()), allow_unused=True)
        _, cache = trial.cache(names, incl_bwd=True, loss_fn=loss)
    for name, gradient in zip(added, own, strict=True):
        if gradient is None or f"{name}_grad" not in cache:
            yield name, "no gradient reaches it"
        elif not _close(cache[f"{name}_grad"], gradient):
            yield name, "its gradient is not autograd's"


def _stream(trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """`resid_pre` is what the model reports as hidden states; `resid_post` is the next `resid_pre`."""
    with torch.no_grad():
        _, cache = trial.cache([name for name in names if "resid" in name])
    for layer in range(trial.n_layers):
        name, after = f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.hook_resid_post"
        # Most models report what enters each layer, some what leaves it.
        if (
            name in cache
            and trial.hidden is not None
            and not any(each in cache and _close(cache[each], trial.hidden[layer]) for each in (name, after))
        ):
            yield name, "it is not the hidden state that the model reports"
        before = f"blocks.{layer - 1}.hook_resid_post"
        if name in cache and before in cache and not _close(cache[name], cache[before]):
            yield before, "it is not what enters the next layer"


def _sums(trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """What is added adds up, with a norm of the stream in between where there is one."""
    parts = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")
    with torch.no_grad():
        _, cache = trial.cache([name for name in names if name.endswith(parts)])
    for layer in range(trial.n_layers):
        prefix = f"blocks.{layer}."
        pre, attn, mid, mlp, post = (cache.get(prefix + part) for part in parts)
        norms = trial.model._points.stream_norms(layer)
        if pre is None or post is None:
            continue
        if attn is not None and mid is not None and not _close(norms[0](pre + attn), mid):
            yield f"{prefix}hook_attn_out", "the stream plus it is not the stream after it"
            yield f"{prefix}hook_resid_mid", "it is not the stream plus what the attention adds"
        start = mid if mid is not None else pre + attn if attn is not None else pre
        if mlp is not None and not _close(norms[1](start + mlp), post):
            yield f"{prefix}hook_mlp_out", "the stream plus it is not the stream after it"
            if mid is None:
                yield f"{prefix}hook_attn_out", "the stream plus it is not the stream after it"
        elif not trial.model._points.has_mlp(layer) and attn is not None and not _close(start, post):
            yield f"{prefix}hook_attn_out", "the stream plus it is not the stream after it"


def _pattern(trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """The pattern is what the model reports as attentions, or, where it reports none, mixes the values into `z`."""
    with torch.no_grad():
        _, cache = trial.cache([name for name in names if name.endswith(("hook_pattern", "hook_v", "hook_z"))])
    reported = dict(zip(_attention_layers(trial), trial.attentions or (), strict=False))
    for layer in range(trial.n_layers):
        name = f"blocks.{layer}.attn.hook_pattern"
        if name not in cache:
            continue
        own = reported.get(layer)
        is_own = own is not None and _close(cache[name], own)
        if not is_own and not _mixes(cache, layer):
            yield name, "it is not the attention that the model reports, nor does it mix the values into z"


def _attention_layers(trial: _Trial) -> list[int]:
    return [layer for layer in range(trial.n_layers) if trial.model._points.has_attention(layer)]


def _mix(trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """The pattern mixes the values into `z`, but for the few architectures that do something more in between."""
    if trial.model._points.mixes_otherwise():
        return
    with torch.no_grad():
        _, cache = trial.cache([name for name in names if name.endswith(("hook_pattern", "hook_v", "hook_z"))])
    for layer in range(trial.n_layers):
        prefix = f"blocks.{layer}.attn.hook_"
        if all(f"{prefix}{part}" in cache for part in ("pattern", "v", "z")) and not _mixes(cache, layer):
            yield f"{prefix}z", "it is not the values as the pattern mixes them"
            yield f"{prefix}v", "the pattern does not mix it into z"


def _mixes(cache: ActivationCache, layer: int) -> bool:
    pattern, v, z = (cache.get(f"blocks.{layer}.attn.hook_{part}") for part in ("pattern", "v", "z"))
    if pattern is None or v is None or z is None or pattern.shape[1] % v.shape[2]:
        return False
    values = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)
    if values.shape[1] != pattern.shape[3]:
        return False
    return _close(torch.einsum("bhpk,bkhe->bphe", pattern, values), z)


def _queries(trial: _Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """Queries and keys, as they meet, give the scores; and as projected have the same shapes."""
    parts = ("hook_q", "hook_k", "hook_rot_q", "hook_rot_k")
    with torch.no_grad():
        _, cache = trial.cache([name for name in names if name.endswith(parts)])
    for layer in range(trial.n_layers):
        for before, after in (("q", "rot_q"), ("k", "rot_k")):
            plain, met = (cache.get(f"blocks.{layer}.attn.hook_{part}") for part in (before, after))
            if plain is not None and met is not None and plain.shape != met.shape:
                yield f"blocks.{layer}.attn.hook_{before}", f"{list(plain.shape)}, but {list(met.shape)} meet"


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal within what rounding makes of two ways to compute the same."""
    if a.shape != b.shape:
        return False
    a, b = (x.double().nan_to_num(0, 0, 0).clamp(-1e6, 1e6) for x in (a, b))
    return bool((a - b).norm() <= 1e-4 * b.norm() + 1e-6)
