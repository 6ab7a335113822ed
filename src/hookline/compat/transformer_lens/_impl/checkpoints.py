"""Checkpoints of a model's training, by index or value: Pythia, Stanford's GPT-2, TransformerLens's own format."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hookline.compat.transformer_lens._impl.aliases import get_official_model_name
from hookline.compat.transformer_lens._impl.published import published_files
from hookline.errors import HooklineError

PYTHIA_V0_CHECKPOINTS: list[int] = list(range(1000, 143001, 1000))
"""The steps at which the first release of Pythia was saved."""

PYTHIA_CHECKPOINTS: list[int] = [0, *(2**power for power in range(10)), *PYTHIA_V0_CHECKPOINTS]
"""The steps at which Pythia models were saved."""

STANFORD_CRFM_CHECKPOINTS: list[int] = [
    *range(0, 100, 10),
    *range(100, 2000, 50),
    *range(2000, 20000, 100),
    *range(20000, 400001, 1000),
]
"""The steps at which Stanford's GPT-2 models were saved."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its index as it was given or found, its step or number of tokens, and which of the two that is."""

    index: int
    value: int
    label_type: str

    def revision(self, name: str) -> str:
        """The revision on the hub, for models in the format of transformers."""
        return f"checkpoint-{self.value}" if name.startswith("stanford-crfm/") else f"step{self.value}"


def get_checkpoint_labels(model_name: str) -> tuple[list[int], str]:
    """The values of the checkpoints of a model, and whether they are of type "step" or "token"."""
    name = get_official_model_name(model_name)
    if name.startswith("stanford-crfm/"):
        return STANFORD_CRFM_CHECKPOINTS, "step"
    if name.startswith("EleutherAI/pythia"):
        return (PYTHIA_V0_CHECKPOINTS if "v0" in name else PYTHIA_CHECKPOINTS), "step"
    if not name.startswith("NeelNanda/"):
        families = "Pythia, Stanford's GPT-2 and NeelNanda's toy models"
        raise HooklineError(
            f"the checkpoints of {name} are not known, but those of {families}: pass revision=… instead"
        )
    labels = list(checkpoint_files(name))
    if not labels:
        raise HooklineError(f"{name} has no checkpoints")
    return labels, "token" if labels[-1] > 1e9 else "step"


def checkpoint_files(name: str) -> dict[int, str]:
    """The files of the checkpoints of a model in TransformerLens's format, by value."""
    matches = (re.fullmatch(r"checkpoints/.*_(\d+)\.pth", file) for file in published_files(name))
    return {int(match[1]): match[0] for match in matches if match is not None}


def find_checkpoint(name: str, value: int | None, index: int | None) -> Checkpoint | None:
    """The checkpoint of a model with that value or index; None if neither is given."""
    if value is None and index is None:
        return None
    labels, label_type = get_checkpoint_labels(name)
    if index is not None and index in range(-len(labels), len(labels)):
        return Checkpoint(index, labels[index], label_type)
    if index is None and value in labels:
        return Checkpoint(labels.index(value), value, label_type)
    requested = f"value {value}" if index is None else f"index {index}"
    first_labels = ", ".join(map(str, labels[:4]))
    raise HooklineError(
        f"{name} has no checkpoint with {requested}: it has {len(labels)} checkpoints, {first_labels} … {labels[-1]}"
    )
