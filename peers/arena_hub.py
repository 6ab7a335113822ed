"""Random weights and texts under the names that ARENA's interpretability chapter loads from the hub.

    python peers/arena_hub.py FOLDER

With HF_HOME=FOLDER and HF_HUB_OFFLINE=1 the exercises find them. Models are small, except for a GPT-2 whose width the
first part of the course expects (FOLDER/wide). Run it where TransformerLens is installed, so that both libraries get
the same weights; `arena.py` does this. What loads in other ways has doubles in `arena_doubles.py`.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from stack_hub import BOTH_ENDS, END, STORIES, put, tokenizer
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM

GEMMA = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1,
         "head_dim": 16, "query_pre_attn_scalar": 16, "vocab_size": 50300, "sliding_window": 64}  # fmt: skip
GEMMAS = {
    "google/gemma-2-2b": ("gemma2", {"num_hidden_layers": 26, "num_key_value_heads": 2}),
    "google/gemma-2b-it": ("gemma", {"num_hidden_layers": 18}),
    "google/gemma-3-1b-it": ("gemma3_text", {"num_hidden_layers": 26}),
}
SHORTFORMER = {"n_layers": 2, "n_heads": 12, "d_vocab": 50278, "attn_only": True, "normalization_type": None,
               "positional_embedding_type": "shortformer"}  # fmt: skip
OTHELLO = {"n_layers": 8, "d_model": 512, "d_head": 64, "n_heads": 8, "d_mlp": 2048, "d_vocab": 61, "n_ctx": 59,
           "act_fn": "gelu", "normalization_type": "LNPre"}  # fmt: skip
GROKKING = {"n_layers": 1, "d_vocab": 114, "d_model": 128, "d_mlp": 512, "n_heads": 4, "d_head": 32, "n_ctx": 3,
            "act_fn": "relu", "normalization_type": None}  # fmt: skip


def main(home: Path) -> None:
    """Write everything into the folder."""
    torch.manual_seed(0)
    gpt2 = tokenizer(bos_token=END, eos_token=END, unk_token=END, model_max_length=1024)
    for where, width in ((home, 192), (home / "wide", 768)):
        put(where, "gpt2", copying(GPT2LMHeadModel(GPT2Config(n_embd=width, **BOTH_ENDS, n_ctx=1024))), gpt2)
    shutil.copytree(home / "hub" / "models--gpt2", home / "hub" / "models--openai-community--gpt2", dirs_exist_ok=True)
    put(home, "EleutherAI/gpt-neox-20b", AutoConfig.for_model("gpt_neox"), gpt2)
    stories = GPTNeoConfig(**STORIES | {"num_layers": 1, "attention_types": [[["global"], 1]]}, **BOTH_ENDS)
    put(home, "roneneldan/TinyStories-1Layer-21M", GPTNeoForCausalLM(stories), gpt2)
    turns = {"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]}
    words = tokenizer(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", add_bos_token=True, **turns)
    ends = {f"{name}_token_id": words.convert_tokens_to_ids(f"<{name}>") for name in ("bos", "eos", "pad")}
    for name, (kind, sizes) in GEMMAS.items():
        put(home, name, AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **GEMMA | sizes | ends)), words)
    own_formats(home)
    data(home)


def copying(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """A model whose first layer copies tokens, so that a metric is not a difference of nearly equal numbers."""
    attention, width = model.transformer.h[0].attn, model.config.n_embd
    for weight in (attention.c_attn.weight[:, 2 * width :], attention.c_proj.weight):
        weight.data += 3 * torch.eye(width)
    return model


def own_formats(home: Path) -> None:
    """Models in TransformerLens's own format."""
    large = {"d_model": 768, "d_head": 64, "n_ctx": 2048}
    save(home, "callummcdougall/attn_only_2L_half", "attn_only_2L_half.pth", weights(SHORTFORMER | large, biases=False))
    demo = SHORTFORMER | {"n_heads": 8, "d_model": 64, "d_head": 8, "n_ctx": 1024, "d_vocab": 50277}
    name = "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr"
    save(home, name, "model_final.pth", weights(demo))
    more = {"act_fn": "gelu", "tokenizer_name": "EleutherAI/gpt-neox-20b", "d_mlp": 256, "shortformer_pos": True}
    configure(home, name, demo | more)
    save(home, "NeelNanda/Othello-GPT-Transformer-Lens", "synthetic_model.pth", weights(OTHELLO))
    name, full = "Baidicoot/Othello-GPT-Transformer-Lens", OTHELLO | {"normalization_type": "LN"}
    save(home, name, "synthetic_final.pth", to_mingpt(weights(full | {"d_vocab_out": 61})))
    configure(home, name, full | {"architecture": "mingpt", "attn_only": False})


