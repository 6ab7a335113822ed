"""Whether the edges of known circuits come first: programs that tracr compiles into transformers.

    pip install tracr-pypi
    python peers/circuits_tracr.py
    python peers/circuits_tracr.py --prompts 8 reverse

Each program becomes a model without norms whose weights are known. An edge is true if its receiver's weights read what
its sender writes, and the output changes if this edge alone is patched, into the clean or into the corrupted run. All
other edges are false, among them those of heads and MLPs that a program does not use. A number is the AUROC of the
absolute scores, true edges against false ones: 1 if every true edge comes first, 0.5 by chance. Compiled models are
steps, without a slope almost everywhere: few gradients see nothing of them, many on the way from one input to the other
do. `faithful` is the part of the effect that circuits of just as many edges as are true restore, by the best scores.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tracr.compiler import compiling, lib
from tracr.rasp import rasp

from hookline.compat.transformer_lens import HookedTransformer, HookedTransformerConfig
from hookline.experiments import circuits, edges
from hookline.experiments.core.prompts import Prompts
from hookline.experiments.edges import EdgeScores, sender_outputs

LETTERS = ["a", "b", "c", "d"]
BOS = "bos"


@dataclass(frozen=True)
class Program:
    """A program, and the prompts on which its output at the last position differs."""

    expression: Callable[[], rasp.SOp]
    words: list[Any]
    length: int


PROGRAMS = {
    "fraction": Program(lambda: lib.make_frac_prevs(rasp.tokens == "a"), LETTERS, 6),
    "reverse": Program(lambda: lib.make_reverse(rasp.tokens), LETTERS, 5),
    "histogram": Program(lib.make_hist, LETTERS, 5),
    "sort": Program(lambda: lib.make_sort_unique(rasp.tokens, rasp.tokens), [1, 2, 3, 4, 5], 4),
}


def compiled(program: Program) -> tuple[HookedTransformer, Any, list[int]]:
    """The model of a program, what encodes its prompts, and the directions of its output."""
    expression = program.expression()
    found = compiling.compile_rasp_to_model(
        expression, vocab=set(program.words), max_seq_len=program.length, compiler_bos=BOS, causal=False
    )
    labels, cfg = found.residual_labels, found.model_config
    outputs = [at for at, label in enumerate(labels) if label.partition(":")[0] == expression.label]
    params = {name: {key: np.asarray(x) for key, x in each.items()} for name, each in found.params.items()}
    shape = HookedTransformerConfig(
        n_layers=cfg.num_layers, n_heads=cfg.num_heads, d_head=cfg.key_size, d_model=len(labels),
        d_mlp=cfg.mlp_hidden_size, n_ctx=len(params["pos_embed"]["embeddings"]),
        d_vocab=len(params["token_embed"]["embeddings"]),
        d_vocab_out=len(outputs), act_fn="relu", normalization_type=None, attention_dir="bidirectional", device="cpu",
    )  # fmt: skip
    model = HookedTransformer(shape)
    model.load_state_dict({key: torch.tensor(x) for key, x in weights(params, cfg, outputs).items()}, strict=False)
    model.cfg.model_name = expression.label
    return model, found, outputs


def weights(params: dict[str, dict[str, np.ndarray]], cfg: Any, outputs: list[int]) -> dict[str, np.ndarray]:
    """The weights of a compiled model, by the names of TransformerLens."""
    width = params["token_embed"]["embeddings"].shape[1]
    found = {"embed.W_E": params["token_embed"]["embeddings"], "pos_embed.W_pos": params["pos_embed"]["embeddings"]}
    found |= {
        "unembed.W_U": np.eye(width, dtype=np.float32)[:, outputs],
        "unembed.b_U": np.zeros(len(outputs), np.float32),
    }
    for layer in range(cfg.num_layers):
        of, to = f"transformer/layer_{layer}/", f"blocks.{layer}."
        heads = (cfg.num_heads, cfg.key_size)
        for name, letter in (("query", "Q"), ("key", "K"), ("value", "V")):
            each = params[f"{of}attn/{name}"]
            found[f"{to}attn.W_{letter}"] = each["w"].reshape(width, *heads).swapaxes(0, 1)
            found[f"{to}attn.b_{letter}"] = each["b"].reshape(heads)
        found[f"{to}attn.W_O"] = params[f"{of}attn/linear"]["w"].reshape(*heads, width)
        found[f"{to}attn.b_O"] = params[f"{of}attn/linear"]["b"]
        for name, letter in (("linear_1", "in"), ("linear_2", "out")):
            found[f"{to}mlp.W_{letter}"] = params[f"{of}mlp/{name}"]["w"]
            found[f"{to}mlp.b_{letter}"] = params[f"{of}mlp/{name}"]["b"]
    return found


def prompts(program: Program, found: Any, model: HookedTransformer, count: int) -> tuple[Tensor, Tensor]:
    """Clean and corrupted prompts for which the output at the last position differs; the model is checked on them."""
    draw = random.Random(0)
    pairs: list[list[Tensor]] = []
    while len(pairs) < count:
        both = [
            [BOS, *draw.sample(program.words * (1 if program.words[0] == 1 else 2), program.length)] for _ in range(2)
        ]
        ids = [torch.tensor([found.input_encoder.encode(each)]) for each in both]
        said = [np.asarray(found.apply(each).transformer_output) for each in both]
        for one, output in zip(ids, said, strict=True):
            here = model.run_with_cache(one, names_filter="blocks.*.hook_resid_post")[1]
            last = here[f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"]
            torch.testing.assert_close(last, torch.tensor(output), atol=1e-4, rtol=1e-4)
        if not torch.allclose(*(model(one)[:, -1] for one in ids), atol=0.05):
            pairs.append(ids)
    return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


def reading(model: HookedTransformer, receiver: str) -> Tensor:
    """The weights by which a receiver reads the stream, [d_model, _]."""
    if receiver == "logits":
        return model.W_U
    if receiver.startswith("mlp"):
        return model.W_in[int(receiver[3:])]
    node, _, kind = receiver.partition(".")
    layer, head = map(int, node[1:].split("H"))
    return {"q": model.W_Q, "k": model.W_K, "v": model.W_V}[kind][layer, head]


def is_true(given: tuple[HookedTransformer, Tensor, Tensor, Any], scores: EdgeScores) -> Tensor:
    """Which edges change the output if they alone are patched; they must be among those that the weights have."""
    model, *prompts, _ = given
    patched: set[tuple[str, str]] = set()
    for direction in ("denoise", "noise"):
        sample = edges.edge_scores(*given, direction=direction, check=len(scores)).info["sample"]
        patched |= {(cell["sender"], cell["receiver"]) for cell in sample if abs(cell["true"]) > 1e-4}
    both = [sender_outputs(model, Prompts.of_rows(list(each)))[1] for each in prompts]
    for sender, receiver in patched:
        carried = (both[0][sender] - both[1][sender]) @ reading(model, receiver)
        assert (carried.abs() > 1e-4).any(), f"{receiver} does not read {sender}"
    return torch.tensor([pair in patched for pair in zip(scores.senders, scores.receivers, strict=True)])


def auroc(values: Tensor, true: Tensor) -> float:
    """The probability that a true edge has a larger score than a false one; equal scores count half."""
    good, bad = values.abs()[true], values.abs()[~true]
    return float(((good[:, None] > bad).double() + (good[:, None] == bad).double() / 2).mean())


def lead(clean: Tensor) -> Callable[[Tensor], Tensor]:
    """The output of the clean run minus the largest other one, at the last position; a single output is itself."""
    best = clean[:, -1].argmax(-1, keepdim=True)

    def metric(logits: Tensor) -> Tensor:
        last = logits[:, -1]
        if last.shape[-1] == 1:
            return last[:, 0]
        others = last.scatter(-1, best, float("-inf")).amax(-1)
        return last.gather(-1, best)[:, 0] - others

    return metric


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), help=", ".join(PROGRAMS))
    parser.add_argument("--prompts", type=int, default=8)
    asked = parser.parse_args()
    counts = (None, 5, 200)
    shown = "".join(f"{'gradients' if n is None else f'{n} steps':>11}" for n in counts)
    print(f"{'program':<12}{'layers':>7}{'edges':>7}{'true':>6}{shown}{'faithful':>10}")
    for name in asked.programs:
        program = PROGRAMS[name]
        model, found, _ = compiled(program)
        clean, corrupted = prompts(program, found, model, asked.prompts)
        given = model, clean, corrupted, lead(model(clean).detach())
        each = [edges.edge_scores(*given, steps=steps, check=0) for steps in counts]
        true = is_true(given, each[0])
        curve = circuits.faithfulness(*given, each[-1], [0, float(true.double().mean()), 1])
        print(f"{name:<12}{model.cfg.n_layers:>7}{len(true):>7}{int(true.sum()):>6}", end="")
        print("".join(f"{auroc(x.values, true):>11.3f}" for x in each) + f"{curve.values[1]:>10.3f}", flush=True)


if __name__ == "__main__":
    main()
