"""InferenceEngine: run a language model on texts, with its registered hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from hookline.compat.mi_crow.wrong_argument import WrongArgumentError
from hookline.engine import StopForward
from hookline.errors import HooklineError, a_type
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
            raise WrongArgumentError("autocast_dtype needs autocast=True")
        encodings = self._encodings(texts, tok_kwargs or {})
        self.lm.get_input_tracker().set_current_texts(texts, encodings)
        device = next(iter(encodings.values())).device
        casting = torch.autocast(device.type, dtype=autocast_dtype) if autocast else nullcontext()
        with torch.inference_mode(), casting, self._controllers(with_controllers), EvalMode(self.lm.model):
            if stop_after_layer is not None:
                return self._up_to(stop_after_layer, encodings), encodings
            return HookedModule.__call__(self.lm.hooked, **encodings), encodings

    def infer_texts(
        self,
        texts: Sequence[str],
        run_name: str | None = None,
        batch_size: int | None = None,
        *,
        clear_detectors_before: bool = False,
        save_in_batches: bool = True,
        verbose: bool = False,
        **options: Any,
    ) -> tuple[Any, Any]:
        """`execute_inference` in batches; returns the output and the encodings, or lists of them for several batches.

        With `run_name`, what registered detectors recorded is saved to the store after each batch.
        """
        if clear_detectors_before:
            self.lm.clear_detectors()
        batches = tqdm(_batches(texts, batch_size), disable=not verbose)
        results = [self._saving(batch, run_name, i, save_in_batches, options) for i, batch in enumerate(batches)]
        if run_name is not None:
            self._describe(run_name, batch_size or len(texts), options)
        if len(results) == 1:
            return results[0]
        return [output for output, _ in results], [encodings for _, encodings in results]

    def infer_dataset(
        self,
        dataset: Any,
        run_name: str | None = None,
        batch_size: int = 32,
        *,
        clear_detectors_before: bool = False,
        save_in_batches: bool = True,
        verbose: bool = False,
        **options: Any,
    ) -> str:
        """`execute_inference` on all texts; saves what registered detectors recorded, and returns the run's name."""
        self.lm.needed_store()
        if clear_detectors_before:
            self.lm.clear_detectors()
        name = run_name if run_name is not None else f"run_{datetime.now():%Y%m%d_%H%M%S_%f}"
        texts = iter(dataset)
        for number in tqdm(count(), disable=not verbose):
            if not (batch := list(islice(texts, batch_size))):
                break
            self._saving(batch, name, number, save_in_batches, options)
        self._describe(name, batch_size, options)
        return name

    def _saving(
        self, texts: Sequence[str], run_name: str | None, number: int, in_batches: bool, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run a batch, and save what detectors recorded if the run has a name."""
        result = self.execute_inference(texts, **options)
        if run_name is not None:
            self.lm.save_detector_metadata(run_name, number, unified=not in_batches)
        return result

    def _describe(self, run_name: str, batch_size: int, options: dict[str, Any]) -> None:
        about = {"batch_size": batch_size, "max_length": (options.get("tok_kwargs") or {}).get("max_length")}
        meta = {"run_name": run_name, "model": self.lm.model_id, "options": about}
        self.lm.needed_store().put_run_metadata(run_name, meta)

    def _encodings(self, texts: Sequence[str], options: dict[str, Any]) -> dict[str, Tensor]:
        (texts,) = _batches(texts, None)
        hooked = self.lm.hooked
        if options:
            ids, mask = self._tokenized(list(texts), {"padding": True, **options})
            hooked.text.check_ids(ids)
        else:
            ids, mask = hooked.text.encode(list(texts))
        return {"input_ids": ids.to(hooked.device), "attention_mask": mask.to(hooked.device)}

    def _tokenized(self, texts: list[str], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if options["padding"] is True and self.lm.tokenizer.pad_token is None:
            rows = self.lm.tokenize(texts, **options | {"padding": False, "return_tensors": None})["input_ids"]
            return self.lm.hooked.text.padded(rows, self.lm.tokenizer.padding_side)  # any token: the mask hides it
        encoded = self.lm.tokenize(texts, **{"return_tensors": "pt", **options})
        return encoded["input_ids"], encoded["attention_mask"]

    def _up_to(self, layer: str | int, encodings: dict[str, Tensor]) -> Any:
        stop = _Stop()
        try:
            with self.lm.hooked.hooks([(self.lm.layers.resolved(layer), stop)]):
                HookedModule.__call__(self.lm.hooked, **encodings)
        except StopForward:
            return stop.output
        raise HooklineError(f"the forward pass never reached {layer!r}")

    @contextmanager
    def _controllers(self, with_controllers: bool) -> Iterator[None]:
        """A context in which controllers are disabled, unless they are wanted."""
        off = (
            []
            if with_controllers
            else [controller for controller in self.lm.layers.get_controllers() if controller.is_enabled()]
        )
        for controller in off:
            controller.disable()
        try:
            yield
        finally:
            for controller in off:
                controller.enable()

    def extract_logits(self, output: Any) -> Tensor:
        """The logits of an output: the first item of a tuple."""
        logits = getattr(output, "logits", output)
        logits = logits[0] if isinstance(logits, tuple | list) and logits else logits
        if not isinstance(logits, Tensor):
            raise WrongArgumentError(f"{a_type(output)} has no logits")
        return logits


def _batches(texts: Sequence[str], batch_size: int | None) -> list[Sequence[str]]:
    if isinstance(texts, str) or not texts:
        raise WrongArgumentError(f"texts must be a nonempty list of texts, not {texts!r}")
    if batch_size is not None and batch_size < 1:
        raise WrongArgumentError(f"batch_size must be a positive integer, not {batch_size!r}")
    size = batch_size or len(texts)
    return [texts[start : start + size] for start in range(0, len(texts), size)]
