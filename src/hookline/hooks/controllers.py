"""Controllers: hook objects that change what passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from hookline.engine.callbacks import OnError, caller
from hookline.engine.lenses import FIRST
from hookline.engine.names import Filter
from hookline.engine.points import HookPoint
from hookline.engine.structures import NoTensorError
from hookline.errors import InvalidHookError
from hookline.hooks.action import ObjectEdit
from hookline.hooks.hook import Hook, HookType


class Controller(Hook):
    """Changes the tensor that passes, wherever in the module's inputs or outputs it is.

        class Half(Controller):
            def modify_activations(self, module, inputs, output):
                return output / 2

    One that is also a `Detector` reads first, and then changes.
    """

    only_reads: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.only_reads = False  # also of one that is first of all a Detector

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> ObjectEdit:
        """What is done for it at `point`."""
        kind = type(self)
        if kind.modify_activations is Controller.modify_activations and kind._hook_fn is Controller._hook_fn:
            raise InvalidHookError(f"{kind.__name__} does nothing: it does not define modify_activations")
        return super().action(point, dir, prepend=prepend)

    def _hook_fn(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> Any:
        super()._hook_fn(module, input, output)
        if self.is_pre:
            new = self.modify_activations(module, FIRST.get(input), None)
            return None if new is None else FIRST.put(input, new)
        new = self.modify_activations(module, _first(input), FIRST.get(output))
        return None if new is None else FIRST.put(output, new)

    def modify_activations(self, module: nn.Module, inputs: Tensor | None, output: Tensor | None) -> Tensor | None:
        """The tensor that is to flow on; None keeps the one there, with what was written into it.

        Before a module (`PRE_FORWARD`) `inputs` is changed and `output` is None; after it, `output` is.
        """
        raise NotImplementedError


class FunctionController(Controller):
    """Applies a function to the tensor: `function(activation)` or `function(activation, hook)`, as of any hook."""

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
        """What is done for it at `point`. One for some positions, `at(last, …)`, is reported if those never come."""
        action = super().action(point, dir, prepend=prepend)
        if hasattr(self.function, "where"):
            action.only_at(self.function)
        return action

    def modify_activations(self, module: nn.Module, inputs: Tensor | None, output: Tensor | None) -> Tensor | None:  # noqa: ARG002
        """What the function makes of it."""
        return self._invoke(inputs if self.is_pre else output, self.point)


def _first(input: tuple[Any, ...]) -> Tensor | None:
    try:
        return FIRST.get(input)
    except NoTensorError:
        return None
