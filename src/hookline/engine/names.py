"""Names: from what people write to points.

The native dialect names the modules of any network by their paths:

    fc1            the output of module fc1              fc1.output   the same
    fc1.input      its input                             fc1.input[1] its second argument, fc1.input[mask] by name
    lstm[1][0]     a part of an output that is a tuple, list, dict or dataclass; without brackets, the first tensor
    cell#2         the third call of a module that is called several times in a forward pass
    input, output  of the network itself

Where a module itself is called `input` or `output`, that name is the module's, and a colon asks for the event:
`layer:output`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import translate
from typing import Any, Protocol, TypeAlias, runtime_checkable
from weakref import ref

import torch
from torch import nn

from hookline.engine.delegate import Delegate
from hookline.engine.lenses import FIRST, Argument, Item, Lens
from hookline.engine.order import Kind
from hookline.engine.permanent import PermanentHooks
from hookline.engine.points import HookPoint, Site
from hookline.engine.signatures import parameters_of
from hookline.errors import HooklineError, UnavailablePointError, UnknownPointError, no_match, unknown_point

Filter: TypeAlias = (
    str | int | tuple[Any, ...] | nn.Module | re.Pattern[str] | Callable[[str], bool] | Iterable["Filter"] | None
)

_Link: TypeAlias = tuple[dict[str, nn.Module | None], str, nn.Module]
"""A step on the way from the root to a module: in whose children, under which name, which child."""

_EVENT = re.compile(r"(?:(?P<path>.*)[.:]|:?)(?P<event>input|output)")
_CLASSIC = re.compile(r"(blocks|encoder|decoder)\.-?\d|hook_|ln_final\.|unembed\.|lm\.|vision\.|projector\.")
_NAME = re.compile(r"(?P<base>[^\[\]#]*)(?P<items>(?:\[[^\[\]]+\])*)(?:#(?P<call>\d+))?")


class Points:
    """The points of one model, and how to find them."""

    def __init__(self, root: nn.Module, standing: PermanentHooks, *, only_placed: bool = False) -> None:
        self.root, self.permanent, self._only_placed = original(root), standing, only_placed
        self.hint = ""  # what is to be said to those who ask for a language model's points
        self.refresh()

    def refresh(self) -> None:
        """Look at the model's modules anew: some may have come, gone, or been replaced."""
        before: dict[nn.Module, str] = getattr(self, "_paths", {})
        self._past: set[nn.Module] = {*getattr(self, "_past", ()), *before}
        self._paths: dict[nn.Module, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._links: dict[nn.Module, tuple[_Link, ...]] = {}
        events = list(self._walk(self.root, "", ()))
        moved = {module for module, path in before.items() if self._paths.get(module, path) != path}
        self._moved: set[nn.Module] = {*getattr(self, "_moved", ()), *moved}
        self._found: dict[tuple[str, Kind], HookPoint] = {}
        self._asked: dict[str, HookPoint] = {}
        self._selected: dict[str | None, list[HookPoint]] = {}
        if self._only_placed:
            events = [(path, kind) for path, kind in events if isinstance(self._modules[path], HookPoint)]
        self._last_links = [links[-1] for links in self._links.values() if links]
        self._sizes = [(module._modules, len(module._modules)) for module in self._paths]
        self.hook_dict: dict[str, HookPoint] = {}
        self._view: Callable[[], PointDict | None] = lambda: None
        for path, kind in events:
            point = self._point(path, kind)
            self.hook_dict[point.name] = point

    def by_any_name(self) -> PointDict:
        """`hook_dict` for users, which also finds other spellings. It keeps the points alive, not they it."""
        view = self._view()
        if view is None:
            view = PointDict(self)
            self._view = ref(view)
        return view

    def _walk(self, module: nn.Module, path: str, links: tuple[_Link, ...]) -> Iterator[tuple[str, Kind]]:
        """The events of a module and all below it, as near to the order in which they fire as can be told."""
        self._modules[path] = module
        if module in self._paths:
            self._alias(module, path)
            return
        self._paths[module], self._links[module] = path, links
        if isinstance(module, torch.jit.ScriptModule):
            return
        runs = is_called(module)
        if runs and not isinstance(module, HookPoint):
            yield path, Kind.INPUT
        for name, child in module._modules.items():
            if child is not None:
                link = (module._modules, name, child)
                yield from self._walk(original(child), f"{path}.{name}" if path else name, (*links, link))
        if runs:
            yield path, Kind.OUTPUT

    def _alias(self, module: nn.Module, path: str) -> None:
        """A module met again under another name: everything below it has another name too."""
        for below, child in module.named_modules(prefix=path, remove_duplicate=False):
            self._modules[below] = original(child)

    def _point(self, path: str, kind: Kind) -> HookPoint:
        """The point for an event; the same object for every name of a module."""
        module = self._modules[path]
        path = self._paths[module]
        if (path, kind) not in self._found:
            self._found[path, kind] = self._make(path, kind, module)
        return self._found[path, kind]

    def _make(self, path: str, kind: Kind, module: nn.Module) -> HookPoint:
        name = self._name(path, kind)
        if isinstance(module, HookPoint):
            return module.join(name, self.permanent)
        return HookPoint.at_site(name, self._site(module, kind, lens_of(module, kind)), self.permanent)

    def _site(self, module: nn.Module, kind: Kind, lens: Lens) -> Site:
        """Where a native point is."""
        return Site(module, kind, lens)

    def _name(self, path: str, kind: Kind) -> str:
        if kind is Kind.OUTPUT and path:
            return path
        name = f"{path}.{kind.value}" if path else kind.value
        return f"{path}:{kind.value}" if name in self._modules else name

    def find(self, name: str) -> HookPoint:
        """The point with that name; the error names the nearest ones."""
        if not isinstance(name, str):
            raise UnknownPointError(f"a point is asked for by a string, not by {name!r}")
        if name not in self._asked:
            if not self._is_same_tree():
                self.refresh()
            self._asked[name] = self._parse(name)
        if not self._is_in_place(self._asked[name].site):
            self.refresh()
            self._asked[name] = self._parse(name)
        return self._asked[name]

    def _parse(self, name: str) -> HookPoint:
        event = self._event(name)
        if event is not None:
            return self._point(*event).alias(name)
        match = _NAME.fullmatch(name)
        event = self._event(match["base"]) if match else None
        if match is None or event is None:
            raise unknown_point(name, self.hook_dict, hint=self.hint if _CLASSIC.match(name) else "")
        point, keys = self._point(*event), _keys(match["items"])
        only = int(match["call"]) if match["call"] else None
        if not keys:
            return point.alias(name, only)
        site = replace(point.site, lens=lens_of(point.site.module, point.site.kind, keys))
        return HookPoint.at_site(name, site, self.permanent).alias(name, only)

    def _event(self, base: str) -> tuple[str, Kind] | None:
        """Which module and which side of it a name without brackets means."""
        match = _EVENT.fullmatch(base)
        if base in self._modules and base:
            path, kind = base, Kind.OUTPUT
        elif match is not None and (match["path"] or "") in self._modules:
            path, kind = match["path"] or "", Kind(match["event"])
        else:
            return None
        module = self._modules[path]
        if isinstance(module, torch.jit.ScriptModule):
            raise UnavailablePointError(f"{path!r} is a ScriptModule, on which torch allows no hooks")
        if not is_called(module):
            inside = ", ".join(repr(f"{path}.{name}") for name in list(module._modules)[:4])
            raise UnavailablePointError(
                f"{base!r} is a {type(module).__name__}, which only holds modules and is never called itself; "
                f"hook what is in it: {inside or 'nothing'}"
            )
        if isinstance(module, HookPoint) and kind is Kind.INPUT:
            raise UnavailablePointError(f"{path!r} is a HookPoint, which passes its input on: hook {path!r} itself")
        return path, kind

    def of_copy(self, root: nn.Module) -> Points:
        """The points of a copy of the model."""
        return Points(root, PermanentHooks())

    def name_of(self, name: object) -> str:
        """The name of what was asked for by something else than a name: by a point."""
        if not isinstance(name, HookPoint):
            raise UnknownPointError(f"a cache is asked by the name of a point, or by a point, not by {name!r}")
        return name.name

    def has(self, module: nn.Module) -> bool:
        """Whether the module is, or was when last looked at, in this model."""
        return module in self._paths or module in self._past

    def blocks(self) -> list[nn.Module] | None:
        """The layers of a transformer, in order; None for a network without known layers."""
        return None

    def targets(self) -> str:
        """What a hook object may declare as its `hook_point` in this model, in words."""
        return "no layers by role; its points are " + ", ".join(map(repr, list(self.hook_dict)[:8]))

    def is_on_request(self, name: str) -> bool:  # noqa: ARG002
        """Whether a point is recorded only when it is asked for by name. Of a plain network, none is."""
        return False

    def known(self) -> list[HookPoint]:
        """Every point that anybody has got hold of."""
        return [*self._found.values(), *self._asked.values()]

    def canonical_name(self, name: str) -> str:
        """The one spelling for all names of a point: of `fc1.output` it is `fc1`."""
        event = self._event(name)
        if event is None:
            match = _NAME.fullmatch(name)
            event = self._event(match["base"]) if match else None
            if match is None or event is None:
                raise unknown_point(name, self.hook_dict)
            return self._point(*event).name + name[len(match["base"]) :]
        return self._point(*event).name

    def select(self, names: Filter) -> list[HookPoint]:
        """The points that a name, glob, regex, predicate, or a list of these stands for. None stands for all."""
        if not isinstance(names, str) and not self._is_same_tree():
            self.refresh()
        chosen = self._select(names)
        if not self._are_current(chosen):
            self.refresh()
            chosen = self._select(names)
        return chosen

    def _are_current(self, points: list[HookPoint]) -> bool:
        if len(points) < 16 or self._moved:
            return all(self.is_current(point) for point in points)
        return all(modules.get(name) is child for modules, name, child in self._last_links)  # the whole tree, once

    def _is_same_tree(self) -> bool:
        """Whether no module has come or gone since; `is_current` tells of one replaced."""
        return all(len(modules) == size for modules, size in self._sizes)

    def _select(self, names: Filter) -> list[HookPoint]:
        if names is None or isinstance(names, str):
            if names not in self._selected:
                self._selected[names] = self._by_name(names) if names is not None else self._all()
            return self._selected[names]
        if isinstance(names, HookPoint):
            return [self._own(names)]
        if isinstance(names, nn.Module) and (original(names) in self._paths or not isinstance(names, Delegate)):
            return [self._point(self._path_of(original(names)), Kind.OUTPUT)]
        if isinstance(names, re.Pattern):
            return self._matching(names, lambda name: names.search(name) is not None)
        if callable(names) and not isinstance(names, type | PointsHolder):
            return self._matching(names, names)
        if isinstance(names, Iterable) and not isinstance(names, bytes | nn.Module):
            every = [point for each in names for point in self._select(each)]
            if not every:
                raise no_match(names, self.hook_dict)
            chosen: dict[tuple[Site, int | None], HookPoint] = {}
            for point in every:
                chosen.setdefault((point.site, point.only), point)
            return [*chosen.values()]
        raise HooklineError(
            "a filter is a name, a glob, a compiled regex, a predicate, a point, a module, or a list of these, "
            f"not {names!r}"
        )

    def _all(self) -> list[HookPoint]:
        if not self.hook_dict:
            raise UnknownPointError("no HookPoint is placed in this model: ask for modules' inputs and outputs by name")
        return [*self.hook_dict.values()]

    def _by_name(self, name: str) -> list[HookPoint]:
        if name in self.hook_dict or ("*" not in name and "?" not in name):
            return [self.find(name)]
        # Square brackets are part of a name here, not of the glob.
        pattern = re.compile(translate(name.replace("[", "[[]")))
        return self._matching(name, lambda candidate: pattern.match(candidate) is not None)

    def _matching(self, asked: object, predicate: Callable[[str], Any]) -> list[HookPoint]:
        chosen = [point for name, point in self.hook_dict.items() if predicate(name)]
        if not chosen:
            raise no_match(asked, self.hook_dict)
        return chosen

    def _own(self, point: HookPoint) -> HookPoint:
        if point.site.module not in self._paths or self._has_moved(point):
            raise UnknownPointError(
                f"the point {point.name!r} is not one of this model's: it belongs to another model, or its module has "
                f"been replaced. Ask for it by name."
            )
        return point

    def _path_of(self, module: nn.Module) -> str:
        if module not in self._paths:
            raise unknown_point(type(module).__name__, self.hook_dict, hint="That module is not in this model.")
        return self._paths[module]

    def is_current(self, point: HookPoint) -> bool:
        """Whether the point's module is still where it was; people do replace modules, and put others around them."""
        return self._is_in_place(point.site) and not self._has_moved(point)

    def _is_in_place(self, site: Site) -> bool:
        """Whether the modules that the site looks at are where they were when last looked for."""
        return self._is_linked(site.module) and all(self._is_linked(each.module) for each in site.needs)

    def _is_linked(self, module: nn.Module) -> bool:
        links = self._links.get(module)
        return links is not None and all(modules.get(name) is child for modules, name, child in links)

    def _has_moved(self, point: HookPoint) -> bool:
        """Whether the point's name now means another place: LoRA puts a module around the one that had the name."""
        if point.site.module not in self._moved:
            return False
        try:
            return self.find(point.name).site != point.site
        except UnknownPointError:
            return True


@runtime_checkable
class PointsHolder(Protocol):
    """A hooked model: it can be called, but is no predicate on names."""

    hook_dict: dict[str, HookPoint]


class PointDict(dict[str, HookPoint]):
    """Points by name; a name that is not listed is looked for among the other spellings."""

    def __init__(self, points: Points) -> None:
        super().__init__(points.hook_dict)
        self._points = points

    def __missing__(self, name: str) -> HookPoint:
        return self._points.find(name)


def original(module: nn.Module) -> nn.Module:
    """The module itself, without the wrapper that `torch.compile` or `hookline.hook` puts around it."""
    if isinstance(module, Delegate):
        return original(module.module)
    if "_orig_mod" in module._modules:
        return original(module._modules["_orig_mod"])  # type: ignore[arg-type]
    return module


def is_called(module: nn.Module) -> bool:
    """Whether the module can run; a ModuleList only holds others."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def lens_of(module: nn.Module, kind: Kind, keys: tuple[int | str, ...] = ()) -> Lens:
    """The lens for an input or output of a module, or for a part of it."""
    if kind is Kind.INPUT:
        names, positional = parameters_of(module)
        key, rest = (keys[0], keys[1:]) if keys else (None, ())
        return Argument(names, key, rest, positional)
    return Item(keys) if keys else FIRST


def _keys(items: str) -> tuple[int | str, ...]:
    return tuple(int(key) if key.isdigit() else key for key in re.findall(r"\[([^\[\]]+)\]", items))
