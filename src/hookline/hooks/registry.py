"""The registry of a model: permanent hooks, each with an id, that can be looked up, disabled and removed.

A registered hook is like one added with `add_hook(…, is_permanent=True)`: it is active in every thread and however the
model is called, in one order with all other hooks, and `reset_hooks()` leaves it in place.
`reset_hooks(including_permanent=True)` removes it. The registry is a view: the hooks are those of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hookline.engine import HookAction, HookObject, HookPoint, compiling
from hookline.errors import HookError, HooklineError, InvalidHookError
from hookline.functions.callers import refuse_class
from hookline.functions.signatures import is_called
from hookline.hooks.hook import Hook, HookType, hook_type_of
from hookline.types import Filter, HookFunction

if TYPE_CHECKING:
    from hookline.engine import Hooked


@compiling.verbs
class Registry:
    """The hooks registered on a model, each with an id.

    detector = LayerActivationDetector()
    hook_id = model.registry.register_hook("transformer.h.0.attn.c_attn", detector)
    model.registry.unregister_hook(hook_id)
    """

    def __init__(self, model: Hooked) -> None:
        self._model = model

    @property
    def store(self) -> Any:
        """A store for what hooks read, which they get as `context.store`."""
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

        The layer is a name in any dialect, a module, or the number of a block; None if the hook declares it. The hook
        is a `Hook`, an edit such as `zero(head=3)`, or a function. Hooks at one layer run in the order registered.
        """
        refuse_class(hook)
        if isinstance(layer_signature, HookObject) or not callable(hook):
            raise InvalidHookError(
                f"register_hook takes the layer first and then the hook, not {layer_signature!r} and then {hook!r}"
            )
        before = getattr(hook, "hook_type", None)
        if hook_type is not None:
            _set_type(hook, hook_type_of(hook_type))
        try:
            point = self._point(layer_signature, hook)
            action = point.action(hook, prepend=prepend)
            action.registration.id = new = self._new_id(hook, hook_id)
            action.registration.is_permanent = True
            if isinstance(hook, HookObject):
                hook.check_points([point])
                hook.check_target([point], self._model.index)
                hook.attached(self._model)
            point.permanent.add(action)
        except BaseException:
            if hook_type is not None and isinstance(hook, Hook):
                hook.hook_type = before  # type: ignore[assignment]
            raise
        if isinstance(hook, Hook) and layer_signature is not None:
            hook.place(layer_signature)
        return new

    def unregister_hook(self, hook_or_id: Any) -> bool:
        """Remove a hook, given by its id or itself."""
        action = self._action(hook_or_id)
        action.point.permanent.remove(lambda other: other is action)
        return True

    def unregister_all(self) -> None:
        """Remove all registered hooks."""
        for hook_id in self.ids():
            self.unregister_hook(hook_id)

    def hooks(self, layer_signature: Filter = None) -> list[Any]:
        """The registered hooks, in the order in which they run; those of one layer if it is given."""
        if layer_signature is None:
            return [action.hook for action in self._actions()]
        sites = [point.site for point in self._model.index.select(layer_signature)]
        modules = [site.module for site in sites]

        def is_there(action: HookAction) -> bool:
            is_pre = isinstance(action.hook, Hook) and action.hook.is_pre
            return action.point.site in sites or (is_pre and action.point.site.module in modules)

        return [action.hook for action in self._actions() if is_there(action)]

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

        Errors of hooks that were unregistered since come first, until `clear_errors()`.
        """
        past = [error for permanent in self._model.index.permanent_hooks() for error in permanent.past_errors]
        return [*past, *(error for action in self._actions() for error in action.errors)]

    def clear_errors(self) -> None:
        """Clear the list of errors."""
        for permanent in self._model.index.permanent_hooks():
            permanent.past_errors.clear()
        for action in self._actions():
            action.errors.clear()

    def list_layers(self) -> list[str]:
        """The names of the model's modules, at whose outputs hooks can be registered."""
        modules = self._model.index.root.named_modules()
        return [name for name, module in modules if name and is_called(module) and not isinstance(module, HookPoint)]

    def __contains__(self, hook_or_id: object) -> bool:
        return any(hook_or_id in (action.registration.id, action.hook) for action in self._actions())

    def _point(self, layer_signature: Filter, hook: Any) -> HookPoint:
        points = self._model.index
        if isinstance(layer_signature, int) and points.blocks() is None:
            raise HooklineError(
                f"a number is the index of a language model's block, and this model has none: pass the name of a "
                f"module, such as {self.list_layers()[0]!r}, not {layer_signature!r}"
            )
        if layer_signature is None and not isinstance(hook, HookObject):
            raise HooklineError("a function does not declare a layer: pass the name of the layer")
        matches = hook.declared(points) if layer_signature is None else points.select(layer_signature)
        if len(matches) != 1:
            names = [point.name for point in matches][:4]
            raise HooklineError(f"{layer_signature!r} matches {len(matches)} points ({names} …); expected exactly one")
        return matches[0]

    def _new_id(self, hook: Any, given: str | None) -> str:
        if isinstance(hook, Hook) and given not in (None, hook.id):
            raise HooklineError(f"the hook already has the id {hook.id!r}: pass hook_id when creating it")
        new = hook.id if isinstance(hook, Hook) else given or str(uuid4())
        if new in self.ids():
            taken = self._action(new)
            raise HooklineError(
                f"the id {new!r} is used by {taken.hook!r} at {taken.point.name!r}: unregister that hook first, or "
                f"create one with another id"
            )
        return new

    def _actions(self) -> list[HookAction]:
        actions = [
            hook
            for permanent in self._model.index.permanent_hooks()
            for hook in permanent.hooks()
            if hook.registration.id is not None
        ]
        return sorted(actions, key=lambda action: action.order)

    def _action(self, hook_or_id: Any) -> HookAction:
        for action in self._actions():
            identity = action.registration.id if isinstance(hook_or_id, str) else action.hook
            if identity is hook_or_id or (isinstance(hook_or_id, str) and identity == hook_or_id):
                return action
        known_ids = ", ".join(map(repr, self.ids())) or "none"
        raise HooklineError(f"no hook is registered as {hook_or_id!r}; registered ids: {known_ids}")

    def __repr__(self) -> str:
        rows = [f"  {action.point.name}: {action.hook!r}" for action in self._actions()]
        root = type(self._model.index.root).__name__
        return "\n".join([f"Registry of {root}, {len(rows)} hooks registered", *rows])


def _set_type(hook: Any, new: HookType) -> None:
    if not isinstance(hook, Hook):
        raise HooklineError("hook_type needs a Hook object: for a function use the name of the input, 'layer.input'")
    before = hook_type_of(hook.hook_type)
    if new is not before and hook.followers:
        raise HooklineError(f"{hook!r} is already registered as {before.value!r}: create another for {new.value!r}")
    hook.hook_type = new
