"""Relevance patching: relevance in place of gradients, for every point of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, Unpack, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.engine import HookPoint, compiling
from hookline.errors import HooklineError
from hookline.experiments.attribution import Estimate, checked_options
from hookline.experiments.core.aligned import PromptPositions
from hookline.experiments.core.continuations import prompt_pair
from hookline.experiments.core.integration import Line, Traced, gradients_of
from hookline.experiments.core.labels import about, said_points
from hookline.experiments.core.measure import ExampleOptions, Options
from hookline.experiments.core.prompts import Prompt, Prompts, check_weights_stay, has_same_shape
from hookline.experiments.core.sweep import SweepPoints, sweep_points
from hookline.experiments.patching import Direction, into
from hookline.experiments.relevance.difference_rules import DifferenceRules
from hookline.experiments.relevance.relevance_rules import Attention, Rules
from hookline.experiments.result import Result
from hookline.functions.listed_options import lists
from hookline.model import HookedModel

_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How much relevance may be lost by rounding, as a share of all of it; 1e-4 in other dtypes."""
RuleSet: TypeAlias = Literal["zero", "difference"]
_STREAMS = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")


@lists(ExampleOptions, Options)
def relevance(
    model: HookedModel,
    clean: Prompt,
    corrupted: Prompt,
    metric: Any,
    *,
    points: str | Sequence[str] = "resid_pre",
    over: str | Sequence[str] = ("layer", "pos"),
    direction: Direction = "denoise",
    layers: Sequence[int] | None = None,
    rules: RuleSet = "zero",
    attention: Attention = "frozen",
    positions: PromptPositions = None,
    check: int = 16,
    seed: int = 0,
    **options: Unpack[ExampleOptions],
) -> Result:
    """Estimate, from relevance, what `patching.sweep` with the same arguments would measure.

        >>> relevance.relevance(model, clean, corrupted, metric, points="mlp_out", over=("layer", "pos")).axes
        ('layer', 'pos')

    As `attribution.attribution_patching`, at about the same cost, but the gradient is that of a linear model with the
    same activations: denominators of norms are constants, an activation function is its input times a constant, and
    the product of a gate and a value is shared equally between them. With `attention="frozen"`, attention patterns are
    constants, too (RelP), so that queries and keys have no relevance; with "split", they share it with the values
    (AttnLRP); with "gradient", attention is taken to first order, which estimates heads better.

    With `rules="difference"`, the linear model is not one through zero, but one between the two runs: every function
    has the slope between its two values, and what is multiplied by the difference of the inputs is the difference of
    the metrics (DeepLIFT's rule, for norms, products and attention, too). It takes about as long as integrated
    gradients of five steps.

    The rules are found by the torch functions that the model calls. That they cover this model is checked in this run:
    the relevance of the input must be the metric, without what biases and other constants bring about. Otherwise an
    error says where relevance is lost. `info["conservation"]` is the share that is lost, at most 1e-4 in float32, and
    `info["constants"]` the part of the metric that is due to constants. `positions` are as in `patching.sweep`.
    Further options: per_example, batch_size, progress.
    """
    how = checked_options(direction, None, "activations", check, options)
    if attention not in get_args(Attention):
        raise HooklineError(f'attention is "frozen", "split" or "gradient", got {attention!r}')
    if rules not in get_args(RuleSet):
        raise HooklineError(f'rules is "zero" or "difference", got {rules!r}')
    if rules == "difference" and attention != "frozen":
        raise HooklineError(f"rules='difference' has its own rule for attention: leave out attention={attention!r}")
    check_weights_stay(model, "relevance")
    where = sweep_points(model, points, over, layers)
    _check_points(model, where)
    metric, pair = prompt_pair(model, clean, corrupted, metric, may_differ=positions is not None)
    target, source = (pair[1], pair[0]) if direction == "denoise" else (pair[0], pair[1])
    if rules == "difference" and not has_same_shape(*pair):
        raise HooklineError("rules='difference' needs clean and corrupted prompts of the same length: use rules='zero'")
    if rules == "difference":
        line: _LinearLine = _DifferenceLine(model, target, where.names, source)
    else:
        line = _LinearLine(model, target, where.names, attention)
    said = about(model, f"{said_points(points)} patched, {into(direction)}, estimated from relevance")
    said |= {"direction": direction, "rules": rules} | ({"attention": attention} if rules == "zero" else {})
    return Estimate(line, where, pair, direction, how, check, seed, positions).result(metric, said)


def _check_points(model: HookedModel, where: SweepPoints) -> None:
    """Relevance is followed from the metric to the input of the first layer, not to images or embeddings."""
    stack = model.anatomy.main.name
    for point in where.points.values():
        if point.canonical_name.partition(".")[0] not in (stack, "ln_final", "unembed"):
            raise HooklineError(
                f"relevance is computed at the points of the {stack}, not at {point.name!r}: use resid_pre of the "
                f"first layer for the embeddings, or attribution.attribution_patching"
            )


def _streams(model: HookedModel) -> list[str]:
    """The points of the residual stream, in order."""
    anatomy, points = model.anatomy, model.index
    names = [f"{points.layer(layer)}.{name}" for layer in range(len(anatomy.blocks)) for name in _STREAMS]
    streams = [name for name in names if name in points.hook_dict]
    if names[0] not in streams:
        raise HooklineError(
            f"{names[0]} is not available in {anatomy.kind}, so relevance cannot be followed to the input: use "
            f"attribution.attribution_patching"
        )
    return streams


