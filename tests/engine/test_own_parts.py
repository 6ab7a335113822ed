"""Local caches on models that are not sharded; those that are: tests/transformer/test_sharded.py."""

import copy

import pytest
import torch
from networks import MLP
from tiny_models import causal_lm

import hookline
from hookline import HooklineError
from hookline.engine._sharding.own_parts import LocalCache

IDS = torch.tensor([[5, 17, 42, 7]])


@pytest.fixture(scope="module")
def model():
    return hookline.hook(causal_lm("llama"))


@torch.no_grad()
def test_a_model_in_one_process_has_everything(model) -> None:
    (logits, whole), (same, local) = model.run_with_cache(IDS), model.run_with_cache(IDS, local=True)
    assert isinstance(local, LocalCache)
    assert torch.equal(logits, same)
    assert list(local) == list(whole)
    assert all(torch.equal(local[name], whole[name]) for name in whole)
    with pytest.raises(AttributeError, match=r"no 'decompose_resid': .* without local=True"):
        local.decompose_resid()
    assert list(copy.copy(local)) == list(local)


@torch.no_grad()
@pytest.mark.parametrize("removes", [False, True])
def test_all_indices(model, removes) -> None:
    _, cache = model.run_with_cache(IDS, local=True, remove_batch_dim=removes)
    sizes = {"attn.hook_z": 4, "attn.hook_k": 2, "attn.hook_pattern": 4, "hook_resid_post": 32}
    for name, size in sizes.items():
        assert cache.local_indices(f"blocks.0.{name}").tolist() == [*range(size)]
    assert cache.local_indices("blocks.0.mlp.hook_post").numel() == cache["blocks.0.mlp.hook_post"].shape[-1]
    assert cache.local_indices(("z", 0)).tolist() == [0, 1, 2, 3]


def test_gradients_and_hooks(model) -> None:
    given = {"incl_bwd": True, "loss_fn": lambda logits: logits[0, -1, 5]}
    hooks = [("blocks.0.attn.hook_result", hookline.edits.zero(head=1))]
    name = "blocks.0.attn.hook_result"
    given |= {"names_filter": name, "fwd_hooks": hooks}
    caches = [model.run_with_cache(IDS, local=local, **given)[1] for local in (False, True)]
    assert caches[0].keys() == caches[1].keys() == {name, f"{name}_grad"}
    assert all(torch.equal(caches[0][key], caches[1][key]) for key in caches[0])
    assert caches[1].local_indices(f"{name}_grad").tolist() == [0, 1, 2, 3]


@torch.no_grad()
def test_any_module() -> None:
    _, cache = hookline.hook(MLP()).run_with_cache(torch.ones(2, 4), local=True)
    for name in cache:
        assert cache.local_indices(name).tolist() == [*range(cache[name].shape[-1])]


@torch.no_grad()
def test_it_cannot_be_saved(model, tmp_path) -> None:
    _, cache = model.run_with_cache(IDS, local=True)
    with pytest.raises(HooklineError, match="local_indices"):
        cache.save(tmp_path / "cache")
