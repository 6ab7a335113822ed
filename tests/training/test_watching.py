"""watch: numbers equal to plain torch on the same tensors, nothing attached between due steps, warnings in words."""

import copy
import csv
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline import HooklineError, NeverFiredWarning
from hookline.engine import open_runs
from hookline.training import tensor_statistics, watch

STATISTICS = ("mean", "std", "norm", "zeros", "max", "nonfinite")


def by_hand(x: torch.Tensor) -> dict[str, float]:
    x = x.double()
    return {
        "mean": x.mean().item(),
        "std": x.std().item(),
        "norm": x.norm().item(),
        "zeros": (x == 0).double().mean().item(),
        "max": x.abs().max().item(),
        "nonfinite": int((~x.isfinite()).sum()),
    }


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def run_by_hand(module: nn.Module, batch: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
    """Activations and gradients of all layers, by hooks of torch, and the gradients of parameters."""
    seen = {}

    def keep(name):
        def hook(_module, _args, output):
            seen[name, "activation"] = output.detach().clone()
            output.register_hook(lambda grad: seen.__setitem__((name, "gradient"), grad.clone()))

        return hook

    handles = [child.register_forward_hook(keep(name)) for name, child in module.named_children()]
    module(batch).square().mean().backward()
    for handle in handles:
        handle.remove()
    return seen | {(name, "gradient"): parameter.grad.clone() for name, parameter in module.named_parameters()}


def test_statistics_are_those_of_the_tensors() -> None:
    module, batch = cnn(), torch.randn(5, 1, 8, 8)
    expected = run_by_hand(copy.deepcopy(module), batch)
    with watch(module, every=1) as record:
        module(batch).square().mean().backward()
    assert {(row.point, row.kind) for row in record.rows} == {*expected}
    for row in record.rows:
        for name, value in by_hand(expected[row.point, row.kind]).items():
            assert getattr(row.statistics, name) == pytest.approx(value, rel=1e-4, abs=1e-7), (
                row.point,
                row.kind,
                name,
            )
    assert all(row.step == 0 for row in record.rows)


def test_far_from_zero_and_in_half_precision() -> None:
    module = nn.Identity()
    for x in (torch.randn(64, 64) + 1e4, (torch.randn(300, 300) * 100).half(), torch.randn(7, 3).double()):
        x.requires_grad_()
        with watch(module, points="output", every=1) as record:
            module(x)
        row = record.rows[0]
        for name, value in by_hand(x.detach()).items():
            assert getattr(row.statistics, name) == pytest.approx(value, rel=1e-3, abs=1e-6), name


def test_a_step_is_a_training_forward(mlp, x) -> None:
    optimizer = torch.optim.SGD(mlp.parameters(), 0.1)
    with watch(hookline.hook(mlp), every=3) as record:
        for _ in range(5):
            optimizer.zero_grad()
            mlp(x).square().mean().backward()
            optimizer.step()
            mlp.eval()
            mlp(x)
            mlp.train()
            with torch.no_grad():
                mlp(x)
        assert {row.step for row in record.rows} == {0, 3}
    assert {row.step for row in record.rows} == {0, 3}
    table = record.to_dataframe()
    assert list(table.columns) == ["step", "point", "kind", *STATISTICS]
    assert {"fc1.weight", "fc2.bias"} <= {*table[table.kind == "gradient"].point}


def test_nothing_is_attached_between_due_steps(mlp, x) -> None:
    hooked = []

    def count(_x) -> None:
        hooked.append(len(open_runs()))

    with watch(mlp, every=4):
        for _ in range(5):
            hooked.append(any(module._forward_hooks for module in mlp.children()))
            mlp.act.forward = lambda h: (count(h), nn.functional.gelu(h))[1]
            mlp(x).sum().backward()
            assert not open_runs()
    assert hooked == [False, 1, False, 0, False, 0, False, 0, False, 1]
    assert not mlp._forward_hooks
    assert not mlp._forward_pre_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in mlp.parameters())


def test_training_is_the_same_with_and_without() -> None:
    batches = [torch.randn(4, 1, 8, 8) for _ in range(4)]
    torch.manual_seed(0)
    plain = cnn()
    watched = copy.deepcopy(plain)
    for module, every in ((plain, None), (watched, 2)):
        optimizer = torch.optim.Adam(module.parameters())
        context = watch(module, every=every) if every else torch.enable_grad()
        with context:
            for batch in batches:
                optimizer.zero_grad()
                module(batch).square().mean().backward()
                optimizer.step()
    for before, after in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(before, after)


def test_updates_are_relative_to_the_weights(mlp, x) -> None:
    optimizer = torch.optim.SGD(mlp.parameters(), 0.1)
    with watch(mlp, points=["fc1"], every=2) as record:
        for step in range(4):
            mlp(x).square().mean().backward()
            before = mlp.fc1.weight.detach().clone()
            if step % 2:  # gradients of two batches are accumulated
                optimizer.step()
                expected = ((mlp.fc1.weight - before).norm() / before.norm()).item()
                optimizer.zero_grad()
    assert {update.point for update in record.updates} == {"fc1.weight", "fc1.bias"}
    assert [update.step for update in record.updates if update.point == "fc1.weight"] == [0, 2]
    assert record.updates[-2].ratio == pytest.approx(expected, rel=1e-5)
    assert list(record.updates_to_dataframe().columns) == ["step", "point", "ratio"]


