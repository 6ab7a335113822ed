"""Results: labels, parts, what they are turned into, files, pictures, and what is refused."""

import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from hookline import HooklineError
from hookline.experiments.core.labels import token_labels
from hookline.experiments.result import Result

TENSORS_ON_CPU = True

TOKENS = token_labels(["<bos>", "When", " Mary", " and", " John", "\n", " Mary"])


@pytest.fixture
def result():
    return Result(
        torch.randn(4, 7),
        ("layer", "pos"),
        {"layer": range(4), "pos": TOKENS},
        name="logit_diff",
        info={"clean": 3.0, "corrupted": -1.0, "direction": "denoise"},
    )


@pytest.fixture
def several():
    """Two metrics of three layers, with a baseline for each metric."""
    metric = {"metric": ["logit_diff", "prob"]}
    return Result(
        torch.randn(2, 3),
        ("metric", "layer"),
        {**metric, "layer": [0, 1, 2]},
        info={
            "clean": Result(torch.tensor([3.0, 0.9]), ("metric",), metric),
            "corrupted": Result(torch.tensor([-1.0, 0.1]), ("metric",), metric),
            "seed": 5,
        },
    )


def same(a, b):
    assert (a.axes, a.coords, a.name, a.complete) == (b.axes, b.coords, b.name, b.complete)
    assert torch.equal(a.values.nan_to_num(9e9), b.values.nan_to_num(9e9))
    assert a.info.keys() == b.info.keys()
    for key, value in a.info.items():
        if isinstance(value, Result):
            same(value, b.info[key])
        else:
            assert value == b.info[key]


# Parts


def test_a_label_drops_its_axis(result):
    row = result.sel(layer=2)
    assert (row.axes, row.shape) == (("pos",), (7,))
    assert torch.equal(row.values, result.values[2])
    assert result.sel(layer=2, pos="4: John").item() == float(result.values[2, 4])


def test_lists_and_slices_of_labels_keep_it(result):
    part = result.sel(layer=slice(1, 2), pos=["4: John", 0])
    assert part.coords == {"layer": [1, 2], "pos": ["4: John", "0: <bos>"]}
    assert torch.equal(part.values, result.values[1:3][:, [4, 0]])
    assert result.sel(layer=slice(None, None, 2)).coords["layer"] == [0, 2]


def test_a_position_is_found_by_its_number_and_its_token(result):
    for asked in (4, "John", " John", np.int64(4), torch.tensor(4)):
        same(result.sel(pos=asked), result.sel(pos="4: John"))


def test_a_head_is_found_with_its_layer():
    heads = Result(torch.randn(3, 5), ("layer", "head"), {"layer": [2, 3, 4], "head": range(5)})
    assert heads.sel(head="L3H4").item() == heads.sel(layer=3, head=4).item() == float(heads.values[1, 4])
    assert heads.sel(layer=3, head="L3H4").item() == float(heads.values[1, 4])
    with pytest.raises(HooklineError, match="in layer 2"):
        heads.sel(layer=2, head="L3H4")
    flat = Result(torch.randn(2), ("head",), {"head": ["L3H4", "L0H1"]})
    assert flat.sel(head="L0H1").item() == float(flat.values[1])


@pytest.mark.parametrize("key", [0, -1, slice(1, 3), (1, 2), (slice(None), -1), (..., 3), (2, ...), ([0, 2], 1), ...])
def test_places_are_those_of_the_tensor(result, key):
    assert torch.equal(result[key].values, result.values[key])


def test_coordinates_go_along(result):
    assert result[:, 2:4].coords == {"layer": [0, 1, 2, 3], "pos": ["2: Mary", "3: and"]}
    assert [row.values.tolist() for row in result] == result.values.tolist()


