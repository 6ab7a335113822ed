"""The Jacobian lens: how it is fitted, what it reads, and the edits that it makes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeAlias, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.edits import add, project_out, reflect
from hookline.engine import sharding
from hookline.errors import HooklineError
from hookline.experiments.core.answers import Answers, answer_ids, beside, checked_text, laid_out
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.measure import BatchOptions, Options
from hookline.experiments.core.prompts import Prompt, Prompts, check_language_model, prompt_positions, warn_of_dropout
from hookline.experiments.core.sweep import sweep_points
from hookline.experiments.jacobian.cotangents import CotangentBatches, Pullback
from hookline.experiments.jacobian.mean_jacobian import MeanJacobian
from hookline.experiments.jacobian.windows import windows_of
from hookline.experiments.logit_lens import MEASURES, LensTokens, Measure, shown_token, top_tokens
from hookline.experiments.result import Result
from hookline.files.tensorfile import read_tensors, taking_apart, write_tensors
from hookline.functions.listed_options import lists
from hookline.hooks.data_edits import DataEdit
from hookline.model import HookedModel
from hookline.progress import progress_bar
from hookline.residual import ModelCache
from hookline.store.identity import weights_digest
from hookline.text.outliers import Outliers, outlying, row_norms
from hookline.text.token_positions import Positions
from hookline.transformer.norms import norm_of

Hooks: TypeAlias = list[tuple[str, DataEdit]]

FULL = 4
"""With `rank`, how many texts are fitted in all directions."""

_ROOM = 2**28
"""Bytes of logits that are held at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class JacobianLens:
    """A matrix for each of some layers, which maps the stream after it to what it contributes to the final stream.

    lens = jacobian.fit(model, texts)
    lens.matrix(5)                                      # [d_model, d_model]: row final, column layer 5
    lens.read(prompt).plot()                            # the likeliest token by layer and position
    model.run_with_hooks(prompt, fwd_hooks=lens.steer(" Paris", [5]))
    lens.save("lens.safetensors"); JacobianLens.load("lens.safetensors", model)
    """

    matrices: Float[Tensor, "layer d_model d_model"]
    layers: list[int]
    norms: Float[Tensor, " layer"]
    """The median norm of the stream after each layer."""
    errors: Float[Tensor, " layer"]
    """The standard error of each matrix, relative to its norm, from how the texts differ; NaN for one text."""
    info: dict[str, Any] = field(default_factory=dict)
    model: HookedModel | None = None
    """The model that it was fitted on, which reads and edits need."""

    def __post_init__(self) -> None:
        shape, n = list(self.matrices.shape), len(self.layers)
        fits = shape[:1] == [n] and len(shape) == 3 and shape[1] == shape[2] and self.norms.shape == self.errors.shape
        if not fits or list(self.norms.shape) != [n] or len({*self.layers}) < n:
            raise HooklineError(f"a lens needs one square matrix per layer, got {shape} for layers {self.layers}")

    def matrix(self, layer: int) -> Float[Tensor, "d_model d_model"]:
        """The mean of ∂ final stream ∕ ∂ stream after a layer, summed over positions at and after: row final."""
        return self.matrices[self._at(layer)]

    @property
    def error(self) -> Result:
        """The relative standard error of each layer's matrix, as a result with the axis `layer`."""
        return Result(self.errors, ("layer",), {"layer": [*self.layers]}, "relative error", {"about": "Jacobian lens"})

    def read(
        self, prompt: Prompt, tokens: Answers | None = None, *, measure: Measure = "prob", pos: int | None = None
    ) -> Result:
        """What each stream says through the lens: the likeliest token of each cell, or `tokens`: axes `layer`, `pos`.

            result = lens.read(prompt)
            result.info["tokens"][layer][pos]                # the token whose probability is in the cell
            lens.read(prompts, answers, measure="rank", pos=-1)

        The stream times the layer's matrix goes through the final norm and the unembedding. Options are those of
        `logit_lens`. Without `tokens`, it takes one prompt.
        """
        if measure not in MEASURES or (measure == "rank" and tokens is None):
            choices = ", ".join(map(repr, MEASURES))
            raise HooklineError(f"measure is one of {choices} ('rank' needs tokens=…), got {measure!r}")
        model = self._bound()
        text = checked_text(model, prompt, pos)
        cache = self._cache(text, pos)
        shape = text.tokens.shape if pos is None else (len(text), 1)
        info: dict[str, Any] = {"measure": measure, **about(model, "Jacobian lens")}
        if tokens is None:
            chosen = self._likeliest(cache, text)
            info["tokens"] = [[shown_token(model, token) for token in layer[0]] for layer in chosen.tolist()]
        else:
            ids = answer_ids(model, text, tokens, pos)
            chosen, info["tokens"] = beside(ids, torch.Size(shape)).expand(len(self.layers), *shape), ids.tolist()
        chunks, start = [], 0
        for logits in self._logits(cache):
            chunk_ids = chosen[:, :, start : start + logits.shape[2], None].to(logits.device)
            chunks.append(MEASURES[measure](logits, chunk_ids))
            start += logits.shape[2]
        values = torch.cat(chunks, -1)
        places: dict[str, list[Label]] = {} if pos is not None else {"pos": [*text.labels(model)]}
        values = values[..., 0] if pos is not None else values
        return laid_out(values, {"layer": [*self.layers]}, places, measure, info, per_example=False)

    def tokens(self, prompt: Prompt, *, top: int = 5, pos: int | None = -1) -> LensTokens:
        """The likeliest tokens of each layer as a table, at one position or (None) at all: see `lens_tokens`."""
        model = self._bound()
        text = checked_text(model, prompt, pos)
        _check_one(text)
        tokens, probs = top_tokens(model, self._logits(self._cache(text, pos)), top)
        places: list[Label] = [*text.labels(model)]
        return LensTokens([*self.layers], places if pos is None else [places[pos]], tokens, probs)

    def directions(self, tokens: Answers, layer: int) -> Float[Tensor, "token d_model"]:
        """The direction in the stream after a layer along which the lens's logit of each token rises."""
        model = self._bound()
        directions = torch.atleast_2d(model.weights.tokens_to_residual_directions(tokens).detach().float().cpu())
        norm = norm_of(model.anatomy.main.ln_final, model.cfg.d_model)
        if norm is not None:
            gain = norm.gain
            directions = directions * (gain.detach().float().cpu() if isinstance(gain, Tensor) else gain)
            directions = directions - directions.mean(-1, keepdim=True) if norm.subtracts_mean else directions
        return directions @ self.matrix(layer).float()

    def steer(
        self, token: str | int, layers: Sequence[int] | None = None, coefficient: float = 1.0, *, pos: Positions = None
    ) -> Hooks:
        """Edits that add the direction of a token: as long as the stream usually is after that layer, times a number.

        model.generate(prompt, fwd_hooks=…)                  # with model.hooks(lens.steer(" Paris", [5], 0.5)): …
        """
        hooks: Hooks = []
        for layer in self.layers if layers is None else layers:
            unit = _units(self.directions(token, layer), layer)[0]
            hooks.append((self._point(layer), add(unit * self.norms[self._at(layer)].float(), coefficient, pos=pos)))
        return hooks

    def ablate(self, tokens: Answers, layers: Sequence[int] | None = None, *, pos: Positions = None) -> Hooks:
        """Edits that remove the directions of some tokens from the stream: the rest is orthogonal to all of them."""
        hooks: Hooks = []
        for layer in self.layers if layers is None else layers:
            units = _units(self.directions(tokens, layer), layer)
            left, sizes, _ = torch.linalg.svd(units.T.double(), full_matrices=False)
            basis = left[:, sizes > 1e-6 * sizes[0]].T.float()
            hooks += [(self._point(layer), project_out(direction, pos=pos)) for direction in basis]
        return hooks

    def swap(
        self, token: str | int, other: str | int, layers: Sequence[int] | None = None, *, pos: Positions = None
    ) -> Hooks:
        """Edits that exchange two tokens: what the stream has along the direction of one, it then has along the other.

        Both directions are taken with length 1, so the exchange is a reflection, and keeps the norm of the stream.
        """
        hooks: Hooks = []
        for layer in self.layers if layers is None else layers:
            one, two = (_units(self.directions(answer, layer), layer)[0] for answer in (token, other))
            if float((one - two).norm()) < 1e-4:
                raise HooklineError(f"{token!r} and {other!r} have the same direction after layer {layer}: no exchange")
            hooks.append((self._point(layer), reflect(one - two, pos=pos)))
        return hooks

    def save(self, path: str | Path) -> None:
        """Write the lens to a safetensors file, with a checksum and the identity of the model."""
        tensors = {"matrices": self.matrices, "norms": self.norms, "errors": self.errors}
        tensors["layers"] = torch.tensor(self.layers)
        write_tensors(path, "Jacobian lens", tensors, {"info": json.dumps(self.info)})

    @classmethod
    def load(cls, path: str | Path, model: HookedModel | None = None, *, check: bool = True) -> Self:
        """Read what `save` wrote. With a model, it is the one that the lens reads and edits, and must be the same.

        `check=False` accepts other weights of the same shape, such as those of a fine-tuned model or another dtype.
        """
        content, about = read_tensors(path, "Jacobian lens", called="a Jacobian lens", writer="JacobianLens.save")
        with taking_apart(str(path)):
            tensors = (content["matrices"], content["layers"].tolist(), content["norms"], content["errors"])
            lens = cls(*tensors, json.loads(about["info"]))
        return lens if model is None else lens._of(model, path, check=check)

    def _of(self, model: HookedModel, path: str | Path, *, check: bool) -> Self:
        """The lens with a model that it fits."""
        identity = _identity(model)
        for key in ("d_model", "n_layers", "weights") if check else ("d_model", "n_layers"):
            if identity[key] != self.info.get(key):
                more = ", or the same ones in another dtype: check=False accepts it" if key == "weights" else ""
                raise HooklineError(
                    f"{path} is a lens of another model ({self.info.get('model')}, not {identity['model']}): {key} is "
                    f"{self.info.get(key)} there and {identity[key]} here{more}"
                )
        return replace(self, model=model)

    def __repr__(self) -> str:
        worst = float(self.errors.max())
        said = f"{len(self.layers)} layers × {self.matrices.shape[1]}, {self.info.get('texts')} texts"
        error = f", relative error up to {worst:.2g}" if worst == worst else ""
        return f"JacobianLens of {self.info.get('model')}: {said}{error}"

    def _at(self, layer: int) -> int:
        depth = self.info.get("n_layers")
        number = layer + depth if isinstance(layer, int) and layer < 0 and depth else layer
        if number not in self.layers:
            raise HooklineError(f"the lens has no matrix for layer {layer!r}: it has {self.layers}")
        return self.layers.index(number)

    def _bound(self) -> HookedModel:
        if self.model is None:
            raise HooklineError("this lens has no model to read: JacobianLens.load(path, model)")
        return self.model

    def _point(self, layer: int) -> str:
        number = self.layers[self._at(layer)]
        return stream_points(self._bound(), [number])[number]

    def _cache(self, text: Prompts, pos: int | None) -> ModelCache:
        """The streams of a run, at one position or all, and what the readout is checked against."""
        model = self._bound()
        points = stream_points(model, [*dict.fromkeys([*self.layers, model.cfg.n_layers - 1])])
        names = [*points.values(), "unembed.hook_in", "unembed.hook_out"]
        with torch.no_grad():
            return model.run_with_cache(**text.call(model), names_filter=names, pos_slice=pos)[1]

    @torch.no_grad()
    def _logits(self, cache: ModelCache) -> Iterator[Float[Tensor, "layer batch pos vocab"]]:
        """The logits of all layers, in chunks of positions."""
        model = self._bound()
        streams = [cache[name] for name in stream_points(model, self.layers).values()]
        streams = [x[:, None] if x.ndim == 2 else x for x in streams]
        device, (rows, width, _) = streams[-1].device, streams[0].shape
        step = max(1, _ROOM // (4 * rows * model.cfg.d_vocab * len(self.layers)))
        for start in range(0, width, step):
            parts = [x[:, start : start + step].to(device) for x in streams]
            mapped = [
                (x.float() @ m.to(device, torch.float32).T).to(x) for x, m in zip(parts, self.matrices, strict=True)
            ]
            yield torch.stack([cache.stack_logits(x) for x in mapped]).float()

    def _likeliest(self, cache: ModelCache, text: Prompts) -> Tensor:
        """The likeliest token of each cell, `[layer, 1, pos]`."""
        _check_one(text)
        return torch.cat([logits.argmax(-1) for logits in self._logits(cache)], -1)


@lists(BatchOptions, Options)
def fit(
    model: HookedModel,
    texts: Prompt,
    layers: Sequence[int] | None = None,
    *,
    rank: int | None = None,
    window: int | None = None,
    pos: Positions = None,
    outliers: Outliers = "exclude",
    dtype: torch.dtype | None = None,
    **options: Unpack[BatchOptions],
) -> JacobianLens:
    """The mean Jacobian from the stream after each layer to the final stream, over the positions of many texts.

        >>> lens = jacobian.fit(model, texts, progress=False)
        >>> lens.read("The capital of Italy is").axes
        ('layer', 'pos')

    For each position of a text it is the sum of ∂ final stream ∕ ∂ stream after the layer over the positions at and
    after it; then the mean over all positions of all texts. The cost is a forward pass and `d_model` backward passes
    per text, for all layers together. About 100 texts are usual; `lens.error` says how much they differ.

    `window` cuts every text into windows of that many tokens. `pos` limits the positions that take part (as sources
    and in the sums), such as `slice(16, -1)`. Positions with outlying norms, such as attention sinks, are no sources;
    `outliers` is as for `steering.contrast_vectors`. Hooks that are active take part.

    `rank` is for wide models and many texts: after the first 4 texts, backward passes are made in `rank` directions
    only, those in which the Jacobians of these texts differ most. In the others, the mean is that of these texts, and
    `lens.error` includes what that costs. `dtype=torch.bfloat16` computes matrix products in that dtype (autocast):
    faster, and much less precise than float32, but more precise than the mean of 100 texts. Further options: batch_size
    (cotangents at once), progress.
    """
    how, by_layer = Options.of(options, "per_example", "resume"), _checked(model, layers)
    (final,) = stream_points(model, [-1]).values()
    rows = windows_of(model, texts, window)
    _check_rank(rank, len(rows), model.cfg.d_model)
    wide = torch.promote_types(model.cfg.dtype, torch.float32)
    mean = MeanJacobian(len(by_layer), model.cfg.d_model, wide, finds_basis=rank is not None)
    batching = CotangentBatches(None if how.batch_size == "auto" else how.batch_size, dtype)
    norms, n_sources = [], 0
    with progress_bar(how.progress, len(rows), "text") as bar:
        for number, text in enumerate(rows):
            takes_part = _mask(model, text, pos)
            run = Pullback(model, text, list(by_layer.values()), final, takes_part, batching)
            if number == 0:
                run.check_causal()
            streams = [run.streams[name][0].detach() for name in by_layer.values()]
            sources = [_sources(x, takes_part, outliers) for x in streams]
            norms.append(torch.stack([row_norms(x)[m].median().cpu() for x, m in zip(streams, sources, strict=True)]))
            if rank is not None and number == FULL:
                mean.choose_basis()
            vectors = mean.basis[: rank if number >= FULL else None]
            mean.add(run.rows(vectors, [m.to(wide) for m in sources]), counts := [int(m.sum()) for m in sources])
            n_sources += min(counts)
            bar.update()
    info = {**_identity(model), "texts": len(rows), "positions": n_sources, "rank": rank, "window": window}
    norm = torch.stack(norms).mean(0).float()
    return JacobianLens(mean.matrices(), list(by_layer), norm, mean.errors().float(), info, model)


def stream_points(model: HookedModel, layers: Sequence[int] | None) -> dict[int, str]:
    """The names of the points after some layers; an error unless they are one vector per position."""
    points = {
        int(layer): point for (layer,), point in sweep_points(model, "resid_post", "layer", layers).points.items()
    }
    for point in points.values():
        if point.axes != "b p d":
            raise HooklineError(
                f"a Jacobian lens needs a residual stream of one vector per position, but {point.name!r} has axes "
                f"{point.axes}"
            )
    return {layer: point.name for layer, point in points.items()}


def _checked(model: HookedModel, layers: Sequence[int] | None) -> dict[int, str]:
    """The points of the layers, of a model that has a lens."""
    check_language_model(model)
    sharding.check_not_sharded(model.index.root, "a Jacobian lens")
    if model.anatomy.main.name == "encoder" or model.anatomy.is_encoder_decoder:
        raise HooklineError(f"a Jacobian lens needs a decoder-only language model, not {model.cfg.architecture}")
    warn_of_dropout(model)
    return stream_points(model, layers)


def _check_rank(rank: Any, n_texts: int, width: int) -> None:
    if rank is None:
        return
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank < width:
        raise HooklineError(f"rank is a number of directions, from 1 to {width - 1}, or None for all, got {rank!r}")
    if n_texts <= FULL:
        raise HooklineError(
            f"rank={rank} applies after the first {FULL} texts or windows, but there are {n_texts}: leave rank out"
        )


def _mask(model: HookedModel, text: Prompts, pos: Positions) -> Bool[Tensor, " pos"]:
    """The positions that take part."""
    if pos is None:
        return text.mask[0]
    mask = torch.zeros_like(text.mask[0])
    mask[prompt_positions(model, text, pos)[0]] = True
    return mask


def _sources(stream: Tensor, takes_part: Tensor, outliers: Outliers) -> Bool[Tensor, " pos"]:
    """The positions over which the mean is taken: those that take part and are not outlying."""
    norms, sources = row_norms(stream), takes_part.to(stream.device).clone()
    sources[sources.clone()] = ~outlying(norms[sources], outliers)[0]
    return sources


def _identity(model: HookedModel) -> dict[str, Any]:
    cfg = model.cfg
    sizes = {"model": cfg.model_name, "d_model": cfg.d_model, "n_layers": cfg.n_layers}
    return {**sizes, "weights": weights_digest(model.module)}


def _units(directions: Float[Tensor, "token d_model"], layer: int) -> Float[Tensor, "token d_model"]:
    norms = directions.norm(dim=-1, keepdim=True)
    if not bool(((norms > 0) & norms.isfinite()).all()):
        raise HooklineError(f"the lens has no direction for one of the tokens after layer {layer}: it is zero or NaN")
    return directions / norms


def _check_one(text: Prompts) -> None:
    if len(text) != 1:
        raise HooklineError(f"the likeliest tokens are read from one prompt, got {len(text)}: pass tokens=…, or one")
