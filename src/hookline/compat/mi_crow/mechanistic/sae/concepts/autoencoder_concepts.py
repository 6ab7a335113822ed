"""AutoencoderConcepts: edits of features, their names, and the texts where they are most active."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.compat.mi_crow.mechanistic.sae.autoencoder_context import AutoencoderContext
from hookline.compat.mi_crow.mechanistic.sae.concepts.concept_dictionary import ConceptDictionary
from hookline.compat.mi_crow.mechanistic.sae.concepts.concept_models import NeuronText
from hookline.errors import HooklineError
from hookline.files.tensorfile import make_folder, write_bytes


class AutoencoderConcepts:
    """The features of an autoencoder become `features * multiplication + bias` before they are decoded."""

    def __init__(self, context: AutoencoderContext) -> None:
        self.context, self.dictionary = context, None
        self.multiplication = nn.Parameter(torch.ones(context.n_latents))
        self.bias = nn.Parameter(torch.zeros(context.n_latents))
        self._best: list[dict[str, NeuronText]] | None = None

    dictionary: ConceptDictionary | None

    def edited(self, features: Tensor) -> Tensor:
        """The features, after the edits; the same tensor without any."""
        if bool((self.multiplication == 1).all()) and not bool(self.bias.any()):
            return features
        return features * self.multiplication.to(features) + self.bias.to(features)

    def load_concepts_from_csv(self, csv_filepath: str | Path) -> None:
        """Read the names of features: see `ConceptDictionary.from_csv`."""
        self.dictionary = ConceptDictionary.from_csv(csv_filepath, self.context.n_latents)

    def load_concepts_from_json(self, json_filepath: str | Path) -> None:
        """Read the names of features: see `ConceptDictionary.from_json`."""
        self.dictionary = ConceptDictionary.from_json(json_filepath, self.context.n_latents)

    def enable_text_tracking(self) -> None:
        """Keep the texts where each feature is most active, `context.text_tracking_k` of them, from now on."""
        lm = self.context.lm
        if lm is None:
            raise HooklineError("tracking texts needs a language model: register the autoencoder on one first")
        if self.context.text_tracking_negative:
            raise HooklineError("the features of a top-k autoencoder are never negative, so no text is at the bottom")
        lm.get_input_tracker().enable()
        self.context.text_tracking_enabled = True

    def disable_text_tracking(self) -> None:
        """Keep no further texts."""
        self.context.text_tracking_enabled = False

    def update_top_texts(self, features: Tensor, texts: Sequence[str], ids: Tensor, mask: Tensor, decode: Any) -> None:
        """Add the texts of a batch: features are [batch, pos, feature], token ids and mask [batch, pos]."""
        if self._best is None:
            self._best = [{} for _ in range(self.context.n_latents)]
        scores, places = (features * mask[..., None].to(features)).max(1)
        for row, feature in (scores > 0).nonzero().tolist():
            best, text, score = self._best[feature], texts[row], float(scores[row, feature])
            if text in best and best[text].score >= score:
                continue
            place = int(places[row, feature])
            token = decode([int(ids[row, place])])
            best[text] = NeuronText(score, text, int(mask[row, :place].sum()), token)
            if len(best) > self.context.text_tracking_k:
                del best[min(best, key=lambda tracked_text: best[tracked_text].score)]

    def get_top_texts_for_neuron(self, neuron_idx: int, top_m: int | None = None) -> list[NeuronText]:
        """The texts where a feature is most active, best first."""
        if self._best is None or neuron_idx not in range(len(self._best)):
            return []
        return sorted(self._best[neuron_idx].values(), key=lambda neuron_text: -neuron_text.score)[:top_m]

    def get_all_top_texts(self) -> list[list[NeuronText]]:
        """The top texts of every feature."""
        return [self.get_top_texts_for_neuron(feature) for feature in range(len(self._best or ()))]

    def reset_top_texts(self) -> None:
        """Forget the texts."""
        self._best = None

    def export_top_texts_to_json(self, filepath: str | Path) -> Path:
        """Write the top texts of every feature to a JSON file, by the number of the feature."""
        table = {
            feature: [asdict(neuron_text) for neuron_text in texts] for feature, texts in enumerate(self._tracked())
        }
        return _written(filepath, json.dumps(table, ensure_ascii=False, indent=1))

    def export_top_texts_to_csv(self, filepath: str | Path) -> Path:
        """Write the top texts of every feature to a CSV file."""
        file = io.StringIO(newline="")
        rows = csv.writer(file)
        rows.writerow(["neuron_idx", "text", "score", "token_str", "token_idx"])
        for feature, texts in enumerate(self._tracked()):
            rows.writerows(
                [feature, neuron_text.text, neuron_text.score, neuron_text.token_str, neuron_text.token_idx]
                for neuron_text in texts
            )
        return _written(filepath, file.getvalue())

    def _tracked(self) -> list[list[NeuronText]]:
        if self._best is None:
            raise HooklineError("no texts were tracked: call enable_text_tracking, and run the model")
        return self.get_all_top_texts()


def _written(filepath: str | Path, text: str) -> Path:
    path = Path(filepath)
    make_folder(path.parent, "the top texts")
    write_bytes(path, text.encode(), "the top texts")
    return path
