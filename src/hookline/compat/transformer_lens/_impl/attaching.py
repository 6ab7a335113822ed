"""Modules that users attach to a HookedTransformer: in place of a point or a component, or under a new name.

    model.blocks[0].hook_mlp_out = sae                        # in place of a point: it gets what passes there
    model.blocks[0].mlp = Wrapper(model.blocks[0].mlp)        # in place of a component: it is called instead
    model.blocks[0].mlp.hook_in = HookPoint()                 # under a new name: called by whoever calls it

The transformers model keeps its own modules. At a point, an edit of the engine calls the attached module. A component's
own module gets a `forward` that calls the attached one, until that is removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeGuard
from weakref import ref

from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.toys import MID, with_toy_points
from hookline.engine import Delegate, HookPoint, Kind, PermanentHooks, pass_state
from hookline.errors import HooklineError, UnavailablePointError
from hookline.transformer.anatomy import Anatomy
from hookline.transformer.index import ModelPoints

_COMPONENT = re.compile(r"embed|pos_embed|ln_final|unembed|blocks|blocks\.\d+|blocks\.\d+\.(attn|mlp|ln[12](_post)?)")


class _Paths(dict[str, nn.Module]):
    """Modules by path; unlike a dict, it can be referred to weakly."""


class LensPoints(ModelPoints):
    """The points of the model, and those in attached modules."""

    def __init__(self, *args: Any) -> None:
        self.attached: _Paths = _Paths()
        self.adopted: dict[str, HookPoint] = {}
        """Points that a user has made, and that are now points of the model."""
        self.placed: set[str] = set()
        """Names of points that a user has placed."""
        self.replaced: dict[str, str] = {}
        """The usual names of the points in whose place modules are attached, by the path of each module."""
        self.own: dict[str, HookPoint] = {}
        """The points of the model itself, by their usual names."""
        super().__init__(*args)
        self.permanent.attached = ref(self.attached)

    def outdate(self) -> None:
        """Find the points again before they are next used."""
        self._children_then = []

    def refresh(self) -> None:
        """Find the points again, at once: what is attached has a part in their names."""
        super().refresh()
        self.hook_dict  # noqa: B018

    def _walk(self, module: nn.Module, path: str) -> Iterator[tuple[nn.Module, Kind]]:
        yield from super()._walk(module, path)
        if path == "":
            self._children.append(self.attached)  # type: ignore[arg-type]
            for name, attached_module in self.attached.items():
                yield from super()._walk(Delegate.original(attached_module), name)

    def _list(self) -> dict[str, HookPoint]:
        self._table = with_toy_points(self.root, self.anatomy, self._specs)
        self.own = super()._list()
        for name in [name for name in self.adopted if name in self.own]:
            self.own[name] = adopt(self.adopted[name], self.own[name])
        listed, self._moved = {}, dict[str, str]()
        prefixes = {path: _inside(module, path) for path, module in self.attached.items() if _is_component(path)}
        for name, point in self.own.items():
            path = next((path for path in prefixes if name.startswith(f"{path}.")), None)
            if path is None:
                listed[name] = point
            elif prefixes[path] is not None:
                self._moved[name] = f"{prefixes[path]}{name[len(path) :]}"
                listed[self._moved[name]] = point.alias(self._moved[name])
        for path in self.attached:
            listed.pop(self.replaced.get(path, path), None)
        placed = {
            name: point
            for name, point in self._native.items()
            if isinstance(point.site.module, HookPoint) and _is_under_any(name, self.attached)
        }
        self.placed = {*placed, *self.adopted}
        return listed | placed

    def own_name(self, path: str) -> str:
        """The usual name of the model's own point that a path means in any dialect; if it is none, the path itself."""
        if path in self.own or not path.rpartition(".")[2].startswith("hook_"):
            return path
        name = self.replaced.get(path) or (None if _is_under_any(path, self.attached) else self._classic_of(path))
        return name if name in self.own else path

    def _classic_of(self, name: str) -> str | None:
        return _with_mid(super()._classic_of(name))

    def _shorthand(self, asked: object) -> str | None:
        return _with_mid(super()._shorthand(asked))

    def is_on_request(self, name: str) -> bool:
        """Whether a point is recorded only if requested by name; one that a user has placed is always recorded."""
        return name not in self.placed and super().is_on_request(name)

    def _translate(self, name: str) -> HookPoint | None:
        if name in self.placed and name in self.hook_dict:
            return self.hook_dict[name]
        if name in self.attached:
            return self._point(Delegate.original(self.attached[name]), Kind.OUTPUT).alias(name)
        if name in self._moved:
            return self.hook_dict[self._moved[name]].alias(name)
        if name in self._moved.values():
            return self.hook_dict[name]
        return super()._translate(name)