def test_dead_units_are_found_and_said(caplog) -> None:
    module = cnn()
    with torch.no_grad():
        module[1].bias[:3] = -100
        module[1].bias[3] = 100
    with watch(module, every=1) as record:
        for _ in range(2):
            module(torch.randn(5, 1, 8, 8)).sum().backward()
    assert record.dead_units()["2"] == [0, 1, 2]
    assert any(warning.startswith("2: 3 of 4 units") for warning in record.warnings)
    assert sum("3 of 4 units" in entry.getMessage() for entry in caplog.records) == 1
    assert "3 of 4 units" in repr(record)


def test_a_unit_that_was_alive_once_is_not_dead() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with torch.no_grad():
        module[0].weight.copy_(torch.eye(2))
        module[0].bias.zero_()
    with watch(module, every=1) as record:
        module(torch.tensor([[1.0, -1.0]]))
        module(torch.tensor([[-1.0, -1.0]]))
    assert record.dead_units() == {"1": [1]}


def test_vanishing_gradients_and_wrong_numbers_are_said() -> None:
    module = nn.Sequential(*[layer for _ in range(9) for layer in (nn.Linear(6, 6), nn.Sigmoid())])
    with watch(module, every=1) as record:
        module(torch.randn(4, 6)).sum().backward()
    assert any(warning.startswith("0: gradients") for warning in record.warnings)
    assert any(warning.startswith("0.weight: gradients") for warning in record.warnings)
    plain = nn.Linear(2, 2)
    with watch(plain, every=1) as record:
        plain(torch.full((1, 2), math.inf))
    assert record.rows[0].statistics.nonfinite == 2
    assert len(record.warnings) == 1


def test_where_rows_are_written(mlp, x, tmp_path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars = {}

        def add_scalar(self, tag, value, step) -> None:
            self.scalars[tag, step] = value

    class Run:
        def __init__(self) -> None:
            self.logged = []

        def log(self, values) -> None:
            self.logged.append(values)

    path, writer, run = tmp_path / "watch.csv", Writer(), Run()
    for to in (path, str(path), writer, run):
        with watch(mlp, every=1, to=to) as record:
            mlp(x).sum().backward()
    with path.open(newline="") as file:
        lines = [*csv.DictReader(file)]
    assert [*lines[0]] == ["step", "point", "kind", *STATISTICS]
    assert [(line["point"], line["kind"]) for line in lines] == [(row.point, row.kind) for row in record.rows]
    assert float(lines[0]["norm"]) == writer.scalars["activation/fc1/norm", 0] == run.logged[0]["activation/fc1/norm"]
    assert run.logged[0]["watch/step"] == 0


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_checkpointed_region(is_reentrant) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=is_reentrant))

    module, x = Net(), torch.randn(3, 4, requires_grad=True)
    with watch(module, every=1) as record:
        module(x).sum().backward()
    rows = {(row.point, row.kind): row.statistics for row in record.rows}
    expected = torch.ones(3, 2) @ module.last.weight
    assert rows["first", "gradient"].norm == pytest.approx(expected.norm().item(), rel=1e-5)
    assert rows["first", "activation"].norm == pytest.approx(module.first(x).norm().item(), rel=1e-5)


def test_a_module_that_is_called_often_is_one_point() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x):
            return self.cell(self.cell(x))

    module, x = Twice(), torch.randn(2, 3)
    with watch(module, points="cell", every=1) as record:
        module(x)
    both = torch.cat([module.cell(x), module(x)]).detach()
    assert record.rows[0].statistics.std == pytest.approx(by_hand(both)["std"], rel=1e-5)


def test_a_language_model_and_a_compiled_network(x, mlp) -> None:
    model = hookline.load("tinyworld").train()
    with watch(model, points=["blocks.*.hook_resid_post", "transformer.wte.weight"], every=1) as record:
        model("Mary went", return_type="loss").backward()
    assert {row.point for row in record.rows} == {
        *(f"blocks.{layer}.hook_resid_post" for layer in range(4)),
        "transformer.wte.weight",
    } | {row.point for row in record.rows if row.point.endswith((".weight", ".bias"))}
    model.eval()
    compiled = torch.compile(mlp, backend="eager")
    with watch(hookline.hook(compiled), every=2) as record:
        for _ in range(3):
            compiled(x).sum().backward()
    assert {row.step for row in record.rows} == {0, 2}


