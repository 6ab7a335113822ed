"""The registry of a model: hooks that stay, each under an id, to be looked up, disabled and removed.

A registered hook is a standing hook, as one added with `add_hook(…, is_permanent=True)`: it is there for every thread
and every way of calling the model, in one order with all others, and `reset_hooks()` leaves it alone.
`reset_hooks(including_permanent=True)` takes it out. The registry has no list of its own, so it cannot disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from torch import nn

from hookline.engine.callbacks import HookFunction, HookObject, refuse_class
from hookline.engine.hook_actions import HookAction
from hookline.engine.names import Filter, is_called
from hookline.engine.points import HookPoint, hook_action
from hookline.errors import HookError, HooklineError, InvalidHookError
from hookline.hooks.hook import Hook, HookType, hook_type_of

if TYPE_CHECKING:
    from hookline.engine.hooked import Hooked


class Registry:
    """The hooks registered on a model, each under an id.

    detector = LayerActivationDetector()
    hook_id = model.registry.register_hook("transformer.h.0.attn.c_attn", detector)
    model.registry.unregister_hook(hook_id)
    """

    def __init__(self, model: Hooked) -> None:
        self._model = model

    @property
    def store(self) -> Any:
        """Where hooks find a store for what they read, as `context.store`."""
        return vars(self._model).get("_store")

    @store.setter
    def store(self, store: Any) -> None:
        vars(self._model)["_store"] = store

    def register_hook(
        self,
        layer_signature: Filter,
        hook: HookFunction,
        hook_type: HookType | str | None = None,
        *,
        hook_id: str | None = None,
        prepend: bool = False,
    ) -> str:
        """Register a hook at a layer and return its id.

        The layer is a name in any dialect, a module, or the number of a block; None asks the hook itself. The hook is
        a `Hook`, an edit such as `zero(head=3)`, or a function. Several may share a layer, in the order registered.
        """
        _check_order(layer_signature, hook)
        if hook_type is None:
            return self._register(layer_signature, hook, hook_id, prepend)
        before, new = _type_of(hook), hook_type_of(hook_type)
        if new is not before and hook.followers:  # type: ignore[attr-defined]
            raise HooklineError(f"{hook!r} is registered already, as {before.value!r}: make another for {new.value!r}")
        hook.hook_type = new  # type: ignore[attr-defined]
        try:
            return self._register(layer_signature, hook, hook_id, prepend)
        except BaseException:
            hook.hook_type = before  # type: ignore[attr-defined]
            raise

    def _register(self, layer_signature: Filter, hook: Any, hook_id: str | None, prepend: bool) -> str:
        point = self._point(layer_signature, hook)
        action = hook_action(point, hook, "fwd", prepend=prepend)
        action.registration.id = self._new_id(hook, hook_id)
        action.registration.is_permanent = True
        if isinstance(hook, HookObject):
            hook.check_points([point])
            hook.check_target([point], self._model._points)
            hook.attached(self._model)
        point.permanent.add(action)
        if isinstance(hook, Hook) and layer_signature is not None:
            hook.place(layer_signature)
        return action.registration.id

    def unregister_hook(self, hook_or_id: Any) -> bool:
        """Remove a hook, given by its id or itself."""
        action = self._action(hook_or_id)
        action.point.permanent.remove(lambda other: other is action)
        return True

    def unregister_all(self) -> None:
        """Remove all registered hooks."""
        for action in self._actions():
            self.unregister_hook(action.registration.id)

    def hooks(self, layer_signature: Filter = None) -> list[Any]:
        """The registered hooks, in the order in which they were registered to fire; of one layer, if it is named."""
        sites = None if layer_signature is None else [p.site for p in self._model._points.select(layer_signature)]
        modules = None if sites is None else {site.module for site in sites}
        return [
            action.hook
            for action in self._actions()
            if sites is None or modules is None or action.point.site in sites or _is_around(action, modules)
        ]

    def ids(self) -> list[str]:
        """The ids of the registered hooks."""
        return [str(action.registration.id) for action in self._actions()]

    def get(self, hook_id: str) -> Any:
        """The hook with that id."""
        return self._action(hook_id).hook

    def disable(self, hook_or_id: Any) -> None:
        """Stop calling a hook, but keep it registered. This works for functions and edits too."""
        self._switch(hook_or_id, on=False)

    def enable(self, hook_or_id: Any) -> None:
        """Undo `disable`."""
        self._switch(hook_or_id, on=True)

    def is_enabled(self, hook_or_id: Any) -> bool:
        """Whether a registered hook is called."""
        return self._action(hook_or_id).registration.is_enabled()

    def _switch(self, hook_or_id: Any, *, on: bool) -> None:
        action = self._action(hook_or_id)
        if isinstance(action.hook, Hook):
            (action.hook.enable if on else action.hook.disable)()
        else:
            action.registration.switch(on)
            action.point.permanent.refresh()

    def errors(self) -> list[HookError]:
        """Errors of registered hooks with `on_error="skip"`: the first error of each.

        Those of hooks that were unregistered since come first, until `clear_errors()`.
        """
        past = [error for standing in self._model._points.permanent_hooks() for error in standing.past_errors]
        return [*past, *(error for action in self._actions() for error in action.errors)]

    def clear_errors(self) -> None:
        """Clear the list of errors."""
        for standing in self._model._points.permanent_hooks():
            standing.past_errors.clear()
        for action in self._actions():
            action.errors.clear()

    def list_layers(self) -> list[str]:
        """The names of the model's modules: those at whose output a hook can be registered."""
        modules = self._model._points.root.named_modules()
        return [name for name, module in modules if name and is_called(module) and not isinstance(module, HookPoint)]

    def __contains__(self, hook_or_id: object) -> bool:
        return any(hook_or_id in (action.registration.id, action.hook) for action in self._actions())

    def _point(self, layer_signature: Filter, hook: Any) -> HookPoint:
        points = self._model._points
        if isinstance(layer_signature, int) and points.blocks() is None:
            raise HooklineError(
                f"a number is that of a language model's block, and none are known here: give the name of a module, "
                f"such as {self.list_layers()[0]!r}, not {layer_signature!r}"
            )
        if layer_signature is not None:
            found = points.select(layer_signature)
        elif isinstance(hook, HookObject):
            found = hook.declared(points)
        else:
            raise HooklineError("a function has no layer of its own: name the layer")
        if len(found) != 1:
            names = [point.name for point in found][:4]
            raise HooklineError(f"{layer_signature!r} matches {len(found)} points ({names} …); expected exactly one")
        return found[0]

    def _new_id(self, hook: Any, given: str | None) -> str:
        if isinstance(hook, Hook) and given not in (None, hook.id):
            raise HooklineError(f"the hook has an id, {hook.id!r}: give hook_id when making it")
        new = hook.id if isinstance(hook, Hook) else given or str(uuid4())
        taken = next((action for action in self._actions() if action.registration.id == new), None)
        if taken is not None:
            raise HooklineError(
                f"the id {new!r} is taken, by {taken.hook!r} at {taken.point.name!r}: unregister that first, or make a "
                f"hook with another id"
            )
        return new

    def _actions(self) -> list[HookAction]:
        actions = [
            hook
            for standing in self._model._points.permanent_hooks()
            for hook in standing.hooks()
            if hook.registration.id is not None
        ]
        return sorted(actions, key=lambda action: action.order)

    def _action(self, hook_or_id: Any) -> HookAction:
        for action in self._actions():
            if action.registration.id == hook_or_id if isinstance(hook_or_id, str) else action.hook is hook_or_id:
                return action
        known = ", ".join(map(repr, self.ids())) or "none"
        raise HooklineError(f"no hook is registered as {hook_or_id!r}; those that are: {known}")

    def __repr__(self) -> str:
        rows = [f"  {action.point.name}: {action.hook!r}" for action in self._actions()]
        return "\n".join(
            [f"Registry of {type(self._model._points.root).__name__}, {len(rows)} hooks registered", *rows]
        )


def _check_order(layer_signature: Any, hook: Any) -> None:
    refuse_class(hook)
    if isinstance(layer_signature, HookObject) or not callable(hook):
        raise InvalidHookError(
            f"register_hook takes the layer first and then a hook, not {layer_signature!r} and then {hook!r}"
        )


def _type_of(hook: Any) -> HookType:
    if not isinstance(hook, Hook):
        raise HooklineError(
            "hook_type is for Hook objects: a function is for a module's input at the name 'layer.input'"
        )
    return hook_type_of(hook.hook_type)


def _is_around(action: HookAction, modules: set[nn.Module]) -> bool:
    """Whether it is called before one of these modules."""
    return isinstance(action.hook, Hook) and action.hook.is_pre and action.point.site.module in modules
