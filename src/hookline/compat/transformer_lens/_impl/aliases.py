"""The short model names of TransformerLens, and their names on the hub."""

from __future__ import annotations

from hookline.compat.transformer_lens._impl.published import published_name

_SMALL = ("alias-%-x21", "battlestar-%-x49", "caprica-%-x81", "darkmatter-%-x343", "expanse-%-x777")
_MEDIUM = ("arwen-%-x21", "beren-%-x49", "celebrimbor-%-x81", "durin-%-x343", "eowyn-%-x777")


def _of_stanford(size: str, letter: str, name: str) -> tuple[tuple[str, ...], str]:
    """The short names of one of Stanford's models, and its name on the hub."""
    name = name.replace("%", f"gpt2-{size}")
    other = "mistral-small" if size == "small" else "medium-small"
    shorts = (f"stanford-gpt2-{size}", f"gpt2-stanford-{size}", f"gpt2-{other}")
    return (*(f"{short}-{letter}" for short in shorts), name), f"stanford-crfm/{name}"


STANFORD = [
    _of_stanford(size, letter, name)
    for size, names in (("small", _SMALL), ("medium", _MEDIUM))
    for letter, name in zip("abcde", names, strict=True)
]
"""Short names of Stanford's GPT-2 models, and their names on the hub."""

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
    "opt-xxl": "facebook/opt-13b",
    "opt-xxxl": "facebook/opt-30b",
    "opt-xxxxl": "facebook/opt-66b",
    "pythia-v0": "EleutherAI/pythia-70m-v0",
    **{name: official for names, official in STANFORD for name in names},
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
    "meta-llama-2-70b-chat-hf": "meta-llama/Llama-2-70b-chat-hf",
    "CodeLlamallama-2-7b": "codellama/CodeLlama-7b-hf",
    "CodeLlama-7b-python": "codellama/CodeLlama-7b-Python-hf",
    "CodeLlama-7b-instruct": "codellama/CodeLlama-7b-Instruct-hf",
    "qwen-1.8b": "Qwen/Qwen-1_8B",
    "qwen-1.8b-chat": "Qwen/Qwen-1_8B-Chat",
    "qwen-32b-preview": "Qwen/QwQ-32B-Preview",
    **{
        f"stablelm-{kind}-{n}b": f"stabilityai/stablelm-{kind}-alpha-{n}b" for kind in ("base", "tuned") for n in (3, 7)
    },
    **dict.fromkeys(("gpt-oss", "gpt-oss-20b"), "openai/gpt-oss-20b"),
    **dict.fromkeys(("apertus", "apertus-8b"), "swiss-ai/Apertus-8B-2509"),
    **dict.fromkeys(("apertus-instruct", "apertus-8b-instruct"), "swiss-ai/Apertus-8B-Instruct-2509"),
    "mGPT": "ai-forever/mGPT",
    "santacoder": "bigcode/santacoder",
    "tiny-stories-1L-21M": "roneneldan/TinyStories-1Layer-21M",
    "tiny-stories-2L-33M": "roneneldan/TinyStories-2Layers-33M",
    "tiny-stories-instruct-1L-21M": "roneneldan/TinyStories-Instuct-1Layer-21M",  # so on the hub
    "tiny-stories-instruct-2L-33M": "roneneldan/TinyStories-Instruct-2Layers-33M",
    **{f"Llama-2-{size}": f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "13b", "70b")},
    **{f"Llama-2-{size}-chat": f"meta-llama/Llama-2-{size}-chat-hf" for size in ("7b", "13b", "70b")},
}
"""Short names that differ from the name on the hub."""

_IN_ANY_CASE = {name.lower(): official for short, official in IRREGULAR.items() for name in (short, official)}

OWNERS: dict[str, tuple[str, ...]] = {
    "EleutherAI": ("pythia-", "gpt-neo-", "gpt-neox-", "gpt-j-"),
    "facebook": ("opt-",),
    "bigscience": ("bloom-",),
    "google": ("gemma-", "medgemma-"),
    "microsoft": ("phi-", "Phi-"),
    "meta-llama": ("Llama-3", "Meta-Llama-3"),
    "mistralai": ("Mistral-", "Mixtral-"),
    "Qwen": ("Qwen",),
    "HuggingFaceTB": ("SmolLM",),
    "stabilityai": ("stablelm-",),
    "01-ai": ("Yi-",),
}
"""Owners and prefixes of their models, for short names that only omit the owner."""

LOWER: dict[str, str] = {"qwen": "Qwen", "yi-": "01-ai", "olmo-3": "allenai", "mistral-nemo-": "mistralai"}
"""Prefixes of short names in lower case, and the owners of these models, whose names have capitals."""

PYTHIA_SIZES = {"19m": "70m", "125m": "160m", "350m": "410m", "800m": "1b", "1.3b": "1.4b", "2.7b": "2.8b",
                "6.7b": "6.9b", "13b": "12b"}  # fmt: skip
"""Former sizes in the names of Pythia models."""


def get_official_model_name(name: str) -> str:
    """The hub id of a model: `EleutherAI/pythia-70m` for `pythia-70m`. Other names are unchanged."""
    if (official_name := _IN_ANY_CASE.get(name.lower())) is not None:
        return official_name
    short = name.removeprefix("EleutherAI/")
    if short.startswith("pythia-"):
        size, dash, rest = short.removeprefix("pythia-").partition("-")
        return f"EleutherAI/pythia-{PYTHIA_SIZES.get(size, size)}{dash}{rest}"
    if name.lower().startswith("tiny-stories-"):
        return "roneneldan/TinyStories-" + name[len("tiny-stories-") :].replace("instruct", "Instruct")
    if "/" in name:
        return name
    if (hub_name := published_name(name)) is not None:
        return hub_name
    for prefix, owner_of in LOWER.items():
        if name.startswith(prefix):
            return f"{owner_of}/{'-'.join(_with_capital(part) for part in name.split('-'))}"
    owner = next((owner for owner, prefixes in OWNERS.items() if name.startswith(prefixes)), None)
    return f"{owner}/{name}" if owner is not None else name


def _with_capital(part: str) -> str:
    """A part of a name as it is on the hub: `Instruct` for `instruct`, `0.5B` for `0.5b`."""
    return part.upper() if part[:1].isdigit() else part[:1].upper() + part[1:]
