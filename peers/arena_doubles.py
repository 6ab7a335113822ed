"""Doubles of what ARENA's exercises download: run by `demo_cells.py --before` in the process of each part.

Autoencoders, transcoders and datasets are random, and the same with TransformerLens and with hookline. Loops under a
progress bar end after ARENA_STEPS steps. Where TransformerLens has the sizes of a model in a table, it is told those of
the small model in `arena_hub.py`. Plots of two packages that the course takes from repositories are not drawn.
"""

import itertools
import os
import re
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

WORDS = ("the", "a", "cat", "dog", "sun", "rain", "old", "small", "red", "said", "ran", "saw", "tree", "house", "went")
DEMO: Path = globals()["DEMO"]  # given by demo_cells.py
STEPS = int(os.environ.get("ARENA_STEPS", "150"))


def hub() -> None:
    """The list of a repository's files, from the cache: this call has no offline mode."""
    from huggingface_hub import HfApi

    def list_repo_files(_self: Any, repo_id: str, **_: Any) -> list[str]:
        root = Path(os.environ["HF_HOME"], "hub", "models--" + repo_id.replace("/", "--"), "snapshots", "0" * 40)
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())

    HfApi.list_repo_files = list_repo_files  # type: ignore[assignment]


def progress_bars() -> None:
    """Loops of the course that show progress are short; those of libraries are not."""
    from tqdm import asyncio, auto, notebook, std

    class Short(std.tqdm):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            is_long = "site-packages" not in sys._getframe(1).f_code.co_filename
            return itertools.islice(super().__iter__(), STEPS if is_long else None)

    def trange(*values: int, **options: Any) -> Short:
        return Short(range(*values), **options)

    for module in (asyncio, auto, notebook, std, sys.modules["tqdm"]):
        module.tqdm = module.tqdm_notebook = Short  # type: ignore[attr-defined]
        module.trange = trange  # type: ignore[attr-defined]


def datasets() -> None:
    """Random texts, and random tokens, for any dataset."""
    import datasets

    def load_dataset(path: str, *_: Any, split: str | None = None, streaming: bool = False, **__: Any) -> Any:
        draw = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        if re.search("token|othello", path):
            most = 60 if "othello" in path else 50_000
            rows = {"input_ids": torch.randint(1, most, (1500, 300), generator=draw).tolist()}
            rows["tokens"] = rows["input_ids"]
        else:
            picks = torch.randint(len(WORDS), (3000, 150), generator=draw).tolist()
            rows = {"text": [" ".join(WORDS[pick] for pick in row) for row in picks]}
        made = datasets.Dataset.from_dict(rows)
        found = made.to_iterable_dataset() if streaming else made
        return found if split is not None else {"train": found}

    datasets.load_dataset = load_dataset  # type: ignore[assignment]


