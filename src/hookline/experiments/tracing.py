"""Causal tracing: noise the embeddings of a subject, then restore clean activations to see where the answer returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.labels import Label, about, said_points
from hookline.experiments.core.measure import Options, Reader, measured, padded_logits
from hookline.experiments.core.prompts import Prompts, baselines, prompts_of
from hookline.experiments.core.sweep import Grid, SweepPoints, sweep_points
from hookline.experiments.metrics import as_metric, prob
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import Variant, index_of
from hookline.text.image_tokens import image_token_id

__all__ = ["trace"]


def __dir__() -> list[str]:
    return __all__


def trace(
    model: HookedModel,
    prompts: str | Tensor,
    subject: str | int | Sequence[int],
    metric: Any = None,
    *,
    noise: float | Tensor = 3.0,
    samples: int | None = None,
    seed: int | None = None,
    window: int = 1,
    points: str | Sequence[str] = "resid_post",
    per_sample: bool = False,
    **options: Any,
) -> Result:
    """Restore each layer and position of a run with a noised subject, and measure: `result.values[layer, pos]`.

        from hookline.experiments import tracing
        tracing.trace(model, "The capital of France is", "France")
        tracing.trace(model, prompt, "France", points=("mlp_out", "attn_out"), window=3)

    `subject` is a text in the prompt, or positions. Gaussian noise with `noise` times the standard deviation of the
    model's token embeddings is added to its embeddings, in `samples` samples (10 by default, with seed `seed`), and the
    metric is averaged over them; or `noise` is the tensor to add, [sample, position of the subject, d_model]. The
    metric defaults to the probability of the model's own answer at the end. `window`, an odd number, is how many layers
    are restored together, centered on each; fewer at the ends. Several `points` become an axis `point`. `info` has the
    metric of the `clean` and the noised (`corrupted`) runs, and `result.normalized` is 1 where the answer is fully
    restored. `per_sample` keeps an axis `sample`. Further `options`: see `Options`.
    """
    how = _options(options, per_sample)
    text = prompts_of(model, prompts)
    if len(text) != 1:
        raise HooklineError(f"trace takes one prompt, got {len(text)}: trace each separately")
    where = sweep_points(model, points, ("layer", "pos"))
    windows = _windows(where, window, model.cfg.n_layers)
    positions = subject_positions(model, text, subject)
    _check_no_image(model, text, positions, where)
    clean = baselines(model, text, keep=[*where.names, "hook_embed"])[0]
    added, spread = _noise(model, clean, positions, noise, samples, seed)
    count = len(added)
    rows = Prompts(text.tokens.expand(count, -1), text.mask.expand(count, -1), text.more * count)
    answer = {} if metric is not None else {"answer": _own_answer(clean)}
    spec, (rows,) = continued(model, metric if metric is not None else prob(answer["answer"]), rows, repeats=count)
    whole = [clean] if not rows.own else baselines(model, _first(rows, rows.copies), keep=where.names)
    whole *= count
    noised = [
        _noised(model, rows.only(row), positions, added[row // rows.copies], where.names) for row in range(len(rows))
    ]
    logits = padded_logits(whole, rows)
    metrics = as_metric(spec, model, logits, padded_logits(noised, rows), rows.tokens, rows.mask)
    reader = Reader(noised, rows, metrics)
    info: dict[str, Any] = {"direction": "denoise", "clean": reader.values_of(logits), "corrupted": reader.baseline}
    info |= about(model, f"{said_points(points)} restored, subject noised")
    info |= {"subject": positions, "window": window, "noise": spread, "samples": count, **answer}
    coords: dict[str, list[Label]] = {**where.coords, "pos": [*_first(rows, rows.copies).labels(model)]}
    cells = product(windows, range(len(coords["pos"])))
    runs = list(zip(whole, noised, strict=True))
    variants = [[_restored(where, keys, pos, *both) for both in runs] for keys, pos in cells]
    grid = Grid(where.over, {axis: coords[axis] for axis in where.over}, variants)
    return _renamed(measured(reader, grid, info, how), "example", "sample")


def subject_positions(model: HookedModel, text: Prompts, subject: str | int | Sequence[int]) -> list[int]:
    """The positions of the subject in the prompt, counted from the first."""
    length = len(text.span(0))
    if isinstance(subject, str):
        return _found(model, text, subject)
    wanted = [subject] if isinstance(subject, int) else list(subject)
    wrong = next((each for each in wanted if each not in range(-length, length)), None)
    if wrong is not None or not wanted:
        raise HooklineError(
            f"subject position {wrong} is out of range: the prompt has {length} tokens" if wanted else "no subject"
        )
    return sorted({each % length for each in wanted})


def _check_no_image(model: HookedModel, text: Prompts, positions: list[int], where: SweepPoints) -> None:
    """Noise is added to token embeddings, which images replace later."""
    image = image_token_id(model.module.config) if text.more else None
    if image is not None and bool((text.tokens[0, positions] == image).any()):
        raise HooklineError(
            "the subject is an image: noise on the embeddings of its tokens would have no effect, since the image "
            "replaces them. Patch from another image instead: patching.sweep, images.patch"
        )
    if any(point.stream == "image" for point in where.points.values()):
        raise HooklineError("trace needs points of the language model: the vision tower is not noised")


def _found(model: HookedModel, text: Prompts, subject: str) -> list[int]:
    """The positions of the tokens that contain a text."""
    ids = text.row(0)[0].tolist()
    ends = [len(model.to_string(ids[: at + 1])) for at in range(len(ids))]
    whole = model.to_string(ids)
    starts = [at for at in range(len(whole)) if subject and whole.startswith(subject, at)]
    spans = [[p for p, end in enumerate(ends) if end > at and _start(ends, p) < at + len(subject)] for at in starts]
    if len(spans) != 1:
        there = f"occurs {len(spans)} times: pass its positions, one of {spans}" if spans else "does not occur"
        raise HooklineError(f"the subject {subject!r} {there}, in the prompt {whole!r}")
    return spans[0]


def _start(ends: list[int], at: int) -> int:
    return ends[at - 1] if at else 0


def _own_answer(clean: Baseline) -> int:
    if not clean.is_causal:
        raise HooklineError("this model does not predict a next token: pass metric=…")
    return int(clean.logits[-1].argmax())


def _options(options: dict[str, Any], per_sample: bool) -> Options:
    if "per_example" in options:
        raise HooklineError("trace has one prompt and samples of noise: use per_sample=True to keep the samples")
    how = Options.of({**options, "per_example": per_sample})
    return how if how.resume is None else replace(how, resume=_renamed(how.resume, "sample", "example"))


def _windows(where: SweepPoints, window: int, n_layers: int) -> list[list[tuple[Label, ...]]]:
    """For each point and layer, the points that are restored with it."""
    if isinstance(window, bool) or not isinstance(window, int) or window % 2 != 1 or not 1 <= window <= n_layers:
        raise HooklineError(f"window is an odd number of layers, at most {n_layers}, got {window!r}")
    layer, reach = where.over.index("layer"), window // 2
    return [
        [
            other
            for other in where.points
            if abs(int(other[layer]) - int(key[layer])) <= reach
            and other[:layer] + other[layer + 1 :] == key[:layer] + key[layer + 1 :]
        ]
        for key in where.points
    ]


def _noise(
    model: HookedModel,
    clean: Baseline,
    positions: list[int],
    noise: float | Tensor,
    samples: int | None,
    seed: int | None,
) -> tuple[Float[Tensor, "sample position d_model"], float]:
    """The noise of each sample, and its standard deviation."""
    here = clean.kept["hook_embed"]
    shape = (len(positions), here.shape[-1])
    if isinstance(noise, Tensor):
        if samples is not None or seed is not None:
            raise HooklineError("noise is a tensor, so samples and seed have no effect: remove them")
        added = noise[None] if noise.ndim == 2 else noise
        if added.ndim != 3 or added.shape[1:] != shape or not len(added):
            raise HooklineError(f"noise has shape {list(noise.shape)}, it must be [sample, {shape[0]}, {shape[1]}]")
        return added.to(here), float(added.float().std())
    count = 10 if samples is None else samples
    if not noise > 0 or isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise HooklineError(f"noise must be positive and samples at least 1, got noise={noise}, samples={samples}")
    spread = noise * _spread(model, clean)
    generator = torch.Generator().manual_seed(0 if seed is None else seed)
    return (torch.randn(count, *shape, generator=generator) * spread).to(here), spread


def _spread(model: HookedModel, clean: Baseline) -> float:
    """The standard deviation of all token embeddings as they enter the stream: some models scale them."""
    vocabulary = model.W_E.detach().float()
    here = vocabulary[clean.tokens[0].to(vocabulary.device)]
    return float(vocabulary.std() * clean.kept["hook_embed"].float().std().to(here.device) / here.std())


def _noised(model: HookedModel, text: Prompts, positions: list[int], added: Tensor, keep: list[str]) -> Baseline:
    def add(embed: Tensor) -> None:
        embed[:, positions] += added

    return baselines(model, text, keep=keep, fwd_hooks=[("hook_embed", add)])[0]


def _first(rows: Prompts, count: int) -> Prompts:
    """The first rows."""
    return Prompts(rows.tokens[:count], rows.mask[:count], rows.more[:count], rows.copies, rows.own[:count])


def _restored(
    where: SweepPoints, keys: list[tuple[Label, ...]], pos: int, clean: Baseline, noised: Baseline
) -> Variant:
    """Clean activations at one position of each of these points; none if the text is shorter."""
    if pos >= clean.tokens.shape[1]:
        return ()
    points = [where.points[key] for key in keys]
    return [noised.change(point, clean.kept[point.name][index_of(point, pos=pos)], pos=pos) for point in points]


def _renamed(result: Result, old: str, new: str) -> Result:
    """The result with an axis renamed, also in the results in its info."""
    if old not in result.axes:
        return result
    info = {key: _renamed(x, old, new) if isinstance(x, Result) else x for key, x in result.info.items()}
    axes = tuple(new if axis == old else axis for axis in result.axes)
    coords = {new if axis == old else axis: labels for axis, labels in result.coords.items()}
    return replace(result, axes=axes, coords=coords, info=info)
