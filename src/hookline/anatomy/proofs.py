"""The checks that points are what their names say, on the model at hand.

Nothing here trusts our own reading of an architecture. Every point is checked against the model itself: that it fires
once; that caching it changes no bit of the logits; that an identity edit leaves them and a zeroing edit does not;
that its gradient is autograd's own; that the stream is what the model reports as hidden states and the pattern what
it reports as attentions; that what is added adds up, the pattern mixes the values into `z`, and the heads' results sum
to the projection's output; that a norm without its inside gives its bias; that a head's own copy of the stream does
there what the stream itself would do; that experts are chosen by their router.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from hookline.cache import ActivationCache
from hookline.errors import NeverFiredWarning
from hookline.names import lens_of
from hookline.points import HookPoint, Site
from hookline.taps import Kind

if TYPE_CHECKING:
    from hookline.model import HookedModel

Check: TypeAlias = Callable[["Trial", list[str]], Iterator[tuple[str, str]]]
"""Names of points in, those that fail out, with the reason."""


class Trial:
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

    def see(self, points: list[HookPoint], edits: list[tuple[Any, Any]] | None = None) -> list[Tensor]:
        """What flows at points that need no name, under some edits."""
        seen: dict[int, Tensor] = {}

        def look(place: int) -> Callable[[Tensor], None]:
            return lambda x: seen.update({place: x.clone()})

        self.run(fwd_hooks=[*(edits or []), *((point, look(place)) for place, point in enumerate(points))])
        return [seen[place] for place in range(len(points))]

    def at(self, module: nn.Module, kind: Kind) -> HookPoint:
        """A module's input or output."""
        return self.model._points.at(kind.value, Site(module, kind, lens_of(module, kind)))

    def each(self, names: list[str], point: str) -> Iterator[tuple[str, int]]:
        """Those of the names that are this point of a layer, with the layer."""
        for layer in range(self.n_layers):
            if f"blocks.{layer}.{point}" in names:
                yield f"blocks.{layer}.{point}", layer

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


def _fires_once(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    seen: dict[str, int] = dict.fromkeys(names, 0)

    def count(_x: Tensor, hook: Any) -> None:
        seen[hook.name] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverFiredWarning)  # that is what is being found out
        trial.run(fwd_hooks=[(name, count) for name in names])
    for name, times in seen.items():
        if times != 1:
            yield name, f"fires {times} times in a forward pass"


def _leaves_logits(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    with torch.no_grad():
        if torch.equal(trial.cache(names)[0], trial.logits):
            return
        for name in names:
            if not torch.equal(trial.cache([name])[0], trial.logits):
                yield name, "caching it changes the logits"


def _identity(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    if _close(trial.run(fwd_hooks=[(name, torch.clone) for name in names]), trial.logits):
        return
    for name in names:
        if not _close(trial.run(fwd_hooks=[(name, torch.clone)]), trial.logits):
            yield name, "an identity edit changes the logits"


def _effect(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if torch.equal(trial.run(fwd_hooks=[(name, torch.zeros_like)]), trial.logits):
            yield name, "a zeroing edit has no effect"


def _gradient(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
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


def _stream(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
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


def _sums(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
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


def _pattern(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
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


def _attention_layers(trial: Trial) -> list[int]:
    return [layer for layer in range(trial.n_layers) if trial.model._points.has_attention(layer)]


def _mix(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
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


def _queries(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """Queries and keys, as they meet, give the scores; and as projected have the same shapes."""
    parts = ("hook_q", "hook_k", "hook_rot_q", "hook_rot_k")
    with torch.no_grad():
        _, cache = trial.cache([name for name in names if name.endswith(parts)])
    for layer in range(trial.n_layers):
        for before, after in (("q", "rot_q"), ("k", "rot_k")):
            plain, met = (cache.get(f"blocks.{layer}.attn.hook_{part}") for part in (before, after))
            if plain is not None and met is not None and plain.shape != met.shape:
                yield f"blocks.{layer}.attn.hook_{before}", f"{list(plain.shape)}, but {list(met.shape)} meet"


def _results(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """The heads' results sum to the projection's output, but for its bias."""
    for name, layer in trial.each(names, "attn.hook_result"):
        o: Any = trial.model._points.block(layer).o
        result, into, out = trial.see([trial.model.point(name), trial.at(o, Kind.INPUT), trial.at(o, Kind.OUTPUT)])
        if not _close(result.sum(-2) + o.forward(torch.zeros_like(into)), out):
            yield name, "summed over heads it is not what the projection gives"


def _norms(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """A norm gives twice as much, but for its bias, if what is normalized is doubled, or the scale halved."""
    for name in names:
        kind = name.rpartition(".")[2]
        if kind not in ("hook_scale", "hook_normalized"):
            continue
        module = trial.model.point(name).site.module
        out = trial.at(module, Kind.OUTPUT)
        factor = 2.0 if kind == "hook_normalized" else 0.5
        (before,), (after,) = trial.see([out]), trial.see([out], [(name, lambda x, factor=factor: x * factor)])
        bias = getattr(module, "bias", None)
        bias = torch.zeros_like(before) if bias is None else bias.expand_as(before)
        if not _close(after - bias, 2 * (before - bias)):
            yield name, "the norm's output does not change with it as it should"


def _copies(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """Another stream as the copy of every head, or of the MLP, does there what it does as the stream itself."""
    for point, where in _READERS.items():
        for name, layer in trial.each(names, point):
            stream, reader = trial.model.point(name).site.needs, f"blocks.{layer}.{where}"
            if not stream or reader not in trial.model.hook_dict:
                continue
            seen = [trial.model.point(reader)]
            (as_stream,) = trial.see(seen, [(trial.model._points.at("stream", stream[0]), _other)])
            (as_copies,) = trial.see(seen, [(name, _other)])
            if not _close(as_copies, as_stream):
                yield name, "it does not do what the stream itself would do there"


_READERS = {
    "hook_attn_in": "attn.hook_z",
    "hook_q_input": "attn.hook_q",
    "hook_k_input": "attn.hook_k",
    "hook_v_input": "attn.hook_v",
    "hook_mlp_in": "hook_mlp_out",
}


def _other(x: Tensor) -> Tensor:
    """Another stream: the same for every copy of it."""
    *_, positions, width = x.shape[:2] + x.shape[-1:]
    other = torch.linspace(-1, 1, positions * width, device=x.device).mul(37).sin().view(positions, width)
    return (other if x.ndim == 3 else other[:, None]).expand_as(x).to(x.dtype)


def _experts(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """Another order of the experts' logits chooses others."""
    for name, layer in trial.each(names, "mlp.hook_router"):
        chosen = f"blocks.{layer}.mlp.hook_expert_indices"
        if chosen in trial.model.hook_dict:
            seen = [trial.model.point(chosen)]
            (before,), (after,) = trial.see(seen), trial.see(seen, [(name, torch.neg)])
            if torch.equal(before, after):
                yield name, "it does not decide which experts are chosen"


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal within what rounding makes of two ways to compute the same."""
    if a.shape != b.shape:
        return False
    a, b = (x.double().nan_to_num(0, 0, 0).clamp(-1e6, 1e6) for x in (a, b))
    return bool((a - b).norm() <= 1e-4 * b.norm() + 1e-6)


CHECKS: tuple[Check, ...] = (
    _fires_once, _leaves_logits, _identity, _effect, _gradient, _stream, _sums, _pattern, _mix, _queries, _results,
    _norms, _copies, _experts,
)  # fmt: skip