def test_baselines_per_metric_are_selected_along(several):
    assert several.sel(metric="prob").info == {"clean": pytest.approx(0.9), "corrupted": pytest.approx(0.1), "seed": 5}
    assert several.sel(metric=["prob"]).info["clean"].coords == {"metric": ["prob"]}
    assert several.sel(layer=1).info["clean"].shape == (2,)
    assert several.mean("metric").info["clean"] == pytest.approx((3.0 + 0.9) / 2)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda r: r.sel(layer=4), "no label 4"),
        (lambda r: r.sel(layer=-1), r"isel\(layer=-1\)"),
        (lambda r: r.sel(layer=True), "no label True"),
        (lambda r: r.sel(layer=None), "no label None"),
        (lambda r: r.sel(pos="Jon"), "Did you mean '4: John'"),
        (lambda r: r.sel(pos="Mary"), "'2: Mary', '6: Mary'"),
        (lambda r: r.sel(position=1), "no axis 'position'"),
        (lambda r: r.sel(layer=slice(3, 1)), "selects nothing"),
        (lambda r: r.sel(layer=slice(0, 9)), "no label 9"),
        (lambda r: r.sel(layer=[]), "not an index"),
        (lambda r: r.isel(layer=4), "index 4"),
        (lambda r: r.isel(layer=[True, False, True, True]), "not an index"),
        (lambda r: r.isel(layer=[1, 1]), "twice"),
        (lambda r: r["layer"], r"sel\(…\)"),
        (lambda r: r[None], "not an index"),
        (lambda r: r[0, 0, 0], "too many indices"),
        (lambda r: r[..., ...], "too many indices"),
        (lambda r: r.mean("head"), "no axis 'head'"),
        (lambda r: r.item(), "28"),
        (float, "28"),
        (lambda r: iter(r[0, 0]), "one number"),
        (lambda r: r.top(0), "got 0"),
        (lambda r: r.top(2.0), "got 2.0"),
        (lambda r: r.top(2, by="size"), "by must be"),
    ],
)
def test_a_part_that_is_not_there(result, ask, message):
    with pytest.raises(HooklineError, match=message):
        ask(result)


# Making one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": ("layer",)}, "1 axes"),
        ({"axes": ("layer", "layer")}, "different names"),
        ({"axes": ("layer", "value")}, '"value"'),
        ({"axes": "layer"}, "axes are names"),
        ({"axes": ("layer", "a b")}, "axes are names"),
        ({"coords": {"layer": range(4)}}, "coords must"),
        ({"coords": {"layer": range(4), "pos": range(6)}}, "7 but 6 labels"),
        ({"coords": {"layer": range(4), "pos": [1, 2, 3, 4, 5, 6, 1]}}, "the label 1 twice"),
        ({"coords": {"layer": [0, 1, 2, None], "pos": range(7)}}, "'layer' has None"),
        ({"coords": {"layer": [0, 1, 2, True], "pos": range(7)}}, "'layer' has True"),
        ({"values": "numbers"}, "not str"),
        ({"values": torch.ones(4, 7, dtype=torch.complex64)}, "real numbers"),
        ({"values": torch.ones(0, 7), "coords": {"layer": [], "pos": range(7)}}, "is empty"),
        ({"info": {"model": object()}}, r"info\['model'\]"),
        ({"info": {1: 2}}, "keys of info"),
        ({"info": {"clean": Result(torch.ones(1), ("metric",), {"metric": ["a"]})}}, "is not among"),
        ({"info": {"clean": Result(torch.ones(4), ("layer",), {"layer": [1, 2, 3, 4]})}}, "has other labels"),
    ],
)
def test_what_cannot_be_a_result(result, change, message):
    with pytest.raises(HooklineError, match=message):
        replace(result, **change)


def test_it_is_a_value_of_its_own():
    values, labels = torch.ones(2, requires_grad=True), [0, 1]
    made = Result(values, ("layer",), {"layer": labels})
    labels.append(2)
    with torch.no_grad():
        values.zero_()
    assert made.values.tolist() == [1.0, 1.0]
    assert not made.values.requires_grad
    assert made.coords == {"layer": [0, 1]}
    with pytest.raises(FrozenInstanceError):
        made.name = "other"


def test_values_are_floats():
    kinds = {torch.bfloat16: torch.float32, torch.float64: torch.float64, torch.int64: torch.float64}
    for given_dtype, kept in kinds.items():
        assert Result(torch.ones(2, dtype=given_dtype), ("a",), {"a": [0, 1]}).values.dtype == kept


def test_labels_of_tokens_say_what_is_blank():
    assert token_labels([" Mary", "\n", " "]) == ["0: Mary", "1: '\\n'", "2: ' '"]


# Numbers


