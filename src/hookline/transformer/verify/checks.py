"""Checks that each point holds the value that its name promises, on a given model.

Every point is compared with the model itself, not with our reading of its architecture: it fires once, with the
expected axes; caching it leaves the logits bitwise equal; an identity edit leaves them unchanged, and a zeroing edit
does not; its gradient is that of autograd; the stream equals the hidden states and the pattern the attentions that
the model reports; the outputs of attention and MLP add up to the stream; the pattern mixes the values into `z`;
scaled scores leave the real tokens of a padded batch finite; the results of heads sum to the output of the
projection; a norm scales with its normalized activation; editing all per-head inputs has the effect of editing the
stream; the router determines the experts.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.engine import ActivationCache, Derived, Kind
from hookline.errors import NeverFiredWarning
from hookline.transformer.verify.probe import Layer, Probe

Check: TypeAlias = Callable[[Probe, list[str]], Iterator[tuple[str, str]]]
"""Takes the names of points; yields those that fail, with the reason."""


def _fires_once(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    shapes: dict[str, list[torch.Size]] = {name: [] for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverFiredWarning)  # reported as a failure below
        probe.run(fwd_hooks=[(name, lambda x, hook: shapes[hook.name].append(x.shape)) for name in names])
    for name, seen in shapes.items():
        if len(seen) != 1:
            yield name, f"fires {len(seen)} times in a forward pass"
        elif (axes := probe.model.hook_dict[name].axes) and len(seen[0]) != len(axes.split()):
            yield name, f"it has {len(seen[0])} axes, not {axes}"


def _leaves_logits(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    with torch.no_grad():
        if torch.equal(probe.cache(names)[0], probe.logits):
            return
        for name in names:
            if not torch.equal(probe.cache([name])[0], probe.logits):
                yield name, "caching it changes the logits"


def _identity(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    if _close(probe.run(fwd_hooks=[(name, torch.clone) for name in names]), probe.logits):
        return
    for name in names:
        if not _close(probe.run(fwd_hooks=[(name, torch.clone)]), probe.logits):
            yield name, "an identity edit changes the logits"


def _effect(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    for name in probe.unchanged_by_zeroing(names):
        if torch.equal(probe.run(fwd_hooks=[(name, torch.zeros_like)]), probe.logits):
            yield name, "a zeroing edit has no effect"


def _gradient(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """Compare with the gradient of a tensor that is added to the activation.

    Scores and patterns are compared by themselves: an edit there makes torch leave the fused kernel, which rounds
    differently, and the gradients of some norms' denominators are sums of which rounding is all that remains.
    """
    hook_dict = probe.model.hook_dict
    for is_in_kernel in (False, True):
        group = [name for name in names if (hook_dict[name].site.kind in (Kind.SCORES, Kind.PATTERN)) == is_in_kernel]
        if group:
            yield from _gradient_of(probe, group)


def _gradient_of(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    added: dict[str, Tensor] = {}

    def add(x: Tensor, hook: Any) -> Tensor | None:
        if not x.is_floating_point():
            return None
        added[hook.name] = torch.zeros_like(x, requires_grad=True)
        return x + added[hook.name]

    def loss(logits: Tensor) -> Tensor:
        return (logits * torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)).sum()

    with torch.enable_grad():
        logits = probe.model.run_with_hooks(**probe.inputs, fwd_hooks=[(name, add) for name in names])
        if not added:
            return
        gradients = torch.autograd.grad(loss(logits), list(added.values()), allow_unused=True)
        is_reached = any(gradient is not None for gradient in gradients)
        cache = probe.cache(names, incl_bwd=True, loss_fn=loss)[1] if is_reached else {}
    for name, gradient in zip(added, gradients, strict=True):
        if gradient is None or f"{name}_grad" not in cache:
            yield name, "no gradient reaches it"
        elif not _close(cache[f"{name}_grad"], gradient):
            yield name, "its gradient differs from autograd's"


def _stream(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """`resid_pre` is what the model reports as hidden states; `resid_post` is the next `resid_pre`.

    Some models report the output of each layer instead of its input.
    """
    cache = probe.values(names, "hook_resid_pre", "hook_resid_post")
    for last, layer in zip([None, *probe.layers], probe.layers, strict=False):
        if layer.architecture.adds_between_layers:  # the model reports the stream before the addition
            continue
        name, after, hidden = layer.point("hook_resid_pre"), layer.point("hook_resid_post"), layer.hidden
        is_reported = hidden is None or any(
            point_name in cache and _close(cache[point_name], hidden) for point_name in (name, after)
        )
        if name in cache and not is_reported:
            yield name, "it differs from the hidden state that the model reports"
        before = last.point("hook_resid_post") if last is not None and layer.number else ""
        if name in cache and before in cache and not _close(cache[before], cache[name]):
            yield before, "it differs from the input of the next layer"


def _sums(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """Outputs of attention and MLP add up to the stream, with a norm of the stream in post-norm models."""
    parts = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_cross_attn_out", "hook_resid_mid_cross",
             "hook_mlp_out", "hook_resid_post")  # fmt: skip
    cache = probe.values(names, *parts)
    for layer in probe.layers:
        values = {part: cache.get(layer.point(part)) for part in parts}
        pre, attn, mid, cross, mid_cross, mlp, post = values.values()
        wrong: dict[str, str] = {}
        if post is None:
            wrong = dict.fromkeys(("hook_attn_out", "hook_mlp_out"), "there is no stream to add it to")
        elif pre is not None:
            after_attn, after_cross, after_mlp = layer.stream_norms()
            if attn is not None and mid is not None and not _close(after_attn(pre + attn), mid):
                wrong["hook_attn_out"] = _NO_SUM
                wrong["hook_resid_mid"] = "it is not the stream plus the attention output"
            start = mid if mid is not None else pre + attn if attn is not None else pre
            if cross is not None and mid_cross is not None:
                if not _close(after_cross(start + cross), mid_cross):
                    wrong["hook_cross_attn_out"] = _NO_SUM
                    wrong["hook_resid_mid_cross"] = "it is not the stream plus the cross-attention output"
                start = mid_cross
            if mlp is not None and not _close(after_mlp(start + mlp), post):
                wrong["hook_mlp_out"] = _NO_SUM
                if mid is None:
                    wrong["hook_attn_out"] = _NO_SUM
            elif not layer.block.has_mlp and not _close(start, post):
                wrong["hook_attn_out"] = _NO_SUM
        yield from ((layer.point(part), why) for part, why in wrong.items() if values[part] is not None)


_NO_SUM = "adding it to the stream does not give the next stream"


def _pattern(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """The pattern equals the attentions that the model reports, or mixes the values into `z`."""
    cache = probe.values(names, "hook_pattern", "hook_v", "hook_z")
    for layer in probe.layers:
        for part, reported in (("attn", layer.pattern), ("cross_attn", layer.cross_pattern)):
            name = layer.point(f"{part}.hook_pattern")
            if (
                name in cache
                and not (reported is not None and _close(cache[name], reported))
                and not _mixes(cache, layer, part)
            ):
                yield name, "it differs from the attention that the model reports, and does not mix the values into z"


def _mix(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """The pattern mixes the values into `z`, except in architectures with gated values."""
    if probe.anatomy.architecture.gated_values:
        return
    cache = probe.values(names, "hook_pattern", "hook_v", "hook_z")
    for layer in probe.layers:
        for part in ("attn", "cross_attn"):
            prefix = layer.point(f"{part}.hook_")
            if all(f"{prefix}{role}" in cache for role in ("pattern", "v", "z")) and not _mixes(cache, layer, part):
                yield f"{prefix}z", "it is not the values mixed by the pattern"
                yield f"{prefix}v", "the pattern does not mix it into z"


def _mixes(cache: ActivationCache, layer: Layer, part: str) -> bool:
    pattern, v, z = (cache.get(layer.point(f"{part}.hook_{role}")) for role in ("pattern", "v", "z"))
    if pattern is None or v is None or z is None:
        return False
    if pattern.shape[1] % v.shape[2] or pattern.shape[3] != v.shape[1]:
        return False
    values = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)
    return _close(torch.einsum("bhpk,bkhe->bphe", pattern, values), z)


def _scores(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """Scaled scores leave real tokens of a left-padded batch finite: masked entries stay masked."""
    score_names, batch = [name for name in names if name.endswith("hook_attn_scores")], probe.padded()
    if not score_names or batch is None:
        return
    mask = batch["attention_mask"].bool()

    def is_finite(scaled: list[str]) -> bool:
        hooks = [(name, lambda scores: scores * 1.3) for name in scaled]
        logits = probe.model.run_with_hooks(**batch, fwd_hooks=hooks)
        probe.on_run()
        is_by_token = logits.shape[:2] == mask.shape
        return bool((logits[mask.to(logits.device)] if is_by_token else logits).isfinite().all())

    with torch.no_grad():
        if not is_finite([]) or is_finite(score_names):
            return
        for name in score_names:
            if not is_finite([name]):
                yield name, "scaled in a padded batch, it makes real tokens NaN"


def _queries(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """Queries and keys have the same shapes after projection and in the product."""
    cache = probe.values(names, "hook_q", "hook_k", "hook_rot_q", "hook_rot_k")
    for layer in probe.layers:
        for part, (before, after) in itertools.product(("attn", "cross_attn"), (("q", "rot_q"), ("k", "rot_k"))):
            name, met = layer.point(f"{part}.hook_{before}"), cache.get(layer.point(f"{part}.hook_{after}"))
            if name in cache and met is not None and cache[name].shape != met.shape:
                yield name, f"its shape is {list(cache[name].shape)}, but {list(met.shape)} in the product"


def _results(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """The results of heads sum to the output of the projection, without its bias."""
    result_names = [name for name in names if name.endswith("hook_result")]
    modules: list[Any] = [probe.model.point(name).site.module for name in result_names]
    points = [
        (probe.model.point(name), *probe.ends(module)) for name, module in zip(result_names, modules, strict=True)
    ]
    for name, o, (result, into, out) in zip(result_names, modules, probe.observe_groups(points), strict=True):
        summed = result.sum(-2).reshape(out.shape)  # packed images have no batch axis
        if not _close(summed + o.forward(torch.zeros_like(into)), out):
            yield name, "its sum over heads is not the output of the projection"


def _norms(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """The output of a norm, without its bias, doubles if its normalized activation doubles or its scale halves."""
    for kind, factor in (("hook_normalized", 2.0), ("hook_scale", 0.5)):
        norm_names = [name for name in names if name.endswith(kind)]
        modules: list[Any] = [probe.model.point(name).site.module for name in norm_names]
        edits = [(name, lambda x, factor=factor: x * factor) for name in norm_names]
        seen = probe.observe_groups([probe.ends(module) for module in modules], edits)
        for name, module, (into, out) in zip(norm_names, modules, seen, strict=True):
            bias = getattr(module, "bias", None)
            bias = torch.zeros_like(out) if bias is None else bias.expand_as(out)
            if not _close(out - bias, 2 * (module.forward(into) - bias)):
                yield name, "the output of the norm does not change with it as expected"


def _copies(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """Replacing the inputs of all heads, or of the MLP, has the effect of replacing the stream."""
    for point, where in _READERS.items():
        reader_points = [
            (name, layer.point(where), site.needs[0])
            for name, layer in probe.each(names, point)
            if (site := probe.model.point(name).site).needs and isinstance(site.lens, Derived)
            if layer.point(where) in probe.model.hook_dict
        ]
        seen = [probe.model.point(reader) for _, reader, _ in reader_points]
        as_streams = probe.observe(
            seen, [(probe.model.index.at("stream", stream), _other) for *_, stream in reader_points]
        )
        as_copies = probe.observe(seen, [(name, _other) for name, *_ in reader_points])
        for (name, *_), copies, streams in zip(reader_points, as_copies, as_streams, strict=True):
            if not _close(copies, streams):
                yield name, "editing it does not have the effect of editing the stream"


_READERS = {
    "hook_attn_in": "attn.hook_z",
    "hook_q_input": "attn.hook_q",
    "hook_k_input": "attn.hook_k",
    "hook_v_input": "attn.hook_v",
    "hook_mlp_in": "hook_mlp_out",
}


def _other(x: Tensor) -> Tensor:
    """Another stream, the same for every head."""
    *_, positions, width = x.shape[:2] + x.shape[-1:]
    other = torch.linspace(-1, 1, positions * width, device=x.device).mul(37).sin().view(positions, width)
    return (other if x.ndim == 3 else other[:, None]).expand_as(x).to(x.dtype)


def _experts(probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """Negating the router logits changes the chosen experts."""
    for name, layer in probe.each(names, "mlp.hook_router"):
        chosen = layer.point("mlp.hook_expert_indices")
        if chosen in probe.model.hook_dict:
            seen = [probe.model.point(chosen)]
            (before,), (after,) = probe.observe(seen), probe.observe(seen, [(name, torch.neg)])
            if torch.equal(before, after):
                yield name, "it does not determine which experts are chosen"


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal within rounding."""
    if a.shape != b.shape:
        return False
    rounding = max((torch.finfo(x.dtype).eps for x in (a, b) if x.is_floating_point()), default=0.0)
    a, b = (x.double().nan_to_num(0, 0, 0).clamp(-1e6, 1e6) for x in (a, b))
    return bool((a - b).norm() <= max(1e-4, 4 * rounding) * b.norm() + 1e-6)


CHECKS: tuple[Check, ...] = (
    _fires_once, _leaves_logits, _identity, _effect, _gradient, _stream, _sums, _pattern, _mix, _scores, _queries,
    _results, _norms, _copies, _experts,
)  # fmt: skip
