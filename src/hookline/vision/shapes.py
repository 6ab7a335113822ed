"""Shapes of a plan, from a run: what models do with pictures depends on the data, so that it cannot be left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline.engine.hooked import Hooked
from hookline.engine.plan import Plan, Row


def with_shapes(model: Hooked, plan: Plan, inputs: Mapping[str, Any]) -> Plan:
    """The plan with the shapes that its points have in a run on these inputs; no activation is kept."""
    names = [row.name for row in plan.rows]
    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs, names_filter=names, device="meta")
    calls: dict[str, list[Tensor]] = {}
    for name, value in cache.items():
        calls.setdefault(name.partition("#")[0], []).append(value)  # a module that ran several times has a # for each
    return Plan(tuple(_with_shape(row, calls.get(row.name, [])) for row in plan.rows), plan.modules)


def _with_shape(row: Row, calls: list[Tensor]) -> Row:
    if not calls:
        return replace(row, calls=0)
    return replace(row, shape=tuple(calls[0].shape), dtype=calls[0].dtype, calls=len(calls))
