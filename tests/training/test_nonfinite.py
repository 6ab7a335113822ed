"""find_nonfinite: values planted at known modules, forward, backward, in half precision, compiled."""

import math

import pytest
import torch
from torch import nn

import hookline
from hookline import HooklineError
from hookline.errors import HooklineWarning
from hookline.training import NonFiniteError, find_nonfinite


class Planted(nn.Module):
    """Passes its input on, with one value that is not finite."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = x.clone()
        new.view(-1)[2] = self.value
        return new


class Root(nn.Module):
    """The root of a distance: its gradient at 0 is NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0).abs().sqrt()


def nested(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), *layers), nn.Linear(4, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_innermost_module_forward(value) -> None:
    module, x = nested(Planted(value), nn.ReLU()), torch.randn(3, 4)
    inputs = module[1][0](module[0](x))
    with pytest.raises(NonFiniteError) as raised, find_nonfinite(module):
        module(x)
    first = raised.value.first
    assert (first.point, first.what) == ("1.1", "output")
    assert isinstance(raised.value, HooklineError)
    assert f"{inputs.min().item():.4g} to {inputs.max().item():.4g}" in str(raised.value)
    assert "1 NaN of 12" in str(raised.value) or "1 infinite of 12" in str(raised.value)
    assert not any(child._forward_hooks for child in module.modules())


def test_without_raising_the_run_continues() -> None:
    module, x = nested(Planted(math.nan)), torch.randn(3, 4)
    with find_nonfinite(module, raises=False) as found:
        assert found.first is None
        output = module(x)
    assert found.first.point == "1.1"
    assert output.isnan().any()
    with find_nonfinite(nested(), raises=False) as found:
        assert nested()(x).isfinite().all()
    assert found.first is None


def test_what_backward_makes() -> None:
    module = nested(Root())
    with pytest.raises(NonFiniteError) as raised, find_nonfinite(module):
        module(torch.randn(3, 4)).sum().backward()
    assert (raised.value.first.point, raised.value.first.what) == ("1.1", "gradient of the input")
    assert "float32 [3, 4] from" in str(raised.value)


def test_a_gradient_that_code_between_modules_makes(mlp) -> None:
    with find_nonfinite(mlp, raises=False) as found:
        (mlp(torch.randn(3, 4)) * 0).abs().sqrt().sum().backward()
    assert found.first.what == "gradient of the output"
    assert found.first.point in ("fc2", "output")


def test_a_gradient_of_a_parameter() -> None:
    """The sum over rows overflows, though every gradient of an activation is finite."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(NonFiniteError) as raised, find_nonfinite(module):
        (module(torch.full((9, 4), 1e4)) * 1e38).sum(1).backward(torch.full((9,), 0.5))
    assert raised.value.first.what == "gradient"
    assert raised.value.first.point in ("1.bias", "1.weight")


def test_half_precision() -> None:
    module = nested()
    with torch.no_grad():
        module[1][0].weight.mul_(1e5)
    with pytest.raises(NonFiniteError) as raised, find_nonfinite(module), torch.autocast("cpu", dtype=torch.float16):
        module(torch.ones(3, 4) * 100)
    assert raised.value.first.point == "1.0"
    assert "float16" in str(raised.value)


def test_compiled_code_runs_uncompiled_and_says_so() -> None:
    module = nested(Planted(math.nan))
    compiled = torch.compile(module, backend="eager")
    x = torch.randn(3, 4)
    compiled(x)
    with pytest.warns(HooklineWarning), pytest.raises(NonFiniteError) as raised, find_nonfinite(compiled):
        compiled(x)
    assert raised.value.first.point == "1.1"


def test_a_language_model(monkeypatch) -> None:
    model = hookline.load("tinyworld")
    with find_nonfinite(model):
        model("Mary went", return_type="loss").backward()
    model.zero_grad()

    def poisoned(h):
        h[0, 1, 3] = math.inf

    hooks = model.hooks([("blocks.2.mlp.hook_post", poisoned)])
    with hooks, pytest.raises(NonFiniteError) as raised, find_nonfinite(model):
        model("Mary went")
    assert raised.value.first.point == "transformer.h.2.mlp.c_proj"
    assert "1 infinite" in str(raised.value)
