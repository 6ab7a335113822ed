"""`transformer_lens.loading_from_pretrained` and `supported_models`: names of models, and their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.compat.transformer_lens._impl.absent import DEVICES, refusing
from hookline.compat.transformer_lens._impl.aliases import IRREGULAR
from hookline.compat.transformer_lens._impl.aliases import get_official_model_name as get_official_model_name
from hookline.compat.transformer_lens._impl.checkpoints import PYTHIA_CHECKPOINTS as PYTHIA_CHECKPOINTS
from hookline.compat.transformer_lens._impl.checkpoints import PYTHIA_V0_CHECKPOINTS as PYTHIA_V0_CHECKPOINTS
from hookline.compat.transformer_lens._impl.checkpoints import STANFORD_CRFM_CHECKPOINTS as STANFORD_CRFM_CHECKPOINTS
from hookline.compat.transformer_lens._impl.checkpoints import find_checkpoint
from hookline.compat.transformer_lens._impl.checkpoints import get_checkpoint_labels as get_checkpoint_labels
from hookline.compat.transformer_lens._impl.describe import NO_BOS, described
from hookline.compat.transformer_lens._impl.pretrained import (
    anatomy_of,
    empty_model,
    get_device,
    note_checkpoint,
    refuse,
)
from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig
from hookline.errors import warn

OFFICIAL_MODEL_NAMES: list[str] = list(dict.fromkeys(IRREGULAR.values()))
"""Hub ids of models with short names; any other model of transformers can be loaded too."""

MODEL_ALIASES: dict[str, list[str]] = {
    official: [short for short, name in IRREGULAR.items() if name == official] for official in OFFICIAL_MODEL_NAMES
}
"""Short names of each of them."""

DEFAULT_MODEL_ALIASES: list[str] = [aliases[0] for aliases in MODEL_ALIASES.values()]
"""The first short name of each."""


def make_model_alias_map() -> dict[str, str]:
    """Hub ids by lower-case name, short or official."""
    return {name.lower(): official for official, names in MODEL_ALIASES.items() for name in (official, *names)}


def get_pretrained_model_config(
    model_name: str,
    hf_cfg: dict[str, Any] | None = None,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    fold_ln: bool = False,
    device: str | torch.device | None = None,
    n_devices: int = 1,
    default_prepend_bos: bool | None = None,
    dtype: torch.dtype = torch.float32,
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    **kwargs: Any,
) -> HookedTransformerConfig:
    """The config of a model, without loading its weights; with `fold_ln`, of a model with folded norms."""
    refuse(n_devices=DEVICES if n_devices != 1 else None)
    checkpoint = find_checkpoint(model_name, checkpoint_value, checkpoint_index)
    module = empty_model(model_name, hf_cfg, dtype, first_n_layers, checkpoint, **kwargs)
    anatomy = anatomy_of(module)
    prepends = anatomy.config.model_type not in NO_BOS if default_prepend_bos is None else default_prepend_bos
    extra_fields: dict[str, Any] = {"tokenizer_name": get_official_model_name(model_name)}
    extra_fields |= {"model_name": model_name.rpartition("/")[2], "device": device or get_device(), "dtype": dtype}
    cfg = described(module, anatomy, default_prepend_bos=prepends, **extra_fields)
    note_checkpoint(cfg, checkpoint)
    if fold_ln and cfg.normalization_type in ("LN", "RMS"):
        cfg.normalization_type += "Pre"
    if n_ctx is not None and n_ctx > cfg.n_ctx:
        warn(f"n_ctx={n_ctx} is more than the {cfg.n_ctx} positions that {model_name} was trained with")
    cfg.n_ctx = cfg.n_ctx if n_ctx is None else n_ctx
    return cfg


def fill_missing_keys(model: Any, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, with the model's own for names that are missing; warns about missing matrices."""
    missing = {name: value for name, value in model.state_dict().items() if name not in state_dict}
    if matrices := [name for name in missing if "W_" in name]:
        warn(f"no weights are given for {', '.join(matrices)}: the model keeps its own")
    return {**state_dict, **missing}


__getattr__ = refusing("transformer_lens.loading_from_pretrained")
