"""The methods that run a language model with hooks, with a cache, or for a cache only."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal, Unpack, overload

from torch import Tensor

from hookline.engine import compiling
from hookline.functions.listed_options import lists
from hookline.model_options import CacheOptions, HookOptions, Input, RecordOptions, ReturnType
from hookline.residual import ModelCache
from hookline.transformer.model_inputs import ModelInputs

_DEFAULTS = SimpleNamespace(
    fwd_hooks=(),
    bwd_hooks=(),
    reset_hooks_end=True,
    clear_contexts=False,
    on_error="raise",
    allow_shape=False,
    remove_batch_dim=False,
    incl_bwd=False,
    local=False,
    loss_per_token=False,
)
"""Defaults other than None."""


def _positional(self: Any, input: Input = None, return_type: ReturnType = "logits") -> None:
    """The positional arguments of a call."""


@compiling.verbs
class RunMethods(ModelInputs):
    """A base of `HookedModel`. The types of what is returned depend on `return_type`."""

    @overload  # type: ignore[override]
    def run_with_hooks(
        self, input: Input = ..., return_type: Literal["logits", "loss"] = ..., **options: Unpack[HookOptions]
    ) -> Tensor: ...
    @overload
    def run_with_hooks(
        self, input: Input = ..., return_type: Literal["both"] = ..., **options: Unpack[HookOptions]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def run_with_hooks(self, input: Input = ..., return_type: None = ..., **options: Unpack[HookOptions]) -> None: ...
    @overload
    def run_with_hooks(
        self, input: Input = ..., return_type: Literal["output"] = ..., **options: Unpack[HookOptions]
    ) -> Any: ...
    @overload
    def run_with_hooks(
        self,
        input: Input = ...,
        return_type: ReturnType = ...,
        *,
        labels: Tensor | None,
        **options: Unpack[HookOptions],
    ) -> Any: ...
    @lists(HookOptions, _DEFAULTS, args_of=_positional)
    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """The output, with these hooks active for this one forward pass.

        Takes the arguments of a call (`input`, `images`, …) and of `HookedModule.run_with_hooks` (`fwd_hooks`, …).
        """
        return super().run_with_hooks(*args, **kwargs)

    @overload  # type: ignore[override]
    def run_with_cache(
        self, input: Input = ..., return_type: Literal["logits", "loss"] = ..., **options: Unpack[CacheOptions]
    ) -> tuple[Tensor, ModelCache]: ...
    @overload
    def run_with_cache(
        self, input: Input = ..., return_type: Literal["both"] = ..., **options: Unpack[CacheOptions]
    ) -> tuple[tuple[Tensor, Tensor], ModelCache]: ...
    @overload
    def run_with_cache(
        self, input: Input = ..., return_type: None = ..., **options: Unpack[CacheOptions]
    ) -> tuple[None, ModelCache]: ...
    @overload
    def run_with_cache(
        self, input: Input = ..., return_type: Literal["output"] = ..., **options: Unpack[CacheOptions]
    ) -> tuple[Any, ModelCache]: ...
    @overload
    def run_with_cache(
        self,
        input: Input = ...,
        return_type: ReturnType = ...,
        *,
        labels: Tensor | None,
        **options: Unpack[CacheOptions],
    ) -> tuple[Any, ModelCache]: ...
    @lists(CacheOptions, _DEFAULTS, args_of=_positional)
    def run_with_cache(self, *args: Any, **kwargs: Any) -> tuple[Any, ModelCache]:
        """The output and the activations; the cache also keeps the logits.

        Takes the arguments of a call (`input`, `images`, …) and of `HookedModule.run_with_cache` (`names_filter`, …).
        """
        passes_stream_on = kwargs.get("names_filter") is not None and self._passes_stream_on(kwargs.get("fwd_hooks"))
        output, cache = super().run_with_cache(*args, **kwargs)
        cache.passes_stream_on = passes_stream_on  # type: ignore[attr-defined]
        logits = output[0] if isinstance(output, tuple) else output
        logits = logits.get("logits") if isinstance(logits, Mapping) else logits
        is_whole = kwargs.get("stop_at_layer") is None
        if isinstance(cache, ModelCache) and is_whole and isinstance(logits, Tensor) and logits.ndim == 3:
            cache.keep_logits(logits.detach())
        return output, cache  # type: ignore[return-value]

    @overload  # type: ignore[override]
    def cache(
        self,
        input: Input = ...,
        return_type: ReturnType = ...,
        *,
        stop_early: bool = True,
        **options: Unpack[RecordOptions],
    ) -> ModelCache: ...
    @overload
    def cache(
        self,
        input: Input = ...,
        return_type: ReturnType = ...,
        *,
        stop_early: bool = True,
        labels: Tensor,
        **options: Unpack[RecordOptions],
    ) -> ModelCache: ...
    @lists(RecordOptions, _DEFAULTS, args_of=_positional)
    def cache(self, *args: Any, stop_early: bool = True, **kwargs: Any) -> ModelCache:
        """The activations only; layers after the last that is needed do not run. See `HookedModule.cache`."""
        if len(args) < 2 and kwargs.get("stop_at_layer") is None:
            kwargs.setdefault("return_type", None)
        passes_stream_on = self._passes_stream_on(kwargs.get("fwd_hooks"))
        cache = super().cache(*args, stop_early=stop_early, **kwargs)
        cache.passes_stream_on = passes_stream_on  # type: ignore[attr-defined]
        return cache  # type: ignore[return-value]

    def _passes_stream_on(self, fwd_hooks: Any) -> bool:
        """Whether nothing can change the stream between two layers: no hook, and not the model."""
        is_hooked = fwd_hooks or self.index.active_hooks()
        is_hooked = is_hooked or any(block.module._forward_pre_hooks for block in self.anatomy.blocks)
        return not is_hooked and not self.anatomy.main.architecture.adds_between_layers
