"""Saving the activations of many texts, through `hookline.store`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import torch

from hookline.compat.mi_crow.wrong_argument import WrongArgumentError

if TYPE_CHECKING:
    from hookline.compat.mi_crow.language_model.language_model import LanguageModel


class LanguageModelActivations:
    """Writes activations to the language model's store. `lm.store.open_run(name)` reads them back."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm, self.context = lm, lm.context

    def save_activations(
        self,
        texts: Iterable[str],
        layer_signature: Any,
        run_name: str | None = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> str:
        """`save_activations_dataset` for a list of texts."""
        return self.save_activations_dataset(texts, layer_signature, run_name, batch_size or 32, **options)

    def save_activations_dataset(
        self,
        dataset: Any,
        layer_signature: Any,
        run_name: str | None = None,
        batch_size: int = 32,
        *,
        column: str | int | None = None,
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
        autocast: bool = False,
        save_attention_mask: bool = False,
        verbose: bool = False,
        free_cuda_cache_every: int | None = 0,  # noqa: ARG002 (torch's allocator needs no help: only one batch is kept)
    ) -> str:
        """Save the activations of one or several layers at every token except padding; returns the run's name.

        The data set is a list of texts, or has columns, one of which is `column`. An interrupted run is resumed when
        this is called again with the same arguments. With `save_attention_mask`, the batches of the run have the mask.
        """
        from hookline.store import harvest

        if autocast:
            raise WrongArgumentError(
                "activations are saved in the dtype of the model: load it in another, or pass dtype="
            )
        lm, store = self._lm, self._lm.needed_store()
        name = run_name if run_name is not None else f"run_{datetime.now():%Y%m%d_%H%M%S_%f}"
        signatures = layer_signature if isinstance(layer_signature, list) else [layer_signature]
        if not signatures or None in signatures:
            raise WrongArgumentError("layer_signature must be a layer, or a list of layers, to save activations of")
        points = [lm.layers.resolved(signature) for signature in signatures]
        options: dict[str, Any] = {"batch_size": batch_size, "column": column, "dtype": dtype, "max_tokens": max_length}
        harvest(lm.hooked, dataset, points, store.run_path(name) / "activations", progress=verbose, **options)
        options |= {"dtype": None if dtype is None else str(dtype), "save_attention_mask": save_attention_mask}
        layers, names = [str(signature) for signature in signatures], [lm.hooked.point(point).name for point in points]
        about = {"run_name": name, "model": lm.model_id, "layer_signatures": layers, "points": names}
        store.put_run_metadata(name, about | {"options": options})
        return name
