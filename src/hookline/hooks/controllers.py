"""Controllers: hook objects that change the activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from hookline.engine import FIRST, HookPoint
from hookline.errors import InvalidHookError
from hookline.functions.callers import caller
from hookline.hooks.action import ObjectEdit, here
from hookline.hooks.hook import Hook, HookType
from hookline.types import Filter, OnError
from hookline.values.structures import NoTensorError


class Controller(Hook):
    """Changes the first tensor in the module's inputs or outputs.

        class Half(Controller):
            def modify_activations(self, module, inputs, output):
                return output / 2

    A class that is also a `Detector` reads first, and then changes.
    """

    only_reads: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.only_reads = False  # also if it derives from Detector first

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> ObjectEdit:
        """The action that calls it at `point`."""
        kind = type(self)
        if kind.modify_activations is Controller.modify_activations and kind._hook_fn is Controller._hook_fn:
            raise InvalidHookError(f"{kind.__name__} does nothing: define modify_activations")
        return super().action(point, dir, prepend=prepend)

    def _hook_fn(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> Any:
        super()._hook_fn(module, input, output)
        value = input if self.is_pre else output
        try:
            inputs = FIRST.get(input)
        except NoTensorError:
            if self.is_pre:
                raise
            inputs = None
        new = self.modify_activations(module, inputs, None if self.is_pre else FIRST.get(output))
        return None if new is None else FIRST.put(value, new)

    def modify_activations(self, module: nn.Module, inputs: Tensor | None, output: Tensor | None) -> Tensor | None:
        """Return the new tensor; None keeps the current one, with any in-place edits.

        Before a module (`PRE_FORWARD`) the new tensor replaces `inputs`, and `output` is None; after it, `output`.
        """
        raise NotImplementedError


class FunctionController(Controller):
    """Applies a function to the tensor: `function(activation)` or `function(activation, hook)`, like any hook."""

    def __init__(
        self,
        layer_signature: Filter,
        function: Callable[..., Tensor | None],
        hook_type: HookType | str | None = None,
        hook_id: str | None = None,
        *,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(layer_signature, hook_type, hook_id, on_error=on_error)
        self.function, self._invoke = function, caller(function)

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> ObjectEdit:
        """The action that calls it at `point`. Positions of `at(last, …)` that are never reached are reported."""
        action = super().action(point, dir, prepend=prepend)
        if hasattr(self.function, "where"):
            action.only_at(self.function)
        return action

    def modify_activations(self, module: nn.Module, inputs: Tensor | None, output: Tensor | None) -> Tensor | None:  # noqa: ARG002
        """Apply the function. Called by hand, outside a pass, it gets None as the point."""
        return self._invoke(inputs if self.is_pre else output, here.get())
