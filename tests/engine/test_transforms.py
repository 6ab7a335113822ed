"""Edits inside the transforms of `torch.func`: `grad`, `jacrev`, `vmap`, `jvp`."""

import pytest
import torch
from torch import Tensor, nn

import hookline

X = torch.tensor([[0.3, -1.2, 0.7, 2.0], [1.1, 0.4, -0.6, -0.2]])


class Branches(nn.Module):
    """Uses a tensor twice: as the input of a module, and beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.first(x)
        return self.second(shared) + shared


class InPlace(nn.Module):
    """Relies on a module that writes in place to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        doubled = 2 * x
        self.relu(doubled)
        return doubled + 1


NET = Branches()
HOOKED = hookline.hook(Branches())


def by_hand(scale: Tensor) -> Tensor:
    return NET.second(scale * torch.ones(2, 4)) + NET.first(X)


def with_hookline(scale: Tensor) -> Tensor:
    with HOOKED.hooks([("second.input", lambda _x, hook: scale * torch.ones(2, 4))]):
        return HOOKED(X)


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.jacrev,
        torch.func.jacfwd,
        lambda f: torch.func.grad(lambda x: f(x).pow(2).sum()),
        lambda f: lambda x: torch.func.vmap(f)(torch.stack([x, 3 * x])),
        lambda f: lambda x: torch.func.vmap(torch.func.jacrev(f))(torch.stack([x, 3 * x])),
        lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones(()),)),
        lambda f: torch.func.jacrev(torch.func.jacrev(lambda x: f(x).pow(3).sum())),
    ],
    ids=["jacrev", "jacfwd", "grad", "vmap", "vmap of jacrev", "jvp", "twice"],
)
def test_an_edited_input_does_not_reach_what_is_beside_it(transform) -> None:
    torch.testing.assert_close(transform(with_hookline)(torch.tensor(1.5)), transform(by_hand)(torch.tensor(1.5)))


@pytest.mark.parametrize("inference", [False, True])
def test_vmap_in_inference_mode(inference) -> None:
    with torch.inference_mode(inference):
        found = torch.func.vmap(with_hookline)(torch.tensor([1.0, 2.0]))
        torch.testing.assert_close(found, torch.func.vmap(by_hand)(torch.tensor([1.0, 2.0])))


@pytest.mark.parametrize("inference", [False, True])
def test_writes_in_place_reach_the_caller(inference) -> None:
    """Each row of `vmap` has its own input, so that the model's own tensor is one of `vmap` too."""

    def found(x: Tensor) -> Tensor:
        model = hookline.hook(InPlace())
        with model.hooks([("relu.input", lambda value, hook: value - 1)]):
            return model(x)

    with torch.inference_mode(inference):
        torch.testing.assert_close(torch.func.vmap(found)(X), (2 * X - 1).relu() + 1)
        torch.testing.assert_close(found(X), (2 * X - 1).relu() + 1)


def test_the_gradient_through_a_write_in_place() -> None:
    def found(x: Tensor) -> Tensor:
        model = hookline.hook(InPlace())
        with model.hooks([("relu.input", lambda value, hook: value - 1)]):
            return model(x).sum()

    torch.testing.assert_close(torch.func.grad(found)(X), 2.0 * (2 * X > 1))
