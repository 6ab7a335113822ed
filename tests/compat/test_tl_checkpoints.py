"""Checkpoints of a model's training: their labels, and loading one."""

import json

import pytest
import torch

from hookline.compat.transformer_lens import HookedTransformer, HookedTransformerConfig
from hookline.compat.transformer_lens._impl.aliases import get_official_model_name
from hookline.compat.transformer_lens._impl.checkpoints import find_checkpoint, get_checkpoint_labels
from hookline.compat.transformer_lens._impl.published import from_mingpt, published_name
from hookline.errors import HooklineError

TOKENS = torch.arange(3, 17).view(2, 7)
PYTHIA = "EleutherAI/pythia-70m"
CONFIG = {"d_model": 16, "n_layers": 2, "d_mlp": 64, "d_head": 8, "n_heads": 2, "n_ctx": 16, "d_vocab": 30}


@pytest.mark.parametrize(
    ("name", "value", "index", "revision"),
    [
        (PYTHIA, 1000, None, "step1000"),
        (PYTHIA, None, -1, "step143000"),
        (PYTHIA, None, 3, "step4"),
        ("pythia-70m-v0", None, 3, "step4000"),
        ("stanford-gpt2-small-a", 400, None, "checkpoint-400"),
        ("stanford-crfm/x", None, -1, "checkpoint-400000"),
    ],
)
def test_revisions(name, value, index, revision) -> None:
    found = find_checkpoint(name, value, index)
    assert found.revision("stanford-crfm/x" if "stanford" in name else name) == revision
    assert get_checkpoint_labels(name)[0][found.index] == found.value
    assert found.label_type == "step"


def test_no_checkpoint_is_asked_for() -> None:
    assert find_checkpoint("anything", None, None) is None


@pytest.mark.parametrize(("value", "index"), [(1001, None), (None, 999)])
def test_checkpoints_that_do_not_exist(value, index) -> None:
    with pytest.raises(HooklineError, match="154 checkpoints, 0, 1, 2, 4 … 143000"):
        find_checkpoint(PYTHIA, value, index)


def test_models_whose_checkpoints_are_not_known() -> None:
    with pytest.raises(HooklineError, match="revision"):
        get_checkpoint_labels("gpt2")


def test_names_of_older_models() -> None:
    assert published_name("solu-2l-pile") == published_name("solu-2l-old") == "NeelNanda/SoLU_2L_v10_old"


