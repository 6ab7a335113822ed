"""TopKSae: hookline's top-k autoencoder as a hook, with mi-crow's methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from hookline.compat.mi_crow.mechanistic.sae.autoencoder_context import AutoencoderContext
from hookline.compat.mi_crow.mechanistic.sae.concepts.autoencoder_concepts import AutoencoderConcepts
from hookline.compat.mi_crow.mechanistic.sae.concepts.concept_dictionary import ConceptDictionary
from hookline.compat.mi_crow.mechanistic.sae.sae_trainer import SaeTrainer as SaeTrainer
from hookline.compat.mi_crow.mechanistic.sae.sae_trainer import TopKSaeTrainingConfig as TopKSaeTrainingConfig
from hookline.errors import HooklineError
from hookline.hooks import Controller, Detector
from hookline.sae import SAEConfig, SparseAutoencoder

if TYPE_CHECKING:
    from hookline.compat.mi_crow.store.local_store import LocalStore


class Engine(SparseAutoencoder):
    """The autoencoder itself; `top_k` is the number of active features."""

    @property
    def top_k(self) -> int | None:
        """The number of active features."""
        return self.cfg.k


class TopKSae(Controller, Detector):
    """A top-k autoencoder as a hook: the layer's output becomes its reconstruction, and its features are kept.

        sae = TopKSae(n_latents=4 * d, n_inputs=d)
        sae.train(lm.store, run_id, layer, TopKSaeTrainingConfig(k=8, epochs=10))
        lm.layers.register_hook(layer, sae)

    `sae.tensor_metadata["neurons"]` has the features of the last call, [batch, pos, n_latents].
    """

    def __init__(
        self,
        n_latents: int,
        n_inputs: int,
        hook_id: str | None = None,
        device: str = "cpu",
        store: Any = None,
        *,
        k: int = 1,
    ) -> None:
        super().__init__(hook_id=hook_id, store=store)
        self.sae_engine = Engine(SAEConfig("topk", n_inputs, n_latents, k=k)).to(device)
        self._about = AutoencoderContext(self, n_latents, n_inputs, device=device, store=store)
        self.concepts = AutoencoderConcepts(self._about)

    @property
    def context(self) -> AutoencoderContext:
        """Its settings; `lm` is the language model that it is registered on."""
        return self._about

    def attached(self, model: Any) -> None:
        """Note that it is about to be used on `model`."""
        super().attached(model)
        self._about.lm = getattr(self._context, "language_model", None)

    @property
    def k(self) -> int | None:
        """The number of active features."""
        return self.sae_engine.top_k

    @property
    def _text_tracking_enabled(self) -> bool:
        return self._about.text_tracking_enabled

    def encode(self, x: Tensor) -> Tensor:
        """The features of activations, mostly 0."""
        return self.sae_engine.encode(x)

    def decode(self, features: Tensor) -> Tensor:
        """The reconstruction of activations from features."""
        return self.sae_engine.decode(features)

    def forward(self, x: Tensor) -> Tensor:
        """The reconstruction of activations."""
        return self.sae_engine(x)

    def attach_dictionary(self, concept_dictionary: ConceptDictionary) -> None:
        """Use these names of features."""
        self.concepts.dictionary = concept_dictionary

    @property
    def trainer(self) -> SaeTrainer:
        """The training of this autoencoder."""
        return SaeTrainer(self)

    def train(
        self,
        store: LocalStore,
        run_id: str,
        layer_signature: str | int,
        config: TopKSaeTrainingConfig | None = None,
        training_run_id: str | None = None,
    ) -> dict[str, Any]:
        """Train on the activations of a run: see `SaeTrainer.train`."""
        return self.trainer.train(store, run_id, layer_signature, config, training_run_id)

    def use(self, sae: SparseAutoencoder) -> None:
        """Take the weights of another autoencoder."""
        if sae.d_in != self._about.n_inputs:
            raise HooklineError(f"the activations have the width {sae.d_in}, but n_inputs is {self._about.n_inputs}")
        self.sae_engine = Engine(sae.cfg).to(sae.device)
        self.sae_engine.load_state_dict(sae.state_dict())

    def modify_activations(self, module: nn.Module, inputs: Tensor | None, output: Tensor | None) -> Tensor | None:  # noqa: ARG002
        """The reconstruction from the features, after the edits of `concepts`."""
        x = inputs if output is None else output
        assert x is not None
        features = self.encode(self.sae_engine.flattened(x, self.point))
        detached_features = features.detach()
        self.capture("neurons", detached_features if detached_features.ndim > 2 else detached_features[:, None])
        self.tensor_metadata["activations"] = self.tensor_metadata["neurons"]
        self.metadata["batch_items"] = [_item(row) for row in detached_features.flatten(0, -2).cpu()]
        if self._about.text_tracking_enabled:
            self._track(detached_features)
        return self.decode(self.concepts.edited(features)).view(x.shape).to(x.dtype)

    def process_activations(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> None:
        """Nothing: features are kept where they are computed, in `modify_activations`."""

    def _track(self, features: Tensor) -> None:
        lm = self.context.lm
        tracker = None if lm is None else lm.get_input_tracker()
        if tracker is None or not tracker.encodings:
            return
        ids, mask = (tracker.encodings[name].cpu() for name in ("input_ids", "attention_mask"))
        if features.shape[:2] == ids.shape:
            texts = tracker.get_current_texts()
            self.concepts.update_top_texts(features.cpu(), texts, ids, mask, lm.tokenizer.decode)

    def save(self, name: str, path: str | Path | None = None) -> Path:
        """Write it to the folder `path/name.pt`, in the format of SAELens, and return the folder."""
        folder = Path.cwd() if path is None else Path(path)
        layer, edits = self._about.lm_layer_signature, self.concepts
        extra = {"multiplication": edits.multiplication.tolist(), "bias": edits.bias.tolist()}
        cfg = self.sae_engine.cfg
        about = {**cfg.metadata, "mi_crow": {"layer_signature": layer, "model_id": self._about.model_id, **extra}}
        saved = SparseAutoencoder(replace(cfg, metadata=about))
        saved.load_state_dict(self.sae_engine.state_dict())
        saved.save(folder / f"{name}.pt")
        return folder / f"{name}.pt"

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote, or any top-k autoencoder in the format of SAELens."""
        path = Path(path)
        if path.is_file():
            raise HooklineError(f"{path} is a pickle file of mi-crow, which hookline does not read: train it again")
        sae = SparseAutoencoder.load(path)
        if sae.cfg.architecture != "topk":
            raise HooklineError(f"{path} has a {sae.cfg.architecture!r} autoencoder, not a top-k one")
        new, about = cls(sae.d_sae, sae.d_in), sae.cfg.metadata.get("mi_crow", {})
        new.use(sae)
        new._about.lm_layer_signature, new._about.model_id = about.get("layer_signature"), about.get("model_id")
        for edit in ("multiplication", "bias"):
            if edit in about:
                getattr(new.concepts, edit).data = torch.tensor(about[edit])
        return new


def _item(features: Tensor) -> dict[str, Any]:
    indices = features.nonzero().flatten().tolist()
    return {"nonzero_indices": indices, "activations": {index: float(features[index]) for index in indices}}