class Attached:
    """The attached modules of a model, by path."""

    def __init__(self, points: LensPoints) -> None:
        self._points = points
        self.modules = points.attached
        self.forwards: dict[str, Callable[..., Any]] = {}
        """Functions that were assigned to the `forward` of a component."""
        self._splices = PermanentHooks(points.root)
        self._splices.raises_own = True
        self._replaced: dict[nn.Module, Callable[..., Any]] = {}
        """The own `forward` of each module that has another one now."""

    def get(self, path: str) -> nn.Module | HookPoint | None:
        """What is attached at that path, or the model's own point there if a user has made it."""
        module = self.modules.get(path) or self._points.adopted.get(path)
        if module is None and (self._points.replaced or self._points.adopted):
            name = self._points.own_name(path)
            module = self.modules.get(self._path_of(name)) or self._points.adopted.get(name)
        return module

    def _path_of(self, name: str) -> str:
        """The path of the module in place of this point, which may be another name of the point."""
        return next((path for path, replaced in self._points.replaced.items() if replaced == name), name)

    def put(self, path: str, value: Any) -> None:
        """Attach a module; the model's own point or component at that path restores it."""
        points = self._points
        if path.endswith(".forward"):
            component = path.removesuffix(".forward")
            self._check_component(component)
            self.forwards[component] = value
            self._reroute(component)
            return
        if not isinstance(value, nn.Module):
            raise HooklineError(f"{path} takes a module, not {type(value).__name__}")
        if path in points.specs and points.specs[path].site is None:
            raise UnavailablePointError(f"{path!r} is not available on this model: {points.specs[path].why}")
        name = points.own_name(path)
        is_own = getattr(value, "_path", None) == path or value is points.own.get(name)
        if _is_component(path) and not is_own:
            self._check_component(path)
        self.remove(path)
        if is_own:
            return
        if name in points.own and is_new(value):
            points.adopted[name] = adopt(value, points.own[name])
        else:
            self.modules[path] = value
            self._reroute(path) if _is_component(path) else self._splice(path, name, value)
            for name, submodule in value.named_modules(prefix=path):
                if isinstance(submodule, HookPoint):  # from now on, its hooks are hooks of the model
                    submodule.join(name, points.permanent)
        points.outdate()

    def remove(self, path: str) -> None:
        """Remove what is attached there; the model's own point or component is back in its place."""
        name = self._points.own_name(path)
        path = self._path_of(name) if name in self._points.own else path
        self._points.adopted.pop(name, None)
        self._points.replaced.pop(path, None)
        if self.modules.pop(path, None) is None:
            return
        self._splices.remove(lambda hook: hook.hook.path == path)
        if _is_component(path):
            self._reroute(path)
        self._points.outdate()

    def kept(self) -> dict[str, Any]:
        """What is attached, for a copy of the model; raises if a module is in place of a point."""
        if at_points := list(self._points.replaced):
            raise HooklineError(
                f"a model cannot be copied or pickled while modules are attached at its points "
                f"({', '.join(at_points)}): assign HookPoint() there first, and attach them to the copy"
            )
        return {**self.modules, **{f"{path}.forward": forward for path, forward in self.forwards.items()}}

    def restore(self, attached: dict[str, Any]) -> None:
        """Attach all of this to a copy of the model, whose modules still have the `forward` of the model."""
        for path in attached:
            module = module_at(self._points.anatomy, path.removesuffix(".forward")) if "." in path else None
            if module is not None and isinstance(vars(module).get("forward"), Reroute):
                del vars(module)["forward"]
        for path, value in attached.items():
            self.put(path, value)

    def own_forward(self, module: nn.Module) -> Callable[..., Any]:
        """The module; if another is called in its place, its own `forward`."""
        return self._replaced.get(module, module)

    def _splice(self, path: str, name: str, module: nn.Module) -> None:
        if name not in self._points.own:
            return
        self._points.replaced[path] = name
        action = self._points.own[name].action(Splice(path, module))
        action.must_fire = False  # a run may stop before it
        action.registration.is_permanent = True
        self._splices.add(action)

    def _check_component(self, path: str) -> None:
        module, anatomy = module_at(self._points.anatomy, path), self._points.anatomy
        last = path.rpartition(".")[2]
        what = "its own arguments are those of transformers"
        if last == "embed" and (anatomy.main.embed_norm is not None or anatomy.main.architecture.embedding_factor != 1):
            module, what = None, "it is followed by a norm or a factor"
        elif last == "mlp" and anatomy.architecture.residual_in_mlp:
            module, what = None, "it adds the residual itself"
        elif last not in ("embed", "mlp", "unembed") and not last.startswith("ln"):
            module = None
        if module is None:
            raise HooklineError(
                f"{path} of this model cannot be replaced: {what}. Attach a module at one of its points, such as "
                f"{path}.hook_…, or at the stream before and after it"
            )

    def _reroute(self, path: str) -> None:
        """Call what is attached in place of the component's own module, or restore the module."""
        module: Any = module_at(self._points.anatomy, path)
        target = self.modules.get(path, self.forwards.get(path))
        if module not in self._replaced and target is not None:
            self._replaced[module] = vars(module).get("forward") or partial(type(module).forward, module)
        if target is not None:
            vars(module)["forward"] = Reroute(target)
        elif (forward := self._replaced.pop(module, None)) is not None:
            del vars(module)["forward"]
            if not (isinstance(forward, partial) and forward.func is type(module).forward):
                vars(module)["forward"] = forward