def test_the_cells_that_stand_out(result):
    flat = result.values.flatten()
    for by, key in (("abs", flat.abs()), ("value", flat), ("lowest", -flat)):
        cells = result.top(5, by=by)
        assert [result.sel(**cell.labels).item() for cell in cells] == [cell.value for cell in cells]
        assert [cell.value for cell in cells] == flat[key.argsort(descending=True)[:5]].tolist()
    assert "layer  pos" in repr(result.top(3))
    assert "<table>" in result.top(3)._repr_html_()


def test_an_effect_is_measured_from_the_run_that_was_changed():
    coords, info = {"layer": [0, 1, 2]}, {"clean": 10.0, "corrupted": -12.0}
    made = Result(torch.tensor([-13.0, 8.0, -1.0]), ("layer",), coords, info={**info, "direction": "denoise"})
    assert [cell.value for cell in made.top(3, by="effect")] == [8.0, -1.0, -13.0]
    assert "top  layer 1 = 8 · " in repr(made)
    noised = replace(made, info={**info, "direction": "noise"})
    assert [cell.value for cell in noised.top(3, by="effect")] == [-13.0, -1.0, 8.0]
    assert [cell.labels for cell in noised.normalized.top(3, by="effect")] == [{"layer": at} for at in (0, 2, 1)]
    with pytest.raises(HooklineError, match="no baseline 'clean'"):
        replace(made, info={}).top(1, by="effect")


def test_cells_not_done_are_left_out():
    values = torch.tensor([[1.0, torch.nan], [torch.nan, -2.0]])
    part = Result(values, ("a", "b"), {"a": [0, 1], "b": [0, 1]}, complete=False)
    assert [cell.value for cell in part.top(9)] == [-2.0, 1.0]
    assert "incomplete: 2 of 4 cells" in repr(part)
    assert part.mean().values.isnan()
    nothing = Result(torch.full((2,), torch.nan), ("a",), {"a": [0, 1]}, complete=False)
    assert "no cell done" in repr(nothing)
    assert nothing.top(1) == []
    assert repr(nothing.top(1)) == "value"


def test_mean_is_the_tensors(result):
    assert torch.equal(result.mean("pos").values, result.values.mean(1))
    assert result.mean("pos").axes == ("layer",)
    assert result.mean().item() == pytest.approx(float(result.values.mean()))


def test_difference(result):
    assert torch.equal((result - result).values, torch.zeros(4, 7))
    assert torch.equal((result - result.sel(layer=0)).values, result.values - result.values[0])
    assert torch.equal((result - result.mean("pos")).values, result.values - result.values.mean(1, keepdim=True))
    assert torch.equal((result - 1.5).values, result.values - 1.5)
    assert (result - result).info == {"direction": "denoise"}
    assert not (result - replace(result, complete=False)).complete
    with pytest.raises(HooklineError, match="among"):
        result.sel(layer=0) - result
    with pytest.raises(HooklineError, match="other labels"):
        result - result[:2]
    with pytest.raises(TypeError):
        result - "one"


def test_normalised_is_one_at_clean_and_zero_at_corrupted(result):
    ends = replace(result[0, :2], values=torch.tensor([3.0, -1.0])).normalized
    assert ends.values.tolist() == [1.0, 0.0]
    again = ends.normalized
    assert torch.equal(again.values, ends.values)


def test_normalised_by_metric(several):
    for metric in ("logit_diff", "prob"):
        alone, among = several.sel(metric=metric).normalized, several.normalized.sel(metric=metric)
        assert torch.allclose(alone.values, among.values)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, "no clean and no corrupted run"),
        ({"clean": 1.0}, "no corrupted run"),
        ({"clean": 2.0, "corrupted": 2.0}, "same logit_diff"),
        ({"clean": 2.0, "corrupted": 2.0 + 1e-9}, "same logit_diff"),
        ({"clean": float("nan"), "corrupted": 2.0}, "NaN"),
        ({"clean": "high", "corrupted": 2.0}, r"info\['clean'\]"),
    ],
)
def test_normalised_needs_baselines_that_differ(result, info, message):
    with pytest.raises(HooklineError, match=message):
        replace(result, info=info).normalized


def test_normalised_names_the_metric_without_effect(several):
    flat = replace(several, info={**several.info, "corrupted": replace(several.info["clean"])})
    with pytest.raises(HooklineError, match="'metric': 'logit_diff'"):
        flat.normalized


# Other forms


