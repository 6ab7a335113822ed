"""LanguageModel: a hooked model with mi-crow's components: layers, inference, activations and a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

import hookline
from hookline.compat.mi_crow.language_model.activations import LanguageModelActivations
from hookline.compat.mi_crow.language_model.context import LanguageModelContext
from hookline.compat.mi_crow.language_model.inference import InferenceEngine
from hookline.compat.mi_crow.language_model.layers import LanguageModelLayers
from hookline.compat.mi_crow.mechanistic.sae.concepts.input_tracker import InputTracker
from hookline.compat.mi_crow.store.local_store import LocalStore
from hookline.compat.mi_crow.wrong_argument import WrongArgumentError
from hookline.errors import HooklineError
from hookline.hooks import Controller, Detector
from hookline.model import HookedModel

Device: TypeAlias = str | torch.device | None
"""The device for the model; None does not move it."""


class LanguageModel:
    """A language model with hooks that are registered at its layers.

        lm = LanguageModel.from_huggingface("gpt2", store=LocalStore("./store"))
        outputs, encodings = lm.inference.execute_inference(["Hello, world!"])

    `lm.hooked` is the same model with hookline's own methods.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, store: Any = None, model_id: str | None = None, device: Device = None
    ) -> None:
        hooked = hookline.hook(model if device is None else model.to(device), tokenizer)
        if not isinstance(hooked, HookedModel):
            raise HooklineError(f"{type(model).__name__} is not a supported language model")
        self.hooked = hooked
        self.store = LocalStore(store) if isinstance(store, str | Path) else store
        name = model_id or str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        self.model_id = name.replace("/", "_")  # usable as the name of a folder
        self._tracker = InputTracker()
        self.context = LanguageModelContext(self)
        self.layers = LanguageModelLayers(self)
        self.inference = InferenceEngine(self)
        self.activations = LanguageModelActivations(self)

    @classmethod
    def from_huggingface(
        cls,
        model_name: str,
        store: Any = None,
        tokenizer_params: dict[str, Any] | None = None,
        model_params: dict[str, Any] | None = None,
        device: Device = None,
    ) -> Self:
        """Load a model and its tokenizer from the hub or a folder; "tinyworld" is included in the package."""
        hooked = hookline.load(model_name, **({} if device is None else {"device": device}) | (model_params or {}))
        tokenizer = hooked.tokenizer
        if tokenizer_params:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path, **tokenizer_params)
        return cls(hooked.module, tokenizer, store, model_name)

    @classmethod
    def from_local(
        cls, saved_path: str | Path, store: Any = None, model_id: str | None = None, device: Device = None
    ) -> Self:
        """Load a model from a folder written by `save_model` or transformers' `save_pretrained`."""
        path = Path(saved_path)
        if path.suffix in (".pt", ".pth", ".bin"):
            how = "load it with torch, and call LanguageModel.from_model(model, tokenizer)"
            raise HooklineError(f"{path} is a pickle file, which can execute code: {how}")
        if not path.is_dir():
            raise HooklineError(f"there is no folder {path}")
        hooked = hookline.load(path.resolve())
        return cls(hooked.module, hooked.tokenizer, store, model_id or path.name, device)

    @classmethod
    def from_local_torch(cls, model_path: str, tokenizer_path: str, store: Any = None, device: Device = None) -> Self:
        """Load a model from one folder and its tokenizer from another."""
        from transformers import AutoTokenizer

        lm = cls.from_local(model_path, store)
        return cls(lm.model, AutoTokenizer.from_pretrained(tokenizer_path), store, lm.model_id, device)

    @classmethod
    def from_model(
        cls, model: nn.Module, tokenizer: Any, store: Any = None, model_id: str | None = None, device: Device = None
    ) -> Self:
        """Wrap a model that is already in memory."""
        return cls(model, tokenizer, store, model_id, device)

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self.hooked.module

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.hooked.tokenizer

    def needed_store(self) -> LocalStore:
        """The store; raises if there is none."""
        if not isinstance(self.store, LocalStore):
            raise WrongArgumentError("this needs a store: LanguageModel.from_…(…, store=LocalStore(base_path=…))")
        return self.store

    def save_model(self, path: str | Path | None = None) -> Path:
        """Write the model and its tokenizer to a folder, by default in the store, for `from_local`."""
        folder = Path(path) if path is not None else self.needed_store().base_path / "models" / self.model_id
        self.model.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)
        return folder

    def get_input_tracker(self) -> InputTracker:
        """The texts of the current inference, once it is enabled."""
        return self._tracker

    def tokenize(self, texts: list[str], **kwargs: Any) -> Any:
        """The tokenizer's output for these texts."""
        return self.tokenizer(texts, **kwargs)

    def get_all_detector_metadata(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """The metadata and the tensors that registered detectors recorded, both by layer."""
        detectors = self.layers.get_detectors()
        layers = [str(detector.layer_signature) for detector in detectors]
        named = {
            layer if layers.count(layer) == 1 else f"{layer}#{detector.id}": detector
            for layer, detector in zip(layers, detectors, strict=True)
        }
        metadata = {name: detector.metadata for name, detector in named.items()}
        return metadata, {name: detector.tensor_metadata for name, detector in named.items()}

    def clear_detectors(self) -> None:
        """Clear what registered detectors recorded."""
        for detector in self.layers.get_detectors():
            detector.clear_captured()

    def save_detector_metadata(
        self, run_name: str, batch_idx: int | None, unified: bool = False, clear_after_save: bool = True
    ) -> str:
        """Save what registered detectors recorded to the store, and by default clear them.

        With `unified` it becomes the next batch of the run, and `batch_idx` is ignored.
        """
        store, metadata = self.needed_store(), self.get_all_detector_metadata()
        if unified:
            saved = store.put_run_detector_metadata(run_name, *metadata)
        elif batch_idx is None:
            raise WrongArgumentError("pass the number of the batch, as batch_idx=0, or unified=True for the next one")
        else:
            saved = store.put_detector_metadata(run_name, batch_idx, *metadata)
        if clear_after_save:
            self.clear_detectors()
        return saved

    def __repr__(self) -> str:
        hooks = self.layers.hooks()
        counts = {kind.__name__: sum(isinstance(hook, kind) for hook in hooks) for kind in (Detector, Controller)}
        return f"LanguageModel({self.model_id!r}, {counts['Detector']} detectors, {counts['Controller']} controllers)"
