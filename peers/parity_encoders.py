"""Parity with TransformerLens's smaller modules: both libraries run the same weights, and results are compared by name.

    python peers/parity_encoders.py --python PATH        a Python with transformer-lens 3.5 installed

HookedEncoder and BertNextSentencePrediction on a random BERT, HookedEncoderDecoder on a random T5, and SVDInterpreter,
head_detector, evals and ungrouped keys and values on random GPT-2- and Llama-shaped models. The largest difference
for each name is printed; if one exceeds the tolerance, the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from parity_transformerlens import TOLERANCE, far, own_model, peer_model, save_models
from torch import Tensor

TOKENS = torch.tensor([[5, 9, 31, 7, 7, 44, 2], [3, 9, 12, 40, 51, 6, 33]])
TYPES = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
SHAPE = {"d_model": 32, "d_head": 8, "n_heads": 4, "n_layers": 2, "d_mlp": 48, "d_vocab": 70, "device": "cpu"}
WEIGHTS = [
    "W_E",
    "W_U",
    "b_U",
    "W_Q",
    "W_K",
    "W_V",
    "W_O",
    "b_Q",
    "b_K",
    "b_V",
    "b_O",
    "W_in",
    "W_out",
    "b_in",
    "b_out",
]


def main() -> int:
    """Compare and print; return 0 if all agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="a Python with transformer-lens 3.5 installed")
    parser.add_argument("--peer", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peer:
        torch.save(measured(Path(options.peer), "transformer_lens"), Path(options.peer) / "peer.pt")
        return 0
    if not options.python:
        parser.error("pass --python")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder)
        save_encoders(folder)
        subprocess.run([options.python, __file__, "--peer", name], check=True)
        peer = torch.load(folder / "peer.pt")
        own = measured(folder, "hookline.compat.transformer_lens")
    shared = [name for name in peer if name in own]
    differences = {name: far(shown(peer[name]), shown(own[name])) for name in shared}
    for name, difference in differences.items():
        print(f"  {difference:8.1e}  {name}{'' if difference <= TOLERANCE else '   DIFFERS'}")
    print(f"  only TransformerLens: {', '.join(name for name in peer if name not in own) or 'nothing'}")
    bad = sum(not difference <= TOLERANCE for difference in differences.values())
    print(f"{bad} of {len(shared)} differ by more than {TOLERANCE}, relative to their size")
    return int(bad > 0)


def shown(x: Tensor) -> Tensor:
    """Return a tensor with masked entries as zeros."""
    return torch.where(x < -1e30, 0, x)