def test_arrays_and_tensors(result):
    assert torch.equal(torch.as_tensor(result), result.values)
    assert np.array_equal(np.asarray(result), result.numpy())
    assert np.asarray(result, dtype=np.float64).dtype == np.float64
    result.numpy()[:] = 0
    assert result.values.abs().sum() > 0


def test_dict_is_plain(several):
    plain = several.to_dict()
    assert plain["values"] == several.values.tolist()
    assert plain["info"]["clean"]["coords"] == {"metric": ["logit_diff", "prob"]}


def test_dataframe_is_tidy(result):
    pytest.importorskip("pandas", reason="pandas comes with hookline[data]")
    table = result.to_dataframe()
    assert list(table.columns) == ["layer", "pos", "value"]
    for row in table.itertuples():
        assert row.value == result.sel(layer=row.layer, pos=row.pos).item()
    assert result[0, 0].to_dataframe()["value"].tolist() == [result[0, 0].item()]


def test_xarray_has_the_same_labels(several):
    pytest.importorskip("xarray", reason="xarray comes with hookline[data]")
    array = several.to_xarray()
    assert array.dims == several.axes
    assert float(array.sel(metric="prob", layer=2)) == several.sel(metric="prob", layer=2).item()
    assert array.attrs == {"seed": 5, "complete": True}


@pytest.mark.parametrize(
    ("library", "verb", "extra"),
    [("pandas", "to_dataframe", "data"), ("xarray", "to_xarray", "data"), ("matplotlib", "plot", "plot")],
)
def test_a_library_that_is_not_there(result, monkeypatch, library, verb, extra):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(HooklineError, match=rf'{verb} needs {library}.*"hookline\[{extra}\]"'):
        getattr(result, verb)()


def test_repr_tells(result):
    text = repr(result)
    best = result.top(1, by="effect")[0]
    assert text.startswith("Result logit_diff [layer 4 × pos 7], ")
    assert "clean 3, corrupted -1, direction denoise" in text
    assert f"layer {best.labels['layer']}, pos {best.labels['pos']} = {best.value:.4g}" in text
    assert repr(result[0, 0]).startswith(f"Result logit_diff = {result[0, 0].item():.4g}")


def test_repr_of_baselines_that_are_no_numbers(result):
    assert "clean When Mary" in repr(replace(result, info={"clean": "When Mary", "corrupted": True}))


def test_html_is_escaped(result):
    assert "0: &lt;bos&gt;" in replace(result[:, :1])._repr_html_()
    assert "<bos>" not in result._repr_html_()
    assert result[0, 0]._repr_html_().startswith("<p>")


# Files


def test_what_is_saved_comes_back(result, several, tmp_path):
    partial = replace(result, values=result.values.index_fill(0, torch.tensor([3]), torch.nan), complete=False)
    for each in (result, several, partial, result[0, 0], result[:, ::2]):
        each.save(tmp_path / "result.safetensors")
        same(Result.load(tmp_path / "result.safetensors"), each)


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    labels=st.lists(st.text() | st.integers(), min_size=1, max_size=5, unique=True),
    name=st.text(),
    info=st.dictionaries(st.text(), plain_values, max_size=3),
)
def test_any_labels_and_info_come_back(tmp_path_factory, labels, name, info):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    made = Result(torch.randn(len(labels)), ("a",), {"a": labels}, name, info)
    made.save(path)
    same(Result.load(path), made)


def test_every_changed_byte_is_noticed(several, tmp_path):
    path = tmp_path / "result.safetensors"
    several.save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            same(Result.load(path), several)  # white space in the header, say
        except HooklineError:
            continue
    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(HooklineError, match=r"file.*result"):
            Result.load(path)


def test_foreign_files_are_refused(result, tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"values": torch.ones(2)}, path)
    with pytest.raises(HooklineError, match=r"Result\.save"):
        Result.load(path)
    save_file({"values": torch.ones(2)}, path, {"hookline": "activations"})
    with pytest.raises(HooklineError, match=r"Result\.save"):
        Result.load(path)
    save_file({"values": torch.ones(2)}, path, {"hookline": "result", "version": "99"})
    with pytest.raises(HooklineError, match="update hookline"):
        Result.load(path)
    save_file({"values": torch.ones(2)}, path, {"hookline": "result", "version": "1"})
    with pytest.raises(HooklineError, match="damaged"):
        Result.load(path)
    path.write_text("layer,pos\n")
    for bad in (path, tmp_path, tmp_path / "nothing"):
        with pytest.raises(HooklineError, match=r"file.*result"):
            Result.load(bad)
    with pytest.raises(HooklineError, match="written"):
        result.save(tmp_path / "no" / "folder")


