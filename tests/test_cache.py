"""The cache, and stopping early."""

import pytest
import torch

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