@pytest.mark.parametrize(
    ("short", "official"),
    [
        ("tiny-stories-1L-21M", "roneneldan/TinyStories-1Layer-21M"),
        ("tiny-stories-instruct-33M", "roneneldan/TinyStories-Instruct-33M"),
        ("stanford-gpt2-medium-e", "stanford-crfm/eowyn-gpt2-medium-x777"),
        ("gpt2-mistral-small-c", "stanford-crfm/caprica-gpt2-small-x81"),
        ("darkmatter-gpt2-small-x343", "stanford-crfm/darkmatter-gpt2-small-x343"),
        ("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("qwen-1.8b-chat", "Qwen/Qwen-1_8B-Chat"),
        ("qwen3-0.6b-base", "Qwen/Qwen3-0.6B-Base"),
        ("Qwen/Qwen2-7B", "Qwen/Qwen2-7B"),
        ("yi-6b-chat", "01-ai/Yi-6B-Chat"),
        ("olmo-3.1-32b-think", "allenai/Olmo-3.1-32B-Think"),
        ("mistral-nemo-base-2407", "mistralai/Mistral-Nemo-Base-2407"),
        ("stablelm-tuned-7b", "stabilityai/stablelm-tuned-alpha-7b"),
        ("pythia-v0", "EleutherAI/pythia-70m-v0"),
        ("opt-xxl", "facebook/opt-13b"),
        ("medgemma-4b-it", "google/medgemma-4b-it"),
    ],
)
def test_short_names(short, official) -> None:
    assert get_official_model_name(short) == official


@pytest.fixture
def cached(tmp_path, monkeypatch) -> dict[int, HookedTransformer]:
    """A model with three checkpoints in the cache of a hub that cannot be reached."""
    folder = tmp_path / "models--NeelNanda--SoLU_2L512W_C4_Code"
    snapshot = folder / "snapshots" / ("0" * 40)
    (snapshot / "checkpoints").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(
        json.dumps(CONFIG | {"act_fn": "gelu", "attn_only": False, "normalization": "LN"})
    )
    models = {}
    for value in (0, 10**9, 2 * 10**9):
        models[value] = HookedTransformer(HookedTransformerConfig(**CONFIG, act_fn="gelu", seed=1 + value // 10**9))
        torch.save(models[value].state_dict(), snapshot / "checkpoints" / f"SoLU_{value:012d}.pth")
    torch.save(models[2 * 10**9].state_dict(), snapshot / "SoLU_final.pth")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return models


def test_checkpoints_of_a_published_model(cached) -> None:
    labels, kind = get_checkpoint_labels("solu-2l")
    assert (labels, kind) == ([0, 10**9, 2 * 10**9], "token")
    for options, value in (({"checkpoint_index": 1}, 10**9), ({"checkpoint_value": 0}, 0), ({}, 2 * 10**9)):
        model = HookedTransformer.from_pretrained_no_processing("solu-2l", device="cpu", **options)
        assert torch.equal(model(TOKENS), cached[value](TOKENS))
        assert model.cfg.from_checkpoint is bool(options)
        assert model.cfg.checkpoint_value == (value if options else None)
    with pytest.raises(HooklineError, match="3 checkpoints"):
        HookedTransformer.from_pretrained("solu-2l", device="cpu", checkpoint_index=3)


def test_a_model_that_is_not_cached(cached) -> None:
    del cached
    with pytest.raises(HooklineError, match="cannot load NeelNanda/SoLU_3L512W_C4_Code"):
        get_checkpoint_labels("solu-3l")


def test_the_older_format_is_refused() -> None:
    with pytest.raises(HooklineError, match="SoLU_2L_v10_old"):
        HookedTransformer.from_pretrained("solu-2l-pile", device="cpu")


def _mingpt(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a small model as minGPT saves them."""
    found = {"tok_emb.weight": state["embed.W_E"], "pos_emb": state["pos_embed.W_pos"][None]}
    found |= {"head.weight": state["unembed.W_U"].T}
    for name in ("ln_final", "blocks.0.ln1", "blocks.0.ln2", "blocks.1.ln1", "blocks.1.ln2"):
        theirs = name.replace("ln_final", "ln_f")
        found |= {f"{theirs}.weight": state[f"{name}.w"], f"{theirs}.bias": state[f"{name}.b"]}
    for block in ("blocks.0", "blocks.1"):
        for letter, name in (("Q", "query"), ("K", "key"), ("V", "value")):
            heads = state[f"{block}.attn.W_{letter}"]  # a linear layer: rows are outputs, head after head
            found[f"{block}.attn.{name}.weight"] = torch.cat([head.T for head in heads])
            found[f"{block}.attn.{name}.bias"] = torch.cat(list(state[f"{block}.attn.b_{letter}"]))
        found[f"{block}.attn.proj.weight"] = torch.cat([head.T for head in state[f"{block}.attn.W_O"]], dim=1)
        found[f"{block}.attn.proj.bias"] = state[f"{block}.attn.b_O"]
        for index, side in ((0, "in"), (2, "out")):
            found[f"{block}.mlp.{index}.weight"] = state[f"{block}.mlp.W_{side}"].T
            found[f"{block}.mlp.{index}.bias"] = state[f"{block}.mlp.b_{side}"]
    return found


def test_weights_of_mingpt() -> None:
    """`othello-gpt` is published with minGPT's names; its unembedding has no bias."""
    cfg = HookedTransformerConfig(**CONFIG, act_fn="gelu", seed=4)
    model = HookedTransformer(cfg)
    for name, parameter in model.named_parameters():
        if not name.endswith("b_U"):
            torch.nn.init.normal_(parameter)
    state = model.state_dict()
    found = from_mingpt(_mingpt(state), cfg)
    assert found.keys() == {name for name in state if not name.endswith(("mask", "IGNORE"))}
    assert all(torch.equal(value, state[name]) for name, value in found.items())


def test_a_published_model_of_mingpt(cached, tmp_path) -> None:
    del cached
    folder = tmp_path / "models--Baidicoot--Othello-GPT-Transformer-Lens"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    config = CONFIG | {"act_fn": "gelu", "attn_only": False, "normalization_type": "LN", "architecture": "mingpt"}
    (snapshot / "config.json").write_text(json.dumps(config))
    model = HookedTransformer(HookedTransformerConfig(**CONFIG, act_fn="gelu", normalization_type="LN", seed=4))
    torch.save(_mingpt(model.state_dict()), snapshot / "synthetic_final.pth")
    found = HookedTransformer.from_pretrained_no_processing("othello-gpt", device="cpu")
    assert torch.equal(found(TOKENS), model(TOKENS))
    assert found.cfg.original_architecture == "mingpt"
