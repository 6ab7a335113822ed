"""Names: from what people write to points.

The native dialect names the modules of any network by their paths:

    fc1            the output of module fc1              fc1.output   the same
    fc1.input      its input                             fc1.input[1] its second argument, fc1.input[mask] by name
    lstm[1][0]     a part of an output that is a tuple, list, dict or dataclass; without brackets, the first tensor
    cell#2         the third call of a module that is called several times in a forward pass
    input, output  of the network itself
    attn.pattern   inside a module that computes attention: attn.q, attn.k, attn.scores, attn.pattern

Where a module itself is called `input`, `q` and so on, that name is the module's, and a colon asks for the event:
`layer:output`.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import translate
from functools import partial
from typing import Any

import torch
from torch import nn

from hookline.engine._inner.plain_attention import NAMES, HeadAxis, heads_of
from hookline.engine._memory.outside import OwnedTensors, held_in
from hookline.engine._recording.lineage import Lineage, is_exact
from hookline.engine._recording.ready import ReadyRuns
from hookline.engine._reports.suggestions import meant_by
from hookline.engine._sharding.split_values import check_items, completing, preparations, why_refused
from hookline.engine._staying.added_hooks import active_hooks
from hookline.engine._staying.permanent import PermanentHooks
from hookline.engine.delegate import Delegate
from hookline.engine.hook_actions import HookAction
from hookline.engine.lenses import FIRST, Argument, Item, Lens, chained
from hookline.engine.order import Kind
from hookline.engine.points import HookPoint, Site, check_direction, is_chosen, remove_from_contexts
from hookline.engine.taps import lock
from hookline.errors import (
    HooklineError,
    UnavailablePointError,
    UnknownPointError,
    a_type,
    how_many,
    no_match,
    unknown_point,
)
from hookline.functions.signatures import is_called, parameters_of
from hookline.types import Filter, Stream

_EVENT = re.compile(r"(?:(?P<path>.*)[.:]|:?)(?P<event>input|output|q|k|scores|pattern)")
_KINDS = {"input": Kind.INPUT, "output": Kind.OUTPUT, **NAMES}
_EVENTS = {kind: name for name, kind in _KINDS.items()}
_SELECTIONS = 1000  # lists of names whose points are remembered
_BY_RUN = "A run shows which modules compute attention: pass verify(*inputs).points, or names without globs"
_NAME = re.compile(r"(?P<base>[^\[\]#]*)(?P<items>(?:\[[^\[\]]+\])*)(?:#(?P<call>\d+))?")


class Points:
    """The points of one model, and how to find them.

    A subclass lists other points (`_list`), and says which of them a name of another dialect means (`_translate`).
    """

    def __init__(self, root: nn.Module, standing: PermanentHooks, *, only_placed: bool = False) -> None:
        self.root, self.permanent, self._only_placed = Delegate.original(root), standing, only_placed
        for prepare in preparations:
            prepare(self.root)
        self.hint: Callable[[str], str] = lambda _name: ""
        """Returns the last sentence of the error about an unknown name."""
        self._first_paths: dict[nn.Module, str] = {}
        self.last_run = threading.local()
        """`errors` of the last run in each thread."""
        self.refresh()

    def refresh(self) -> None:
        """Read the tree of modules again after some were added, removed or replaced."""
        self._paths: dict[nn.Module, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._children: list[dict[str, nn.Module | None]] = []
        self._points: dict[tuple[nn.Module, Kind], HookPoint] = {}
        self._asked: dict[str, HookPoint] = {}
        self._selected: dict[str | tuple[str, ...] | None, list[HookPoint]] = {}
        self.ready_runs = ReadyRuns()
        self._events = [*self._walk(self.root, "")]
        self._children_then = [dict(children) for children in self._children]
        self._held = held_in(self.root)
        self._placed = [module for module in self._paths if isinstance(module, HookPoint)]
        self._shared = {module for path, module in self._modules.items() if self._paths.get(module) != path}
        self._first_paths = {**self._paths, **self._first_paths}
        for placed in self._placed:
            self._point(placed, Kind.OUTPUT)
        self._native_points: dict[str, HookPoint] | None = None  # made when they are needed
        self._listed: tuple[dict[str, HookPoint], dict[tuple[Site, int | None], str]] | None = None

    @property
    def _native(self) -> dict[str, HookPoint]:
        """The points at the inputs and outputs of all modules."""
        if self._native_points is None:
            with lock:  # of two threads, both get the points of the first
                if self._native_points is None:
                    points = [self._point(*event) for event in self._events]
                    self._native_points = {point.name: point for point in points}
        return self._native_points

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """The points with a name of their own, in the order in which they fire."""
        return self._listing()[0]

    def _listing(self) -> tuple[dict[str, HookPoint], dict[tuple[Site, int | None], str]]:
        """The points by name, and the names by site and call."""
        if self._listed is None:
            with lock:
                if self._listed is None:
                    points = self._list()
                    self._listed = points, {(point.site, point.only): name for name, point in points.items()}
        return self._listed

    def _list(self) -> dict[str, HookPoint]:
        """The points of `hook_dict`, in the order in which they fire."""
        if not self._only_placed:
            return self._native
        return {name: point for name, point in self._native.items() if isinstance(point.site.module, HookPoint)}

    def _walk(self, module: nn.Module, path: str) -> Iterator[tuple[nn.Module, Kind]]:
        """The events of a module and of all below it, in the order in which they are likely to fire."""
        self._modules[path] = module
        if module in self._paths:  # shared under another name, and so is everything below it
            for below, child in module.named_modules(prefix=path, remove_duplicate=False):
                self._modules[below] = Delegate.original(child)
            return
        self._paths[module] = path
        if isinstance(module, torch.jit.ScriptModule):
            return
        self._children.append(module._modules)
        has_points = is_called(module) and why_refused(module) is None
        if has_points and not isinstance(module, HookPoint):
            yield module, Kind.INPUT
        for name, child in module._modules.items():
            if child is not None:
                yield from self._walk(Delegate.original(child), f"{path}.{name}" if path else name)
        if has_points:
            yield module, Kind.OUTPUT

    def _point(self, module: nn.Module, kind: Kind) -> HookPoint:
        """The point at an event: the same object for every name of its module."""
        if (why := why_refused(module)) is not None:
            raise UnavailablePointError(f"{self._native_name(self._paths[module], kind)!r} is not available: {why}")
        if (module, kind) not in self._points:
            name = self._native_name(self._paths[module], kind)
            if isinstance(module, HookPoint):
                point = module.join(name, self.permanent)
            else:
                site = Site(module, kind, lens_of(module, kind), stream=self._stream_of(module))
                listed = self._inside(module, kind) if kind.is_inner else None
                point = listed or HookPoint.at_site(name, site, self.permanent)
            self._points[module, kind] = point
        return self._points[module, kind]

    def _inside(self, module: nn.Module, kind: Kind) -> HookPoint | None:
        """The listed point at an event inside a module, if there is one: that of a known architecture."""
        listed = (point for point in self.hook_dict.values() if point.only is None)
        return next((point for point in listed if point.site.module is module and point.site.kind is kind), None)

    def _native_name(self, path: str, kind: Kind) -> str:
        if kind is Kind.OUTPUT and path:
            return path
        event = _EVENTS[kind]
        name = f"{path}.{event}" if path else event
        return f"{path}:{event}" if name in self._modules else name

    def _stream_of(self, module: nn.Module) -> Stream:  # noqa: ARG002
        """The stream of the points at a module."""
        return "text"

    def find(self, name: str) -> HookPoint:
        """Return the point with that name; the error lists similar names."""
        if not isinstance(name, str):
            raise UnknownPointError(f"the name of a point must be a string, not {name!r}")
        self.keep_up()
        return self._named(name)

    def keep_up(self) -> None:
        """Read the tree again if any module was added, removed or replaced since."""
        if self._children != self._children_then:
            self.refresh()

    def lineage(self, modules: Iterable[nn.Module] | None = None) -> Lineage:
        """The children of some modules and of all above them, as they were read last.

        Those of the whole tree for None, or if a module is not in it, or in several places: any of them may be meant.
        """
        shared = self._shared
        paths = [None] if modules is None else [None if m in shared else self._paths.get(m) for m in modules]
        if None in paths:
            return Lineage(self._children)
        parts = [path.split(".") if path else [] for path in paths if path is not None]
        here = {".".join(some[:depth]) for some in parts for depth in range(len(some) + 1)}
        return Lineage([self._modules[path]._modules for path in here])

    def held(self) -> OwnedTensors:
        """The dictionaries in which the modules hold their parameters and buffers."""
        return self._held if self._children == self._children_then else held_in(self.root)

    def _named(self, name: str) -> HookPoint:
        if name not in self._asked:
            self._asked[name] = self._parse(name)
        return self._asked[name]

    def _parse(self, name: str) -> HookPoint:
        listed = self._translate(name)
        if listed is not None:
            return listed
        event = self._event(name)
        if event is not None:
            return self._point(*event).alias(name)
        match = _NAME.fullmatch(name)
        event = self._event(match["base"]) if match else None
        if match is None or event is None:
            raise unknown_point(name, self._all_names(), hint=self._advice(name), meant=partial(self.meant_by, name))
        point = self._point(*event)
        if match["items"]:
            keys = tuple(int(key) if key.isdigit() else key for key in re.findall(r"\[([^\[\]]+)\]", match["items"]))
            site = replace(point.site, lens=lens_of(*event, keys))
            point = HookPoint.at_site(point.name + match["items"], site, self.permanent)
        return point.alias(name, int(match["call"]) if match["call"] else None)

    def _translate(self, name: str) -> HookPoint | None:  # noqa: ARG002
        """The listed point that a name in another dialect means; None if it is in none."""
        return None

    def _shorthand(self, asked: object) -> str | None:  # noqa: ARG002
        """The name of a point given as a tuple or a number; None if that has no meaning here."""
        return None

    def _advice(self, name: str) -> str:
        """The last sentence of the error about an unknown name."""
        return self.hint(name)

    def _all_names(self) -> list[str]:
        return [*dict.fromkeys([*self.hook_dict, *self._native])]

    def meant_by(self, name: str) -> list[str]:
        """The points that a name which is not there may mean."""
        return meant_by(name, self._all_names(), self._is_point)

    def _is_point(self, name: str) -> bool:
        try:
            self._parse(name)
        except UnknownPointError:
            return False
        return True

    def _event(self, name: str) -> tuple[nn.Module, Kind] | None:
        """The module, and its input or output, that a native name without brackets means."""
        match = _EVENT.fullmatch(name)
        if name in self._modules and name:
            path, kind = name, Kind.OUTPUT
        elif match is not None and (match["path"] or "") in self._modules:
            path, kind = match["path"] or "", _KINDS[match["event"]]
        else:
            return None
        module = self._modules[path]
        if isinstance(module, torch.jit.ScriptModule):
            raise UnavailablePointError(f"{path!r} is a ScriptModule, and torch does not support hooks on it")
        if not is_called(module):
            inside = ", ".join(repr(f"{path}.{child}") for child in list(module._modules)[:4])
            raise UnavailablePointError(
                f"{name!r} is {a_type(module)}, which only holds modules and is never called itself; "
                f"hook the modules in it: {inside or 'it has none'}"
            )
        if isinstance(module, HookPoint) and kind is Kind.INPUT:
            raise UnavailablePointError(f"{path!r} is a HookPoint, whose output is its input: hook {path!r} itself")
        return module, kind

    def canonical_name(self, name: str) -> str:
        """The one name for all names of a point: `fc1` for `fc1.output`."""
        point, (_, names) = self._named(name), self._listing()
        if (point.site, point.only) in names:
            return names[point.site, point.only]
        call = "" if point.only is None else f"#{point.only}"
        return names.get((point.site, None), point.canonical_name) + call

    def name_of(self, asked: object) -> str:
        """The name of a point given as a point, or as a shorthand that this model understands."""
        name = asked.name if isinstance(asked, HookPoint) else self._shorthand(asked)
        if name is None:
            raise UnknownPointError(f"{asked!r} is not the name of a point, and not a point")
        return name

    def of_copy(self, root: nn.Module) -> Points:
        """The points of a copy of the model."""
        return Points(root, PermanentHooks())

    def has(self, module: nn.Module) -> bool:
        """Whether the module is in this model, or was when the tree was read."""
        return module in self._first_paths

    def is_current(self, point: HookPoint) -> bool:
        """Whether the point is still in the model under its name.

        People replace modules, and LoRA wraps one in another that takes over its name.
        """
        self.keep_up()
        module = point.site.module
        if any(site.module not in self._paths for site in (point.site, *point.site.needs)):
            return False
        if self._paths[module] == self._first_paths[module]:
            return True
        try:
            return self._named(point.name).site == point.site
        except UnknownPointError:
            return False

    def active_hooks(self) -> list[HookAction]:
        """The enabled hooks that may change activations: added ones, and those of open contexts."""
        return active_hooks(self)

    def added_hooks_text(self) -> str:
        """How many hooks are added, for the end of a list in a model's repr; empty if there are none."""
        count = len(self.permanent.hooks())
        return f", {how_many(count, 'hook')} added" if count else ""

    def remove_hooks(
        self, direction: str, *, including_permanent: bool, level: int | None, of_contexts: bool = False
    ) -> None:
        """Remove the hooks that were added; with `of_contexts` also those of open contexts that allow it."""
        check_direction(direction, "fwd", "bwd", "both")

        def is_meant(hook: HookAction) -> bool:
            return self.has(hook.module) and is_chosen(hook, direction, including_permanent, level)

        for permanent in self.permanent_hooks():
            permanent.remove(is_meant)
        if of_contexts:
            remove_from_contexts(is_meant)

    def blocks(self) -> list[nn.Module] | None:
        """The layers of a transformer, in order; None for other networks."""
        return None

    def targets(self) -> str:
        """The valid values of `hook_point` of a hook object on this model, as a sentence."""
        return "no layers by role; its points are " + ", ".join(map(repr, list(self.hook_dict)[:8]))

    def is_on_request(self, name: str) -> bool:  # noqa: ARG002
        """Whether a point is recorded only if requested by name."""
        return False

    def known(self) -> list[HookPoint]:
        """Every point that exists as an object."""
        return [*self.hook_dict.values(), *self._points.values(), *self._asked.values()]

    def permanent_hooks(self) -> list[PermanentHooks]:
        """The sets of added hooks that these points belong to: the model's, and those of models inside it."""
        return [*dict.fromkeys([self.permanent, *(point.permanent for point in self._placed)])]

    def select(self, names: Filter) -> list[HookPoint]:
        """Return the points of a filter (`types.Filter`); None: all."""
        self.keep_up()
        return self._select(names)

    def _select(self, names: Filter) -> list[HookPoint]:
        if names is None or isinstance(names, str):
            if names not in self._selected:
                self._selected[names] = self._all() if names is None else self._by_name(names)
            return self._selected[names]
        if type(names) is list and {*map(type, names)} == {str}:
            known = tuple(names)
            if known not in self._selected:
                if len(self._selected) > _SELECTIONS:
                    self._selected.clear()
                self._selected[known] = self._united(names)
            return self._selected[known]
        if isinstance(names, nn.Module):
            return [self._own(names)]
        if isinstance(names, re.Pattern):
            return self._matching(names, lambda name: names.search(name) is not None)
        if isinstance(names, dict):
            return self._renamed(names)
        if isinstance(names, type) and issubclass(names, nn.Module):
            return self._of_class(names)
        if callable(names) and not isinstance(names, type):
            return self._matching(names, names)
        shorthand = self._shorthand(names)
        if shorthand is not None:
            return [self._named(shorthand)]
        if not isinstance(names, Iterable) or isinstance(names, bytes | type):
            raise HooklineError(
                "a filter is a name, a glob, a compiled regex, a predicate, a point, a module, a class of modules, a "
                f"list of these, or a dict from new names to points, not {names!r}"
            )
        return self._united(names)

    def _united(self, names: Iterable[Any]) -> list[HookPoint]:
        """The points that any of several filters selects, each once."""
        chosen: dict[tuple[Site, int | None], HookPoint] = {}
        for point in (point for each in names for point in self._select(each)):
            chosen.setdefault((point.site, point.only), point)
        if not chosen:
            raise no_match(names, self.hook_dict)
        return [*chosen.values()]

    def _of_class(self, kind: type[nn.Module]) -> list[HookPoint]:
        """The outputs of all modules of exactly this class, under their native names."""
        modules = [module for module in self._paths if type(module) is kind]
        if not modules:
            counts = Counter(type(module).__name__ for module in self._paths)
            counted = ", ".join(f"{name} ({count})" for name, count in counts.most_common(12))
            derived = {type(module).__name__ for module in self._paths if isinstance(module, kind)}
            hint = f" Of classes derived from it: {', '.join(sorted(derived))}." if derived else ""
            raise UnknownPointError(
                f"no module of this model is of the class {kind.__name__} itself.{hint} Its classes are {counted}"
            )
        for module in modules:
            self._event(self._paths[module])  # raises for what torch hooks do not see
        return [self._point(module, Kind.OUTPUT) for module in modules]

    def _renamed(self, names: dict[Any, Any]) -> list[HookPoint]:
        """The points of a dict, each under its new name."""
        if not names:
            raise no_match(names, self.hook_dict)
        return [self._under_new_name(new, asked) for new, asked in names.items()]

    def _under_new_name(self, new: Any, asked: Any) -> HookPoint:
        if not isinstance(new, str) or not new or "#" in new or new.endswith("_grad"):
            raise HooklineError(f"a new name is a string without '#' and without '_grad' at its end, not {new!r}")
        points = self._select(asked)
        if len(points) != 1:
            raise HooklineError(
                f"each new name is for one point, but {asked!r}, called {new!r} here, matches {len(points)}: "
                f"{[point.name for point in points][:8]}"
            )
        if self._means_another(new, points[0]):
            raise HooklineError(f"{new!r} is the name of another point of this model: rename {asked!r} differently")
        return points[0].renamed(new)

    def _means_another(self, name: str, point: HookPoint) -> bool:
        """Whether a name is that of another point; "scores" is free, though any module may compute attention."""
        if name in NAMES:
            return False
        try:
            named = self._named(name)
        except UnknownPointError:
            return False
        return (named.site, named.only) != (point.site, point.only)

    def _all(self) -> list[HookPoint]:
        if not self.hook_dict:
            raise UnknownPointError("no HookPoint is placed in this model: name a module's input or output")
        return [point for name, point in self.hook_dict.items() if not self.is_on_request(name)]

    def _by_name(self, name: str) -> list[HookPoint]:
        if name in self.hook_dict or is_exact(name):
            return [self._named(name)]
        # Square brackets are part of a name here, not of the glob.
        pattern = re.compile(translate(name.replace("[", "[[]")))
        return self._matching(name, lambda candidate: pattern.match(candidate) is not None)

    def _matching(self, asked: object, predicate: Callable[[str], Any]) -> list[HookPoint]:
        chosen = [point for name, point in self.hook_dict.items() if predicate(name)]
        if not chosen:
            is_in_attention = isinstance(asked, str) and asked.rpartition(".")[2] in NAMES
            raise no_match(asked, self.hook_dict, _BY_RUN if is_in_attention else "")
        return chosen

    def _own(self, asked: nn.Module) -> HookPoint:
        """A point or module given as a filter, if it is in this model."""
        if not isinstance(asked, HookPoint):
            module = Delegate.original(asked)
            if module not in self._paths:
                hint = "That module is not in this model."
                raise unknown_point(type(module).__name__, self.hook_dict, hint=hint)
            return self._point(module, Kind.OUTPUT)
        if not self.is_current(asked):
            raise UnknownPointError(
                f"the point {asked.name!r} is not in this model: it belongs to another model, or its module was "
                f"replaced. Ask for it by name."
            )
        return asked


class PointDict(dict[str, HookPoint]):
    """Points by name, for users; a name that is not listed is looked up in the other dialects."""

    def __init__(self, points: Points) -> None:
        super().__init__(points.hook_dict)
        self._points = points

    def __missing__(self, name: str) -> HookPoint:
        return self._points.find(name)


def lens_of(module: nn.Module, kind: Kind, keys: tuple[int | str, ...] = ()) -> Lens:
    """The lens for an input or output of a module, or for a part of it."""
    lens: Lens = Item(keys) if keys else FIRST
    if kind.is_inner:
        lens = HeadAxis(heads_of(module)) if heads_of(module) > 1 else FIRST
    elif kind is Kind.INPUT:
        names, positional = parameters_of(module)
        key, rest = (keys[0], keys[1:]) if keys else (None, ())
        lens = Argument(names, key, rest, positional)
    else:
        check_items(module, keys)
    return chained(lens, *completing(module, kind))