def configure(home: Path, name: str, config: dict[str, Any]) -> None:
    """Write the config of a repository."""
    (put(home, name, None, None) / "config.json").write_text(json.dumps(config), encoding="utf-8")


def data(home: Path) -> None:
    """Results of training runs, and examples."""
    run = {name: to_old_layout(name, value) for name, value in weights(GROKKING, biases=False).items()}
    run = {name: value for name, value in run.items() if "W_" in name or "mlp.b_" in name}
    losses = {"train_losses": torch.rand(50_000).tolist(), "test_losses": torch.rand(5_000).tolist()}
    states = [{name: value * (1 + 0.001 * step) for name, value in run.items()} for step in range(5)]
    full = {"state_dicts": [states[step % 5] for step in range(501)], "epochs": list(range(0, 50_100, 100)), **losses}
    save(home, "callummcdougall/grokking_full_run_data", "full_run_data.pth", full)
    name = "gpt2-small-layer-8-mlp-transcoder-folded-b_dec_out/log_sparsity.pt"
    save(home, "callummcdougall/arena-demos-transcoder", name, -5 * torch.rand(24_576))
    othello = {
        "tokens.pt": torch.randint(1, 61, (64, 59)),
        "target_logits.pt": torch.randn(64, 59, 61),
        "linear_probes.pt": {mode: torch.randn(512, 64) for mode in ("theirs vs mine", "empty")},
    }
    for name, value in othello.items():
        save(home, "callummcdougall/arena-demos-othellogpt", name, value)


def weights(sizes: dict[str, Any], *, biases: bool = True) -> dict[str, torch.Tensor]:
    """Random weights of a model of TransformerLens."""
    model = HookedTransformer(HookedTransformerConfig(**{"act_fn": "gelu", "seed": 3} | sizes))
    for name, parameter in model.named_parameters():
        if biases or ".b_" not in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model.state_dict()


def to_mingpt(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with the names and the layout of minGPT."""
    made = {"tok_emb.weight": state["embed.W_E"], "pos_emb": state["pos_embed.W_pos"][None]}
    made |= {
        "head.weight": state["unembed.W_U"].T,
        "ln_f.weight": state["ln_final.w"],
        "ln_f.bias": state["ln_final.b"],
    }
    for layer in range(OTHELLO["n_layers"]):
        block = f"blocks.{layer}."
        for ours, theirs in (("Q", "query"), ("K", "key"), ("V", "value")):
            made[f"{block}attn.{theirs}.weight"] = state[f"{block}attn.W_{ours}"].mT.flatten(0, 1)
            made[f"{block}attn.{theirs}.bias"] = state[f"{block}attn.b_{ours}"].flatten()
        made[f"{block}attn.proj.weight"] = state[f"{block}attn.W_O"].flatten(0, 1).T
        made[f"{block}attn.proj.bias"] = state[f"{block}attn.b_O"]
        for norm in ("ln1", "ln2"):
            made |= {
                f"{block}{norm}.weight": state[f"{block}{norm}.w"],
                f"{block}{norm}.bias": state[f"{block}{norm}.b"],
            }
        for index, side in ((0, "in"), (2, "out")):
            made[f"{block}mlp.{index}.weight"] = state[f"{block}mlp.W_{side}"].T
            made[f"{block}mlp.{index}.bias"] = state[f"{block}mlp.b_{side}"]
    return {name: value.contiguous() for name, value in made.items()}


def to_old_layout(name: str, value: torch.Tensor) -> torch.Tensor:
    """A weight as the first program about grokking saved it."""
    if "W_O" in name:
        return value.flatten(0, 1).T.contiguous()
    return value if "W_U" in name or "W_pos" in name or "W_" not in name else value.mT.contiguous()


def save(home: Path, name: str, file: str, value: Any) -> None:
    """Save a file of a repository where the hub's cache has it."""
    path = put(home, name, None, None) / file
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
