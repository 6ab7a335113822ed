"""Penalties on activations and distances from a teacher, against losses that are written by hand."""

import copy

import pytest
import torch
from networks import MLP, Twice
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline import HookError, HooklineError
from hookline.errors import HooklineWarning
from hookline.training import distill, l1, l2, penalty


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.parametrize("function", [l1, l2])
def test_a_penalty_is_that_of_the_activation(mlp, x, function) -> None:
    hidden = mlp.act(mlp.fc1(x))
    (mlp.fc2(hidden).sum() + 0.1 * function(hidden)).backward()
    expected = gradients(mlp)
    mlp.zero_grad()
    both = sum(function(mlp.act(mlp.fc1(inputs))) for inputs in (x, 2 * x))
    with penalty(mlp, "act", function) as term:
        (mlp(x).sum() + 0.1 * term()).backward()
        for before, after in zip(expected, gradients(mlp), strict=True):
            torch.testing.assert_close(before, after)
        with pytest.raises(HooklineError):
            term()
        with torch.no_grad():
            mlp(x)
        with pytest.raises(HooklineError):
            term()
        mlp(x)
        mlp(2 * x)
        assert term().item() == pytest.approx(both.item())
    assert not any(module._forward_hooks for module in mlp.modules())


class Regions(nn.Module):
    def __init__(self, inner: nn.Module, is_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.is_reentrant = inner, is_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.is_reentrant)


def test_a_penalty_in_a_checkpointed_region(mlp) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with penalty(mlp, "act") as term:
        (mlp(x).sum() + term()).backward()
    expected = gradients(mlp)
    mlp.zero_grad()
    outer = Regions(mlp, False)
    with penalty(outer, "inner.act") as term:
        (outer(x).sum() + term()).backward()
    for before, after in zip(expected, gradients(mlp), strict=True):
        torch.testing.assert_close(before, after)
    reentrant = Regions(mlp, True)
    with penalty(reentrant, "inner.act"), pytest.raises(HookError):
        reentrant(x)


def test_a_penalty_under_autocast(mlp, x) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), penalty(mlp, ["act", "fc1"]) as term:
        loss = mlp(x).float().sum() + term()
    loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(mlp))


@pytest.mark.parametrize("points", [["act"], {"act": "act"}, "act"])
def test_the_distance_from_a_teacher(mlp, x, points) -> None:
    teacher = MLP()
    expected = nn.functional.mse_loss(mlp.act(mlp.fc1(x)), teacher.act(teacher.fc1(x)).detach())
    with distill(mlp, hookline.hook(teacher), points) as distance:
        mlp(x)
        term = distance(x)
        with pytest.raises(HooklineError):
            distance(x)
    assert torch.equal(term, expected)
    term.backward()
    assert mlp.fc1.weight.grad is not None
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_teacher_with_other_names_and_shapes(mlp, x) -> None:
    teacher = nn.Sequential(nn.Linear(4, 16), nn.GELU())
    fit = nn.Linear(8, 16)
    with distill(
        mlp, teacher, {"act": "1"}, lambda mine, theirs: nn.functional.mse_loss(fit(mine), theirs)
    ) as distance:
        mlp(x)
        distance(x).backward()
    assert fit.weight.grad.abs().sum() > 0
    with pytest.raises(HooklineError):
        distill(mlp, teacher, {"fc*": "1"})
    assert torch.equal(copy.deepcopy(mlp)(x), mlp(x))


def test_a_function_that_returns_no_single_number_raises(mlp, x) -> None:
    with pytest.raises(HooklineError):
        penalty(mlp, "act", "l1")
    for function in (lambda h: h.sum(1), lambda h: 0.5):
        with penalty(mlp, "act", function), pytest.raises(HookError):
            mlp(x)
    with distill(mlp, copy.deepcopy(mlp), ["act"], lambda h, other: (h - other).square()) as distance:
        mlp(x)
        with pytest.raises(HooklineError):
            distance(x)


def test_shapes_that_differ_are_not_broadcast(mlp, x) -> None:
    teacher = nn.Sequential(nn.Linear(x.shape[1], 1))
    with distill(mlp, teacher, {"fc1": "0"}) as distance:
        mlp(x)
        with pytest.raises(HooklineError):
            distance(x)
    with distill(
        mlp, teacher, {"fc1": "0"}, lambda h, other: (h.mean(1, keepdim=True) - other).square().mean()
    ) as term:
        mlp(x)
        assert term(x).ndim == 0


def test_a_student_whose_module_is_called_several_times() -> None:
    student, x = Twice(), torch.randn(3, 4)
    teacher = nn.Sequential(nn.Linear(4, 4))
    with distill(student, teacher, {"cell": "0"}), pytest.raises(HookError, match="cell#0"):
        student(x)
    with distill(student, teacher, {"cell#1": "0"}) as distance:
        student(x)
        student(x)
        distance(x)


def test_a_teacher_in_training_mode_is_warned_of(mlp, x) -> None:
    teacher = nn.Sequential(nn.Linear(4, 8), nn.Dropout())
    warned = pytest.warns(HooklineWarning)
    with warned, distill(mlp, teacher, {"fc1": "0"}):
        mlp(x)
