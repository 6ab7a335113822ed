"""Causal tracing: noise the embeddings of a subject, then restore clean activations to see where the answer returns."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.labels import about, said_points
from hookline.experiments.core.measure import Options, Reader, ResumeOptions, measured, metric_values
from hookline.experiments.core.prompts import Prompts, baselines, prompt_positions, prompts_of
from hookline.experiments.core.sweep import CellBuilder, Grid, Key, SweepPoints, make_cells, sweep_points
from hookline.experiments.metrics import as_metric, prob
from hookline.experiments.result import Result
from hookline.functions.listed_options import lists
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.text.image_tokens import image_token_id

__all__ = ["trace"]


def __dir__() -> list[str]:
    return __all__


@lists(ResumeOptions, Options)
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
    **options: Unpack[ResumeOptions],
) -> Result:
    """Restore each layer and position of a run with a noised subject, and measure: `result.values[layer, pos]`.

        >>> tracing.trace(model, "The capital of France is", "France").normalized.top(2, by="value")
        layer  pos        value
        3      4: is      1
        0      3: France  0.8868
        >>> tracing.trace(model, "The capital of France is", "France", points=("mlp_out", "attn_out"), window=3).axes
        ('point', 'layer', 'pos')

    `subject` is a text in the prompt, or positions. Gaussian noise with `noise` times the standard deviation of the
    model's token embeddings is added to its embeddings, in `samples` samples (10 by default, with seed `seed`), and the
    metric is averaged over them; or `noise` is the tensor to add, [sample, position of the subject, d_model]. The
    metric defaults to the probability of the model's own answer at the end. `window`, an odd number, is how many layers
    are restored together, centered on each; fewer at the ends. Several `points` become an axis `point`. `info` has the
    metric of the `clean` and the noised (`corrupted`) runs, and `result.normalized` is 1 where the answer is fully
    restored. `per_sample` keeps an axis `sample`. Further `options`: see `Options`.
    """
    if "per_example" in options:
        raise HooklineError("trace has one prompt and samples of noise: use per_sample=True to keep the samples")
    how = Options.of({**options, "per_example": per_sample})
    text = prompts_of(model, prompts)
    if len(text) != 1:
        raise HooklineError(f"trace takes one prompt, got {len(text)}: trace each separately")
    where, positions = sweep_points(model, points, ("layer", "pos")), subject_positions(model, text, subject)
    _check(model, text, positions, where, window)
    clean = baselines(model, text, keep=[*where.names, "hook_embed"])[0]
    added, spread = _noise(model, clean, positions, noise, samples, seed)
    count = len(added)
    rows = Prompts(text.tokens.expand(count, -1), text.mask.expand(count, -1), text.more * count)
    answer = {} if metric is not None else {"answer": _own_answer(clean)}
    metric = metric if metric is not None else prob(answer["answer"])
    metric, (rows,) = continued(model, metric, rows, repeats=count)
    once = rows.part(range(rows.copies))
    whole = ([clean] if not rows.own else baselines(model, once, keep=where.names)) * count
    noised = [
        _noised(model, rows.only(row), positions, added[row // rows.copies], where.names) for row in range(len(rows))
    ]
    logits = [rows.padded([base.logits for base in bases]) for bases in (whole, noised)]
    reader = Reader(noised, rows, as_metric(metric, model, logits[0], logits[1], rows.tokens, rows.mask))
    info: dict[str, Any] = {"direction": "denoise", "corrupted": reader.baseline}
    info |= {"clean": metric_values(reader.metrics, logits[0])}
    info |= about(model, f"{said_points(points)} restored, subject noised")
    info |= {"subject": positions, "window": window, "noise": spread, "samples": count, **answer}
    cells = make_cells(where, noised, once.labels(model))
    builder = CellBuilder(cells, [base.kept for base in whole], noised, rows)
    variants = [builder.variant_for(_near(key, where, window // 2)) for key in cells.covered]
    return measured(reader, Grid(where.over, cells.coords, variants), info, how, axis="sample")


def _near(key: Key, where: SweepPoints, reach: int) -> list[Key]:
    """The cells of a window: a cell, and those of the layers around it."""
    at = where.over.index("layer")
    layers = [layer for layer in where.coords["layer"] if abs(int(layer) - int(key[at])) <= reach]
    return [(*key[:at], layer, *key[at + 1 :]) for layer in layers]


def subject_positions(model: HookedModel, text: Prompts, subject: str | int | Sequence[int]) -> list[int]:
    """The positions of the subject in the prompt, counted from the first; a text is found by the tokens it covers."""
    if not isinstance(subject, str):
        return prompt_positions(model, text, subject, "subject")[0]
    ids = text.row(0)[0].tolist()
    ends = [len(model.to_string(ids[:at])) for at in range(len(ids) + 1)]
    whole = model.to_string(ids)
    starts = [at for at in range(len(whole)) if subject and whole.startswith(subject, at)]
    spans = [[p for p in range(len(ids)) if ends[p + 1] > at and ends[p] < at + len(subject)] for at in starts]
    if len(spans) != 1:
        problem = f"occurs {len(spans)} times: pass its positions, one of {spans}" if spans else "does not occur"
        raise HooklineError(f"the subject {subject!r} {problem}, in the prompt {whole!r}")
    return spans[0]


def _check(model: HookedModel, text: Prompts, positions: list[int], where: SweepPoints, window: Any) -> None:
    """Raise if the window is not odd, or noise would have no effect: images replace the embeddings of their tokens."""
    n_layers = model.cfg.n_layers
    if isinstance(window, bool) or not isinstance(window, int) or window % 2 != 1 or not 1 <= window <= n_layers:
        raise HooklineError(f"window is an odd number of layers, at most {n_layers}, got {window!r}")
    image = image_token_id(model.module.config) if text.more else None
    if image is not None and bool((text.tokens[0, positions] == image).any()):
        raise HooklineError(
            "the subject is an image: noise on the embeddings of its tokens would have no effect, since the image "
            "replaces them. Patch from another image instead: patching.sweep, images.patch"
        )
    if where.in_tower:
        raise HooklineError("trace needs points of the language model: the vision tower is not noised")


def _own_answer(clean: Baseline) -> int:
    if not clean.is_causal:
        raise HooklineError("this model does not predict a next token: pass metric=…")
    return int(clean.logits[-1].argmax())


def _noise(
    model: HookedModel,
    clean: Baseline,
    positions: list[int],
    noise: float | Tensor,
    samples: int | None,
    seed: int | None,
) -> tuple[Float[Tensor, "sample position d_model"], float]:
    """The noise of each sample, and its standard deviation."""
    embeddings = clean.kept["hook_embed"]
    shape = (len(positions), embeddings.shape[-1])
    if isinstance(noise, Tensor):
        if samples is not None or seed is not None:
            raise HooklineError("noise is a tensor, so samples and seed have no effect: remove them")
        added = noise[None] if noise.ndim == 2 else noise
        if added.ndim != 3 or added.shape[1:] != shape or not len(added):
            raise HooklineError(f"noise has shape {list(noise.shape)}, it must be [sample, {shape[0]}, {shape[1]}]")
        return added.to(embeddings), float(added.float().std())
    count = 10 if samples is None else samples
    if isinstance(noise, bool) or not isinstance(noise, Real):
        raise HooklineError(f"noise is a number of standard deviations, such as 3.0, or a tensor, not {noise!r:.60}")
    if not noise > 0 or isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise HooklineError(f"noise must be positive and samples at least 1, got noise={noise}, samples={samples}")
    vocabulary = model.W_E.detach().float()
    scale = embeddings.float().std().to(vocabulary.device) / vocabulary[clean.tokens[0].to(vocabulary.device)].std()
    spread = noise * float(vocabulary.std() * scale)  # as the embeddings enter the stream: some models scale them
    generator = torch.Generator().manual_seed(seed or 0)
    return (torch.randn(count, *shape, generator=generator) * spread).to(embeddings), spread


def _noised(model: HookedModel, text: Prompts, positions: list[int], added: Tensor, keep: list[str]) -> Baseline:
    def add(embed: Tensor) -> None:
        embed[:, positions] += added

    return baselines(model, text, keep=keep, fwd_hooks=[("hook_embed", add)])[0]
