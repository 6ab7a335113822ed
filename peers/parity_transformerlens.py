"""Parity with TransformerLens: both libraries run the same weights, and their results are compared by name.

    python peers/parity_transformerlens.py --python PATH        a Python with transformer-lens 3.5 installed
    python peers/parity_transformerlens.py --make-env FOLDER    create such an environment there first

A GPT-2-shaped and a Llama-shaped model (grouped heads, gated MLPs, rotary positions) with random weights are run by
both libraries, with and without weight processing. The function `measured` is the same for both, because the
interface is the same. The largest difference for each name is printed; if one exceeds the tolerance, the exit status
is 1. Then both libraries run the same random programs with hooks (`hook_programs.py`), and their traces are compared.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hook_programs import difference, trace
from torch import Tensor

TOLERANCE = 5e-5
"""Relative to the largest number of a tensor: float32, a few layers, a different order of operations."""

KINDS = ("gpt2", "llama")
PROGRAMS = 150
TOKENS = [[5, 9, 31, 7, 7, 44, 2, 18, 60], [3, 9, 12, 40, 51, 6, 33, 33, 1]]
ANSWERS, WRONG = [4, 27], [11, 50]

KNOWN = {
    r"unprocessed logit_attrs": "the final norm's weight is part of the readout: TransformerLens leaves it out",
    r".*\.ln1\..*_grad": "TransformerLens calls this norm three times, and keeps the gradient of one call",
}
"""Intended differences, with the reason. They are printed, but not counted."""


def main() -> int:
    """Compare and print; return 0 if all agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="a Python with transformer-lens installed")
    parser.add_argument(
        "--make-env", metavar="FOLDER", help="create a virtual environment with transformer-lens there, and use it"
    )
    parser.add_argument("--peer", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peer:
        run_peer(Path(options.peer))
        return 0
    if options.make_env:
        options.python = make_environment(Path(options.make_env))
    if not options.python:
        parser.error("pass --python or --make-env")
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        subprocess.run([options.python, __file__, "--peer", folder], check=True)
        results = [compare(Path(folder), kind, is_processed) for kind in KINDS for is_processed in (False, True)]
        results += [compare_programs(Path(folder), kind) for kind in KINDS]
    return int(not all(results))


def make_environment(folder: Path) -> str:
    """Create a virtual environment with TransformerLens."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "transformer-lens==3.5.*"], check=True)
    return python


def save_models(folder: Path) -> None:
    """Save random models, with nontrivial norms and biases, in the transformers format."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    models = {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=4, n_embd=32, vocab_size=64, n_positions=32)),
        "llama": LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48,
                vocab_size=64, max_position_embeddings=32, tie_word_embeddings=False,
            )
        ),
    }  # fmt: skip
    for kind, model in models.items():
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.eval().save_pretrained(folder / kind)