class Splice:
    """A hook that calls an attached module."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module

    def __call__(self, x: Tensor) -> Tensor:
        """The module's output for the activation."""
        with pass_state.as_part_of_the_model():
            if self.path.endswith("attn.o.hook_in"):  # in TransformerLens, the heads side by side, unlike hook_z
                return self.module(x.flatten(2)).view_as(x)
            return self.module(x)


class Reroute:
    """The `forward` of a module in whose place another one is called. An object, so that a copy refers to a copy."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the other one returns."""
        return self.target(*args, **kwargs)


def module_at(anatomy: Anatomy, path: str) -> nn.Module | None:
    """The module of the transformers model that is a component by itself; None if there is none."""
    stack, _, rest = path.partition(".")
    if stack != "blocks":
        return anatomy.unembed if stack == "unembed" else getattr(anatomy.main, stack, None)
    layer, _, name = rest.partition(".")
    if not name:
        return None
    return getattr(anatomy.blocks[int(layer)], name) if int(layer) in range(len(anatomy.blocks)) else None


def _with_mid(name: str | None) -> str | None:
    """The name of a point; `("mid", 0)` is inside the MLP."""
    return re.sub(r"(\d+)\.hook_mid$", rf"\1.{MID.name}", name) if name is not None else None


def is_new(value: nn.Module) -> TypeGuard[HookPoint]:
    """Whether this is a point that nobody uses yet."""
    if type(value) is not HookPoint or value._site is not None or value._modules:
        return False
    return value.permanent.root() is None and not value.permanent.hooks() and not value._forward_hooks


def adopt(value: HookPoint, model_point: HookPoint) -> HookPoint:
    """Make a new point the model's own."""
    value.name, value._canonical_name, value.axes, value.only = (
        model_point.name,
        model_point.name,
        model_point.axes,
        model_point.only,
    )
    value._site, value._permanent = model_point.site, model_point.permanent
    return value


def _is_component(path: str) -> bool:
    return _COMPONENT.fullmatch(path) is not None


def _inside(module: nn.Module, path: str) -> str | None:
    """Where the component of that path is inside the module that is attached in its place."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, Delegate) and getattr(submodule, "_path", None) == path:
            return f"{path}.{name}" if name else path
    return None


def _is_under(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _is_under_any(name: str, paths: Iterable[str]) -> bool:
    return any(_is_under(name, path) for path in paths)
