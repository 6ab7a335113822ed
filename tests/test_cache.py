"""The cache, and stopping early."""

import pickle

import pytest
import torch
from networks import Twice
from safetensors.torch import save_file
from torch import nn

import hookline
from hookline import UnavailablePointError


def test_cache_options(net) -> None:
    x = torch.randn(1, 4)
    _, cache = net.run_with_cache(x, remove_batch_dim=True)
    assert cache["fc1"].shape == (8,)
    assert not cache.has_batch_dim
    assert cache.remove_batch_dim() is cache
    _, wide = net.run_with_cache(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"needs a batch of one, but 'input' has shape \(2, 4\)"):
        wide.remove_batch_dim()
    assert wide.to(torch.float64)["fc1"].dtype == torch.float64
    text = repr(wide)
    assert "ActivationCache: 8 activations, " in text
    assert "fc1        [2, 8] float32" in text


def test_cache_errors(net, x) -> None:
    _, cache = net.run_with_cache(x, names_filter="fc1")
    with pytest.raises(hookline.UnknownPointError, match="Did you mean 'fc1'"):
        cache["fc12"]
    with pytest.raises(UnavailablePointError, match="'act' is a point of this model but is not in this cache"):
        cache["act"]


def test_stop_early(net, x) -> None:
    ran = []
    handle = net.module.fc2.register_forward_hook(lambda *_: ran.append(1))
    assert list(net.cache(x, names_filter=["fc1", "fc1.input"], stop_early=True)) == ["fc1.input", "fc1"]
    assert ran == []
    assert list(net.cache(x, names_filter="fc1")) == ["fc1"]
    assert ran == [1]
    handle.remove()


def test_more_ways_to_ask(net, x) -> None:
    _, cache = net.run_with_cache(x)
    assert cache[net.hook_dict["fc1"]] is cache["fc1"]
    assert cache["fc1#0"] is cache["fc1"]
    for nonsense in (0, None, ("fc1",)):
        assert nonsense not in cache
        with pytest.raises(KeyError, match="by the name of a point"):
            cache[nonsense]
    twice = hookline.hook(Twice()).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)[1]
    assert len(twice.calls("cell_grad")) == len(twice.calls("cell")) == 3


def test_a_cache_can_be_pickled_without_its_model(net, x) -> None:
    _, cache = net.run_with_cache(x)
    again = pickle.loads(pickle.dumps(cache))
    assert list(again) == list(cache)
    assert torch.equal(again["fc1"], cache["fc1"])
    assert len(pickle.dumps(cache)) < 20_000


def test_a_change_of_dtype_is_for_floats() -> None:
    cache = hookline.hook(nn.Embedding(3, 2)).cache(torch.tensor([1]))
    half = cache.to(dtype=torch.float16)
    assert half["input"].dtype == torch.int64
    assert half["output"].dtype == torch.float16
    assert cache.to("cpu", torch.bfloat16)["output"].dtype == torch.bfloat16


def test_a_tensor_without_a_batch_axis_stays(x) -> None:
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x).sum()

    cache = hookline.hook(Loss()).cache(x[:1], remove_batch_dim=True)
    assert cache["fc"].shape == (4,)
    assert cache["output"].shape == ()


def test_names_that_would_clash(x) -> None:
    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.w_grad = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.w_grad(self.w(x))

    with pytest.raises(hookline.HooklineError, match="two things would be cached as 'w_grad'"):
        hookline.hook(Clash()).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)


def test_sparse_tensors_have_a_size(x) -> None:
    class Sparse(nn.Module):
        def forward(self, x):
            return x.to_sparse()

    assert "output" in repr(hookline.hook(Sparse()).cache(x))


def test_save_and_load(tmp_path) -> None:
    model = hookline.load("tinyworld")
    with torch.no_grad():
        _, cache = model.run_with_cache("Mary went to the store")
    cache.save(tmp_path / "cache.safetensors")
    again = type(cache).load(tmp_path / "cache.safetensors", model)
    assert set(again) == set(cache)
    assert all(torch.equal(again[name], cache[name]) for name in cache)
    assert torch.equal(again["q", 3], cache["q", 3])
    assert torch.allclose(again.decompose_resid().sum(0), cache["resid_post", -1], atol=1e-5)
    bare = hookline.ActivationCache.load(tmp_path / "cache.safetensors")
    assert torch.equal(bare["blocks.3.attn.hook_q"], cache["q", 3])
    assert "<code>blocks.3.attn.hook_q</code>" in cache._repr_html_()


def test_files_that_are_no_caches(tmp_path) -> None:
    (tmp_path / "broken").write_bytes(b"nothing")
    with pytest.raises(hookline.HooklineError, match="is no file of activations"):
        hookline.ActivationCache.load(tmp_path / "broken")
    with pytest.raises(hookline.HooklineError, match="is no file of activations"):
        hookline.ActivationCache.load(tmp_path / "nowhere")
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(hookline.HooklineError, match="not written by a cache"):
        hookline.ActivationCache.load(tmp_path / "other.safetensors")