def measured(model: Any, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return everything to compare, by name; called with the model of either library."""
    logits, cache = model.run_with_cache(tokens)
    yield "logits", logits.log_softmax(-1)
    for name in cache:
        yield name, seen(name, cache[name])
    yield from of_flagged_points(model, tokens)
    yield from of_cache(model, cache, tokens)
    yield from of_weights(model)
    yield from of_forward(model, tokens)
    yield from of_patching(model, tokens)


def seen(name: str, x: Tensor) -> Tensor:
    """Return scores without masked entries, whose values differ and have no effect."""
    return x.tril() if name.endswith("attn_scores") else x


def of_flagged_points(model: Any, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the points that TransformerLens has only with a flag."""
    flags: dict[str, Callable[[bool], None]] = {
        "hook_result": model.set_use_attn_result,
        "hook_mlp_in": model.set_use_hook_mlp_in,
        "hook_attn_in": model.set_use_attn_in,
        "_input": model.set_use_split_qkv_input,
    }
    for ending, switch in flags.items():
        if ending == "hook_attn_in" and model.cfg.n_key_value_heads is not None:
            continue
        switch(True)
        _, cache = model.run_with_cache(tokens, names_filter=lambda name, end=ending: name.endswith(end))
        switch(False)
        for name in cache:
            yield f"flag {name}", cache[name]


def of_cache(model: Any, cache: Any, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the results of every method of ActivationCache, with positional and keyword arguments."""
    for layer, mlp_input in ((None, False), (-1, False), (1, False), (2, True)):
        tag = f"{layer} {mlp_input}"
        yield f"accumulated_resid {tag}", cache.accumulated_resid(layer, True, mlp_input=mlp_input)
        yield f"decompose_resid {tag}", cache.decompose_resid(layer, mlp_input)
        yield f"decompose_resid ln {tag}", cache.decompose_resid(layer, mlp_input, apply_ln=True)
        for expand in (True, False):
            full, labels = cache.get_full_resid_decomposition(layer, mlp_input, expand, return_labels=True)
            yield f"get_full_resid_decomposition {tag} {expand}", by_label(full, labels)
            yield f"get_full_resid_decomposition labels {tag} {expand}", spelled(sorted(labels))
    yield "accumulated_resid labels", spelled(cache.accumulated_resid(incl_mid=True, return_labels=True)[1])
    yield "decompose_resid labels", spelled(cache.decompose_resid(2, return_labels=True)[1])
    yield "stack_head_results labels", spelled(cache.stack_head_results(2, True, True)[1])
    yield "stack_neuron_results labels", spelled(cache.stack_neuron_results(1, return_labels=True)[1])
    yield "all_head_labels", spelled(model.all_head_labels())
    yield "accumulated_resid ln", cache.accumulated_resid(apply_ln=True)
    yield "accumulated_resid pos", cache.accumulated_resid(None, False, False, -1)
    yield "decompose_resid attn", cache.decompose_resid(mode="attn", pos_slice=(1, 4), incl_embeds=False)
    yield "decompose_resid mlp", cache.decompose_resid(mode="mlp", pos_slice=[0, 3])
    yield "stack_head_results", cache.stack_head_results(-1, False, True, pos_slice=-1)
    yield "stack_head_results ln", cache.stack_head_results(2, apply_ln=True)
    yield "stack_activation", cache.stack_activation("scale", -1, "ln1")
    yield "get_neuron_results", cache.get_neuron_results(1, neuron_slice=(0, 5), pos_slice=-1)
    yield "stack_neuron_results", cache.stack_neuron_results(2, -1, (0, 5), incl_remainder=True)
    yield "stack_neuron_results ln", cache.stack_neuron_results(-1, apply_ln=True)
    stack = cache.decompose_resid(pos_slice=-1)
    yield "apply_ln_to_stack", cache.apply_ln_to_stack(stack, pos_slice=-1)
    yield "apply_ln_to_stack 1", cache.apply_ln_to_stack(cache.decompose_resid(1), 1)
    answers, wrong = torch.tensor(ANSWERS), torch.tensor(WRONG)
    yield "logit_attrs", cache.logit_attrs(stack, answers, wrong, -1)
    yield "logit_attrs one", cache.logit_attrs(cache.decompose_resid(), 5)
    yield "logit_attrs every", cache.logit_attrs(cache.decompose_resid(), tokens)
    sliced = model.run_with_cache(tokens)[1].apply_slice_to_batch_dim(1)
    yield "apply_slice_to_batch_dim", sliced["resid_post", 1]
    one = model.run_with_cache(tokens[:1])[1].remove_batch_dim()
    yield "remove_batch_dim", one["pattern", 0]
    yield "remove_batch_dim decompose_resid", one.decompose_resid(apply_ln=True)


def by_label(stack: Tensor, labels: list[str]) -> Tensor:
    """Sort components by label: the two libraries may order them differently."""
    return stack[torch.tensor(sorted(range(len(labels)), key=lambda index: labels[index]))]


def spelled(labels: list[str]) -> Tensor:
    """Return labels as numbers, so that they can be compared like everything else."""
    return torch.tensor([ord(letter) for letter in " ".join(labels)])


def of_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and what is computed from them."""
    names = ["W_E", "W_U", "b_U", "W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "W_in", "W_out", "b_in",
             "b_out"]  # fmt: skip
    names += ["W_gate"] if model.cfg.gated_mlp else []
    names += ["W_pos", "W_E_pos"] if model.cfg.positional_embedding_type == "standard" else []
    for name in names:
        yield name, getattr(model, name)
    yield "QK", model.QK.AB
    yield "OV", model.OV.AB
    yield "blocks.1.attn.W_K", model.blocks[1].attn.W_K
    yield "accumulated_bias", model.accumulated_bias(2, True, False)
    yield "tokens_to_residual_directions", model.tokens_to_residual_directions(torch.tensor(ANSWERS))
    for mode in "QKV":
        yield f"all_composition_scores {mode}", model.all_composition_scores(mode)
    for name, x in model.state_dict().items():
        if not name.endswith(("mask", "IGNORE", "rotary_sin", "rotary_cos")):
            yield f"state {name}", x


def of_forward(model: Any, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the results of runs with all options."""
    yield "loss", model(tokens, return_type="loss")
    yield "loss per token", model(tokens, "both", True).loss
    mid = model(tokens, stop_at_layer=2)
    yield "stop_at_layer", mid
    yield "stop_at_layer end", model(tokens, stop_at_layer=model.cfg.n_layers)
    yield "start_at_layer", model(mid, start_at_layer=2).log_softmax(-1)
    yield "block", model.blocks[2](mid)
    yield "unembed", model.unembed(model.ln_final(mid)).log_softmax(-1)
    yield "mlp", model.blocks[1].mlp(mid)
    yield "embed", model.embed(tokens)
    _, cache = model.run_with_cache(
        tokens, pos_slice=-1, names_filter=lambda name: "resid" in name or "pattern" in name
    )
    for name in cache:
        yield f"pos_slice {name}", cache[name]
    _, cache = model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    for name in cache:
        if name.endswith("_grad"):
            yield name, seen(name, cache[name])


def of_patching(model: Any, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield every sweep of `patching`. TransformerLens cannot patch grouped keys and values by head."""
    patching = importlib.import_module(type(model).__module__.rpartition(".")[0] + ".patching")
    _, clean = model.run_with_cache(tokens.flip(0))
    is_grouped = model.cfg.n_key_value_heads is not None
    for name in sorted(vars(patching)):
        is_of_heads = name.endswith("head_all_pos_every") or name.endswith("head_by_pos_every")
        if name.startswith("get_act_patch_") and not (is_grouped and ("_k_" in name or "_v_" in name or is_of_heads)):
            yield name, getattr(patching, name)(model, tokens, clean, lead)


def lead(logits: Tensor) -> Tensor:
    """Return the mean logit difference."""
    rows = torch.arange(len(logits))
    return (logits[rows, -1, torch.tensor(ANSWERS)] - logits[rows, -1, torch.tensor(WRONG)]).mean()


def gathered(model: Any) -> dict[str, Tensor]:
    """Return all results as plain tensors."""
    found = {name: x.detach().float().contiguous().clone() for name, x in measured(model, torch.tensor(TOKENS))}
    return {name: x for name, x in found.items() if x.numel()}


def run_peer(folder: Path) -> None:
    """In the environment of TransformerLens: run both models, and save the results to the folder."""
    from safetensors.torch import save_file

    for kind in KINDS:
        for is_processed in (False, True):
            save_file(gathered(peer_model(folder / kind, kind, is_processed)), folder / f"{kind}_{is_processed}.peer")
        (folder / f"{kind}.programs").write_text(json.dumps(traces(peer_model(folder / kind, kind, False))))


def traces(model: Any) -> list[Any]:
    """Return the trace of every program."""
    return [trace(model, torch.tensor(TOKENS), seed) for seed in range(PROGRAMS)]


def compare_programs(folder: Path, kind: str) -> bool:
    """Print which programs differ on one model; return whether none does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hooks that never fire, because a program removes them first
        own = json.loads(json.dumps(traces(own_model(folder / kind, False))))
    peer = json.loads((folder / f"{kind}.programs").read_text())
    found = [(seed, difference(one, other)) for seed, (one, other) in enumerate(zip(peer, own, strict=True))]
    bad = [(seed, what) for seed, what in found if what]
    for seed, what in bad:
        print(f"  program {seed}: {what}")
    print(f"{kind}: {len(bad)} of {PROGRAMS} random hook programs differ")
    return not bad


def peer_model(folder: Path, kind: str, is_processed: bool) -> Any:
    """Return TransformerLens's model with these weights, by its own conversion."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    fields = {"d_model": 32, "d_head": 8, "n_heads": 4, "n_layers": 3, "n_ctx": 32, "d_vocab": 64, "device": "cpu"}
    if kind == "gpt2":
        fields |= {"act_fn": "gelu_new", "eps": config["layer_norm_epsilon"], "normalization_type": "LN"}
    else:
        fields |= {
            "act_fn": "silu", "eps": config["rms_norm_eps"], "normalization_type": "RMS", "n_key_value_heads": 2,
            "positional_embedding_type": "rotary", "gated_mlp": True, "final_rms": True, "d_mlp": 48, "rotary_dim": 8,
            "rotary_adjacent_pairs": False,
        }  # fmt: skip
    fields["original_architecture"] = type(own).__name__
    fields["normalization_type"] += "Pre" if is_processed else ""
    cfg = HookedTransformerConfig(**fields)
    model = HookedTransformer(cfg)
    convert = convert_gpt2_weights if kind == "gpt2" else convert_llama_weights
    steps = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    model.load_and_process_state_dict(convert(own, cfg), **dict.fromkeys(steps, is_processed))
    return model.eval()


def own_model(folder: Path, is_processed: bool) -> Any:
    """Return hookline's model with these weights."""
    from transformers import AutoModelForCausalLM

    from hookline.compat.transformer_lens import HookedTransformer

    make = HookedTransformer.from_pretrained if is_processed else HookedTransformer.from_pretrained_no_processing
    return make(folder.name, hf_model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), device="cpu")


def compare(folder: Path, kind: str, is_processed: bool) -> bool:
    """Print the table of one model; return whether everything agrees."""
    from safetensors.torch import load_file

    what = "processed" if is_processed else "unprocessed"
    peer, own = load_file(folder / f"{kind}_{is_processed}.peer"), gathered(own_model(folder / kind, is_processed))
    shared = [name for name in peer if name in own]
    print(f"\n{kind}, {what}: {len(shared)} names in both")
    bad = 0
    for name in shared:
        reason = next((why for known, why in KNOWN.items() if re.match(known, f"{what} {name}")), "")
        difference = far(peer[name], own[name])
        is_bad = not difference <= TOLERANCE and not reason
        bad += is_bad
        print(f"  {difference:8.1e}  {name}{'   DIFFERS' if is_bad else ''}{'   (' + reason + ')' if reason else ''}")
    print(f"  only TransformerLens: {', '.join(name for name in peer if name not in own) or 'nothing'}")
    print(f"  only hookline: {', '.join(name for name in own if name not in peer) or 'nothing'}")
    print(f"{kind}, {what}: {bad} of {len(shared)} differ by more than {TOLERANCE}, relative to their size")
    return not bad


def far(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest number; infinite if the shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-3))


if __name__ == "__main__":
    sys.exit(main())
