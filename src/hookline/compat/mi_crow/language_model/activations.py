"""Saving the activations of many texts, through `hookline.store`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.compat.mi_crow.language_model.language_model import LanguageModel


class LanguageModelActivations:
    """Writes activations to the language model's store. `lm.store.open_run(name)` reads them back."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm

    def save_activations(
        self,
        texts: Iterable[str],
        layer_signature: Any,
        run_name: str | None = None,
        batch_size: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
        verbose: bool = False,
    ) -> str:
        """Save what a layer, or several, have at every token of these texts, padding apart; gives the run's name."""
        return self._save(texts, layer_signature, run_name, batch_size or 32, None, dtype, max_length, verbose)

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
        verbose: bool = False,
    ) -> str:
        """As `save_activations`, for a data set: texts, or anything with columns, of which `column` names one.

        A run that was interrupted goes on where it was when it is called again with the same arguments.
        """
        return self._save(dataset, layer_signature, run_name, batch_size, column, dtype, max_length, verbose)

    def _save(
        self,
        dataset: Any,
        layer_signature: Any,
        run_name: str | None,
        batch_size: int,
        column: str | int | None,
        dtype: torch.dtype | None,
        max_length: int | None,
        verbose: bool,
    ) -> str:
        from hookline.store import harvest

        lm, store = self._lm, self._lm.needed_store()
        name = run_name if run_name is not None else f"run_{datetime.now():%Y%m%d_%H%M%S_%f}"
        signatures = layer_signature if isinstance(layer_signature, list) else [layer_signature]
        if not signatures or None in signatures:
            raise HooklineError("name the layer, or a list of layers, whose activations are to be saved")
        points = [lm.layers.resolved(each) for each in signatures]
        options: dict[str, Any] = {"batch_size": batch_size, "column": column, "dtype": dtype, "max_tokens": max_length}
        harvest(lm.hooked, dataset, points, store.run_path(name) / "activations", progress=verbose, **options)
        store.put_run_metadata(
            name,
            {
                "run_name": name,
                "model": lm.model_id,
                "layer_signatures": [str(each) for each in signatures],
                "options": {**options, "dtype": str(dtype) if dtype is not None else None},
            },
        )
        return name
