"""Random programs with hooks, which TransformerLens and hookline both run: contexts, resets, filters, errors.

`trace(model, tokens, seed)` runs one program and returns what can be observed: which hooks fired, where and in which
order, what they received, the keys of caches, the outputs of the model, and the hooks of each point.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

NAMES = (
    *("blocks.0.hook_resid_pre", "blocks.0.attn.hook_z", "blocks.1.hook_mlp_out", "blocks.1.mlp.hook_post"),
    *("blocks.2.hook_resid_post", "blocks.1.attn.hook_pattern", "blocks.0.ln2.hook_scale", "hook_embed"),
)
FILTERS: dict[str, Callable[[str], bool]] = {
    "mlp": lambda name: "mlp" in name,
    "z": lambda name: name.endswith("hook_z"),
    "ln_final": lambda name: "ln_final" in name,
    "first layer": lambda name: name.startswith("blocks.0.") and ".ln1." not in name,  # called three times there
    "attn": lambda name: "attn" in name,
    "in": lambda name: name.endswith("_in"),
    "embed": lambda name: "embed" in name,
    "all": lambda name: True,
}
FLAGS = ("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in")


class StoppedError(Exception):
    """The exception that hooks of a program raise."""


class Program:
    """A running program."""

    def __init__(self, model: Any, tokens: Tensor, seed: int) -> None:
        self.model, self.tokens, self.random = model, tokens, random.Random(seed)
        self.seen: list[Any] = []
        self.count = 0

    def run(self) -> list[Any]:
        """Run the program; return everything that was recorded."""
        self.set_flags(False)
        self.model.reset_hooks(including_permanent=True)
        try:
            self.set_flags(None)
            self.steps(self.random.randint(3, 7), depth=0)
        finally:
            self.model.reset_hooks(including_permanent=True)
            self.set_flags(False)
        return self.seen

    def set_flags(self, is_on: bool | None) -> None:
        """Set all flags, or a random subset. They decide which points a filter matches when a hook is added."""
        is_grouped = self.model.cfg.n_key_value_heads is not None
        for flag in FLAGS[: -1 if is_grouped else None]:
            chosen = self.random.random() < 0.3 if is_on is None else is_on
            if flag != "use_attn_in" or not self.model.cfg.use_split_qkv_input:  # one or the other
                getattr(self.model, f"set_{flag}")(chosen)

    def steps(self, count: int, depth: int) -> None:
        """Run random steps."""
        kinds = (
            *(self.call, self.call, self.add, self.with_hooks, self.with_hooks, self.cached, self.reset, self.remove),
            *(self.look, self.fail, self.ctx, self.backward),
        )
        for _ in range(count):
            self.random.choice(kinds)()
            if depth < 2 and self.random.random() < 0.3:
                self.context(depth)

    def hook(self) -> Callable[..., Any]:
        """Return a hook that records its activation, and may change it."""
        self.count += 1
        number, kind = self.count, self.random.choice(("read", "scale", "shift", "read"))

        def fn(x: Tensor, hook: Any) -> Tensor | None:
            self.seen.append(["fired", number, hook.name, rounded(x)])
            hook.ctx["times"] = hook.ctx.get("times", 0) + 1
            return None if kind == "read" else x * 0.5 if kind == "scale" else x + 0.01

        return fn

    def where(self) -> Any:
        """Return a random name or filter."""
        if self.random.random() < 0.65:
            return self.random.choice(NAMES)
        return FILTERS[self.random.choice(["mlp", "z", "ln_final", "first layer", "in"])]

    def hooks(self, most: int = 2) -> list[Any]:
        """Return random pairs of names and hooks."""
        return [(self.where(), self.hook()) for _ in range(self.random.randint(1, most))]

    def call(self) -> None:
        """Run the model."""
        self.seen.append(["out", rounded(self.model(self.tokens))])

    def add(self) -> None:
        """Add a hook that stays."""
        permanent, prepend = self.random.random() < 0.3, self.random.random() < 0.3
        self.model.add_hook(self.random.choice(NAMES), self.hook(), is_permanent=permanent, prepend=prepend)

    def with_hooks(self) -> None:
        """Run with hooks, which may stay afterward."""
        resets, clears = self.random.random() < 0.7, self.random.random() < 0.3
        out = self.model.run_with_hooks(
            self.tokens, fwd_hooks=self.hooks(), reset_hooks_end=resets, clear_contexts=clears
        )
        self.seen.append(["out", rounded(out)])

    def context(self, depth: int) -> None:
        """Run more steps inside a context."""
        resets = self.random.random() < 0.7
        with self.model.hooks(fwd_hooks=self.hooks(), reset_hooks_end=resets):
            self.call()
            self.steps(self.random.randint(1, 3), depth + 1)

    def cached(self) -> None:
        """Cache the points that a filter selects."""
        name = self.random.choice(list(FILTERS))
        out, cache = self.model.run_with_cache(self.tokens, names_filter=FILTERS[name] if name != "all" else None)
        kept = [key for key in sorted(cache.keys()) if ".ln1." not in key]  # the last of three calls there
        self.seen.append(["cache", name, {key: rounded(cache[key]) for key in kept}, rounded(out)])

    def reset(self) -> None:
        """Reset some hooks."""
        direction, permanent = self.random.choice(("both", "fwd", "bwd")), self.random.random() < 0.3
        self.model.reset_hooks(self.random.random() < 0.5, direction, permanent)

    def remove(self) -> None:
        """Remove the hooks of one point."""
        self.model.hook_dict[self.random.choice(NAMES)].remove_hooks("both")

    def look(self) -> None:
        """Record how many hooks the points have."""
        points = [self.model.hook_dict[name] for name in NAMES]
        self.seen.append(["hooks", [len(point.fwd_hooks) for point in points], [p.has_hooks() for p in points]])

    def fail(self) -> None:
        """Run with a hook that raises, and catch the exception."""
        sign = StoppedError("stop")

        def fn(x: Tensor, hook: Any) -> None:  # noqa: ARG001
            raise sign

        try:
            self.model.run_with_hooks(self.tokens, fwd_hooks=[(self.random.choice(NAMES), fn)])
        except StoppedError as error:
            self.seen.append(["caught", error is sign])

    def ctx(self) -> None:
        """Record the `ctx` of the points."""
        self.seen.append(["ctx", [self.model.hook_dict[name].ctx.get("times", 0) for name in NAMES]])

    def backward(self) -> None:
        """Compute a loss and its gradient, with a backward hook that stays until it is reset."""
        fired: list[float] = []
        name = self.random.choice(NAMES[:5])
        hooks = [(name, lambda grad, hook: fired.append(rounded(grad)))]
        with torch.enable_grad(), self.model.hooks(bwd_hooks=hooks):
            self.model(self.tokens, return_type="loss").backward()
        self.seen.append(["gradient", name, fired])


def rounded(x: Tensor) -> float:
    """Return a number that identifies a tensor, up to rounding."""
    kept = x.detach().double().tril() if x.ndim == 4 and x.shape[-1] == x.shape[-2] else x.detach().double()
    return float(kept.abs().mean())


def trace(model: Any, tokens: Tensor, seed: int) -> list[Any]:
    """Return the trace of one program."""
    with torch.no_grad():
        seen = Program(model, tokens, seed).run()
    # Queries, keys and values are computed in parallel: their order does not matter.
    groups = ([*group] for _, group in groupby(seen, key=_side_by_side))
    return [entry for group in groups for entry in (sorted(group, key=_point) if _side_by_side(group[0]) else group)]


def _point(entry: list[Any]) -> str:
    return entry[2] if entry[0] == "fired" else ""


_BRANCHES = {f"hook_{branch}{kind}": kind or "projected" for branch in "qkv" for kind in ("_input", "")}


def _side_by_side(entry: list[Any]) -> str:
    """Return the kind of an entry whose order does not matter; an empty string for others."""
    return _BRANCHES.get(_point(entry).rpartition(".")[2], "")


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """Describe the first difference between two traces; None if there is none."""
    if isinstance(one, float) and isinstance(other, float):
        return None if abs(one - other) <= 1e-4 * (1 + abs(one)) else f"{where}: {one} and {other}"
    if isinstance(one, list) and isinstance(other, list):
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            if found := difference(a, b, f"{where}[{index}]"):
                return found
        return None if len(one) == len(other) else f"{where}: {len(one)} and {len(other)} entries: {one} {other}"
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{where}: keys {sorted(one.keys() ^ other.keys())}"
        return next((found for key in one if (found := difference(one[key], other[key], f"{where}[{key}]"))), None)
    return None if one == other else f"{where}: {one} and {other}"
