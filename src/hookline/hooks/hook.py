"""Hook: a hook with an identity, that can be enabled and disabled, looked up, and named in error messages."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from enum import StrEnum
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Self
from uuid import uuid4
from weakref import WeakSet, ref

from torch import nn

from hookline.engine import HookObject, HookPoint, Points
from hookline.errors import HooklineError, InvalidHookError, UnknownHookPointError, UnknownPointError
from hookline.functions.callers import binds, check_on_error
from hookline.hooks.action import ObjectEdit, ObjectRead, here, input_point_of
from hookline.hooks.context import context_of
from hookline.hooks.values import in_order, out_of_order
from hookline.types import Filter, OnError

if TYPE_CHECKING:
    from hookline.engine import PermanentHooks

_OF_THE_MODEL = ("_given_context", "_root", "followers")
"""Attributes that belong to the models that a hook is used on: copies and pickles do not have them."""


class HookType(StrEnum):
    """When a hook object is called: after its module has run, or before."""

    FORWARD = "forward"
    PRE_FORWARD = "pre_forward"


class Hook(HookObject):
    """A hook as an object. Derive from it and define what it does, in one of two ways:

        class Double(Hook):
            def _hook_fn(self, module, input, output):
                return output * 2

        class Patch(Hook):                       # declares its own target
            hook_point, layer = "lm.mlp.out", 3

            def __call__(self, module, args, kwargs, output):
                return self.replacement

        model.registry.register_hook("transformer.h.0", Double())
        model.run_with_hooks(prompt, fwd_hooks=[("blocks.0.hook_mlp_out", Double()), Patch()])

    The returned value replaces the output; None keeps the output, with any in-place edits. A hook that is called before
    its module (`hook_type=HookType.PRE_FORWARD`, or a `hook_point` that ends in `.pre`) gets None as the output, and
    returns new inputs: `_hook_fn` a tensor or the tuple it was given, `__call__` the pair `(args, kwargs)`.

    The target is declared by the subclass, when the hook is created, or where it is used. Declarations that differ are
    an error. A subclass with `__call__` that declares only a `layer` means the output of that layer, `"lm.layer.post"`.
    """

    # A subclass may declare these; it need not call `Hook.__init__`.
    hook_point: str | None = None
    layer: int | None = None
    layer_signature: Any = None
    hook_type: HookType | str = HookType.FORWARD
    only_reads: ClassVar[bool] = False

    id: str
    """Its name in the registry and in errors: the given one, or a UUID."""
    followers: WeakSet[PermanentHooks] | set[PermanentHooks]
    """The sets of permanent hooks that it is in. Only a disabled hook keeps them alive: no module does."""
    switches: int = 0
    _enabled: bool = True
    _has_default_layer: bool = False
    _takes_output: bool = True  # the third argument of `_hook_fn`
    _given_context: Any = None
    _root: Callable[[], nn.Module | None] = staticmethod(lambda: None)  # a weak reference, once it is used

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Give it an id, also if a subclass does not call `Hook.__init__`."""
        new = super().__new__(cls)
        new.id, new.followers = str(uuid4()), WeakSet()
        return new

    def __init__(
        self,
        layer_signature: Filter = None,
        hook_type: HookType | str | None = None,
        hook_id: str | None = None,
        *,
        on_error: OnError | None = None,
    ) -> None:
        if isinstance(layer_signature, str) and layer_signature in list(HookType):
            raise InvalidHookError(
                f"the first argument is the layer, but {str(layer_signature)!r} is a hook type: pass hook_type= and "
                f"hook_id= by keyword"
            )
        if hook_id is not None and (not isinstance(hook_id, str) or not hook_id):
            raise InvalidHookError(f"hook_id must be a non-empty string, not {hook_id!r}")
        if hook_id is not None:
            self.id = hook_id
        if layer_signature is not None:
            self.layer_signature = layer_signature
        if hook_type is not None:
            self.hook_type = hook_type_of(hook_type)
        if on_error is not None:
            check_on_error(on_error)
            self.on_error = on_error

    def enable(self) -> None:
        """Call the hook again after `disable`."""
        self._switch(True)

    def disable(self) -> None:
        """Stop calling the hook until it is enabled. A registered hook is taken off the model, and costs nothing."""
        self._switch(False)

    def _switch(self, on: bool) -> None:
        self._enabled = on
        self.followers = WeakSet(self.followers) if on else set(self.followers)
        self.switches += 1
        for standing in list(self.followers):
            standing.refresh()
        self.switches += 1  # a pass that began in between did not have the hook throughout either

    def is_enabled(self) -> bool:
        """Whether the hook is called."""
        return self._enabled

    enabled = property(is_enabled)

    def joined(self, standing: PermanentHooks) -> None:
        """Note that it was added to a set of permanent hooks."""
        self.followers.add(standing)

    def left(self, standing: PermanentHooks) -> None:
        """Note that it was removed from a set of permanent hooks."""
        self.followers.discard(standing)
        roots = [root for other in self.followers if (root := other.root()) is not None]
        if roots and self._root() is standing.root():
            self._root = ref(roots[0])

    @property
    def context(self) -> Any:
        """The context of the model that calls it: model, registry, store and the other registered hooks.

        While it is not being called: the context of the model that it was last used on, or None.
        """
        if self._given_context is not None:
            return self._given_context
        point = here.get()
        root = self._root() if point is None else point.permanent.root()
        return context_of(root) if root is not None else None

    _context = context  # its name in hooks written for mi-crow

    def set_context(self, context: Any) -> None:
        """Use another object as the context, until the hook is used on a model again."""
        self._given_context = context

    @property
    def point(self) -> HookPoint:
        """The point at which it is being called."""
        point = here.get()
        if point is None:
            raise HooklineError(f"{self.described} has a point only while it is being called")
        return point

    @property
    def is_pre(self) -> bool:
        """Whether it is called before its module runs."""
        is_input = (self.hook_point or "").endswith((".pre", ".input"))
        return hook_type_of(self.hook_type) is HookType.PRE_FORWARD or is_input

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return None, a new output, or before the module new `(args, kwargs)`."""
        outputs = (output,) if self._takes_output else ()
        result = self._hook_fn(module, in_order(module, args, kwargs), *outputs)
        if result is None or not self.is_pre:
            return result
        return out_of_order(module, args, kwargs, result)

    def _hook_fn(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> Any:  # noqa: ARG002
        """Return None or a new value. `input` has the arguments in the order of the module's parameters.

        A subclass may leave out `output`, as the pre-hooks of torch do.
        """
        return None

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> ObjectEdit:
        """The action that calls it at `point`."""
        if dir != "fwd":
            raise InvalidHookError(
                f"{self.described} works on the forward pass: for gradients use a function or an edit such as zero()"
            )
        if type(self)._hook_fn is Hook._hook_fn and type(self).__call__ is Hook.__call__:
            raise InvalidHookError(f"{type(self).__name__} does nothing: define _hook_fn or __call__")
        if self.is_pre:
            point = input_point_of(point, lambda: self.described)
        bind = signature(self._hook_fn).bind
        self._takes_output = binds(bind, None, None, None) or not binds(bind, None, None)
        root = point.permanent.root()
        if root is not None:
            self._root = ref(root)
        return (ObjectRead if self.only_reads else ObjectEdit)(point, self, prepend=prepend)

    def attached(self, model: Any) -> None:
        """Note that it is about to be used on `model`."""
        root = model.index.root
        context_of(root, model)
        self._root, self._given_context = ref(root), None

    def declared(self, points: Points) -> list[HookPoint]:
        """The points that it declares; without a declaration, those of its default layer."""
        targets = self._targets(points)
        if not targets and self.layer_signature is None:
            return super().declared(points)
        declared_points = targets[0] if targets else points.select(self.layer_signature)
        self.check_target(declared_points, points)
        return declared_points

    def says_where(self) -> bool:
        """Whether it declares where it belongs."""
        return self._target() is not None or self._own_signature is not None

    def check_target(self, given: list[HookPoint], points: Points) -> None:
        """Raise an error if it is used at other points than those that it declares."""
        for declared in self._targets(points):
            if self._sites(declared) != self._sites(given):
                raise InvalidHookError(
                    f"{self.described} declares the target {_names(declared)}, but it is used at {_names(given)}"
                )

    def _targets(self, points: Points) -> list[list[HookPoint]]:
        """The points of each of its declarations."""
        targets = [] if self._target() is None else [self._found(points)]
        return targets if self._own_signature is None else [*targets, points.select(self._own_signature)]

    @property
    def _own_signature(self) -> Any:
        return None if self._has_default_layer else self.layer_signature

    def _target(self) -> Any:
        """The target that it declares by `hook_point` and `layer`."""
        calls_itself = type(self).__call__ is not Hook.__call__
        if self.hook_point is None and (self.layer is None or not calls_itself):
            return None
        if self.layer is not None and (isinstance(self.layer, bool) or not isinstance(self.layer, int)):
            raise InvalidHookError(f"{type(self).__name__}.layer must be the number of a layer, not {self.layer!r}")
        name = self.hook_point or ("lm.layer.pre" if self.is_pre else "lm.layer.post")
        return name if self.layer is None else (name, self.layer)

    def _found(self, points: Points) -> list[HookPoint]:
        """The points of its `hook_point` and `layer`."""
        target = self._target()
        try:
            return points.select(target)
        except HooklineError as error:
            why = str(error) if isinstance(error, UnknownPointError) else "it has no such layers"
            name = target if self.layer is None else target[0]
            raise UnknownHookPointError(
                f"{type(self).__name__} declares hook_point={name!r} and layer={self.layer!r}, which this model does "
                f"not have: {why} It has {points.targets()}."
            ) from error

    def _sites(self, points: list[HookPoint]) -> set[Any]:
        placed = [input_point_of(point, lambda: self.described) if self.is_pre else point for point in points]
        return {(point.site, point.only) for point in placed}

    def place(self, layer_signature: Any) -> None:
        """Set the layer, unless the hook declares its own. This one is a default: it may be used elsewhere."""
        if self.layer_signature is None or self._has_default_layer:
            self.layer_signature, self._has_default_layer = layer_signature, True

    def is_holding(self) -> bool:
        """Whether it has kept anything that it read."""
        return False

    @property
    def described(self) -> str:
        """Its class and id, as messages show it."""
        return f"{type(self).__name__} {self.id!r}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_THE_MODEL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.followers = WeakSet() if self._enabled else set()

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        new.__setstate__(self.__getstate__() | {"id": new.id})
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__(deepcopy(self.__getstate__(), memo) | {"id": new.id})
        return new

    def __repr__(self) -> str:
        state = "" if self._enabled else ", disabled"
        layer = self.layer_signature
        name = type(layer).__name__ if isinstance(layer, nn.Module) else repr(layer)
        return f"<{type(self).__name__} {self.id!r}{f' at {name}' if layer is not None else ''}{state}>"


def _names(points: list[HookPoint]) -> str:
    return " and ".join(repr(point.name) for point in points[:2]) + (", …" if len(points) > 2 else "")


def hook_type_of(hook_type: HookType | str) -> HookType:
    """The hook type that was given, as a member of `HookType`."""
    try:
        return HookType(hook_type)
    except ValueError:
        words = ", ".join(f"{member.value!r}" for member in HookType)
        raise InvalidHookError(f"hook_type must be a HookType, or one of {words}, not {hook_type!r}") from None
