"""Every way to name a point of any network."""

import re
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hookline
from hookline import HookPoint, UnknownPointError
from hookline.errors import UnavailablePointError


def names(net, names_filter) -> list[str]:
    return [point.name for point in net.index.select(names_filter)]


def test_hook_dict_is_in_firing_order(net, x) -> None:
    expected = ["input", "fc1.input", "fc1", "act.input", "act", "fc2.input", "fc2", "output"]
    assert list(net.hook_dict) == expected
    assert list(net.run_with_cache(x)[1]) == expected
    assert all(isinstance(point, HookPoint) and point.name == name for name, point in net.hook_dict.items())


@pytest.mark.parametrize(
    ("names_filter", "expected"),
    [
        ("fc1", ["fc1"]),
        ("fc1.output", ["fc1.output"]),
        ("fc*", ["fc1.input", "fc1", "fc2.input", "fc2"]),
        ("fc?", ["fc1", "fc2"]),
        (["fc2", "fc1"], ["fc2", "fc1"]),
        (["fc1", "fc*"], ["fc1", "fc1.input", "fc2.input", "fc2"]),
        (("fc1", "act"), ["fc1", "act"]),
        ({"fc1"}, ["fc1"]),
        (re.compile(r"\.input$"), ["fc1.input", "act.input", "fc2.input"]),
        (lambda name: name.startswith("act"), ["act.input", "act"]),
        ([re.compile("^act$"), "fc1", lambda name: name == "fc2"], ["act", "fc1", "fc2"]),
    ],
)
def test_filters(net, names_filter, expected) -> None:
    assert names(net, names_filter) == expected


def test_a_point_is_a_filter(net, x) -> None:
    point = net.hook_dict["fc1"]
    assert list(net.run_with_cache(x, names_filter=point)[1]) == ["fc1"]
    other = hookline.hook(nn.Linear(4, 4))
    with pytest.raises(UnknownPointError, match=r"belongs.*model"):
        other.run_with_cache(x, names_filter=point)


def test_a_module_is_a_filter(net, x) -> None:
    assert list(net.run_with_cache(x, names_filter=net.module.fc1)[1]) == ["fc1"]
    for other in (nn.Linear(1, 1), hookline.hook(nn.Linear(1, 1))):
        with pytest.raises(UnknownPointError, match="this model"):
            net.run_with_cache(x, names_filter=other)


@pytest.mark.parametrize("wrong", ["fc3", "fc1.inputs", "fc1[", "fc1#x", "", "fc1.weight", "fc1 "])
def test_an_unknown_name_lists_the_nearest(net, wrong) -> None:
    with pytest.raises(UnknownPointError, match=re.escape(repr(wrong))) as error:
        net.hooks(fwd_hooks=[(wrong, torch.relu)])
    assert isinstance(error.value, KeyError)
    assert "\\n" not in str(error.value)
    if wrong:
        assert "Did you mean" in str(error.value)
        assert "'fc1" in str(error.value)


def test_a_name_unlike_any_lists_what_exists(net) -> None:
    with pytest.raises(UnknownPointError, match=r"'input', 'fc1\.input', 'fc1'"):
        net.point("zzzzzzzzz")


@pytest.mark.parametrize("empty", ["zz*", [], re.compile("zz"), lambda name: False])
def test_a_filter_that_matches_nothing_raises(net, x, empty) -> None:
    with pytest.raises(UnknownPointError, match="8 points") as error:
        net.run_with_cache(x, names_filter=empty)
    assert " at 0x" not in str(error.value)


@pytest.mark.parametrize("nonsense", [3, 2.5, object()])
def test_what_is_no_filter(net, nonsense) -> None:
    with pytest.raises(hookline.HooklineError, match="filter"):
        net.run_with_cache(torch.ones(1, 4), names_filter=nonsense)


def test_hook_name_is_the_name_asked_for(net, x) -> None:
    seen = []
    spellings = ["fc1", "fc1.output", "fc1#0", "fc1:output"]
    net.run_with_hooks(x, fwd_hooks=[(name, lambda h, hook: seen.append(hook.name)) for name in spellings])
    assert seen == spellings


def test_all_spellings_find_a_cached_point(net, x) -> None:
    _, cache = net.run_with_cache(x, names_filter="fc1.output")
    assert list(cache) == ["fc1.output"]
    assert cache["fc1"] is cache["fc1.output"]
    assert cache["fc1:output"] is cache["fc1"]


def test_layer() -> None:
    net = hookline.hook(nn.Sequential(nn.Sequential(nn.Linear(1, 1))))
    assert net.point("0.0.input").layer() == 0
    with pytest.raises(hookline.HooklineError, match="numbered"):
        net.point("input").layer()


