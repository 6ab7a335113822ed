"""Detectors: hook objects that read activations and keep them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn

from hookline.engine import FIRST, HookAction, HookPoint, open_runs, pass_state, snapshot, undo
from hookline.errors import HooklineError, InvalidHookError, a_type
from hookline.functions.listed_options import lists
from hookline.functions.signatures import parameters_of
from hookline.hooks.hook import Hook, HookType
from hookline.types import Filter, OnError

ACTIVATIONS = "activations"


class DetectorOptions(TypedDict, total=False):
    """The options of every detector."""

    store: Any
    keep_all: bool
    on_error: OnError | None


_DETECTOR = SimpleNamespace(keep_all=False)


class Detector(Hook):
    """Reads activations and keeps them: the first tensor, as "activations", unless a subclass does otherwise.

        class Norm(Detector):
            def process_activations(self, module, input, output):
                self.metadata["norm"] = output.norm().item()

    `tensor_metadata` has tensors, `metadata` everything else. A kept tensor is a snapshot of the last call; with
    `keep_all`, `get_captured()` returns a list of all of them since `clear_captured()`. In-place edits of the tensors
    that a detector is given do not reach the model.
    """

    only_reads: ClassVar[bool] = True

    def __init__(
        self,
        layer_signature: Filter = None,
        hook_type: HookType | str | None = None,
        hook_id: str | None = None,
        *,
        store: Any = None,
        keep_all: bool = False,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(layer_signature, hook_type, hook_id, on_error=on_error)
        self.store, self.keep_all = store, keep_all
        self.metadata: dict[str, Any] = {}
        self.tensor_metadata: dict[str, Tensor] = {}
        self._every: dict[str, list[Tensor]] = {}

    def _hook_fn(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> Any:
        self.process_activations(module, input, output)
        return super()._hook_fn(module, input, output)

    def process_activations(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        """Read the inputs or the output. A subclass may override this."""
        self.process_activation(input if self.is_pre else output)

    def process_activation(self, activation: Any) -> None:
        """Keep the first tensor of the value."""
        self.capture(ACTIVATIONS, FIRST.get(activation))

    def capture(self, key: str, tensor: Tensor) -> None:
        """Keep a detached snapshot of a tensor under `key`, and its shape in `metadata`."""
        captured = snapshot(tensor.detach())
        self.tensor_metadata[key], self.metadata[f"{key}_shape"] = captured, tuple(captured.shape)
        if self.keep_all:
            self._every.setdefault(key, []).append(captured)

    def get_captured(self, key: str | None = None) -> Any:
        """The last tensor kept under `key` (default: the first key) or None; with `keep_all`, the list of all."""
        key = next(iter(self.tensor_metadata), ACTIVATIONS) if key is None else key
        return self._every.get(key, []) if self.keep_all else self.tensor_metadata.get(key)

    def clear_captured(self) -> None:
        """Forget everything that was kept."""
        self.tensor_metadata.clear()
        self.metadata.clear()
        self._every.clear()

    def is_holding(self) -> bool:
        """Whether it has captured anything."""
        return any(vars(self).get(name) for name in ("tensor_metadata", "metadata"))

    def check_points(self, points: list[HookPoint]) -> None:
        """Raise an error if it would be at two places at once: what it reads at one would replace the other."""
        if self._actions() and not pass_state.hooks:
            undo.clear_state()
            gc.collect()  # it may be on a model that is no longer in use
        places = [f"{_how(action)} at {action.point.name!r}{_of_another(action, points)}" for action in self._actions()]
        places += [repr(point.name) for point in points]
        if len(places) > 1:
            raise InvalidHookError(
                f"{self.described} reads at one place, but it would be {places[0]}, and at {places[1]}: create another "
                f"detector (copy.copy(detector) is one), or unregister this one first"
            )

    def _actions(self) -> list[HookAction]:
        """Its actions: registered or added, on any model, or in a context that is open here."""
        standing = [action for follower in self.followers if follower.root() is not None for action in follower.hooks()]
        running = [action for run in open_runs() for action in run.actions]
        return [action for action in [*standing, *running] if isinstance(action, HookAction) and action.hook is self]

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # a subclass that does not call `Detector.__init__` has none of these
        state |= {name: dict(state[name]) for name in ("metadata", "tensor_metadata") if name in state}
        return state | {"_every": {key: [*values] for key, values in state.get("_every", {}).items()}}


def _how(action: HookAction) -> str:
    return "in an open context" if action.is_in_run else "registered" if action.registration.id else "added"


def _of_another(action: HookAction, points: list[HookPoint]) -> str:
    root = action.point.permanent.root()
    is_same = root is None or any(point.permanent.root() is root for point in points)
    return "" if is_same else f" of another model, {a_type(root)}"


class LayerActivationDetector(Detector):
    """Keeps the activation of a layer, cast to `target_dtype` if one is given."""

    @lists(DetectorOptions, _DETECTOR)
    def __init__(
        self,
        layer_signature: Filter = None,
        hook_id: str | None = None,
        target_dtype: torch.dtype | None = None,
        **options: Unpack[DetectorOptions],
    ) -> None:
        super().__init__(layer_signature, hook_id=hook_id, **options)
        self.target_dtype = target_dtype

    def capture(self, key: str, tensor: Tensor) -> None:
        """Keep the tensor in `target_dtype`."""
        super().capture(key, tensor if self.target_dtype is None else tensor.to(self.target_dtype))


class ModelInputDetector(Detector):
    """Keeps the inputs of the model: token ids, and the mask of tokens that are neither padding nor special.

    For an encoder-decoder model the decoder's ids are kept too, as "decoder_input_ids". For a network that takes no
    token ids, its first input tensor is kept, as "inputs".
    """

    @lists(DetectorOptions, _DETECTOR)
    def __init__(
        self,
        layer_signature: Filter = None,
        hook_id: str | None = None,
        save_input_ids: bool = True,
        save_attention_mask: bool = False,
        special_token_ids: Iterable[int] | None = None,
        **options: Unpack[DetectorOptions],
    ) -> None:
        super().__init__(layer_signature, HookType.PRE_FORWARD, hook_id, **options)
        self.place("input")
        self.save_input_ids, self.save_attention_mask = save_input_ids, save_attention_mask
        self.special_token_ids = None if special_token_ids is None else set(special_token_ids)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG002
        """Keep the requested arguments, by name."""
        self._capture_inputs(dict(zip(parameters_of(module)[0], args, strict=False)) | kwargs, (args, kwargs))

    def set_inputs_from_encodings(self, encodings: Mapping[str, Any], module: nn.Module | None = None) -> None:  # noqa: ARG002
        """Keep the requested arguments of a dictionary, as if the model were called with it."""
        self._capture_inputs(encodings, encodings)

    def _capture_inputs(self, inputs: Mapping[str, Any], value: Any) -> None:
        ids = inputs.get("input_ids")
        if self.save_input_ids:
            self.capture("inputs" if ids is None else "input_ids", FIRST.get(value) if ids is None else ids)
            if isinstance(decoder_ids := inputs.get("decoder_input_ids"), Tensor):
                self.capture("decoder_input_ids", decoder_ids)
        if self.save_attention_mask:
            if ids is None:
                raise HooklineError("this module is not called with token ids, so they have no attention mask")
            self.capture("attention_mask", self._mask(ids, inputs.get("attention_mask")))

    def _mask(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        tokenizer = getattr(self.context, "tokenizer", None)
        all_special_ids = getattr(tokenizer, "all_special_ids", ())
        special = all_special_ids if self.special_token_ids is None else self.special_token_ids
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        return real & ~torch.isin(ids, torch.tensor(sorted(special), device=ids.device, dtype=ids.dtype))

    def get_captured_input_ids(self) -> Tensor | None:
        """The token ids of the last call."""
        return self.tensor_metadata.get("input_ids")

    def get_captured_attention_mask(self) -> Tensor | None:
        """The mask of the last call."""
        return self.tensor_metadata.get("attention_mask")


class ModelOutputDetector(Detector):
    """Keeps the output of the model: its logits (or its first tensor), and on request its last hidden state."""

    @lists(DetectorOptions, _DETECTOR)
    def __init__(
        self,
        layer_signature: Filter = None,
        hook_id: str | None = None,
        save_output_logits: bool = True,
        save_output_hidden_state: bool = False,
        **options: Unpack[DetectorOptions],
    ) -> None:
        super().__init__(layer_signature, HookType.FORWARD, hook_id, **options)
        self.place("output")
        self.save_output_logits, self.save_output_hidden_state = save_output_logits, save_output_hidden_state

    def process_activations(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        """Keep the requested parts."""
        if self.save_output_logits:
            logits = getattr(output, "logits", None)
            self.capture("output_logits", FIRST.get(output) if logits is None else logits)
        if self.save_output_hidden_state:
            self.capture("output_hidden_state", _last_hidden_state(output))

    def get_captured_output_logits(self) -> Tensor | None:
        """The logits of the last call."""
        return self.tensor_metadata.get("output_logits")

    def get_captured_output_hidden_state(self) -> Tensor | None:
        """The last hidden state of the last call."""
        return self.tensor_metadata.get("output_hidden_state")


def _last_hidden_state(output: Any) -> Tensor:
    state = getattr(output, "last_hidden_state", None)
    if state is None and getattr(output, "hidden_states", None):
        state = output.hidden_states[-1]
    if state is None:
        raise HooklineError(
            "the output has no hidden state: call the model with output_hidden_states=True (a HookedModel also with "
            'return_type="output"), or use a LayerActivationDetector at its last layer'
        )
    return state
