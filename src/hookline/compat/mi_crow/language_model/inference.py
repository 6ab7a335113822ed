"""InferenceEngine: run a language model on texts, with its registered hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.engine.recorder import StopForward
from hookline.errors import HooklineError
from hookline.hooks import Hook
from hookline.hooks.hooked_module import HookedModule
from hookline.transformer.contexts import EvalMode

if TYPE_CHECKING:
    from hookline.compat.mi_crow.language_model.language_model import LanguageModel


class _Stop(Hook):
    """Records the output of a layer and stops the forward pass there."""

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        """Record the output and stop."""
        self.output = output
        raise StopForward


class InferenceEngine:
    """Runs a language model on texts."""

    def __init__(self, language_model: LanguageModel) -> None:
        self.lm = language_model

    def execute_inference(
        self,
        texts: Sequence[str],
        tok_kwargs: dict[str, Any] | None = None,
        autocast: bool = False,
        autocast_dtype: torch.dtype | None = None,
        with_controllers: bool = True,
        stop_after_layer: str | int | None = None,
    ) -> tuple[Any, dict[str, Tensor]]:
        """The model's output on these texts, and their encodings: token ids and attention mask.

        With `stop_after_layer` later layers do not run, and the output is that layer's.
        """
        if autocast_dtype is not None and not autocast:
            raise HooklineError("autocast_dtype needs autocast=True")
        encodings = self._encodings(texts, tok_kwargs or {})
        device = next(iter(encodings.values())).device
        casting = torch.autocast(device.type, dtype=autocast_dtype) if autocast else nullcontext()
        with torch.inference_mode(), casting, self._controllers(with_controllers), EvalMode(self.lm.model):
            if stop_after_layer is not None:
                return self._up_to(stop_after_layer, encodings), encodings
            return HookedModule.__call__(self.lm.hooked, **encodings), encodings

    def _encodings(self, texts: Sequence[str], options: dict[str, Any]) -> dict[str, Tensor]:
        if isinstance(texts, str) or not texts:
            raise HooklineError(f"texts must be a nonempty list of texts, not {texts!r}")
        hooked = self.lm.hooked
        if options:
            encoded = self.lm.tokenize(list(texts), **{"padding": True, "return_tensors": "pt", **options})
            ids, mask = encoded["input_ids"], encoded["attention_mask"]
            hooked._text.check_ids(ids)
        else:
            ids, mask = hooked._text.encode(list(texts))
        return {"input_ids": ids.to(hooked._device), "attention_mask": mask.to(hooked._device)}

    def _up_to(self, layer: str | int, encodings: dict[str, Tensor]) -> Any:
        stop = _Stop()
        try:
            with self.lm.hooked.hooks([(self.lm.layers.resolved(layer), stop)]):
                HookedModule.__call__(self.lm.hooked, **encodings)
        except StopForward:
            return stop.output
        raise HooklineError(f"the forward pass never reached {layer!r}")

    @contextmanager
    def _controllers(self, wanted: bool) -> Iterator[None]:
        """A context in which controllers are disabled, unless they are wanted."""
        off = [] if wanted else [each for each in self.lm.layers.get_controllers() if each.is_enabled()]
        for controller in off:
            controller.disable()
        try:
            yield
        finally:
            for controller in off:
                controller.enable()

    def extract_logits(self, output: Any) -> Tensor:
        """The logits of an output."""
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise HooklineError(f"a {type(output).__name__} has no logits")
        return logits
