"""Hook: a hook with an identity, that can be switched on and off, looked up, and blamed."""

from __future__ import annotations

from copy import deepcopy
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from hookline.engine.callbacks import HookObject, OnError, check_on_error
from hookline.engine.names import Filter, Points
from hookline.engine.points import HookPoint
from hookline.errors import HooklineError, InvalidHookError, UnknownHookPointError, UnknownPointError
from hookline.hooks.action import ObjectEdit, ObjectRead, here, input_of
from hookline.hooks.context import HookContext
from hookline.hooks.values import in_order, out_of_order

if TYPE_CHECKING:
    from hookline.engine.permanent import PermanentHooks


class HookType(StrEnum):
    """When a hook object is called: after its module has run, or before."""

    FORWARD = "forward"
    PRE_FORWARD = "pre_forward"


class Hook(HookObject):
    """A hook as an object. Derive from it and say what to do, in one of two ways:

        class Double(Hook):
            def _hook_fn(self, module, input, output):
                return output * 2

        class Patch(Hook):                       # says itself where it belongs
            hook_point, layer = "lm.mlp.out", 3

            def __call__(self, module, args, kwargs, output):
                return self.replacement

        model.registry.register_hook("transformer.h.0", Double())
        model.run_with_hooks(prompt, fwd_hooks=[("blocks.0.hook_mlp_out", Double()), Patch()])

    What is returned takes effect; None keeps what is there, with whatever was written into it. A hook that is called
    before its module (`hook_type=HookType.PRE_FORWARD`, or a `hook_point` that ends in `.pre`) is given None for the
    output, and returns new inputs: `_hook_fn` a tensor or the tuple it was given, `__call__` the pair `(args, kwargs)`.

    Where it belongs is said once: by the subclass, when it is made, or when it is given. Two that differ are an error.
    A subclass with `__call__` that declares a `layer` alone means the output of that layer, `"lm.layer.post"`.
    """

    # What a subclass may declare; it need not call `Hook.__init__`.
    hook_point: str | None = None
    layer: int | None = None
    layer_signature: Any = None
    hook_type: HookType | str = HookType.FORWARD
    only_reads: ClassVar[bool] = False

    _id: str | None = None
    _enabled: bool = True
    switches: int = 0
    _placed: tuple[Any] | None = None  # once it is registered: the `layer_signature` that it declared itself
    _context: Any = None
    _contexts: WeakKeyDictionary[nn.Module, Any] | None = None
    _followers: WeakSet[PermanentHooks] | None = None
    _kept: tuple[PermanentHooks, ...] = ()  # while it is disabled, when nothing on the modules keeps them

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
                f"the first argument is the layer, and {str(layer_signature)!r} is a type: pass hook_type= and "
                f"hook_id= by keyword"
            )
        if hook_id is not None and (not isinstance(hook_id, str) or not hook_id):
            raise InvalidHookError(f"hook_id must be a string that is not empty, not {hook_id!r}")
        self._id = hook_id
        if layer_signature is not None:
            self.layer_signature = layer_signature
        if hook_type is not None:
            self.hook_type = hook_type_of(hook_type)
        if on_error is not None:
            check_on_error(on_error)
            self.on_error = on_error

    @property
    def id(self) -> str:
        """Its name in the registry and in errors: the one given, or one that no other hook has."""
        if self._id is None:
            self._id = str(uuid4())
        return self._id

    def enable(self) -> None:
        """Be called again."""
        self._switch(True)

    def disable(self) -> None:
        """Not be called until enabled. One that is registered is taken off the model meanwhile, and costs nothing."""
        self._switch(False)

    def _switch(self, on: bool) -> None:
        self._enabled = on
        self._keep_followers()
        self.switches += 1
        for standing in list(self.followers):
            standing.refresh()
        self.switches += 1  # a pass that began in between did not have the hook for all of its time either

    def is_enabled(self) -> bool:
        """Whether it is called."""
        return self._enabled

    @property
    def enabled(self) -> bool:
        """Whether it is called."""
        return self._enabled

    @property
    def followers(self) -> WeakSet[PermanentHooks]:
        """The sets of standing hooks that it is in. They have the modules, and it keeps no model alive."""
        if self._followers is None:
            self._followers = WeakSet()
        return self._followers

    def joined(self, standing: PermanentHooks) -> None:
        """It is one of these standing hooks."""
        self.followers.add(standing)
        self._keep_followers()

    def _keep_followers(self) -> None:
        self._kept = () if self._enabled else tuple(self.followers)

    def left(self, standing: PermanentHooks) -> None:
        """It is no longer one of these standing hooks."""
        self.followers.discard(standing)
        self._keep_followers()
        root = standing.root()
        if root is not None and len(self._known) > 1 and self._known.pop(root, None) is self._context:
            self._context = list(self._known.values())[-1]

    @property
    def _known(self) -> WeakKeyDictionary[nn.Module, Any]:
        if self._contexts is None:
            self._contexts = WeakKeyDictionary()
        return self._contexts

    @property
    def context(self) -> Any:
        """The model that calls it, with its layers, its store and the other registered hooks.

        While it is not being called: the model that it was last used on, or None.
        """
        point = here.get()
        root = point.permanent.root() if point is not None else None
        return self._context if root is None else self._known.get(root, self._context)

    def set_context(self, context: Any) -> None:
        """Let another object be the context, until the hook is used on a model again."""
        self._known.clear()
        self._context = context

    def used_on(self, root: nn.Module, context: Any) -> None:
        """The context is this one, where the hook is called by the model `root`."""
        self._known.pop(root, None)
        self._known[root] = self._context = context

    @property
    def point(self) -> HookPoint:
        """The point at which it is being called."""
        point = here.get()
        if point is None:
            raise HooklineError(f"{self.described} is at no point: that is known while it is being called")
        return point

    @property
    def is_pre(self) -> bool:
        """Whether it is called before its module runs."""
        return hook_type_of(self.hook_type) is HookType.PRE_FORWARD or (self.hook_point or "").endswith(
            (".pre", ".input")
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """What flows on: None, a new output, or before the module new `(args, kwargs)`."""
        result = self._hook_fn(module, in_order(module, args, kwargs), output)
        if result is None or not self.is_pre:
            return result
        return out_of_order(module, args, kwargs, result)

    def _hook_fn(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> Any:  # noqa: ARG002
        """What flows on. `input` has the arguments of the call in the order of the module's parameters."""
        return None

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> ObjectEdit:
        """What is done for it at `point`."""
        if dir != "fwd":
            raise InvalidHookError(
                f"{self.described} works on the forward pass: for gradients give a function or an edit such as zero()"
            )
        if type(self)._hook_fn is Hook._hook_fn and type(self).__call__ is Hook.__call__:
            raise InvalidHookError(f"{type(self).__name__} does nothing: it defines neither _hook_fn nor __call__")
        if self.is_pre:
            point = input_of(point, lambda: self.described)
        root = point.permanent.root()
        if root is not None and root not in self._known and (self._context is None or self._known):
            self.used_on(root, HookContext(root))
        return (ObjectRead if self.only_reads else ObjectEdit)(point, self, prepend=prepend)

    def declared(self, points: Points) -> list[HookPoint]:
        """Where its `hook_point` and `layer`, or else its `layer_signature`, say."""
        if self._target() is None:
            return super().declared(points) if self.layer_signature is None else points.select(self.layer_signature)
        found = self._found(points)
        if self.layer_signature is not None:
            self._check_same(found, points.select(self.layer_signature), self.layer_signature)
        return found

    def says_where(self) -> bool:
        """Whether it declares where it belongs."""
        return self._target() is not None or self.own_signature is not None

    def check_target(self, given: list[HookPoint], points: Points) -> None:
        """An error if it is given for other points than those that it declares."""
        if self._target() is not None:
            self._check_same(self._found(points), given, [point.name for point in given])
        if self.own_signature is not None:
            self._check_same(points.select(self.own_signature), given, [point.name for point in given])

    def _target(self) -> Any:
        """What it declares by `hook_point` and `layer`."""
        calls_itself = type(self).__call__ is not Hook.__call__
        if self.hook_point is None and (self.layer is None or not calls_itself):
            return None
        if self.layer is not None and (isinstance(self.layer, bool) or not isinstance(self.layer, int)):
            raise InvalidHookError(f"{type(self).__name__}.layer is the number of a layer, not {self.layer!r}")
        name = self.hook_point or ("lm.layer.pre" if self.is_pre else "lm.layer.post")
        return name if self.layer is None else (name, self.layer)

    def _found(self, points: Points) -> list[HookPoint]:
        target = self._target()
        try:
            return points.select(target)
        except HooklineError as error:
            why = str(error) if isinstance(error, UnknownPointError) else "it has no such layers"
            name = target if self.layer is None else target[0]
            raise UnknownHookPointError(
                f"{type(self).__name__} declares hook_point={name!r} and layer={self.layer!r}, which this "
                f"model has not: {why} It has {points.targets()}."
            ) from error

    def _check_same(self, declared: list[HookPoint], given: list[HookPoint], asked: Any) -> None:
        if self._sites(declared) != self._sites(given):
            names = " and ".join(repr(point.name) for point in declared[:2]) + (", …" if len(declared) > 2 else "")
            raise InvalidHookError(
                f"{self.described} declares itself for {names}, but is given for {asked!r}: say it once, or the same"
            )

    def _sites(self, points: list[HookPoint]) -> set[Any]:
        placed = [input_of(point, lambda: self.described) if self.is_pre else point for point in points]
        return {(point.site, point.only) for point in placed}

    @property
    def own_signature(self) -> Any:
        """The `layer_signature` that it was made with, also when it is registered."""
        return self.layer_signature if self._placed is None else self._placed[0]

    def place(self, layer_signature: Any) -> None:
        """It is registered at that layer."""
        self._placed = (self.own_signature,)
        self.layer_signature = layer_signature

    def is_holding(self) -> bool:
        """Whether it has kept anything of what it saw."""
        return False

    def attached(self, model: Any) -> None:
        """It is about to be used on `model`."""
        self.used_on(model._points.root, HookContext(model._points.root, model))

    @property
    def described(self) -> str:
        """How messages name it."""
        return f"{type(self).__name__} {self.id!r}"

    def __getstate__(self) -> dict[str, Any]:
        of_the_model = ("_context", "_contexts", "_followers", "_kept")
        return {name: value for name, value in vars(self).items() if name not in of_the_model}

    def __copy__(self) -> Self:
        return self._copied(self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = new = self._copied({})
        vars(new).update(deepcopy(self.__getstate__(), memo), _id=None)
        return new

    def _copied(self, state: dict[str, Any]) -> Self:
        """Another hook, with an id of its own."""
        new = type(self).__new__(type(self))
        vars(new).update(state, _id=None)
        return new

    def __repr__(self) -> str:
        state = "" if self._enabled else ", disabled"
        layer = self.layer_signature
        name = type(layer).__name__ if isinstance(layer, nn.Module) else repr(layer)
        return f"<{type(self).__name__} {self.id!r}{f' at {name}' if layer is not None else ''}{state}>"


def hook_type_of(given: HookType | str) -> HookType:
    """The type that a word stands for."""
    try:
        return HookType(given)
    except ValueError:
        words = ", ".join(f"{each.value!r}" for each in HookType)
        raise InvalidHookError(f"hook_type must be a HookType, or one of {words}, not {given!r}") from None
