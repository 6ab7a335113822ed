"""Hook methods with the arguments of TransformerLens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.slices import Slice, SliceInput
from hookline.engine import HookAction, Hooked, HookHandle, HookPoint
from hookline.errors import warn
from hookline.transformer.index import ModelPoints
from hookline.transformer.resume import hooks_before
from hookline.types import Direction, Filter, HookFunction, HookList, OnError

CachingHooks = tuple[dict[str, Tensor], list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]]

_open: ContextVar[tuple[nn.Module, ...]] = ContextVar("hookline_lens_contexts", default=())
"""Models with open contexts in this thread or task, outermost first."""


class HookIntrospectionMixin:
    """`list_hooks`, for a class with a `hook_dict`."""

    hook_dict: dict[str, HookPoint]

    def _listed(self, name_filter: Filter) -> dict[str, HookPoint]:
        names: Any = [name_filter] if isinstance(name_filter, str) else name_filter
        chosen = names if callable(names) else lambda name: names is None or name in names
        return {name: point for name, point in self.hook_dict.items() if chosen(name)}

    def list_hooks(
        self, name_filter: Filter = None, dir: Literal["fwd", "bwd", "both"] = "both", including_permanent: bool = True
    ) -> dict[str, list[HookHandle]]:
        """The current hooks by point name, including those of open contexts."""
        handles_by_name = {
            name: [*(point.fwd_hooks if dir != "bwd" else ()), *(point.bwd_hooks if dir != "fwd" else ())]
            for name, point in self._listed(name_filter).items()
        }
        for name, handles in handles_by_name.items():
            handles_by_name[name] = [handle for handle in handles if including_permanent or not handle.is_permanent]
        return {name: handles for name, handles in handles_by_name.items() if handles}


class LensHooks(HookIntrospectionMixin, Hooked):
    """The hook methods of a HookedRootModule. A mixin, listed before the base class of the model.

    As in TransformerLens, hooks have a level: the number of contexts of the same model that are open around theirs. A
    context that resets its hooks also removes hooks that an earlier context of its level left behind
    (`reset_hooks_end=False`), and `reset_hooks()` removes the hooks of every open context.
    """

    is_caching = False
    _plans_once = False  # the level of a hook is part of its action

    @property
    def context_level(self) -> int:
        """The number of nested contexts of this model in this thread or task."""
        return sum(root is self._points.root for root in _open.get())

    @contextmanager
    def _context(self, *, resets: bool) -> Iterator[None]:
        """Enter a level; on exit, with `resets`, remove all hooks of this level."""
        before = _open.get()
        _open.set((*before, self._points.root))
        level = self.context_level
        try:
            yield
        finally:
            if resets:
                self._points.permanent.remove(
                    lambda hook: hook.registration.level == level and not hook.registration.is_permanent
                )
            _open.set(before)

    def _actions(
        self, fwd_hooks: HookList, bwd_hooks: HookList, on_error: OnError, allow_shape: bool = False
    ) -> list[HookAction]:
        actions = super()._actions(fwd_hooks, bwd_hooks, on_error, allow_shape)
        for action in actions:
            action.registration.level = self.context_level
        return actions

    @contextmanager
    def hooks(  # type: ignore[override]
        self,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """A context manager in which these hooks are active; returns the model.

        Contexts are cleared only if hooks are reset.
        """
        clears = clear_contexts and reset_hooks_end
        with (
            self._context(resets=reset_hooks_end),
            super().hooks(fwd_hooks, bwd_hooks, reset_hooks_end=reset_hooks_end, clear_contexts=clears),
        ):
            yield self

    def run_with_hooks(
        self, *args: Any, reset_hooks_end: bool = True, clear_contexts: bool = False, **kwargs: Any
    ) -> Any:
        """The model's output with these hooks active for this one forward pass; see `Hooked.run_with_hooks`."""
        clears = clear_contexts and reset_hooks_end
        with self._context(resets=reset_hooks_end):
            return super().run_with_hooks(*args, reset_hooks_end=reset_hooks_end, clear_contexts=clears, **kwargs)

    def run_with_cache(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The output and the activations; see `Hooked.run_with_cache`."""
        with self._context(resets=True):
            return super().run_with_cache(*args, **kwargs)

    def add_hook(
        self,
        name: Filter,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        allow_shape: bool = False,
    ) -> Any:
        """Add a hook at a point, or at all points of a filter, until it is removed or reset."""
        options = {"is_permanent": is_permanent, "level": level, "prepend": prepend, "allow_shape": allow_shape}
        return super().add_hook(name, hook, dir, **options)  # type: ignore[arg-type]

    def check_hooks_to_add(self, hook_point: HookPoint, hook_point_name: str, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise if the point does not exist. No flags are required."""
        self.point(hook_point_name)

    def check_and_add_hook(self, hook_point: HookPoint, hook_point_name: str, *args: Any, **kwargs: Any) -> None:
        """`check_hooks_to_add`, then `add_hook` with the same arguments."""
        self.check_hooks_to_add(hook_point, hook_point_name)
        self.add_hook(hook_point_name, *args, **kwargs)

    def remove_all_hook_fns(
        self,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove every added hook, and the hooks of open contexts in this thread; with `level`, those of that level."""
        self._points.remove_hooks(direction, including_permanent=including_permanent, level=level, of_contexts=True)

    def reset_hooks(self, clear_contexts: bool = True, *args: Any, **kwargs: Any) -> None:
        """`remove_all_hook_fns` with the other arguments; with `clear_contexts`, also empty every point's `ctx`."""
        self.remove_all_hook_fns(*args, **kwargs)
        self.is_caching = False
        if clear_contexts:
            self.clear_contexts()

    @property
    def mod_dict(self) -> dict[str, Any]:
        """All points by name, and their modules by path."""
        return {**dict(self.module.named_modules()), **self.hook_dict}

    def _listed(self, name_filter: Filter) -> dict[str, HookPoint]:
        if name_filter is None:
            return self.hook_dict
        return {point.canonical_name: point for point in self._points.select(name_filter)}

    def get_caching_hooks(
        self,
        names_filter: Filter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Slice | SliceInput = None,
    ) -> CachingHooks:
        """A dict, and the forward and backward hooks that will fill it."""
        self.is_caching = True
        cache = {} if cache is None else cache
        names = [point.name for point in self._at((lambda _: True) if names_filter is None else names_filter)]
        where = Slice.unwrap(pos_slice)
        forward = _saver(cache, "", device, remove_batch_dim, where)
        backward = _saver(cache, "_grad", device, remove_batch_dim, where)
        return cache, [(name, forward) for name in names], [(name, backward) for name in names if incl_bwd]

    def add_caching_hooks(self, names_filter: Filter = None, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """A dict that each later run fills, until hooks are reset; the arguments are those of `get_caching_hooks`."""
        cache, forward, backward = self.get_caching_hooks(names_filter, *args, **kwargs)
        directions: dict[Direction, Any] = {"fwd": forward, "bwd": backward}
        for direction, hooks in directions.items():
            for name, hook in hooks:
                self.add_hook(name, hook, direction)
        return cache

    def cache_all(self, cache: dict[str, Tensor] | None, *args: Any, **kwargs: Any) -> None:
        """`add_caching_hooks` of all points, with its arguments after `names_filter`."""
        self.add_caching_hooks(None, *args, cache=cache, **kwargs)

    def cache_some(self, cache: dict[str, Tensor] | None, names: Filter, *args: Any, **kwargs: Any) -> None:
        """`add_caching_hooks` of some points, with its arguments after `names_filter`."""
        self.add_caching_hooks(names, *args, cache=cache, **kwargs)


def leave_out_hooks(points: ModelPoints, layer: int) -> None:
    """Let a run from this layer leave out the hooks before it, as in TransformerLens, with a warning."""
    hooks = hooks_before(points, layer)
    for hook in hooks:
        hook.must_fire = False
    if hooks:
        names = ", ".join(dict.fromkeys(hook.point.name for hook in hooks))
        warn(f"these hooks do not fire, because the run starts at layer {layer}: {names}")


def _saver(cache: dict[str, Tensor], suffix: str, device: Any, remove_batch_dim: bool, where: Slice) -> HookFunction:
    def save(x: Tensor, hook: HookPoint) -> None:
        value = x.detach() if device is None else x.detach().to(device)
        axes = hook.axes.split()
        axis = axes.index("p") - len(axes) if "p" in axes else -2
        if value.ndim >= -axis:
            value = where.apply(value, axis)
        cache[hook.name + suffix] = value[0] if remove_batch_dim else value

    return save
