"""Small models that were published in TransformerLens's own format: `solu-2l`, `attn-only-2l`, `othello-gpt`."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from hookline.compat.transformer_lens.tl_config import HookedTransformerConfig
from hookline.errors import HooklineError
from hookline.transformer.hub import as_hookline_error

_WIDTHS = {6: 768, 8: 1024, 10: 1280, 12: 1536}
"""Widths of SoLU models by their number of layers; those with fewer are 512 wide."""

_KINDS = {"solu": "SoLU", "gelu": "GELU", "attn-only": "Attn_Only"}
_NAMED = {
    "redwood_attn_2l": "ArthurConmy/redwood_attn_2l",
    "othello-gpt": "Baidicoot/Othello-GPT-Transformer-Lens",
    **dict.fromkeys(
        ("attn-only-demo", "attn-only-2l-demo", "attn-only-2l-induction-demo", "attn-only-2l-shortformer-6b-big-lr"),
        "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr",
    ),
}
_OWNERS = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
_SAME = ("d_model", "n_layers", "d_mlp", "d_head", "n_heads", "n_ctx", "d_vocab", "act_fn", "attn_only")


def published_name(name: str) -> str | None:
    """The name on the hub of a model in TransformerLens's own format: `NeelNanda/SoLU_2L512W_C4_Code` for `solu-2l`."""
    if name.startswith(_OWNERS) and "tokenizer" not in name:
        return name
    if name in _NAMED:
        return _NAMED[name]
    match = re.fullmatch(r"(solu|gelu|attn-only)-(\d+)l(-new|-c4-code|(?:-wiki)?(?:-finetune)?|-pile|-old)", name)
    if match is None:
        return None
    kind, layers, version = match[1], int(match[2]), match[3]
    if version in ("-pile", "-old"):
        raise HooklineError(
            f"{name!r} has an older format, which is not supported: {name.removesuffix(version)} is newer"
        )
    data = "Wiki_Finetune" if "finetune" in version or version == "-wiki" else "C4_Code"
    return f"NeelNanda/{_KINDS[kind]}_{layers}L{_WIDTHS.get(layers, 512)}W_{data}"


def load_published(
    name: str, dtype: Any, n_layers: int | None = None
) -> tuple[HookedTransformerConfig, dict[str, Tensor]]:
    """The config and the weights of such a model, from the hub or its cache."""
    from huggingface_hub import HfApi

    from hookline.compat.transformer_lens.utils import download_file_from_hf

    with as_hookline_error(name):
        found = download_file_from_hf(name, "config.json")
        files = [file for file in HfApi().list_repo_files(name) if file.endswith("final.pth")]
    if "_old" in name or found.get("architecture", "neel") != "neel" or not files:
        raise HooklineError(f"{name} has an older format, which is not supported")
    cfg = HookedTransformerConfig(
        **{key: found[key] for key in _SAME},
        tokenizer_name=found.get("tokenizer_name"),
        final_rms=found.get("final_rms", False),
        normalization_type=found["normalization"] if "normalization" in found else found["normalization_type"],
        positional_embedding_type="shortformer" if found.get("shortformer_pos") else "standard",
        original_architecture="neel",
        init_weights=False,
        dtype=dtype,
    )
    with as_hookline_error(name):
        state: dict[str, Tensor] = download_file_from_hf(name, files[0])
    if n_layers is not None:
        cfg.n_layers = n_layers
        kept = tuple(f"blocks.{layer}." for layer in range(n_layers))
        state = {key: value for key, value in state.items() if not key.startswith("blocks.") or key.startswith(kept)}
    return cfg, {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
