"""Processing: rewrite weights without changing the output, verify that, and restore the original weights.

Parameters are never written to: others replace them, and `restore_weights` puts the original objects back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from hookline.engine import compiling, sharding, undo
from hookline.errors import HooklineError
from hookline.transformer.outputs import outcome
from hookline.weights.processing.centering import center_unembed, center_writers
from hookline.weights.processing.folding import fold_norms
from hookline.weights.processing.swaps import Swaps, rounding
from hookline.weights.processing.value_biases import fold_value_biases

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints

_STEPS: dict[str, Callable[..., None]] = {
    "fold_ln": fold_norms,
    "fold_value_biases": fold_value_biases,
    "center_writing_weights": center_writers,
    "center_unembed": center_unembed,
}
"""In the order in which they are done. Each takes the points, the swaps, and a function that runs the example."""


@dataclass(frozen=True)
class Processing:
    """Which steps are applied to the weights of a model, and why others were left out."""

    fold_ln: bool = False
    fold_value_biases: bool = False
    center_writing_weights: bool = False
    center_unembed: bool = False
    left_out: tuple[tuple[str, str], ...] = ()
    """The steps that were left to choose (None) and are not exact on this model, each with the reason."""

    def __str__(self) -> str:
        done = [f"{name}: done" for name in _STEPS if getattr(self, name)]
        return "\n".join([*done, *(f"{name}: left out, because {why}" for name, why in self.left_out)])


_in_force: WeakKeyDictionary[nn.Module, tuple[Processing, Swaps]] = WeakKeyDictionary()


def _restore(root: nn.Module) -> None:
    if root in _in_force:
        _in_force[root][1].undo()
        _in_force.pop(root, None)


def processing_of(root: nn.Module) -> Processing | None:
    """The processing of the weights of a model; None if they are the original ones."""
    return _in_force[root][0] if _in_force and root in _in_force else None


@compiling.verbs
class WeightProcessing:
    """Reversible processing of a language model's weights. A mixin: it needs the model's points and example tokens."""

    _points: ModelPoints
    module: nn.Module

    def example_tokens(self) -> Tensor:
        """Two short rows of tokens."""
        raise NotImplementedError

    @property
    def processing(self) -> Processing | None:
        """Which steps are applied to the weights; None if they are the original ones."""
        return processing_of(self._points.root)

    def process_weights(
        self,
        *,
        fold_ln: bool | None = None,
        center_writing_weights: bool | None = None,
        center_unembed: bool | None = None,
        fold_value_biases: bool | None = None,
    ) -> Processing:
        """Rewrite the weights until `restore_weights`, without changing the log-probabilities.

        `fold_ln` folds the weights and biases of norms into the modules that read them, except for norms after
        attention or MLP; `fold_value_biases` folds value biases into output biases; `center_writing_weights` centers
        the weights that write to the stream; `center_unembed` centers the unembedding over the vocabulary. With True a
        step is done or raises; with None it is done if it is exact, and `model.processing.left_out` has the reason
        otherwise.

        Each step is verified by running the model before and after it. Rewritten weights are in memory twice until they
        are restored. Restore them before saving, moving or training the model.
        """
        options = (fold_ln, fold_value_biases, center_writing_weights, center_unembed)
        requested = dict(zip(_STEPS, options, strict=True))
        if self.processing is not None:
            raise HooklineError(f"the weights are processed ({self.processing!r}): call restore_weights() first")
        swaps, left_out = Swaps(), {}
        root = self._points.root
        sharding.check_not_sharded(root, "process_weights")
        try:
            for name, is_wanted in requested.items():
                if is_wanted is not False and (why := self._step(name, swaps)) is not None:
                    if is_wanted:
                        raise HooklineError(f"{name} is not exact on this model: {why}")
                    left_out[name] = str(why)
            done = {
                name: True for name, is_wanted in requested.items() if is_wanted is not False and name not in left_out
            }
            if not done:
                reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items()) or "every option is False"
                raise HooklineError(f"there is nothing to process: {reasons}")
            processing = Processing(**done, left_out=tuple(left_out.items()))
            _in_force[root] = processing, swaps
            return processing
        except BaseException:
            undo.run_twice_on_interrupt(swaps.undo)
            _in_force.pop(root, None)
            raise

    def restore_weights(self) -> None:
        """Put back the parameters from before `process_weights`: the same objects, including tied weights."""
        _restore(self._points.root)

    def processed_weights(self, **options: bool | None) -> ProcessedWeights:
        """A block in which the weights are processed, see `process_weights`, and restored on exit."""
        return ProcessedWeights(self, options)

    def _step(self, name: str, swaps: Swaps) -> HooklineError | None:
        """Do one step and prove it; if it is not possible or changes the output, undo it and return the reason."""
        done = len(swaps)
        try:
            with compiling.tracing_lock(), undo.attaching, undo.Unhooked(self.module), undo.GradMode(False):
                before = self._outcome()
                self._do(name, swaps)
                _prove(before, self._outcome(), is_shifted=name == "center_unembed")
        except HooklineError as error:
            swaps.undo(to=done)
            return error
        return None

    def _do(self, name: str, swaps: Swaps) -> None:
        _STEPS[name](self._points, swaps, self._outcome)

    def _outcome(self) -> Tensor:
        """The output of the model on the example, with the same random numbers each time (dropout)."""
        tokens = self.example_tokens()
        inputs: dict[str, Any] = {"input_ids": tokens}
        if self._points.anatomy.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens.flip(1)
        with torch.random.fork_rng(devices=[tokens.device] if tokens.is_cuda else []):
            torch.manual_seed(0)
            return outcome(self.module(**inputs, use_cache=False)).detach()


def _prove(before: Tensor, after: Tensor, *, is_shifted: bool) -> None:
    """Raise if the output changed by more than rounding, or its log-probabilities if logits may be shifted."""
    tolerance = rounding(before.dtype)
    one, two = (x.double().log_softmax(-1) if is_shifted else x.double() for x in (before, after))
    change = float((one - two).norm() / (one - one.mean(-1, keepdim=True)).norm())
    if not change <= tolerance:  # also if it is NaN
        raise HooklineError(f"it changes the output on an example by {change:.1g}, more than rounding ({tolerance})")


class ProcessedWeights(undo.UndoBlock):
    """A block in which the weights of a model are processed; entering it returns the `Processing`."""

    def __init__(self, model: WeightProcessing, options: dict[str, bool | None]) -> None:
        self._process: partial[Processing] | None = partial(model.process_weights, **options)
        self._root, self._is_ours = ref(model.module), False

    def open(self) -> Processing:
        """Process the weights."""
        root, process, self._process = self._root(), self._process, None
        if root is None or process is None:
            raise HooklineError("this block was already entered: call processed_weights() again")
        self._is_ours = processing_of(root) is None  # otherwise the next line raises
        return process()

    def close(self) -> None:
        """Restore the weights."""
        root = self._root()
        if self._is_ours and root is not None:
            _restore(root)

    def is_on(self, root: nn.Module) -> bool:
        """Whether the block processes the weights of this model."""
        return self._root() is root

    @compiling.untraced
    def __enter__(self) -> Processing:
        """Process the weights, and return what was done."""
        return cast("Processing", super().__enter__())
