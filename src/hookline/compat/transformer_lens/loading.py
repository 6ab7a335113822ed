"""`transformer_lens.loading_from_pretrained` and `supported_models`: names of models, and their checkpoints."""

from __future__ import annotations

from hookline.compat.transformer_lens.absent import refusing
from hookline.compat.transformer_lens.aliases import IRREGULAR, PYTHIA_STEPS
from hookline.compat.transformer_lens.aliases import get_official_model_name as get_official_model_name

OFFICIAL_MODEL_NAMES: list[str] = list(dict.fromkeys(IRREGULAR.values()))
"""Hub ids of models with short names; any other model of transformers can be loaded too."""

MODEL_ALIASES: dict[str, list[str]] = {
    official: [short for short, name in IRREGULAR.items() if name == official] for official in OFFICIAL_MODEL_NAMES
}
"""Short names of each of them."""

DEFAULT_MODEL_ALIASES: list[str] = [aliases[0] for aliases in MODEL_ALIASES.values()]
"""The first short name of each."""

PYTHIA_CHECKPOINTS: list[int] = PYTHIA_STEPS
"""The steps at which the weights of Pythia models were saved."""


def make_model_alias_map() -> dict[str, str]:
    """Hub ids by lower-case name, short or official."""
    return {name.lower(): official for official, names in MODEL_ALIASES.items() for name in (official, *names)}


__getattr__ = refusing("transformer_lens.loading_from_pretrained")
