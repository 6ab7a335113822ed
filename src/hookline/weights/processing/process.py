"""Processing: weights rewritten so that the model says the same more simply, proved when done, and undone at will.

Nothing is written into any parameter: others are put in their place, and the very same objects come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from hookline.engine import compiling
from hookline.engine.blocks import Block, surely
from hookline.engine.taps import lock
from hookline.errors import HooklineError
from hookline.transformer.contexts import GradMode
from hookline.transformer.verify.probe import outcome
from hookline.weights.processing.centering import center_unembed, center_writers
from hookline.weights.processing.folding import fold_norms
from hookline.weights.processing.readers import Unhooked
from hookline.weights.processing.swaps import Swaps
from hookline.weights.processing.value_biases import fold_value_biases

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints

_STEPS = ("fold_ln", "fold_value_biases", "center_writing_weights", "center_unembed")
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Processing:
    """What is done to a model's weights at the moment, and why something was left out."""

    fold_ln: bool = False
    fold_value_biases: bool = False
    center_writing_weights: bool = False
    center_unembed: bool = False
    left_out: tuple[tuple[str, str], ...] = ()
    """What was neither asked for nor forbidden, and is not exact here; with the reason."""

    def __str__(self) -> str:
        done = [f"{name}: done" for name in _STEPS if getattr(self, name)]
        return "\n".join([*done, *(f"{name}: left out, since {why}" for name, why in self.left_out)])


_in_force: WeakKeyDictionary[nn.Module, tuple[Processing, Swaps]] = WeakKeyDictionary()


def _restore(root: nn.Module) -> None:
    if root in _in_force:
        _in_force[root][1].undo()
        _in_force.pop(root, None)


def processing_of(root: nn.Module) -> Processing | None:
    """What is done to the weights of a model; None if they are as they were."""
    return _in_force[root][0] if root in _in_force else None


class WeightProcessing:
    """Reversible processing of a language model's weights. A mixin: it needs the model's points and example tokens."""

    _points: ModelPoints
    module: nn.Module

    def example_tokens(self) -> Tensor:
        """Two short rows of tokens, to try things on."""
        raise NotImplementedError

    @property
    def processing(self) -> Processing | None:
        """What is done to the weights at the moment; None if they are as they were loaded."""
        return processing_of(self._points.root)

    def process_weights(
        self,
        *,
        fold_ln: bool | None = None,
        center_writing_weights: bool | None = None,
        center_unembed: bool | None = None,
        fold_value_biases: bool | None = None,
    ) -> Processing:
        """Rewrite the weights until `restore_weights`, so that the model gives the same log-probabilities.

        `fold_ln` moves the norms' weights and biases into the maps that read them (norms after an attention or an MLP
        stay); `fold_value_biases` moves the values' biases into the output's; `center_writing_weights` takes the mean
        out of what is written to the stream; `center_unembed` out of each position's logits. What is True is done or
        raises; what is None is done where it is exact, and `model.processing.left_out` says why not where not.

        Each step is proved by running the model before and after it. Every weight that is rewritten is held twice until
        restored. Do restore before saving, moving or training the model.
        """
        wanted = {
            "fold_ln": fold_ln,
            "fold_value_biases": fold_value_biases,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
        }
        if self.processing is not None:
            raise HooklineError(f"the weights are processed already ({self.processing!r}): restore_weights() first")
        swaps, left_out = Swaps(), {}
        root = self._points.root
        try:
            for name, is_wanted in wanted.items():
                if is_wanted is not False and (why := self._step(name, swaps)) is not None:
                    if is_wanted:
                        raise HooklineError(f"{name} is not exact on this model: {why}")
                    left_out[name] = str(why)
            done = {name: True for name, is_wanted in wanted.items() if is_wanted is not False and name not in left_out}
            if not done:
                reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items()) or "every option is False"
                raise HooklineError(f"there is nothing to process: {reasons}")
            found = Processing(**done, left_out=tuple(left_out.items()))
            _in_force[root] = found, swaps
            return found
        except BaseException:
            surely(swaps.undo)
            _in_force.pop(root, None)
            raise

    def restore_weights(self) -> None:
        """Put back the parameters that were there before `process_weights`: the same objects, ties and all."""
        _restore(self._points.root)

    def processed_weights(self, **options: bool | None) -> ProcessedWeights:
        """A block in which the weights are processed: see `process_weights`. They are as before on any way out."""
        return ProcessedWeights(self, options)

    def _step(self, name: str, swaps: Swaps) -> HooklineError | None:
        """Do one step and prove it; if it is refused or changes the outcome, undo it and give the reason."""
        done = len(swaps)
        try:
            with compiling.tracing_lock(), lock, Unhooked(self.module), GradMode(False):
                before = self._outcome()
                self._do(name, swaps, _ROUNDING.get(before.dtype, 5e-2))
                self._prove(before, is_shifted=name == "center_unembed")
        except HooklineError as error:
            swaps.undo(to=done)
            return error
        return None

    def _do(self, name: str, swaps: Swaps, tolerance: float) -> None:
        steps: dict[str, Callable[[], None]] = {
            "fold_ln": partial(fold_norms, self._points, swaps, self._outcome),
            "fold_value_biases": partial(fold_value_biases, self._points, swaps, self._outcome),
            "center_writing_weights": partial(center_writers, self._points, swaps, self._outcome, tolerance),
            "center_unembed": partial(center_unembed, self._points, swaps, self._outcome),
        }
        steps[name]()

    def _outcome(self) -> Tensor:
        """What the model gives for the example, with the same chance each time (dropout, in training)."""
        tokens = self.example_tokens()
        inputs: dict[str, Any] = {"input_ids": tokens}
        if self._points.anatomy.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens.flip(1)
        with torch.random.fork_rng(devices=[tokens.device] if tokens.is_cuda else []):
            torch.manual_seed(0)
            return outcome(self.module(**inputs, use_cache=False)).detach()

    def _prove(self, before: Tensor, *, is_shifted: bool) -> None:
        after, tolerance = self._outcome(), _ROUNDING.get(before.dtype, 5e-2)
        one, two = (x.double().log_softmax(-1) if is_shifted else x.double() for x in (before, after))
        change = float((one - two).norm() / (one - one.mean(-1, keepdim=True)).norm())
        if not change <= tolerance:  # be it no number
            raise HooklineError(
                f"tried on an example, it changes what the model gives by {change:.1g} of its size, and rounding would "
                f"by less than {tolerance}"
            )


class ProcessedWeights(Block):
    """A block in which a model's weights are processed; entering it gives what was done."""

    def __init__(self, model: WeightProcessing, options: dict[str, bool | None]) -> None:
        self._process: partial[Processing] | None = partial(model.process_weights, **options)
        self._root, self._is_ours = ref(model._points.root), False

    def open(self) -> Processing:
        """Process them."""
        root, process, self._process = self._root(), self._process, None
        if root is None or process is None:
            raise HooklineError("this block was entered before: call processed_weights() again")
        self._is_ours = processing_of(root) is None  # else what is there stays, and the next line says so
        return process()

    def close(self) -> None:
        """Restore them."""
        root = self._root()
        if self._is_ours and root is not None:
            _restore(root)

    def is_on(self, root: nn.Module) -> bool:
        """Whether it is this model's weights."""
        return self._root() is root

    def __enter__(self) -> Processing:
        """What was done to the weights."""
        return self.begin()