def test_the_callback_of_trainers(mlp, x) -> None:
    watching = watch(mlp, every=1)
    callback = watching.callback()
    for name in ("setup", "on_fit_start", "on_train_batch_end", "on_before_zero_grad", "teardown"):
        getattr(callback, name)(None, None)
    callback.on_train_begin(None, None, None, model=mlp)
    mlp(x).sum().backward()
    callback.on_train_end(None, None, None)
    assert {row.step for row in callback.record.rows} == {0}
    callback.on_train_start(None, None)
    assert mlp._forward_pre_hooks
    del callback
    assert not mlp._forward_pre_hooks


def test_mistakes_are_raised_before_anything_runs(mlp, x, tmp_path) -> None:
    for wrong in ({"every": 0}, {"to": 3}, {"to": tmp_path / "missing" / "x.csv"}, {"points": "nonsense"}):
        with pytest.raises(HooklineError):
            watch(mlp, **wrong)
    mlp.compile(backend="eager")
    with pytest.raises(HooklineError):
        watch(mlp)


def test_a_watch_without_steps_is_said(mlp, x) -> None:
    mlp.eval()
    with pytest.warns(NeverFiredWarning), watch(mlp):
        mlp(x)


def test_after_an_error_nothing_is_attached(mlp) -> None:
    with watch(mlp, every=1) as record:
        with pytest.raises(RuntimeError):
            mlp(torch.ones(1, 5))
        assert not open_runs()
        mlp(torch.ones(1, 4)).sum().backward()
    assert {row.step for row in record.rows} == {1}


def test_a_unit_that_dies_is_dead_later() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with torch.no_grad():
        module[0].weight.copy_(torch.eye(2))
        module[0].bias.zero_()
    with watch(module, every=1) as record:
        for step in range(5):
            module(torch.tensor([[1.0, 1.0 if step < 2 else -1.0]]))
            assert record.dead_units().get("1", []) == ([1] if step >= 4 else [])


def test_a_backward_pass_after_other_forward_passes(mlp, x) -> None:
    """As with two views of each image: the gradients are those of the step that was due."""
    with watch(mlp, every=10) as record:
        outputs = [mlp(x), mlp(2 * x)]
        (outputs[0].sum() + outputs[1].sum()).backward()
    rows = {(row.point, row.kind): row.statistics for row in record.rows}
    assert rows["fc2", "gradient"].norm == pytest.approx(15**0.5)
    assert rows["fc2", "activation"].norm == pytest.approx(outputs[0].norm().item(), rel=1e-5)


def test_globs_are_of_points_and_parameters(mlp, x) -> None:
    for points, expected in (
        ("fc*", {"fc1.input", "fc1", "fc2.input", "fc2", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}),
        ("*.weight", {"fc1.weight", "fc2.weight"}),
        (["act", "fc2.bias"], {"act", "fc2.bias"}),
    ):
        with watch(mlp, points, every=1) as record:
            mlp(x).sum().backward()
        assert {row.point for row in record.rows} == expected


def test_what_is_never_called_or_returns_no_tensor_is_left_out() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(3))])
            self.empty, self.unused, self.nothing = nn.ModuleList(), nn.Linear(2, 2), Nothing()

        def forward(self, x):
            self.nothing(x)
            return x * self.weights[0]

    class Nothing(nn.Module):
        def forward(self, x):
            return None

    module = Odd()
    with watch(module, every=1) as record:
        module(torch.randn(2, 3)).sum().backward()
    assert {row.point for row in record.rows} == {"weights.0"}
    with watch(module, "nothing", every=1), pytest.raises(HooklineError):
        module(torch.randn(2, 3))


def test_a_network_in_a_compiled_one_is_compiled_once(mlp, x) -> None:
    graphs, runs = [], []

    def backend(graph, _inputs):
        graphs.append(graph)
        return lambda *inputs: runs.append(graph) or graph(*inputs)

    compiled = torch.compile(mlp, backend=backend)
    with watch(mlp, every=3) as record:
        for _ in range(6):
            compiled(x).sum().backward()
    assert len(graphs) == 1
    assert len(runs) == 4
    assert {row.step for row in record.rows} == {0, 3}


@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 300), (9,), (2, 3, 4, 5)])
@pytest.mark.parametrize("on_host", [True, False])
def test_counts_and_moments_are_exact(monkeypatch, shape, on_host) -> None:
    monkeypatch.setattr(tensor_statistics, "_is_on_host", lambda _x: on_host)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(shape).relu().to(dtype)
        for axis in (None, *(range(len(shape)) if len(shape) > 1 else ())):
            others = [other for other in range(x.ndim) if other != axis]
            counts = tensor_statistics.nonzero_counts(x, axis)
            assert torch.equal(counts.long(), (x != 0).sum(others))
            assert tensor_statistics.moments_of(x, counts).nonzero == x.count_nonzero()
    x.view(-1)[:3] = torch.tensor([math.nan, math.inf, 0.0])
    counts = tensor_statistics.nonzero_counts(x)
    assert counts.sum() == x.count_nonzero()
    assert tensor_statistics.moments_of(x, counts).nonfinite == 2