# Pictures


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib comes with hookline[plot]")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def grid(rows, columns, *, words=False):
    labels = token_labels([f" word{'y' * (at % 9)}" for at in range(columns)]) if words else range(columns)
    return Result(torch.randn(rows, columns), ("layer", "pos"), {"layer": range(rows), "pos": labels})


def labels_of(axis):
    return [label for label in axis.get_ticklabels() if label.get_text()]


def assert_apart(axis):
    """The labels that are drawn do not overlap, and there are some."""
    axis.get_figure(root=True).canvas.draw()
    boxes = [label.get_window_extent() for label in labels_of(axis)]
    assert boxes
    assert not any(a.overlaps(b) for at, a in enumerate(boxes) for b in boxes[:at])


@pytest.mark.quick_for("shape0", "shape1", "shape4")
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (12, 16), (32, 64), (80, 400), (3, 128)])
def test_labels_never_overlap(pyplot, shape, words):
    ax = grid(*shape, words=words).plot()
    assert_apart(ax.xaxis)
    assert_apart(ax.yaxis)
    ax.figure.set_size_inches(3, 2)
    assert_apart(ax.xaxis)
    assert_apart(ax.yaxis)


def test_every_label_is_drawn_where_there_is_room(pyplot):
    shown = grid(12, 16, words=True)
    ax = shown.plot()
    ax.figure.canvas.draw()
    assert [label.get_text() for label in labels_of(ax.xaxis)] == shown.coords["pos"]
    assert [label.get_text() for label in labels_of(ax.yaxis)] == list(map(str, range(12)))


def test_colours_are_as_far_on_both_sides(pyplot):
    shown = grid(3, 4)
    reach = float(shown.values.abs().max())
    assert shown.plot().images[0].get_clim() == pytest.approx((-reach, reach))
    low, high = shown.plot(center=1.0).images[0].get_clim()
    assert (low + high) / 2 == pytest.approx(1.0)
    assert shown.plot(vmin=-9, vmax=5).images[0].get_clim() == (-9, 5)
    assert shown.plot(cmap="PiYG").images[0].get_cmap().name == "PiYG"
    zeros = replace(shown, values=torch.zeros(3, 4)).plot()
    assert zeros.images[0].get_clim() == (-1, 1)


def test_a_line_with_its_baselines(pyplot, result):
    ax = result.sel(pos=4).plot(color="green")
    assert ax.lines[0].get_ydata().tolist() == result.sel(pos=4).values.tolist()
    assert ax.lines[0].get_color() == "green"
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {"clean", "corrupted"}
    assert_apart(result.sel(layer=1).plot().xaxis)


def test_metrics_have_panels_with_scales_of_their_own(pyplot):
    values = torch.stack([torch.randn(3, 4) * 10, torch.rand(3, 4)])
    coords = {"metric": ["logit_diff", "prob"], "layer": range(3), "pos": range(4)}
    figure = Result(values, ("metric", "layer", "pos"), coords).plot()
    panels = [ax for ax in figure.axes if ax.images]
    assert [ax.get_title(loc="left") for ax in panels] == ["logit_diff", "prob"]
    assert [ax.images[0].get_clim()[1] for ax in panels] == pytest.approx(values.abs().amax((1, 2)).tolist())


def test_other_panels_share_a_scale(pyplot):
    values = torch.randn(5, 3, 4)
    coords = {"point": list("abcde"), "layer": range(3), "pos": range(4)}
    made = Result(values, ("point", "layer", "pos"), coords)
    panels = [ax for ax in made.plot().axes if ax.images]
    assert len(panels) == 5
    assert {ax.images[0].get_clim()[1] for ax in panels} == {float(values.abs().max())}
    assert len([ax for ax in made.plot(panels="layer").axes if ax.images]) == 3
    lines = [ax for ax in made.isel(point=0).plot(panels="layer").axes if ax.lines]
    assert len({ax.get_ylim() for ax in lines}) == 1


