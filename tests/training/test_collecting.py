"""collect: statistics over batches, against numpy in float64 on all rows at once."""

import numpy as np
import pytest
import torch
from networks import MLP, Twice
from torch import nn

import hookline
from hookline import HooklineError, NeverFiredWarning, UnknownPointError
from hookline.errors import HooklineWarning
from hookline.training import absolute_max, collect, covariance, mean, second_moment

ALL = {"mean": mean, "cov": covariance, "second": second_moment, "max": absolute_max}


def rows_of(batches: list[torch.Tensor]) -> np.ndarray:
    return torch.cat([batch.reshape(-1, batch.shape[-1]) for batch in batches]).double().numpy()


@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_statistics_are_those_of_all_rows(offset) -> None:
    batches = [torch.randn(size, 3, 4) + offset for size in (5, 1, 9, 2)]
    rows = rows_of(batches)
    module = nn.Identity()
    for side in ("in", "out"):
        values = collect(nn.Sequential(module), "0", {side: ALL}, batches)["0"][side]
        np.testing.assert_allclose(values["cov"], np.cov(rows.T), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(values["mean"], rows.mean(0), rtol=1e-12)
        np.testing.assert_allclose(values["second"], rows.T @ rows / len(rows), rtol=1e-12)
        np.testing.assert_allclose(values["max"], np.abs(rows).max(0))


def test_modules_by_class_and_by_name(mlp) -> None:
    batches = [torch.randn(6, 4) for _ in range(3)]
    by_class = collect(mlp, nn.Linear, {"in": covariance, "out": absolute_max}, batches)
    assert list(by_class) == ["fc1", "fc2"]
    hidden = rows_of([mlp.act(mlp.fc1(batch)).detach() for batch in batches])
    np.testing.assert_allclose(by_class["fc2"]["in"], np.cov(hidden.T), rtol=1e-5, atol=1e-9)
    assert torch.equal(by_class["fc1"]["out"], mlp.fc1(torch.cat(batches)).abs().amax(0))
    assert list(collect(hookline.hook(mlp), "fc1", {"in": mean}, batches)) == ["fc1"]
    assert list(collect(mlp, ["fc2", "act"], {"out": mean}, batches)) == ["act", "fc2"]


def test_every_call_of_a_module_counts() -> None:
    module, x = Twice(), torch.randn(5, 4)
    inputs = rows_of([x, module.cell(x).detach(), module.cell(module.cell(x)).detach()])
    np.testing.assert_allclose(collect(module, "cell", {"in": mean}, [x])["cell"]["in"], inputs.mean(0), rtol=1e-5)


def test_padding_is_no_row() -> None:
    model, name = hookline.load("tinyworld"), "transformer.h.0.ln_1"
    texts = ["Mary went to the store", "John"]
    alone = rows_of([model.cache(text, names_filter=name)[name] for text in texts])
    values = collect(model, name, {"out": {"mean": mean, "cov": covariance}}, [texts])[name]["out"]
    np.testing.assert_allclose(values["mean"], alone.mean(0), atol=1e-5)
    np.testing.assert_allclose(values["cov"], np.cov(alone.T), atol=1e-5)


def test_batches_as_loaders_yield_them(mlp) -> None:
    x, labels = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    expected = collect(mlp, "fc1", {"in": mean}, [x])["fc1"]["in"]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=4)
    assert torch.allclose(collect(mlp, "fc1", {"in": mean}, loader)["fc1"]["in"], expected)
    assert torch.equal(collect(mlp, "fc1", {"in": mean}, ({"x": batch} for batch in [x]))["fc1"]["in"], expected)


def test_mistakes(mlp) -> None:
    x = torch.randn(3, 4)
    for wrong in ({"inputs": mean}, {}, {"in": torch.mean}, {"in": 3}):
        with pytest.raises(HooklineError):
            collect(mlp, "fc1", wrong, [x])
    with pytest.raises(UnknownPointError):
        collect(mlp, nn.Conv2d, {"in": mean}, [x])
    with pytest.raises(HooklineError):
        collect(mlp, "fc1", {"in": covariance}, [x[:1]])
    with pytest.warns(HooklineWarning):
        collect(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)), "1", {"in": mean}, [x])


def test_a_module_that_is_not_called_is_left_out() -> None:
    module = MLP()
    module.unused = nn.Linear(2, 2)
    with pytest.warns(NeverFiredWarning):
        assert list(collect(module, nn.Linear, {"in": mean}, [torch.randn(3, 4)])) == ["fc1", "fc2"]


def test_a_tensor_is_no_batches(mlp) -> None:
    with pytest.raises(HooklineError):
        collect(mlp, nn.Linear, {"in": mean}, torch.randn(6, 4))