def autoencoders() -> None:
    """Random autoencoders and transcoders for any release."""
    try:
        import sae_lens
    except ImportError:
        return

    def from_pretrained(
        _kind: type, release: str, sae_id: str, device: str = "cpu", dtype: Any = "float32", **_: Any
    ) -> Any:
        made = autoencoder(sae_lens, release, sae_id)
        draw = torch.Generator().manual_seed(zlib.crc32(f"{release} {sae_id}".encode()))
        for name, parameter in made.named_parameters():
            center, spread = (2.0, 0.01) if "threshold" in name else (0.0, 0.1)
            parameter.data = torch.randn(parameter.shape, generator=draw) * spread + center
        dead = torch.arange(made.cfg.d_sae) % (made.cfg.d_sae // 24) != 9  # few features are ever active
        made.W_enc.data[:, dead], made.b_enc.data[dead] = 0.0, -1.0
        made.cfg.device = str(device)
        return made.to(device=device, dtype=getattr(torch, str(dtype).removeprefix("torch.")))

    sae_lens.SAE.from_pretrained = classmethod(from_pretrained)


def autoencoder(sae_lens: Any, release: str, sae_id: str) -> Any:
    """An autoencoder with the shape and point of a release, for the small models."""
    from sae_lens.saes.sae import SAEMetadata

    layer = int(next(iter(re.findall(r"(?:blocks\.|layer[_-])(\d+)", sae_id)), 0))
    point, width, model, kind, more = f"blocks.{layer}.hook_resid_pre", 192, "gpt2-small", "Standard", {}
    if "hook_z" in sae_id:
        point, more = f"blocks.{layer}.attn.hook_z", {"reshape_activations": "hook_z"}
    if "gemma" in release:
        point, width, model, kind = f"blocks.{layer}.hook_resid_post", 64, "gemma-2-2b", "JumpReLU"
    if "transcoder" in release:
        point = f"blocks.{layer}.ln2.hook_normalized"
        kind, more = ("JumpReLUSkipTranscoder" if "affine" in sae_id else "Transcoder"), {"d_out": width}
    if "demos" in release and "transcoder" not in release:
        point, width, model = {
            "stories": ("blocks.0.hook_mlp_out", 64, "tiny-stories-1L-21M"),
            "attn2l": ("blocks.0.attn.hook_z", 64, "attn-only-2l-demo"),
            "othello": ("blocks.5.mlp.hook_pre", 2048, "othello-gpt"),
        }[next(each for each in ("stories", "attn2l", "othello") if each in release)]
        more = {"reshape_activations": "hook_z"} if "hook_z" in point else {}
    out = f"blocks.{layer}.hook_mlp_out" if "Transcoder" in kind else None
    metadata = SAEMetadata(
        hook_name=point, hook_name_out=out, model_name=model, prepend_bos=True, context_size=128,
        hook_head_index=None, hook_layer=layer, neuronpedia_id=f"double/{layer}", model_from_pretrained_kwargs={},
        dataset_path="NeelNanda/pile-10k", sae_lens_training_version=None,
    )  # fmt: skip
    features = int(next(iter(re.findall(r"hook_resid_pre_(\d+)", sae_id)), 24_576))
    most = 24_576 if width == 192 else 4096
    sizes = {"d_in": width, "d_sae": min(features, most), "metadata": metadata, "apply_b_dec_to_input": out is None}
    config = getattr(sae_lens, f"{kind}SAEConfig", None) or getattr(sae_lens, f"{kind}Config")
    owner = getattr(sae_lens, f"{kind}SAE", None) or getattr(sae_lens, kind)
    return owner(config(**sizes, **more))


def transcoders() -> None:
    """Random transcoders for circuit-tracer's replacement of gemma-2-2b."""
    if "circuit" not in DEMO.parent.name:
        return
    from circuit_tracer.replacement_model import replacement_model as replacement
    from circuit_tracer.transcoder import SingleLayerTranscoder, TranscoderSet
    from circuit_tracer.transcoder.activation_functions import TopK

    def load_transcoder_from_hub(*_: Any, dtype: torch.dtype = torch.float32, **__: Any) -> Any:
        layers = {}
        for layer in range(26):
            made = SingleLayerTranscoder(64, 16_384, TopK(1), layer, dtype=dtype)
            draw = torch.Generator().manual_seed(layer)
            for parameter in made.parameters():
                parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
            layers[layer] = made
        return TranscoderSet(layers, "ln2.hook_normalized", "hook_mlp_out", scan="random"), {}

    replacement.load_transcoder_from_hub = load_transcoder_from_hub


def gradients() -> None:
    """Tests of one part turn gradients off for good; its later sections, written for a new kernel, need them."""
    original = torch.set_grad_enabled
    if "circuit" in DEMO.parent.name:
        torch.set_grad_enabled = lambda mode: original(  # type: ignore[assignment, misc]
            mode or sys._getframe(1).f_code.co_filename.endswith("tests.py")
        )


def sizes() -> None:
    """TransformerLens reads sizes that it has in a table from the config on the hub instead."""
    from transformer_lens import loading_from_pretrained as loading

    if "hookline" in loading.__name__ or "hookline" in str(loading.__file__):
        return  # it reads the config
    original = loading.convert_hf_model_config

    def convert_hf_model_config(model_name: str, **options: Any) -> dict[str, Any]:
        from transformers import AutoConfig

        found = original(model_name, **options)
        if "gemma" in model_name:
            config = AutoConfig.from_pretrained(loading.get_official_model_name(model_name))
            for name, theirs in SIZES.items():
                if name in found:
                    found[name] = getattr(config, theirs, found[name])
        return found

    loading.convert_hf_model_config = convert_hf_model_config


SIZES = {
    **{"d_model": "hidden_size", "d_head": "head_dim", "n_heads": "num_attention_heads", "d_mlp": "intermediate_size"},
    **{"n_layers": "num_hidden_layers", "d_vocab": "vocab_size", "n_key_value_heads": "num_key_value_heads"},
    **{"window_size": "sliding_window"},
}


def plots() -> None:
    """Figures are made, but not shown; a package that is only in a repository draws nothing."""
    import circuitsvis.attention
    from plotly.basedatatypes import BaseFigure

    BaseFigure.show = lambda *_, **__: None
    circuitsvis.attention.attention_patterns = circuitsvis.attention.attention_heads = lambda **_: (
        None
    )  # as in its fork
    package = types.ModuleType("neel_plotly")
    for name in ("scatter", "line", "imshow", "histogram"):
        setattr(package, name, lambda *_, **__: None)
    sys.modules.setdefault("neel_plotly", package)


os.environ |= {"HF_TOKEN": "none", "OPENAI_API_KEY": "none"}
for each in (hub, progress_bars, datasets, autoencoders, transcoders, gradients, sizes, plots):
    each()