def test_cells_not_done_are_drawn_as_such(pyplot, result):
    values = result.values.clone()
    values[2:] = torch.nan
    ax = replace(result, values=values, complete=False).plot()
    assert ax.images[0].get_array().mask.tolist() == values.isnan().tolist()
    assert "incomplete: 14 of 28 cells" in ax.get_title(loc="left")
    ax.figure.canvas.draw()


def test_odd_tokens_can_be_drawn(pyplot):
    odd = token_labels(["$a$", "$", "$$", "\n", "中文", "x" * 80, "a_b^c", "\\frac", ""])
    ax = Result(torch.randn(2, 9), ("layer", "pos"), {"layer": [0, 1], "pos": odd}, name="$x$ 中").plot()
    ax.figure.canvas.draw()
    texts = [label.get_text() for label in labels_of(ax.xaxis)]
    assert len(texts) == 9
    assert max(map(len, texts)) <= 20


@pytest.mark.parametrize("token", ["$$", "$$x$$", "\\$", "$\\frac$"])
def test_dollar_signs_are_not_mathematics(pyplot, token):
    result = Result(torch.randn(3), ("pos",), {"pos": token_labels([token, "b", token])}, name=token)
    result.plot().figure.canvas.draw()
    Result(torch.randn(2, 1), ("head", "pos"), {"head": ["a", token], "pos": [token]}).plot().figure.canvas.draw()


def test_values_from_zero_up_get_one_color(pyplot):
    image = replace(grid(3, 4), values=torch.rand(3, 4) + 0.1).plot().images[0]
    assert image.get_cmap().name == "Blues"
    assert image.get_clim()[0] == 0.0


def test_the_bar_shows_only_values_that_occur(pyplot):
    """A probability of 0.2, changed to as much as 0.9, is colored from -0.5 on; the bar begins at 0.05."""
    coords = {"layer": [0], "pos": [0, 1, 2]}
    info = {"direction": "denoise", "clean": 0.9, "corrupted": 0.2}
    ax = Result(torch.tensor([[0.05, 0.2, 0.9]]), ("layer", "pos"), coords, "prob", info).plot()
    assert ax.images[0].get_clim() == pytest.approx((-0.5, 0.9))
    bar = next(other for other in ax.figure.axes if other is not ax)
    assert bar.get_ylim() == pytest.approx((0.05, 0.9))


def test_categories_get_bars_and_layers_a_line(pyplot):
    heads = Result(torch.randn(5), ("head",), {"head": range(5)}).plot()
    assert [bar.get_height() for bar in heads.patches] == heads.containers[0].datavalues.tolist()
    assert len(heads.patches) == 5
    layers = Result(torch.randn(5), ("layer",), {"layer": range(5)}).plot()
    assert not layers.patches
    assert len(layers.lines[0].get_xdata()) == 5


def test_a_result_over_a_count_is_drawn_as_curves(pyplot):
    values, orders = torch.randn(2, 6), ["as ranked", "reversed"]
    ax = Result(values, ("order", "count"), {"order": orders, "count": range(6)}, info={"clean": 1.0}).plot()
    assert not ax.images
    curves = {line.get_label(): line.get_ydata().tolist() for line in ax.lines if len(line.get_xdata()) == 6}
    assert curves == dict(zip(orders, values.tolist(), strict=True))
    assert [text.get_text() for text in ax.get_legend().get_texts()].count("clean") == 1


def test_the_title_says_what_was_done_and_on_which_model(pyplot, result):
    info = {**result.info, "about": "resid_pre patched, clean into corrupted", "model": "tinyworld"}
    title = replace(result, info=info).plot().get_title(loc="left").replace("\n", " ")
    assert title == "logit_diff: resid_pre patched, clean into corrupted · tinyworld"


def test_of_too_many_categories_the_strongest_are_drawn(pyplot):
    values = torch.zeros(301, 570)
    values[7, 500] = -3.0
    coords = {"sender": [f"s{at}" for at in range(301)], "receiver": [f"r{at}" for at in range(570)]}
    ax = Result(values, ("sender", "receiver"), coords).plot()
    assert ax.images[0].get_array().shape == (40, 40)
    assert float(ax.images[0].get_array().min()) == -3.0
    assert "40 of 301 senders, 40 of 570 receivers" in ax.get_title(loc="left").replace("\n", " ")


