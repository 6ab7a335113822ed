"""Detectors: hook objects that read, and keep what they have read."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hookline.engine.callbacks import OnError
from hookline.engine.calls import running
from hookline.engine.hook_actions import HookAction
from hookline.engine.lenses import FIRST
from hookline.engine.names import Filter
from hookline.engine.points import HookPoint
from hookline.engine.runs import clear_state
from hookline.engine.schedule import active
from hookline.engine.signatures import parameters_of
from hookline.engine.snapshots import snapshot
from hookline.errors import HooklineError, InvalidHookError
from hookline.hooks.hook import Hook, HookType

ACTIVATIONS = "activations"


class Detector(Hook):
    """Reads what passes and keeps it: the first tensor, under "activations", unless a subclass says otherwise.

        class Norm(Detector):
            def process_activations(self, module, input, output):
                self.metadata["norm"] = output.norm().item()

    `tensor_metadata` has the tensors, `metadata` all else. What is kept is a snapshot of the last call; with
    `keep_all`, `get_captured()` is the list of all of them since `clear_captured()`. Nothing that a detector does to
    the tensors it is given reaches the model.
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
        """Read what passes. A subclass may do it in its own way."""
        self.process_activation(input if self.is_pre else output)

    def process_activation(self, activation: Any) -> None:
        """Keep the first tensor of it."""
        self.capture(ACTIVATIONS, FIRST.get(activation))

    def capture(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor as it is now under `key`, without its graph, and its shape in `metadata`."""
        kept = snapshot(tensor.detach())
        self.tensor_metadata[key], self.metadata[f"{key}_shape"] = kept, tuple(kept.shape)
        if self.keep_all:
            self._every.setdefault(key, []).append(kept)

    def get_captured(self, key: str | None = None) -> Any:
        """What was kept last, or with `keep_all` the list of it; None if nothing was. By default the first key."""
        key = next(iter(self.tensor_metadata), ACTIVATIONS) if key is None else key
        return self._every.get(key, []) if self.keep_all else self.tensor_metadata.get(key)

    def clear_captured(self) -> None:
        """Forget all of it."""
        self.tensor_metadata.clear()
        self.metadata.clear()
        self._every.clear()

    def is_holding(self) -> bool:
        """Whether it has captured anything."""
        return any(vars(self).get(name) for name in ("tensor_metadata", "metadata"))

    def check_points(self, points: list[HookPoint]) -> None:
        """One place only, wherever it is already: what it keeps of one would be lost to the next."""
        if self._places() and not running.hooks:
            clear_state()
            gc.collect()  # one on a model that nobody has any more is nowhere
        if places := self._places():
            raise InvalidHookError(f"{self.described} {_where(places[0], points)}: {_ADVICE}")
        if len(points) > 1:
            names = f"{points[0].name!r}, {points[1].name!r}{', …' if len(points) > 2 else ''}"
            raise InvalidHookError(f"{self.described} would be at {len(points)} points ({names}): {_ADVICE}")

    def _places(self) -> list[HookAction]:
        """Where it is now: registered or added, on whatever model, or in a context that is open here."""
        standing = [action for each in self.followers if each.root() is not None for action in each.hooks()]
        running = [action for run in active.get() if run.is_open for action in run.actions]
        return [each for each in [*standing, *running] if isinstance(each, HookAction) and each.hook is self]

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # of a subclass without `Detector.__init__` it has none of these
        state |= {name: dict(state[name]) for name in ("metadata", "tensor_metadata") if name in state}
        return state | {"_every": {key: [*some] for key, some in state.get("_every", {}).items()}}


class LayerActivationDetector(Detector):
    """Keeps the activation of a layer, cast to `target_dtype` if one is given."""

    def __init__(
        self,
        layer_signature: Filter = None,
        hook_id: str | None = None,
        target_dtype: torch.dtype | None = None,
        *,
        hook_type: HookType | str | None = None,
        keep_all: bool = False,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(layer_signature, hook_type, hook_id, keep_all=keep_all, on_error=on_error)
        self.target_dtype = target_dtype

    def capture(self, key: str, tensor: Tensor) -> None:
        """Keep it in the dtype asked for."""
        super().capture(key, tensor if self.target_dtype is None else tensor.to(self.target_dtype))


class ModelInputDetector(Detector):
    """Keeps what the model is called with: the token ids, and the mask of those that are neither padding nor special.

    Of a model with an encoder and a decoder the decoder's ids are kept too, as "decoder_input_ids". Of a network that
    takes no token ids, the first tensor that it is called with is kept, as "inputs".
    """

    def __init__(
        self,
        layer_signature: Filter = None,
        hook_id: str | None = None,
        save_input_ids: bool = True,
        save_attention_mask: bool = False,
        special_token_ids: Iterable[int] | None = None,
        *,
        keep_all: bool = False,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(layer_signature, HookType.PRE_FORWARD, hook_id, keep_all=keep_all, on_error=on_error)
        if layer_signature is None:
            self.place("input")
        self.save_input_ids, self.save_attention_mask = save_input_ids, save_attention_mask
        self.special_token_ids = None if special_token_ids is None else set(special_token_ids)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG002
        """Keep the arguments that are asked for, by name."""
        given = dict(zip(parameters_of(module)[0], args, strict=False)) | kwargs
        ids = given.get("input_ids")
        if self.save_input_ids:
            self.capture("inputs" if ids is None else "input_ids", FIRST.get((args, kwargs)) if ids is None else ids)
            if isinstance(of_decoder := given.get("decoder_input_ids"), Tensor):
                self.capture("decoder_input_ids", of_decoder)
        if self.save_attention_mask:
            if ids is None:
                raise HooklineError("no token ids are given to this module, so there is no mask of them")
            self.capture("attention_mask", self._mask(ids, given.get("attention_mask")))

    def _mask(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        special = self._special()
        return real & ~torch.isin(ids, torch.tensor(sorted(special), device=ids.device, dtype=ids.dtype))

    def _special(self) -> set[int]:
        if self.special_token_ids is not None:
            return self.special_token_ids
        tokenizer = self.context.tokenizer if self.context is not None else None
        return set(tokenizer.all_special_ids) if tokenizer is not None else set()

    def get_captured_input_ids(self) -> Tensor | None:
        """The token ids of the last call."""
        return self.tensor_metadata.get("input_ids")

    def get_captured_attention_mask(self) -> Tensor | None:
        """The mask of the last call."""
        return self.tensor_metadata.get("attention_mask")


class ModelOutputDetector(Detector):
    """Keeps what the model gives: its logits (or else its first tensor), and its last hidden state if asked for."""

    def __init__(
        self,
        layer_signature: Filter = None,
        hook_id: str | None = None,
        save_output_logits: bool = True,
        save_output_hidden_state: bool = False,
        *,
        keep_all: bool = False,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(layer_signature, HookType.FORWARD, hook_id, keep_all=keep_all, on_error=on_error)
        if layer_signature is None:
            self.place("output")
        self.save_output_logits, self.save_output_hidden_state = save_output_logits, save_output_hidden_state

    def process_activations(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        """Keep the parts that are asked for."""
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


_ADVICE = (
    "it keeps what it saw at one place. Make a detector for each (copy.copy(detector) is another one), or unregister "
    "it first"
)


def _where(action: HookAction, points: list[HookPoint]) -> str:
    """Where it is already, in words."""
    how = "in an open context" if action.is_in_run else "registered" if action.registration.id else "added"
    root = action.point.permanent.root()
    is_same = root is None or any(point.permanent.root() is root for point in points)
    which = "" if is_same else f" of another model, a {type(root).__name__} that is still there"
    return f"is already {how} at {action.point.name!r}{which}, and would be at {points[0].name!r} as well"


def _last_hidden_state(output: Any) -> Tensor:
    state = getattr(output, "last_hidden_state", None)
    if state is None and getattr(output, "hidden_states", None):
        state = output.hidden_states[-1]
    if state is None:
        raise HooklineError(
            "the output has no hidden state: call the model with output_hidden_states=True, or use a "
            "LayerActivationDetector at its last layer"
        )
    return state