class _LinearLine(Line):
    """The start of a line, in a run whose gradients are those of the rules."""

    def __init__(self, model: HookedModel, prompts: Prompts, points: list[str], attention: Attention) -> None:
        self.streams, self.attention, self.asked = _streams(model), attention, points
        super().__init__(model, prompts, list(dict.fromkeys([*points, *self.streams])), None, "activations")
        self.info = {"conservation": 0.0, "constants": 0.0}
        self._at_zero: Traced | None = None

    def _ran(self, rows: Sequence[int], hooks: list[Any], *, with_grad: bool) -> Float[Tensor, "batch pos vocab"]:
        if not with_grad:
            return super()._ran(rows, hooks, with_grad=with_grad)
        self._rules, self._rows, self._at_zero = Rules(self.attention), rows, None
        with self._rules:
            self._logits = super()._ran(rows, [*self._rules.hooks(self.model.module), *hooks], with_grad=True)
        return self._logits

    def _without_input(self) -> Traced:
        """The logits and streams of the linear model without an input: what its constants bring about."""
        activations: dict[str, Tensor] = {}

        def note(x: Tensor, hook: HookPoint) -> None:
            activations[hook.name] = x if x.requires_grad else x.requires_grad_()  # as in the run with gradients

        hooks: list[Any] = [*self._rules.hooks(self.model.module), (self.streams[0], _zeros)]
        hooks += [(name, note) for name in self.points]  # as in the first run, so that the same functions are called
        with self._rules.replayed(), torch.enable_grad(), compiling.left_out("relevance needs gradients"):
            logits = super()._ran(self._rows, hooks, with_grad=True)
        return logits.detach(), {name: x.detach() for name, x in activations.items()}

    def _of_metric(
        self, metric: Callable[[Tensor], Any], name: str, logits: Tensor, activations: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        self._at_zero = self._at_zero or self._without_input()
        logits_at_zero, at_zero = self._at_zero
        gradients = gradients_of(metric, name, logits, {**activations, "logits": self._logits})
        of_logits = gradients.pop("logits")
        end = _relevance(self._logits - logits_at_zero, of_logits)
        relevances = {
            stream: _relevance(activations[stream] - at_zero[stream], gradients[stream]) for stream in self.streams
        }
        self._check(name, {**relevances, "the logits": end}, logits.dtype)
        self._check_zeros(gradients)
        self.info["constants"] += float((logits_at_zero * of_logits).sum()) / len(self.prompts)
        return gradients

    def _check(self, name: str, by_place: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Raise unless the relevance of the input is that of the logits."""
        size = max(float(x.abs().sum()) for x in by_place.values()) or 1.0
        sums = {place: float(x.sum()) / size for place, x in by_place.items()}
        first, (*_, last) = self.streams[0], sums
        lost, allowed = abs(sums[first] - sums[last]), _TOLERANCE.get(dtype, 1e-4)
        self.info["conservation"] = max(self.info["conservation"], lost)
        if lost <= allowed:
            return
        places = list(sums)
        before = max(at for at, place in enumerate(places[:-1]) if abs(sums[place] - sums[last]) > allowed)
        raise HooklineError(
            f"the relevance of {name} is not conserved between {places[before]} and {places[before + 1]}: it is "
            f"{sums[places[before]] * size:.4g} before and {sums[places[before + 1]] * size:.4g} after. The model "
            f"computes something there that no rule covers: use attribution.attribution_patching (steps=8)"
        )

    def _check_zeros(self, gradients: dict[str, Tensor]) -> None:
        """Raise if a point has no relevance because patterns are constants."""
        flat = next((name for name in self.asked if not bool(gradients[name].any())), None)
        if flat is not None and self.attention == "frozen":
            raise HooklineError(
                f"nothing at {flat!r} is relevant: with attention='frozen', patterns are constants, and what they are "
                f"computed from has no relevance. Use attention='gradient' or 'split'"
            )


class _DifferenceLine(_LinearLine):
    """The start of a line, in a run whose gradients are those of the rules between it and another run."""

    def __init__(self, model: HookedModel, prompts: Prompts, points: list[str], other: Prompts) -> None:
        super().__init__(model, prompts, points, "gradient")
        self.other, self.info = other, {"conservation": 0.0}
        self._there: dict[str, Tensor] = {}  # the streams of the other run

    def _ran(self, rows: Sequence[int], hooks: list[Any], *, with_grad: bool) -> Float[Tensor, "batch pos vocab"]:
        if not with_grad:
            return super()._ran(rows, hooks, with_grad=with_grad)
        rules, self._there = DifferenceRules(), {}

        def note(x: Tensor, hook: HookPoint) -> None:
            self._there[hook.name] = (x if x.requires_grad else x.requires_grad_()).detach()  # as in the other run

        original_prompts, self.prompts = self.prompts, self.other
        try:
            with torch.enable_grad(), rules.recorded():
                noted = [*rules.hooks(self.model.module), *((name, note) for name in self.points)]
                self._end = Line._ran(self, rows, noted, with_grad=True).detach()
        finally:
            self.prompts = original_prompts
        with rules:
            self._logits = Line._ran(self, rows, [*rules.hooks(self.model.module), *hooks], with_grad=True)
        return self._logits

    def _of_metric(
        self, metric: Callable[[Tensor], Any], name: str, logits: Tensor, activations: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        gradients = gradients_of(metric, name, logits, {**activations, "logits": self._logits})
        end = _relevance(self._end - self._logits, gradients.pop("logits"))
        relevances = {
            stream: _relevance(self._there[stream] - activations[stream], gradients[stream]) for stream in self.streams
        }
        self._check(name, {**relevances, "the logits": end}, logits.dtype)
        return gradients


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x).requires_grad_()


def _relevance(x: Tensor, gradient: Tensor) -> Float[Tensor, "batch pos"]:
    """The activation times the gradient at each position."""
    return (x.detach().float() * gradient.float()).sum(-1)
