"""The laws that every lens obeys."""

import torch
from torch import Tensor

from hookline.values.structures import children, tensors_in


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    parts_a, parts_b = list(children(a)), list(children(b))
    if not parts_a:
        return type(a) is type(b) and a == b
    return (
        type(a) is type(b)
        and [k for k, _ in parts_a] == [k for k, _ in parts_b]
        and all(same(x, y) for (_, x), (_, y) in zip(parts_a, parts_b, strict=True))
    )


def check_laws(lens, value) -> None:
    before = [t.clone() for t in tensors_in(value)]
    seen = lens.get(value)
    a, b = torch.randn(seen.shape), torch.randn(seen.shape)
    assert torch.equal(lens.get(lens.put(value, a)), a)
    assert same(lens.put(value, seen), value)
    assert same(lens.put(lens.put(value, a), b), lens.put(value, b))
    assert all(torch.equal(t, old) for t, old in zip(tensors_in(value), before, strict=True)), "value was changed"
