"""Checkpoints of a model's training: their labels, and loading one."""

import json

import pytest
import torch

from hookline.compat.transformer_lens import HookedTransformer, HookedTransformerConfig
from hookline.compat.transformer_lens.checkpoints import find_checkpoint, get_checkpoint_labels
from hookline.compat.transformer_lens.published import published_name
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
    with pytest.raises(HooklineError, match="SoLU_2L_v10_old has an older format"):
        HookedTransformer.from_pretrained("solu-2l-pile", device="cpu")
