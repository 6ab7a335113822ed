"""Small modules for generated networks, each with one habit that real networks have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH = 8


class Scale(nn.Module):
    """Writes to its argument, and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.75)


class Clear(nn.Module):
    """Writes to a part of its argument, and returns nothing of it."""

    def forward(self, x: Tensor) -> Tensor:
        x[..., :1] = 0.5
        return x * 2


class Turn(nn.Module):
    """Returns a view of its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2).view_as(x)


class Same(nn.Module):
    """Returns a view of its argument with the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape)


class Store(nn.Module):
    """Writes its result to a buffer, and returns that."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach() + 0.5
        return self.last


class Count(nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 0.01


class Residual(nn.Module):
    """Has a child that works in place on what another one made, and ignores what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.act(h)
        return x + h


class Two(nn.Module):
    """Returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc(x)
        return h, h.relu()


class Named(nn.Module):
    """Takes keywords, a mask among them, and returns a dictionary with a nested list."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        h = self.fc(hidden) * scale
        if mask is not None:
            h = h.masked_fill(mask, 0.0)
        return {"hidden": h, "parts": [h[..., :4], h.tanh()], "scale": scale}


class Append(nn.Module):
    """Appends to the list that it gets, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, bank: list[Tensor]) -> None:
        bank.append(self.fc(bank[-1]).tanh())


class Fill(nn.Module):
    """Fills the dict that it gets, and a list in it, replaces an item, and returns the dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, cache: dict[str, Any]) -> dict[str, Any]:
        cache["keys"] = self.fc(cache["hidden"])
        cache["layers"].append(cache["last"] * 0.5)
        cache["last"] = cache["keys"].relu()
        return cache


class AttrDict(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        self.__dict__ = self


class Bundle(nn.Module):
    """Returns a dict whose items are attributes too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> AttrDict:
        h = self.fc(x)
        return AttrDict(hidden=h, gate=h.sigmoid())


@dataclass
class Output:
    """What `Wrapped` returns."""

    last: Tensor
    rest: tuple[Tensor, ...] = ()


class Wrapped(nn.Module):
    """Returns a dataclass that has the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Output:
        h = self.fc(x)
        return Output(h, (x, h))


class Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.num_heads, self.fused = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), 2, fused

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(WIDTH, -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(-2, -3) for part in parts)
        if self.fused:
            z = F.scaled_dot_product_attention(q, k, v)
        else:
            z = (q @ k.transpose(-1, -2) / math.sqrt(4)).softmax(-1) @ v
        return self.out(z.transpose(-2, -3).flatten(-2))


class Pieces(nn.Module):
    """Attention that treats two groups of tokens apart, as models with windows or registers do."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.num_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        first, second = q.split([1, x.shape[1] - 1], 2)
        mixed = [(group @ k.transpose(-1, -2)).softmax(-1) @ v for group in (first, second)]
        return torch.cat(mixed, 2).transpose(1, 2).flatten(2)


class Again(nn.Module):
    """Computes its child again during the backward pass."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.body, self.reentrant = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Drops(nn.Module):
    """Drops entries, also in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, device=x.device) < 0.75)


class Selective(nn.Module):
    """Computes its child again, with random numbers in it, but not the results that it keeps."""

    def __init__(self, *operators: str) -> None:
        super().__init__()
        first, second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.body, self.operators = nn.Sequential(first, nn.Tanh(), Drops(), second), operators

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.body(x)
        if not self.operators:
            return checkpoint(self.body, x, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(self.body, x, use_reentrant=False, context_fn=contexts)

    def policy(self, _context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_kept = operator.overloadpacket.__name__ in self.operators
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class Loop(nn.Module):
    """Calls its child several times, once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.cell(x).tanh()
        return self.cell(input=x)


class Numpy(nn.Module):
    """Looks at its argument through numpy, which could write to it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + float(x.detach().float().numpy().size) / 1000)


class Blind(nn.Module):
    """Writes to its argument where torch does not count it."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(0.5)
        return x + 1


class Own(nn.Module):
    """Has a parameter that it uses itself, and passes to a child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.act = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.act(self.scale)


class Sparse(nn.Module):
    """Passes a sparse tensor through children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x.relu().flatten(0, -2).to_sparse())).to_dense().view(x.shape)


class Jagged(nn.Module):
    """Passes a nested tensor through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(WIDTH, WIDTH), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x[0], x[1][:2]], layout=torch.jagged)
        rows = self.act(self.fc(rows)) + rows
        return x + torch.stack([rows.unbind()[0].mean(0), rows.unbind()[1].mean(0)])[:, None]


def weighted(layer: nn.Module) -> nn.Module:
    """A layer whose weight is computed from its direction and magnitude."""
    return parametrizations.weight_norm(layer)


def orthogonal() -> nn.Module:
    return parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))


NAMES = {
    **{name: value for name, value in globals().items() if isinstance(value, type) and issubclass(value, nn.Module)},
    **{"nn": nn, "torch": torch, "F": F, "weighted": weighted, "orthogonal": orthogonal},
}
"""What the sources of generated networks may name."""
