"""Small models that were published in TransformerLens's own format: `solu-2l`, `attn-only-2l`, `othello-gpt`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig
from hookline.errors import HooklineError
from hookline.transformer.hub import as_hookline_error

_WIDTHS = {6: 768, 8: 1024, 10: 1280, 12: 1536}
"""Widths of SoLU models by their number of layers; those with fewer are 512 wide."""

_OLD = {1: 9, 2: 10, 4: 11, 6: 13, 8: 21, 10: 22, 12: 23}
"""Versions of older SoLU models by their number of layers."""

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
        return f"NeelNanda/SoLU_{layers}L_v{_OLD[layers]}_old" if kind == "solu" and layers in _OLD else None
    data = "Wiki_Finetune" if "finetune" in version or version == "-wiki" else "C4_Code"
    return f"NeelNanda/{_KINDS[kind]}_{layers}L{_WIDTHS.get(layers, 512)}W_{data}"


def published_files(name: str) -> list[str]:
    """The files of such a model on the hub, or in its cache if the hub cannot be reached."""
    from huggingface_hub import HfApi, errors, snapshot_download

    with as_hookline_error(name):
        try:
            return list(HfApi().list_repo_files(name))
        except errors.HfHubHTTPError:
            raise
        except Exception:  # unreachable: the type depends on the HTTP library
            folder = Path(snapshot_download(name, local_files_only=True))
            return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def load_published(
    name: str, dtype: Any, n_layers: int | None = None, file: str | None = None
) -> tuple[HookedTransformerConfig, dict[str, Tensor]]:
    """The config and the weights of such a model, from the hub or its cache; of a checkpoint, if a file is given."""
    from hookline.compat.transformer_lens.utils import download_file_from_hf

    with as_hookline_error(name):
        config: dict[str, Any] = (
            {"architecture": "old"} if "_old" in name else download_file_from_hf(name, "config.json")
        )
    kind = config.get("architecture", "neel")
    is_known = kind in ("neel", "mingpt")
    if is_known and file is None:
        file = next((path for path in published_files(name) if path.endswith("final.pth")), None)
    if not is_known or file is None:
        newer = "gelu-…, solu-… and attn-only-… are newer"
        raise HooklineError(f"{name} has an older format, which is not supported: {newer}")
    cfg = HookedTransformerConfig(
        **{key: config[key] for key in _SAME},
        tokenizer_name=config.get("tokenizer_name"),
        final_rms=config.get("final_rms", False),
        normalization_type=config["normalization"] if "normalization" in config else config["normalization_type"],
        positional_embedding_type="shortformer" if config.get("shortformer_pos") else "standard",
        original_architecture=kind,
        init_weights=False,
        dtype=dtype,
    )
    with as_hookline_error(name):
        state: dict[str, Tensor] = download_file_from_hf(name, file)
    if kind == "mingpt":
        state = from_mingpt(state, cfg)
    if n_layers is not None:
        cfg.n_layers = n_layers
        prefixes = tuple(f"blocks.{layer}." for layer in range(n_layers))
        state = {
            key: value for key, value in state.items() if not key.startswith("blocks.") or key.startswith(prefixes)
        }
    return cfg, {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}


def from_mingpt(state: dict[str, Tensor], cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    """Weights with minGPT's names, as those of `othello-gpt`, with TransformerLens's names and layout."""
    weights = {"embed.W_E": state["tok_emb.weight"], "pos_embed.W_pos": state["pos_emb"].squeeze(0)}
    for layer in range(cfg.n_layers):
        block, heads = f"blocks.{layer}", (cfg.n_heads, -1)
        for letter, name in (("Q", "query"), ("K", "key"), ("V", "value")):
            weights[f"{block}.attn.W_{letter}"] = state[f"{block}.attn.{name}.weight"].unflatten(0, heads).mT
            weights[f"{block}.attn.b_{letter}"] = state[f"{block}.attn.{name}.bias"].unflatten(0, heads)
        weights[f"{block}.attn.W_O"] = state[f"{block}.attn.proj.weight"].T.unflatten(0, heads)
        weights[f"{block}.attn.b_O"] = state[f"{block}.attn.proj.bias"]
        for index, side in ((0, "in"), (2, "out")):
            weights[f"{block}.mlp.W_{side}"] = state[f"{block}.mlp.{index}.weight"].T
            weights[f"{block}.mlp.b_{side}"] = state[f"{block}.mlp.{index}.bias"]
    for name in ("ln_f", *(f"blocks.{layer}.{norm}" for layer in range(cfg.n_layers) for norm in ("ln1", "ln2"))):
        ours = name.replace("ln_f", "ln_final")
        weights |= {f"{ours}.w": state[f"{name}.weight"], f"{ours}.b": state[f"{name}.bias"]}
    unembed = state["head.weight"]
    return weights | {"unembed.W_U": unembed.T, "unembed.b_U": unembed.new_zeros(len(unembed))}
