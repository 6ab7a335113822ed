"""Figures as pages: what they contain, and what they refuse. How they look in a browser is in tests/pages."""

import base64
import json
import re

import numpy as np
import pytest
import torch

from hookline import HooklineError
from hookline.experiments import figures
from hookline.experiments.result import Result


def data(page) -> dict:
    """The data inside a page."""
    return json.loads(re.search(r'id="data">(.*?)</script>', str(page), re.DOTALL)[1])


def numbers(packed) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["f32"]), "<f4").reshape(packed["shape"])


def result(*sizes, axes=("layer", "pos", "head"), **info) -> Result:
    coords = {axis: list(range(size)) for axis, size in zip(axes, sizes, strict=False)}
    return Result(torch.randn(sizes), axes[: len(sizes)], coords, "score", info)


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (result(3), ["curves"]),
        (result(3, axes=("head",)), ["bars"]),
        (result(3, 4), ["heat"]),
        (result(2, 3, 4), ["heat", "heat"]),
        (result(2, 5, axes=("metric", "layer")), ["curves", "curves"]),
        (result(2, 5, axes=("order", "count")), ["curves"]),
    ],
)
def test_results_are_drawn_as_by_plot(given, kinds) -> None:
    panels = data(given.plot_html())["panels"]
    assert [panel["kind"] for panel in panels] == kinds
    found = np.concatenate([numbers(panel["values"]).ravel() for panel in panels])
    assert found.tolist() == given.values.flatten().tolist()


def test_colors_are_around_the_run_that_was_changed_and_shared_by_panels() -> None:
    given = result(2, 3, 4, clean=2.0)
    first, second = data(given.plot_html())["panels"]
    reach = float((given.values - 2.0).abs().max())
    assert (first["scale"], first["center"], first["most"]) == ("zero", 2.0, pytest.approx(reach))
    assert second["most"] == first["most"]
    (panel,) = data(abs(given[0]).plot_html())["panels"]
    assert (panel["scale"], panel["center"]) == ("one", 0.0)
    (panel,) = data(given[0].plot_html(center=1.0, title="mine"))["panels"]
    assert panel["center"] == 1.0


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(HooklineError, match="two axes"):
        result(2, 3, 4)[0, 0, 0].plot_html()
    with pytest.raises(HooklineError, match="too many"):
        result(49, 2, 2).plot_html()
    with pytest.raises(HooklineError, match="center"):
        result(3).plot_html(center=1.0)
    with pytest.raises(HooklineError, match="theme"):
        result(3).plot_html(theme="blue")


def test_missing_cells_stay_missing() -> None:
    values = torch.tensor([[1.0, float("nan")], [float("inf"), -2.0]])
    given = Result(values, ("layer", "head"), {"layer": [0, 1], "head": [0, 1]}, complete=False)
    (panel,) = data(given.plot_html())["panels"]
    assert np.isnan(numbers(panel["values"])).tolist() == [[False, True], [True, False]]
    assert panel["most"] == 2.0


def test_a_page_is_small_strict_and_harmless(tmp_path) -> None:
    label = "</script><script>alert(1)</script>"
    given = Result(torch.ones(1, 1), ("point", "head"), {"point": [label], "head": [0]}, name=label)
    page = given.plot_html()
    assert len(str(page)) < 60_000
    assert str(page).count("<script") == 2
    assert "default-src 'none'" in str(page)
    assert "connect-src 'none'" in str(page)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", str(page))
    assert page.save(tmp_path / "page.html").read_text(encoding="utf-8") == str(page)
    frame = page._repr_html_()
    assert frame.startswith("<iframe srcdoc=")
    assert frame.count("<") == 2  # the page is an attribute


def test_attention_and_tokens_check_their_shapes() -> None:
    texts = ["a", "b", "c"]
    assert data(figures.attention_map(texts, torch.eye(3)))["panels"][0]["names"] == ["head 0"]
    panel = data(figures.colored_tokens(texts, torch.tensor([[0.0, 2.0, 1.0], [0.0, -1.0, 0.5]])))["panels"][0]
    assert (panel["most"], panel["scales"], panel["names"]) == ([2.0, 1.0], ["one", "zero"], ["row 0", "row 1"])
    for wrong in (torch.eye(2), torch.ones(3), torch.ones(1, 1, 3, 3)):
        with pytest.raises(HooklineError):
            figures.attention_map(texts, wrong)
    with pytest.raises(HooklineError, match="3 tokens"):
        figures.colored_tokens(texts, [1.0, 2.0])
    with pytest.raises(HooklineError, match="names"):
        figures.colored_tokens(texts, [1.0, 2.0, 3.0], names=["one", "two"])
