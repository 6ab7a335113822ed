"""The checks that points are what their names say, on the model at hand.

Nothing here trusts our own reading of an architecture. Every point is checked against the model itself: that it fires
once, with the axes it is to have; that caching it changes no bit of the logits; that an identity edit leaves them and
a zeroing edit does not; that its gradient is autograd's own; that the stream is what the model reports as hidden states
and the pattern what it reports as attentions; that what is added adds up, the pattern mixes the values into `z`, and
the heads' results sum to the projection's output; that a norm without its inside gives its bias; that a head's own
copy of the stream does there what the stream itself would do; that experts are chosen by their router.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.engine.cache import ActivationCache
from hookline.engine.lenses import Chain
from hookline.errors import NeverFiredWarning
from hookline.transformer.architectures import architecture
from hookline.transformer.roles import Block
from hookline.transformer.verify.probe import Layer, Trial

Check: TypeAlias = Callable[[Trial, list[str]], Iterator[tuple[str, str]]]
"""Names of points in, those that fail out, with the reason."""


def _fires_once(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    seen: dict[str, int] = dict.fromkeys(names, 0)
    shapes: dict[str, torch.Size] = {}

    def count(x: Tensor, hook: Any) -> None:
        seen[hook.name] += 1
        shapes[hook.name] = x.shape

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverFiredWarning)  # that is what is being found out
        trial.run(fwd_hooks=[(name, count) for name in names])
    for name, times in seen.items():
        if times != 1:
            yield name, f"fires {times} times in a forward pass"
        elif (axes := trial.model.hook_dict[name].axes) and len(shapes[name]) != len(axes.split()):
            yield name, f"it has {len(shapes[name])} axes, not {axes}"


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
    cache = trial.values(names, "hook_resid_pre", "hook_resid_post")
    for layer in trial.layers:
        name, after = layer.point("hook_resid_pre"), layer.point("hook_resid_post")
        if architecture(layer.config.model_type).adds_between_layers:  # the model reports what is there before it adds
            continue
        # Most models report what enters each layer, some what leaves it.
        if (
            name in cache
            and layer.hidden is not None
            and not any(each in cache and _close(cache[each], layer.hidden) for each in (name, after))
        ):
            yield name, "it is not the hidden state that the model reports"
    for before, layer in zip(trial.layers, trial.layers[1:], strict=False):
        this, that = before.point("hook_resid_post"), layer.point("hook_resid_pre")
        is_added_to = architecture(layer.config.model_type).adds_between_layers
        if (
            layer.number
            and not is_added_to
            and this in cache
            and that in cache
            and not _close(cache[this], cache[that])
        ):
            yield this, "it is not what enters the next layer"


def _sums(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """What is added adds up, with a norm of the stream in between where there is one."""
    parts = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_cross_attn_out", "hook_resid_mid_cross",
             "hook_mlp_out", "hook_resid_post")  # fmt: skip
    cache = trial.values(names, *parts)
    for layer in trial.layers:
        pre, attn, mid, cross, mid_cross, mlp, post = (cache.get(layer.point(part)) for part in parts)
        norms = [norm if norm is not None else _same for norm in layer.stream_norms()]
        if pre is None or post is None:
            for part in ("hook_attn_out", "hook_mlp_out"):
                if post is None and layer.point(part) in names:
                    yield layer.point(part), "there is no stream to add it to"
            continue
        if attn is not None and mid is not None and not _close(norms[0](pre + attn), mid):
            yield layer.point("hook_attn_out"), "the stream plus it is not the stream after it"
            yield layer.point("hook_resid_mid"), "it is not the stream plus what the attention adds"
        start = mid if mid is not None else pre + attn if attn is not None else pre
        if cross is not None and mid_cross is not None:
            if not _close(norms[1](start + cross), mid_cross):
                yield layer.point("hook_cross_attn_out"), "the stream plus it is not the stream after it"
                yield layer.point("hook_resid_mid_cross"), "it is not the stream plus what the cross-attention adds"
            start = mid_cross
        if mlp is not None and not _close(norms[2](start + mlp), post):
            yield layer.point("hook_mlp_out"), "the stream plus it is not the stream after it"
            if mid is None:
                yield layer.point("hook_attn_out"), "the stream plus it is not the stream after it"
        elif not _has_mlp(layer.block) and attn is not None and not _close(start, post):
            yield layer.point("hook_attn_out"), "the stream plus it is not the stream after it"


def _same(x: Tensor) -> Tensor:
    return x


def _has_mlp(block: Block) -> bool:
    return block.mlp is not None or block.mlp_out is not None


def _pattern(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """The pattern is what the model reports as attentions, or, where it reports none, mixes the values into `z`."""
    cache = trial.values(names, "hook_pattern", "hook_v", "hook_z")
    for layer in trial.layers:
        for part, own in (("attn", layer.pattern), ("cross_attn", layer.cross_pattern)):
            name = layer.point(f"{part}.hook_pattern")
            if name in cache and not (own is not None and _close(cache[name], own)) and not _mixes(cache, layer, part):
                yield name, "it is not the attention that the model reports, nor does it mix the values into z"


def _mix(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """The pattern mixes the values into `z`, but for the few architectures that do something more in between."""
    if trial.mixes_otherwise:
        return
    cache = trial.values(names, "hook_pattern", "hook_v", "hook_z")
    for layer in trial.layers:
        for part in ("attn", "cross_attn"):
            prefix = layer.point(f"{part}.hook_")
            if all(f"{prefix}{each}" in cache for each in ("pattern", "v", "z")) and not _mixes(cache, layer, part):
                yield f"{prefix}z", "it is not the values as the pattern mixes them"
                yield f"{prefix}v", "the pattern does not mix it into z"


def _mixes(cache: ActivationCache, layer: Layer, part: str) -> bool:
    pattern, v, z = (cache.get(layer.point(f"{part}.hook_{each}")) for each in ("pattern", "v", "z"))
    if pattern is None or v is None or z is None or pattern.shape[1] % v.shape[2]:
        return False
    values = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)
    if values.shape[1] != pattern.shape[3]:
        return False
    return _close(torch.einsum("bhpk,bkhe->bphe", pattern, values), z)


def _queries(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """Queries and keys, as they meet, give the scores; and as projected have the same shapes."""
    cache = trial.values(names, "hook_q", "hook_k", "hook_rot_q", "hook_rot_k")
    for layer in trial.layers:
        for part, (before, after) in itertools.product(("attn", "cross_attn"), (("q", "rot_q"), ("k", "rot_k"))):
            plain, met = (cache.get(layer.point(f"{part}.hook_{each}")) for each in (before, after))
            if plain is not None and met is not None and plain.shape != met.shape:
                yield layer.point(f"{part}.hook_{before}"), f"{list(plain.shape)}, but {list(met.shape)} meet"


def _results(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """The heads' results sum to the projection's output, but for its bias."""
    here = [name for name in names if name.endswith("hook_result")]
    modules: list[Any] = [trial.model.point(name).site.module for name in here]
    points = [(trial.model.point(name), *trial.ends(module)) for name, module in zip(here, modules, strict=True)]
    for name, o, (result, into, out) in zip(here, modules, trial.see_each(points), strict=True):
        if not _close(
            result.sum(-2).reshape(out.shape) + o.forward(torch.zeros_like(into)), out
        ):  # in one row, perhaps
            yield name, "summed over heads it is not what the projection gives"


def _norms(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """A norm gives twice as much, but for its bias, if what is normalized is doubled, or the scale halved."""
    for kind, factor in (("hook_normalized", 2.0), ("hook_scale", 0.5)):
        here = [name for name in names if name.endswith(kind)]
        modules: list[Any] = [trial.model.point(name).site.module for name in here]
        edits = [(name, lambda x, factor=factor: x * factor) for name in here]
        seen = trial.see_each([trial.ends(module) for module in modules], edits)
        for name, module, (into, out) in zip(here, modules, seen, strict=True):
            bias = getattr(module, "bias", None)
            bias = torch.zeros_like(out) if bias is None else bias.expand_as(out)
            if not _close(out - bias, 2 * (module.forward(into) - bias)):
                yield name, "the norm's output does not change with it as it should"


def _copies(trial: Trial, names: list[str]) -> Iterator[tuple[str, str]]:
    """Another stream as the copy of every head, or of the MLP, does there what it does as the stream itself."""
    for point, where in _READERS.items():
        here = [
            (name, layer.point(where), site.needs[0])
            for name, layer in trial.each(names, point)
            if (site := trial.model.point(name).site).needs and not isinstance(site.lens, Chain)  # else it is no copy
            if layer.point(where) in trial.model.hook_dict
        ]
        seen = [trial.model.point(reader) for _, reader, _ in here]
        as_streams = trial.see(seen, [(trial.model._points.at("stream", stream), _other) for *_, stream in here])
        as_copies = trial.see(seen, [(name, _other) for name, *_ in here])
        for (name, *_), copies, streams in zip(here, as_copies, as_streams, strict=True):
            if not _close(copies, streams):
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
        chosen = layer.point("mlp.hook_expert_indices")
        if chosen in trial.model.hook_dict:
            seen = [trial.model.point(chosen)]
            (before,), (after,) = trial.see(seen), trial.see(seen, [(name, torch.neg)])
            if torch.equal(before, after):
                yield name, "it does not decide which experts are chosen"


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal within what rounding makes of two ways to compute the same."""
    if a.shape != b.shape:
        return False
    rounding = max((torch.finfo(x.dtype).eps for x in (a, b) if x.is_floating_point()), default=0.0)
    a, b = (x.double().nan_to_num(0, 0, 0).clamp(-1e6, 1e6) for x in (a, b))
    return bool((a - b).norm() <= max(1e-4, 4 * rounding) * b.norm() + 1e-6)


CHECKS: tuple[Check, ...] = (
    _fires_once, _leaves_logits, _identity, _effect, _gradient, _stream, _sums, _pattern, _mix, _queries, _results,
    _norms, _copies, _experts,
)  # fmt: skip
