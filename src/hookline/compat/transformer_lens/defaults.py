"""Helpers of TransformerLens's `utils` for models, tokenizers and files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline.compat.transformer_lens.aliases import IRREGULAR
from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.compat.transformer_lens.hooked_transformer import HookedTransformer

OFFICIAL_MODEL_NAMES: list[str] = list(dict.fromkeys(IRREGULAR.values()))
"""Hub ids of models with short names."""


@contextmanager
def LocallyOverridenDefaults(model: HookedTransformer, **overrides: Any) -> Iterator[None]:  # noqa: N802
    """Override the defaults of `prepend_bos` and `padding_side` inside a context."""
    if unknown := set(overrides) - {"prepend_bos", "padding_side"}:
        raise HooklineError(f"{sorted(unknown)} have no default; only prepend_bos and padding_side do")
    bos, side = overrides.get("prepend_bos"), overrides.get("padding_side")
    if bos not in (None, True, False) or side not in (None, "left", "right"):
        raise HooklineError(f'prepend_bos must be True or False, and padding_side "left" or "right", not {overrides}')
    if side is not None and model.tokenizer is None:
        raise HooklineError("padding_side needs a tokenizer, and this model has none")
    before = model.cfg.default_prepend_bos, side and model.tokenizer.padding_side
    model.cfg.default_prepend_bos = before[0] if bos is None else bos
    if side is not None:
        model.tokenizer.padding_side = side
    try:
        yield
    finally:
        model.cfg.default_prepend_bos = before[0]
        if side is not None:
            model.tokenizer.padding_side = before[1]


def get_tokenizer_with_bos(tokenizer: Any) -> Any:
    """The tokenizer with a BOS token at the start of each text; unchanged if it has none, or adds it already."""
    if tokenizer.bos_token is None or tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        return tokenizer
    from transformers import AutoTokenizer

    options = {
        key: value for key, value in tokenizer.init_kwargs.items() if key not in ("name_or_path", "add_bos_token")
    }
    new = AutoTokenizer.from_pretrained(tokenizer.name_or_path, add_bos_token=True, **options)
    if new("")["input_ids"][:1] != [new.bos_token_id]:
        raise HooklineError(f"{type(tokenizer).__name__} does not take add_bos_token: pass prepend_bos=True instead")
    return new


def download_file_from_hf(
    repo_name: str,
    file_name: str,
    subfolder: str = ".",
    cache_dir: str | Path | None = None,
    force_is_torch: bool = False,
    **kwargs: Any,
) -> Any:
    """The content of a torch or JSON file on the hub; the local path of any other file."""
    from huggingface_hub import hf_hub_download

    folder = None if subfolder == "." else subfolder
    path = Path(hf_hub_download(repo_name, file_name, subfolder=folder, cache_dir=cache_dir, **kwargs))
    if path.suffix in (".pth", ".pt") or force_is_torch:
        return torch.load(path, map_location="cpu", weights_only=True)
    return json.loads(path.read_text()) if path.suffix == ".json" else str(path)


def print_gpu_mem(step_name: str = "") -> None:
    """Print the GPU memory in use."""
    in_use = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(f"{step_name} ~ {in_use:.2f} GiB allocated on the GPU")
