"""What is printed of many activations, points or modules."""

import pytest
import tiny_models
import torch
from torch import nn

import hookline
from hookline.engine._reports.grouping import grouped, ranges
from hookline.transformer.verify.report import Report, Verdict


@pytest.mark.parametrize(
    ("names", "titles"),
    [
        (["blocks.0.hook_q", "blocks.1.hook_q", "blocks.3.hook_q"], ["blocks.0-1,3.hook_q"]),
        (["hook_embed", "blocks.7.attn.hook_z"], ["hook_embed", "blocks.7.attn.hook_z"]),
        (["cell#0", "cell#1", "cell#2"], ["cell#0-2"]),
        (["layer1.0.conv", "layer1.1.conv", "layer2.0.conv"], ["layer1.0-1.conv", "layer2.0.conv"]),
        (["h.0.1.fc", "h.1.1.fc", "h.0.2.fc"], ["h.0-1.1.fc", "h.0.2.fc"]),
        (["blocks.0.x_grad", "blocks.1.x_grad", "0", "1"], ["blocks.0-1.x_grad", "0-1"]),
        (["conv2d", "resnet50"], ["conv2d", "resnet50"]),
    ],
)
def test_names_in_groups(names, titles) -> None:
    groups = grouped((name, None) for name in names)
    assert [title for title, _ in groups] == titles
    assert sorted(each for _, members in groups for each in members) == sorted(names)


def test_what_differs_is_not_grouped() -> None:
    assert grouped([("h.0", 1), ("h.1", 2), ("h.2", 1)]) == [("h.0,2", ["h.0", "h.2"]), ("h.1", ["h.1"])]
    assert ranges([5, 1, 2, 3, 9]) == "1-3,5,9"


def test_a_cache_prints_one_line_for_each_kind() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama", num_hidden_layers=12))
    with torch.no_grad():
        cache = model.run_with_cache(torch.tensor([[3, 4, 5]]))[1]
    lines = repr(cache).splitlines()
    assert len(cache) > 200
    assert len(lines) < 40
    (q,) = [line for line in lines if "hook_q " in line]
    assert " ".join(q.split()) == "blocks.0-11.attn.hook_q [1, 3, 4, 24] float32, 12 × 1.15 kB"
    assert cache._repr_html_().count("<tr>") == len(lines) - 1
    few = repr(model.cache(torch.tensor([[3, 4, 5]]), names_filter="blocks.*.hook_resid_post"))
    assert len(few.splitlines()) == 13, "a short cache prints every activation"


def test_a_report_prints_its_counts_and_failures() -> None:
    verdicts = (Verdict("a", "proved"), Verdict("b", "unavailable", "none here"), Verdict("ccc", "failed", "it moves"))
    report = Report("gpt2", verdicts)
    assert repr(report).splitlines() == [
        "<Report of gpt2: 1 proved, 1 unavailable, 1 failed; print it to see every point>",
        "  ccc  failed       it moves",
    ]
    assert str(report).splitlines()[1:] == [
        "b    unavailable  none here",
        "ccc  failed       it moves",
        "gpt2: 1 proved, 1 unavailable, 1 failed",
    ]
    assert len(repr(Report("gpt2", verdicts[:2])).splitlines()) == 1


def test_a_plain_module_prints_in_one_line() -> None:
    net = hookline.hook(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    assert repr(net) == "HookedModule(Sequential: 3 modules, 9 parameters, 6 points)"
