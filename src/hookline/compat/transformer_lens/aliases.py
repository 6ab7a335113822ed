"""The short model names of TransformerLens, and their names on the hub."""

from __future__ import annotations

from hookline.compat.transformer_lens.published import published_name

IRREGULAR: dict[str, str] = {
    "gpt2-small": "gpt2",
    **dict.fromkeys(("gpt2-xs", "distil-gpt2", "distill-gpt2", "distillgpt2"), "distilgpt2"),
    **dict.fromkeys(("gpt-neo-small", "neo-small", "neo"), "EleutherAI/gpt-neo-125M"),
    **dict.fromkeys(("gpt-neo-medium", "neo-medium"), "EleutherAI/gpt-neo-1.3B"),
    **dict.fromkeys(("gpt-neo-large", "neo-large"), "EleutherAI/gpt-neo-2.7B"),
    **dict.fromkeys(("gpt-j", "gptj"), "EleutherAI/gpt-j-6B"),
    **dict.fromkeys(("gpt-neox", "neox"), "EleutherAI/gpt-neox-20b"),
    "pythia": "EleutherAI/pythia-70m",
    **dict.fromkeys(("opt", "opt-small"), "facebook/opt-125m"),
    "opt-medium": "facebook/opt-1.3b",
    "opt-large": "facebook/opt-2.7b",
    "opt-xl": "facebook/opt-6.7b",
    **dict.fromkeys(("stanford-gpt2-small-a", "alias-gpt2-small-x21"), "stanford-crfm/alias-gpt2-small-x21"),
    "stanford-gpt2-small-b": "stanford-crfm/battlestar-gpt2-small-x49",
    "stanford-gpt2-medium-a": "stanford-crfm/arwen-gpt2-medium-x21",
    "olmo-1b": "allenai/OLMo-1B-hf",
    "olmo-7b": "allenai/OLMo-7B-hf",
    "olmo-2-1b": "allenai/OLMo-2-0425-1B",
    "olmo-2-7b": "allenai/OLMo-2-1124-7B",
    "olmoe": "allenai/OLMoE-1B-7B-0924",
    "phi-3": "microsoft/Phi-3-mini-4k-instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.1",
    **dict.fromkeys(("mixtral", "mixtral-8x7b"), "mistralai/Mixtral-8x7B-v0.1"),
    **dict.fromkeys(("mixtral-instruct", "mixtral-8x7b-instruct"), "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    **{f"Llama-2-{size}": f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "13b", "70b")},
    **{f"Llama-2-{size}-chat": f"meta-llama/Llama-2-{size}-chat-hf" for size in ("7b", "13b", "70b")},
}
"""Short names that differ from the name on the hub."""

OWNERS: dict[str, tuple[str, ...]] = {
    "EleutherAI": ("pythia-", "gpt-neo-", "gpt-neox-", "gpt-j-"),
    "facebook": ("opt-",),
    "bigscience": ("bloom-",),
    "google": ("gemma-",),
    "microsoft": ("phi-", "Phi-"),
    "meta-llama": ("Llama-3", "Meta-Llama-3"),
    "mistralai": ("Mistral-", "Mixtral-"),
    "Qwen": ("Qwen",),
    "HuggingFaceTB": ("SmolLM",),
    "stabilityai": ("stablelm-",),
    "01-ai": ("Yi-",),
}
"""Owners and prefixes of their models, for short names that only omit the owner."""

PYTHIA_SIZES = {"19m": "70m", "125m": "160m", "350m": "410m", "800m": "1b", "1.3b": "1.4b", "2.7b": "2.8b",
                "6.7b": "6.9b", "13b": "12b"}  # fmt: skip
"""Former sizes in the names of Pythia models."""


def get_official_model_name(name: str) -> str:
    """The hub id of a model: `EleutherAI/pythia-70m` for `pythia-70m`. Other names are unchanged."""
    if name in IRREGULAR:
        return IRREGULAR[name]
    short = name.removeprefix("EleutherAI/")
    if short.startswith("pythia-"):
        size, dash, rest = short.removeprefix("pythia-").partition("-")
        return f"EleutherAI/pythia-{PYTHIA_SIZES.get(size, size)}{dash}{rest}"
    if name.lower().startswith("tiny-stories-"):
        return "roneneldan/TinyStories-" + name[len("tiny-stories-") :].replace("instruct", "Instruct")
    if "/" in name:
        return name
    if (own := published_name(name)) is not None:
        return own
    owner = next((owner for owner, prefixes in OWNERS.items() if name.startswith(prefixes)), None)
    return f"{owner}/{name}" if owner is not None else name
