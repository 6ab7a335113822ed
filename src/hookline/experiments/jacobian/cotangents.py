"""Cotangents: rows of the Jacobian of the final residual stream, many at a time from one forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hookline.errors import HooklineError
from hookline.experiments.core.integration import traced_run
from hookline.experiments.core.prompts import Prompts
from hookline.experiments.jacobian.linear_activations import linear_activations
from hookline.model import HookedModel
from hookline.transformer.memory.halving import BatchFitter, is_out_of_memory

_TOKENS = {"cpu": 4096, "cuda": 131072}
"""How many positions a backward pass covers, over all of its cotangents."""


@dataclass(eq=False)
class CotangentBatches:
    """How many cotangents go through a model at once, and whether they can share one forward pass."""

    most: int | None = None
    """The number of cotangents, as the user set it."""
    dtype: torch.dtype | None = None
    """The dtype of matrix products, if not the model's own."""
    shares: bool = True
    """Whether backward passes can be batched; otherwise the text is repeated, once for each cotangent."""
    fit: BatchFitter = field(default_factory=lambda: BatchFitter("cotangents"))

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.bfloat16, torch.float16):
            raise HooklineError(
                f"dtype is torch.bfloat16, torch.float16, or None for the model's own, got {self.dtype!r}"
            )

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context in which forward passes run; backward passes use the same dtypes."""
        return nullcontext() if self.dtype is None else torch.autocast(device.type, self.dtype)

    def limit(self, device: torch.device, length: int) -> None:
        """Set the size of the first batches, unless memory has run out before."""
        if self.fit.most is None:
            self.fit.most = self.most or max(1, _TOKENS.get(device.type, _TOKENS["cpu"]) // length)


class Pullback:
    """One text and the streams of its run, from which cotangents of the final stream are pulled back.

    `counts` are the positions of the text that are summed over, as targets.
    """

    def __init__(
        self,
        model: HookedModel,
        text: Prompts,
        names: Sequence[str],
        last: str,
        counts: Bool[Tensor, " pos"],
        how: CotangentBatches,
    ) -> None:
        self._model, self._text, self._names, self._last, self._how = model, text, list(names), last, how
        self._copies, self.streams = 0, dict[str, Tensor]()
        self._run(1)
        how.limit(self.target.device, text.width)
        self._counts = counts.to(self.target.device)

    @property
    def target(self) -> Float[Tensor, "copy pos d_model"]:
        """The final stream."""
        return self.streams[self._last]

    def _run(self, copies: int) -> None:
        if copies == self._copies:
            return
        self.streams = {}  # before the next run, so that only one is in memory
        rows = [self._text.row(0)[0]] * copies
        names = dict.fromkeys([*self._names, self._last])
        # Backward passes of fused attention cannot be batched: torch would loop over the cotangents.
        with self._how.autocast(self._model.device), sdpa_kernel(SDPBackend.MATH), linear_activations(self._model):
            call = Prompts.of_rows(rows).call(self._model)
            run = lambda hooks: self._model.run_with_hooks(**call, fwd_hooks=hooks)  # noqa: E731
            self.streams = traced_run(run, copies, list(names))[1]
        self._copies = copies

    def rows(
        self, vectors: Float[Tensor, "vector d_model"], weights: Sequence[Float[Tensor, " pos"]]
    ) -> list[Float[Tensor, "vector d_model"]]:
        """The gradient of each vector's product with the final stream, in each stream, summed over weighted positions.

        The products are summed over the positions that count.
        """
        batches: list[list[Tensor]] = []
        for _, part in self._how.fit.parts(range(len(vectors)), lambda indices: self._part(vectors[list(indices)])):
            summed = [
                torch.einsum("vpd,p->vd", x.to(weight.dtype), weight.to(x.device))
                for x, weight in zip(part, weights, strict=True)
            ]
            batches.append([x.cpu() for x in summed])
            self._check_finite(batches[-1])
        return [torch.cat(parts) for parts in zip(*batches, strict=True)]

    def _check_finite(self, gradients: Sequence[Tensor]) -> None:
        for name, x in zip(self._names, gradients, strict=True):
            if not bool(x.isfinite().all()):
                kind = str(self._how.dtype or self.target.dtype)
                hint = ": float16 may be too narrow, bfloat16 is not" if kind == "torch.float16" else ""
                raise HooklineError(
                    f"the Jacobian from {name!r} has values that are not finite (NaN or infinite), in {kind}{hint}"
                )

    def _part(self, vectors: Float[Tensor, "vector d_model"]) -> list[Float[Tensor, "vector pos d_model"]]:
        """The gradients for some vectors, from one backward pass."""
        if self._how.shares:
            try:
                return [x[:, 0] for x in self._pulled_together(self._seeds(vectors)[:, None])]
            except (RuntimeError, UserWarning) as error:  # an operation of the model cannot be batched
                if is_out_of_memory(error):
                    raise
                self._how.shares = False
        self._run(max(self._copies, len(vectors)))  # a last, smaller part does not need another run
        missing = self._copies - len(vectors)
        seeds = torch.nn.functional.pad(self._seeds(vectors), (0, 0, 0, 0, 0, missing))
        return [x[: len(vectors)] for x in self._pulled(seeds)]

    def _seeds(self, vectors: Tensor) -> Float[Tensor, "vector pos d_model"]:
        return vectors.to(self.target)[:, None] * self._counts[:, None].to(self.target)

    def _pulled_together(self, seeds: Float[Tensor, "vector copy pos d_model"]) -> list[Tensor]:
        with warnings.catch_warnings():
            # Torch would loop over the cotangents: repeating the text is faster.
            warnings.filterwarnings("error", "There is a performance drop", UserWarning)
            return torch.func.vmap(self._pulled)(seeds)

    def _pulled(self, seeds: Float[Tensor, "copy pos d_model"]) -> list[Tensor]:
        sources = [self.streams[name] for name in self._names]
        gradients = torch.autograd.grad(self.target, sources, seeds, retain_graph=True, allow_unused=True)
        for name, x in zip(self._names, gradients, strict=True):
            if x is None:
                raise HooklineError(f"the final stream of {self._model.cfg.architecture} does not depend on {name!r}")
        return list(gradients)

    def check_causal(self) -> None:
        """Raise if the stream at the first position depends on later positions: sums would include earlier targets."""
        self._run(max(1, self._copies))
        if not bool(self.target.isfinite().all()):
            raise HooklineError(f"{self._last!r} has values that are not finite (NaN or infinite)")
        seeds = torch.zeros_like(self.target)
        seeds[:, 0] = torch.randn(seeds.shape[-1], generator=torch.Generator().manual_seed(0)).to(seeds)
        gradients = self._pulled(seeds)
        self._check_finite(gradients)
        for name, x in zip(self._names, gradients, strict=True):
            if bool(x[:, 1:].any()):
                raise HooklineError(
                    f"a Jacobian lens sums over positions at and after each position, but in "
                    f"{self._model.cfg.architecture} earlier positions depend on later ones at {name!r}: use a causal "
                    f"language model"
                )