class Shadowed(nn.Module):
    """A module called `output`, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(4, 4)
        self.input = nn.Linear(4, 4)

    def forward(self, x):
        return 2 * self.output(self.input(x))


def test_a_module_called_output_keeps_its_name(x) -> None:
    net = hookline.hook(nn.Sequential(Shadowed()))
    inner = net.module[0]
    out, cache = net.run_with_cache(x)
    assert torch.equal(cache["0.input"], inner.input(x))
    assert torch.equal(cache["0.output"], inner.output(inner.input(x)))
    assert torch.equal(cache["0"], out)
    assert torch.equal(cache["0:output"], out)
    assert torch.equal(cache["0:input"], x)
    assert torch.equal(cache["0.output.input"], inner.input(x))


def test_containers_say_that_they_never_run(x) -> None:
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    net = hookline.hook(Stack())
    assert "layers" not in net.hook_dict
    with pytest.raises(UnavailablePointError, match=r"ModuleList.*'layers.0', 'layers.1'"):
        net.run_with_cache(x, names_filter="layers")


def test_a_replaced_module_is_found(net, x) -> None:
    net.run_with_cache(x, names_filter="fc1")
    net.module.fc1 = nn.Linear(4, 8)
    assert torch.equal(net.run_with_cache(x, names_filter="fc1")[1]["fc1"], net.module.fc1(x))
    assert torch.equal(net.run_with_cache(x)[1]["fc1"], net.module.fc1(x))


def test_setting_an_attribute_reaches_the_module(net) -> None:
    new = nn.Linear(4, 8)
    net.fc1 = new
    assert net.module.fc1 is new
    net.note = "mine"
    assert not hasattr(net.module, "note")


@given(st.lists(st.sampled_from(["a", "b", "input", "output", "0", "x1"]), min_size=1, max_size=4))
def test_every_listed_name_finds_its_own_point(path) -> None:
    """Whatever modules are called, each name in hook_dict leads back to the same point."""
    module: nn.Module = nn.Linear(1, 1)
    for name in reversed(path):
        outer = nn.Sequential()
        outer.add_module(name, module)
        module = outer
    points = hookline.hook(module).index
    for name, point in points.hook_dict.items():
        assert points.find(name) is point
        assert points.canonical_name(name) == name
        assert points.find(f"{name}#0").site == point.site


def test_a_module_added_later_is_found(x) -> None:
    net = hookline.hook(nn.Sequential(nn.Linear(4, 4)))
    net.run_with_cache(x)
    net.module.append(nn.ReLU())
    assert "1" in net.run_with_cache(x)[1]
    net.module.append(nn.Linear(4, 2))
    assert net.run_with_hooks(x, fwd_hooks=[("2", torch.zeros_like)]).eq(0).all()
    del net.module[2]
    assert list(net.run_with_cache(x)[1])[-2:] == ["1", "output"]


def test_a_scripted_module_is_a_closed_box(x) -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of newer versions of torch
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    net = hookline.hook(nn.Sequential(scripted, nn.Linear(4, 2)))
    assert list(net.run_with_cache(x)[1]) == ["input", "1.input", "1", "output"]
    with pytest.raises(UnavailablePointError, match=r"'0'.*ScriptModule"):
        net.point("0")
    with pytest.raises(hookline.HooklineError, match="ScriptModule"):
        hookline.hook(scripted)


@pytest.mark.parametrize("key", ["f*", "a:output", "b#1", "c[0]", "d e"])
def test_odd_names_of_modules(x, key) -> None:
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.d = nn.ModuleDict({key: nn.Linear(4, 4), "f": nn.Linear(4, 4)})

        def forward(self, x):
            return self.d["f"](self.d[key](x))

    net = hookline.hook(Odd())
    _, cache = net.run_with_cache(x)
    assert len(cache) == 6
    for name in net.hook_dict:
        assert names(net, name) == [name]
        assert torch.equal(net.run_with_cache(x, names_filter=name)[1][name], cache[name])


def test_hook_dict_knows_other_spellings(net) -> None:
    assert net.hook_dict["fc1.output"].site == net.hook_dict["fc1"].site
    with pytest.raises(UnknownPointError, match="you mean"):
        net.hook_dict["fc12"]


def test_point_is_one_point(net) -> None:
    with pytest.raises(hookline.HooklineError, match=r"'fc\*'.* 4 points"):
        net.point("fc*")


@pytest.mark.parametrize("nonsense", [int, b"fc1"])
def test_callables_that_are_no_predicates(net, x, nonsense) -> None:
    with pytest.raises(hookline.HooklineError, match="filter"):
        net.run_with_cache(x, names_filter=nonsense)


def test_a_point_of_a_replaced_module(net, x) -> None:
    old = net.hook_dict["fc1"]
    net.module.fc1 = nn.Linear(4, 8)
    net.run_with_cache(x)
    with pytest.raises(UnknownPointError, match="replaced"):
        net.run_with_cache(x, names_filter=old)


def test_name_and_hook_the_wrong_way_round(net, x) -> None:
    with pytest.raises(hookline.errors.InvalidHookError, match="name first"):
        net.run_with_hooks(x, fwd_hooks=[(torch.relu, "fc1")])
