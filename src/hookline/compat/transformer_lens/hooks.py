"""Hooks as TransformerLens adds and removes them: hookline's verbs, with that library's arguments in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from hookline.compat.transformer_lens.slices import Slice, SliceInput
from hookline.errors import HooklineError
from hookline.functions import HookFunction
from hookline.names import Filter
from hookline.points import Direction, HookPoint
from hookline.verbs import Hooked, HookList

CachingHooks = tuple[dict[str, Tensor], list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]]


class LensHooks(Hooked):
    """The hook methods of a HookedRootModule. A mixin, to come before the kind of model it is for."""

    is_caching = False

    @contextmanager
    def hooks(  # type: ignore[override]
        self,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """A context in which these hooks are active; it gives the model."""
        with super().hooks(fwd_hooks, bwd_hooks, reset_hooks_end=reset_hooks_end, clear_contexts=clear_contexts):
            yield self

    def add_hook(
        self,
        name: Filter,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> Callable[[], None]:
        """Keep a hook at a point, or at all that a filter selects, until it is removed or reset."""
        _check_level(level)
        return super().add_hook(self._meant(name), hook, dir, is_permanent=is_permanent, prepend=prepend)

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,  # noqa: ARG002
        hook_point_name: str,
        hook: HookFunction,  # noqa: ARG002
        dir: Direction = "fwd",  # noqa: ARG002
        is_permanent: bool = False,  # noqa: ARG002
        prepend: bool = False,  # noqa: ARG002
    ) -> None:
        """Raise if there is no such point. No flag need be set for any."""
        self.point(hook_point_name)

    def check_and_add_hook(
        self, hook_point: HookPoint, hook_point_name: str, hook: HookFunction, dir: Direction = "fwd",
        is_permanent: bool = False, level: int | None = None, prepend: bool = False,
    ) -> None:  # fmt: skip
        """`check_hooks_to_add`, then `add_hook`."""
        self.check_hooks_to_add(hook_point, hook_point_name, hook, dir, is_permanent, prepend)
        self.add_hook(hook_point_name, hook, dir, is_permanent, level, prepend)

    def remove_all_hook_fns(
        self,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove every hook that was added and stays."""
        _check_level(level)
        super().remove_all_hook_fns(direction, including_permanent=including_permanent)

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """`remove_all_hook_fns`, and empty every point's `ctx`."""
        self.remove_all_hook_fns(direction, including_permanent, level)
        if clear_contexts:
            self.clear_contexts()

    @property
    def mod_dict(self) -> dict[str, Any]:
        """All points by name, and the modules that they are in by their paths."""
        return {**dict(self.module.named_modules()), **self.hook_dict}

    def list_hooks(
        self, name_filter: Filter = None, dir: Literal["fwd", "bwd", "both"] = "both", including_permanent: bool = True
    ) -> dict[str, list[HookFunction]]:
        """The hooks that were added and stay, by the name of their point."""
        chosen = {point.listed for point in self._points.select(name_filter)} if name_filter is not None else None
        found: dict[str, list[HookFunction]] = {}
        for action in self._points.standing.hooks():
            if dir in (action.dir, "both") and (including_permanent or not action.is_permanent):
                name = action.point.listed
                if chosen is None or name in chosen:
                    found.setdefault(name, []).append(action.hook)
        return found

    def _meant(self, names: Filter) -> Filter:
        """What a filter is for."""
        return names

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
        cache = {} if cache is None else cache
        chosen = self._meant((lambda _: True) if names_filter is None else names_filter)
        names = [point.name for point in self._points.select(chosen)]
        where = Slice.unwrap(pos_slice)
        forward = _saver(cache, "", device, remove_batch_dim, where)
        backward = _saver(cache, "_grad", device, remove_batch_dim, where)
        return cache, [(name, forward) for name in names], [(name, backward) for name in names if incl_bwd]

    def add_caching_hooks(
        self,
        names_filter: Filter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """A dict that each later run fills, until hooks are reset."""
        cache, forward, backward = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        for name, hook in forward:
            self.add_hook(name, hook)
        for name, hook in backward:
            self.add_hook(name, hook, "bwd")
        return cache

    def cache_all(
        self, cache: dict[str, Tensor] | None, incl_bwd: bool = False, device: Any = None,
        remove_batch_dim: bool = False,
    ) -> None:  # fmt: skip
        """`add_caching_hooks` of all points."""
        self.add_caching_hooks(None, incl_bwd, device, remove_batch_dim, cache)

    def cache_some(
        self, cache: dict[str, Tensor] | None, names: Filter, incl_bwd: bool = False, device: Any = None,
        remove_batch_dim: bool = False,
    ) -> None:  # fmt: skip
        """`add_caching_hooks` of some points."""
        self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)


def _check_level(level: int | None) -> None:
    if level is not None:
        raise HooklineError(f"level={level}: contexts remove their own hooks here, and no others; leave it out")


def _saver(cache: dict[str, Tensor], suffix: str, device: Any, remove_batch_dim: bool, where: Slice) -> HookFunction:
    def save(x: Tensor, hook: HookPoint) -> None:
        kept = x.detach() if device is None else x.detach().to(device)
        axes = hook.axes.split()
        axis = axes.index("p") - len(axes) if "p" in axes else -2
        if kept.ndim >= -axis:
            kept = where.apply(kept, axis)
        cache[hook.name + suffix] = kept[0] if remove_batch_dim else kept

    return save