def test_cells_thinner_than_a_pixel_are_merged_and_the_strongest_is_seen(pyplot):
    values = torch.zeros(2, 5000)
    values[1, 4321] = 1.0
    ax = Result(values - 0.5 * values.roll(9, 1), ("layer", "dim"), {"layer": [0, 1], "dim": range(5000)}).plot()
    drawn = ax.images[0].get_array()
    assert drawn.shape[1] <= 900
    assert float(drawn[1].max()) == 1.0
    assert float(drawn[1].min()) == -0.5
    assert ax.get_xlim() == (-0.5, 4999.5)


@pytest.fixture
def shell(pyplot) -> Iterator[Any]:
    """An IPython shell that shows figures as a notebook does."""
    pytest.importorskip("IPython", reason="needs IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from matplotlib_inline.backend_inline import configure_inline_support
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    pyplot.switch_backend("module://matplotlib_inline.backend_inline")
    configure_inline_support(shell, "inline")
    with pyplot.rc_context({"interactive": True}):
        yield shell
    configure_inline_support(shell, "agg")
    pyplot.switch_backend("agg")
    InteractiveShell.clear_instance()


@pytest.mark.parametrize("cell", ["several.plot()", "figure = several.plot()", "several.plot().set_dpi(80)"])
def test_a_notebook_shows_panels_once(shell, several, cell):
    """Whether or not the cell ends with the figure: pyplot shows what is open when the cell is over."""
    from IPython.utils.capture import capture_output

    shell.user_ns["several"] = several
    with capture_output() as shown:
        shell.run_cell(cell).raise_error()
    assert [list(each.data).count("image/png") for each in shown.outputs] == [1]


def test_it_draws_where_it_is_told(pyplot, result):
    _, axes = pyplot.subplots(1, 2)
    assert result.plot(axes[1], title="here") is axes[1]
    assert axes[1].get_title(loc="left") == "here"
    assert not axes[0].images


def test_a_second_line_keeps_the_title(pyplot, result):
    ax = result.sel(layer=0).plot(title="two layers")
    result.sel(layer=1).plot(ax)
    assert ax.get_title(loc="left") == "two layers"
    result.sel(layer=2).plot(ax, title="three layers")
    assert ax.get_title(loc="left") == "three layers"


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda r, ax: r[0, 0].plot(), "one or two axes"),
        (lambda r, ax: r.plot(ax, panels="layer"), "omit ax"),
        (lambda r, ax: r.plot(panels="head"), "no axis 'head'"),
        (lambda r, ax: r[0].plot(center=1.0), "center"),
        (lambda r, ax: r.plot(center=1.0, vmax=3), "center"),
        (lambda r, ax: r.plot(cmap="no colors"), "'no colors'"),
        (lambda r, ax: r.plot(vmin=100.0), "vmin below vmax"),
        (lambda r, ax: grid(60, 2).plot(panels="layer"), "60 panels"),
        (
            lambda r, ax: Result(torch.ones(1, 1, 1, 1), tuple("abcd"), {axis: [0] for axis in "abcd"}).plot(),
            "one or two axes",
        ),
    ],
)
def test_what_cannot_be_drawn(pyplot, result, draw, message):
    with pytest.raises(HooklineError, match=message):
        draw(result, pyplot.subplots()[1])


def test_options_that_matplotlib_does_not_know_are_errors(pyplot, result):
    with pytest.raises(AttributeError, match="colour"):
        result.plot(colour="red")
    with pytest.raises(AttributeError, match="colour"):
        result[0].plot(colour="red")


def test_bars_of_many_categories() -> None:
    values = torch.full((80,), 5.0)
    values[7], values[70] = 4.0, 9.0
    result = Result(values, ("component",), {"component": [f"C{at}" for at in range(80)]}, "x", {"clean": 5.0})
    ax = result.plot()
    bars = ax.patches
    assert len(bars) == 40
    assert "strongest: 40 of 80 components" in ax.get_title(loc="left")
    assert {(bar.get_y(), bar.get_height()) for bar in bars} >= {(5.0, -1.0), (5.0, 4.0)}
    ax.figure.canvas.draw()
    assert not ax.get_legend().get_window_extent().overlaps(ax.get_window_extent())


def test_a_number_given_as_text() -> None:
    result = Result(torch.zeros(8), ("head",), {"head": list(range(8))})
    with pytest.raises(HooklineError, match=r"'4'.*head=4"):
        result.sel(head="4")
