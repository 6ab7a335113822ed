"""Filters that are a class of modules, or a dict from new names to points."""

import pytest
import torch
from networks import MLP, Twice, zero
from torch import nn

import hookline
from hookline import HooklineError, UnknownPointError


class Sub(nn.Linear):
    """A class derived from another."""


@pytest.fixture
def net():
    torch.manual_seed(0)
    return hookline.hook(MLP())


X = torch.ones(2, 4)


def test_a_class_selects_the_outputs_of_its_modules(net) -> None:
    assert [row.name for row in net.points(type=nn.Linear)] == ["fc1", "fc2"]
    _, cache = net.run_with_cache(X, names_filter=nn.Linear)
    assert list(cache) == ["fc1", "fc2"]
    assert torch.equal(cache["fc1"], net.fc1(X))
    assert not net.run_with_hooks(X, fwd_hooks=[(nn.GELU, zero)]).sub(net.fc2.bias).any()
    assert [row.name for row in net.plan([nn.GELU, "fc1"])] == ["act", "fc1"]
    assert list(net.cache(X, names_filter=[nn.Linear, "act"])) == ["fc1", "act", "fc2"]


def test_a_class_selects_no_derived_ones() -> None:
    net = hookline.hook(nn.Sequential(nn.Linear(4, 4), Sub(4, 4)))
    assert [row.name for row in net.points(type=nn.Linear)] == ["0"]
    assert [row.name for row in net.points(type=Sub)] == ["1"]


def test_a_class_that_does_not_occur_raises(net) -> None:
    for kind in (nn.Conv2d, nn.Module, int, nn.ModuleList):
        with pytest.raises(HooklineError):
            net.points(type=kind)
        with pytest.raises(HooklineError):
            net.run_with_cache(X, names_filter=[kind])
    with pytest.raises(HooklineError):
        net.points("fc1", type=nn.Linear)


def test_a_class_gives_native_names_of_a_language_model() -> None:
    model = hookline.load("tinyworld")
    names = [row.name for row in model.points(type=nn.LayerNorm)]
    assert names == [path for path, module in model.module.named_modules() if type(module) is nn.LayerNorm]
    cache = model.cache("Hello", names_filter=nn.LayerNorm)
    assert list(cache) == names


def test_points_get_new_names(net) -> None:
    output, cache = net.run_with_cache(
        X, names_filter={"features": "fc1", "scores": "output"}, incl_bwd=True, loss_fn=torch.sum
    )
    assert {"features", "scores", "features_grad"} <= {*cache}
    assert torch.equal(cache["features"], net.fc1(X))
    assert torch.equal(cache["scores"], output)
    assert [row.name for row in net.plan({"features": "fc1"})] == ["features"]
    assert "features" not in net.hook_dict
    with pytest.raises(UnknownPointError):
        net.cache(X, names_filter="features")
    with pytest.raises(UnknownPointError):
        cache["fc1"]


def test_hooks_see_the_new_name(net) -> None:
    names = []
    net.run_with_hooks(X, fwd_hooks=[({"features": "fc1"}, lambda x, hook: names.append(hook.name))])
    assert names == ["features"]
    with net.hooks(fwd_hooks=[({"features": "fc1"}, zero)]):
        assert not net.cache(X, names_filter={"hidden": "fc1"})["hidden"].any()


def test_one_point_may_get_two_names(net) -> None:
    cache = net.cache(X, names_filter={"a": "fc1", "b": "fc1.output", "fc2": "fc2"})
    assert list(cache) == ["a", "b", "fc2"]
    assert torch.equal(cache["a"], cache["b"])


def test_calls_and_inputs_get_new_names() -> None:
    net = hookline.hook(Twice())
    cache = net.cache(X, names_filter={"second": "cell#1", "into": "cell.input#0", "all": "cell"})
    assert torch.equal(cache["second"], net.cell(net.cell(X)))
    assert torch.equal(cache["into"], X)
    assert torch.equal(cache["all#1"], cache["second"])


@pytest.mark.parametrize(
    "names",
    [
        {"fc2": "fc1"},  # the name of another point
        {"a": "fc*"},  # several points
        {"a": "fc9"},
        {"a#1": "fc1"},
        {"a_grad": "fc1"},
        {3: "fc1"},
        {},
    ],
)
def test_new_names_that_mean_something_else_raise(net, names) -> None:
    with pytest.raises(HooklineError):
        net.cache(X, names_filter=names)


def test_a_store_has_the_new_names(net, tmp_path) -> None:
    names = {"features": "fc1", "scores": "fc2"}
    store = hookline.harvest(net, torch.ones(5, 4), names, tmp_path / "store", progress=False)
    assert sorted(store.points) == ["features", "scores"]
    assert torch.equal(store["features"][:2], net.fc1(X))


def test_a_language_model_takes_new_names() -> None:
    model = hookline.load("tinyworld")
    names = {"stream": "blocks.1.hook_resid_post", "heads": ("z", 0)}
    cache = model.cache("Hello there", names_filter=names)
    assert list(cache) == ["heads", "stream"]
    _, cache = model.generate_with_cache("Hello", names_filter=names, max_new_tokens=3)
    assert {*cache} == {"heads", "stream"}