def save_encoders(folder: Path) -> None:
    """Save a random BERT and a random T5, with nontrivial norms and biases."""
    from transformers import BertConfig, BertForPreTraining, T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    bert = BertConfig(
        vocab_size=70, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=20,
    )  # fmt: skip
    t5 = T5Config(vocab_size=70, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    for name, model in {"bert": BertForPreTraining(bert), "t5": T5ForConditionalGeneration(t5)}.items():
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.eval().save_pretrained(folder / name)


def measured(folder: Path, library: str) -> dict[str, Tensor]:
    """Return all results of one library as plain tensors, by name."""
    found = {}
    for part in (of_bert, of_t5, of_tools, of_groups):
        found |= {name: x.detach().clone().contiguous() for name, x in part(folder, library)}
    return found


def of_bert(folder: Path, library: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the results of the encoder and of next-sentence prediction."""
    from transformers import BertForPreTraining

    lens = importlib.import_module(library)
    own = BertForPreTraining.from_pretrained(folder / "bert").eval()
    if library == "transformer_lens":
        from transformer_lens.pretrained.weight_conversions import convert_bert_weights

        cfg = lens.HookedTransformerConfig(
            n_ctx=20, act_fn="gelu", eps=1e-12, attention_dir="bidirectional", normalization_type="LN", **SHAPE
        )
        model = lens.HookedEncoder(cfg)
        model.load_state_dict(convert_bert_weights(own, cfg), strict=False)
    else:
        model = lens.HookedEncoder.from_pretrained("bert", hf_model=own, device="cpu")
    inputs = {"token_type_ids": TYPES, "one_zero_attention_mask": MASK}
    logits, cache = model.run_with_cache(TOKENS, **inputs)
    yield "bert logits", logits.log_softmax(-1)
    for name in cache:
        yield f"bert {name}", cache[name]
    yield "bert encoder_output", model.encoder_output(TOKENS, TYPES, MASK)
    for name in (*WEIGHTS, "W_pos", "W_E_pos"):
        yield f"bert {name}", getattr(model, name)
    yield "bert OV", model.OV.AB
    nsp = lens.BertNextSentencePrediction(model)
    yield "bert sentences", nsp(TOKENS, **inputs)
    output, cache = nsp.run_with_cache(TOKENS, **inputs)
    yield "bert sentences with cache", output
    for name in ("pooler.hook_pooler_out", "nsp_head.hook_nsp_out", "blocks.1.hook_normalized_resid_post"):
        yield f"bert sentences {name}", cache[name]

    def shift(x: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
        return x + torch.arange(x.shape[-1])  # norms undo a factor, but not this

    for name in ("blocks.0.hook_resid_mid", "blocks.1.hook_resid_post", "embed.hook_token_type_embed"):
        edited = model.run_with_hooks(TOKENS, **inputs, fwd_hooks=[(name, shift)])
        yield f"bert edit of {name}", edited.log_softmax(-1)


def of_t5(folder: Path, library: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the results of the encoder-decoder."""
    from transformers import T5ForConditionalGeneration

    lens = importlib.import_module(library)
    own = T5ForConditionalGeneration.from_pretrained(folder / "t5").eval()
    if library == "transformer_lens":
        from transformer_lens.pretrained.weight_conversions import convert_t5_weights

        cfg = lens.HookedTransformerConfig(
            n_ctx=20, act_fn="relu", eps=1e-6, attention_dir="bidirectional", use_attn_scale=False,
            positional_embedding_type="relative_positional_bias", normalization_type="RMS", tie_word_embeddings=True,
            relative_attention_max_distance=128, relative_attention_num_buckets=32, decoder_start_token_id=0, **SHAPE,
        )  # fmt: skip
        model = lens.HookedEncoderDecoder(cfg)
        model.load_state_dict(convert_t5_weights(own, cfg), strict=False)
    else:
        model = lens.HookedEncoderDecoder.from_pretrained("t5", hf_model=own, device="cpu")
    # One token: TransformerLens does not mask later tokens in the decoder, and differs from transformers after that.
    inputs = {"decoder_input": TOKENS[:, :1].flip(0), "one_zero_attention_mask": MASK}
    logits, cache = model.run_with_cache(TOKENS, **inputs)
    yield "t5 logits", logits.log_softmax(-1)
    for name in cache:
        yield f"t5 {name}", cache[name]
    for name in WEIGHTS:
        if not name.startswith("b_"):
            yield f"t5 {name}", getattr(model, name)
    yield "t5 labels", torch.tensor([ord(letter) for letter in " ".join(model.all_head_labels())])


def causal_model(folder: Path, library: str, kind: str) -> Any:
    """Return the unprocessed model of one library."""
    if library == "transformer_lens":
        return peer_model(folder / kind, kind, False)
    return own_model(folder / kind, False)


def of_tools(folder: Path, library: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the results of SVDInterpreter, head_detector and evals."""
    lens = importlib.import_module(library)
    model = causal_model(folder, library, "gpt2")
    svd = lens.SVDInterpreter(model)
    for kind, head in (("OV", 1), ("w_in", None), ("w_out", None)):
        yield f"svd {kind}", svd.get_singular_vectors(kind, layer_index=1, num_vectors=4, head_index=head).abs()
    detector = importlib.import_module(f"{library}.head_detector")
    _, cache = model.run_with_cache(TOKENS[:1] % 64, remove_batch_dim=True)
    tokens = TOKENS[:1]
    for name in detector.HEAD_NAMES:
        pattern = getattr(detector, f"get_{name}_detection_pattern")(tokens)
        yield f"detector {name}", pattern
        for measure in ("mul", "abs"):
            options = {"exclude_bos": True, "exclude_current_token": measure == "abs", "error_measure": measure}
            score = detector.compute_head_attention_similarity_score(cache["pattern", 1][2].clone(), pattern, **options)
            yield f"detector {name} {measure}", torch.tensor(score)
    evals = importlib.import_module(f"{library}.evals")
    loader = [{"tokens": TOKENS % 64}, {"tokens": TOKENS.flip(0) % 64}]
    yield "evals", torch.tensor(float(evals.evaluate_on_dataset(model, loader, device="cpu")))


def of_groups(folder: Path, library: str) -> Iterator[tuple[str, Tensor]]:
    """Yield keys and values with one row per head, and the effect of editing one of them."""
    model = causal_model(folder, library, "llama")
    model.set_ungroup_grouped_query_attention(True)
    tokens = TOKENS % 64
    names = [f"blocks.1.attn.hook_{name}" for name in ("k", "v", "rot_k", "pattern", "z")]
    _, cache = model.run_with_cache(tokens, names_filter=names)
    for name in names:
        yield f"ungrouped {name}", cache[name]

    def double(x: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
        x[:, :, 1] *= 2
        return x

    for name in names[:2]:
        yield f"ungrouped edit of {name}", model.run_with_hooks(tokens, fwd_hooks=[(name, double)]).log_softmax(-1)


if __name__ == "__main__":
    sys.exit(main())
