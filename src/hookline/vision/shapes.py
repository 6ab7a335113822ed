"""Shapes of a plan, taken from a real run: with images, shapes depend on the data and cannot be inferred."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.engine.hooked import Hooked
from hookline.engine.plan import Plan


def with_shapes(model: Hooked, plan: Plan, inputs: Mapping[str, Any]) -> Plan:
    """The plan with the shapes that its points have in a run on these inputs; no activation is kept."""
    names = [row.name for row in plan.rows]
    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs, names_filter=names, device="meta")
    calls: dict[str, list[Tensor]] = {}
    for name, value in cache.items():
        calls.setdefault(name.partition("#")[0], []).append(
            value
        )  # name#n: the n-th call of a module that ran several times
    return Plan(tuple(row.with_calls(calls.get(row.name, [])) for row in plan.rows), plan.modules)
