"""Hooked: the methods of every model with points, such as `run_with_hooks` and `run_with_cache`."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hookline.engine._compiler import pausing
from hookline.engine._compiler.untraced import verbs
from hookline.engine._gradients.gradients import GradientRecord
from hookline.engine._gradients.replicas import watch_gradients
from hookline.engine._memory.outside import begin_sharing, end_sharing
from hookline.engine._recording.lineage import is_exact
from hookline.engine._recording.ready import HookRun, hook_run, planned_from
from hookline.engine._recording.recorder import Recorder, StopForward, check_backward, loss_of
from hookline.engine._recording.recording import recording_run
from hookline.engine._sharding.own_parts import LocalCache, OwnRecord, own_points
from hookline.engine._sharding.split_values import processes
from hookline.engine._staying.added_hooks import run_and_report
from hookline.engine._staying.permanent import AddedHooks, StayingHooks
from hookline.engine._undo.blocks import end_all
from hookline.engine.actions import Action, Record
from hookline.engine.cache import ActivationCache
from hookline.engine.callbacks import HookObject, hook_pairs, is_none
from hookline.engine.hook_actions import HookAction
from hookline.engine.names import PointDict, Points
from hookline.engine.plan import Plan, make_plan
from hookline.engine.points import HookPoint, check_allows_shape
from hookline.engine.runs import Run, open_runs
from hookline.errors import HookError, HooklineError
from hookline.functions.callers import check_on_error
from hookline.functions.keywords import check_option, own_arguments
from hookline.functions.signatures import parameters_of
from hookline.types import Direction, Filter, HookFunction, HookList, OnError


@verbs
class Hooked:
    """A model with points: a `module` that runs, and the `Points` in it."""

    module: nn.Module
    _points: Points
    _cache_class: type[ActivationCache] = ActivationCache
    _plans_once = True
    """Whether the same hooks at the same names always mean the same points and actions."""
    _graphs: Any = None
    """What runs the model in compiled graphs, if it is compiled."""

    @property
    def index(self) -> Points:
        """The points, found by any of their names: `net.index.select("fc*")`, `net.index.find("fc1")`."""
        return self._points

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """All points by name, in the order in which they fire."""
        return PointDict(self._points)

    def hook_points(self) -> list[HookPoint]:
        """All points."""
        return [*self.hook_dict.values()]

    def point(self, name: str) -> HookPoint:
        """Return the point with that name, in any dialect: `net.point("fc1.input").add_hook(fn)`."""
        points = self._points.select(name)
        if len(points) != 1:
            raise HooklineError(f"{name!r} matches {len(points)} points, not one: {[p.name for p in points][:8]}")
        return points[0]

    def hooks(
        self,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        *,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        on_error: OnError = "raise",
        allow_shape: bool = False,
    ) -> Run | StayingHooks:
        """Return a context manager in which these hooks are active, in this thread or task.

            >>> with net.hooks(fwd_hooks=[("fc2", torch.zeros_like)]):
            ...     net(x)
            tensor([[0., 0.]])

        With `reset_hooks_end=False` they stay after it, as if added with `add_hook`. Backward hooks belong to the
        graphs of the forward passes inside and fire whenever those are run backward. With `on_error="skip"` a hook
        that fails has no effect, and the run continues: `errors` of the context has the errors. With `allow_shape` what
        forward hooks return may have another shape, at the inputs and outputs of modules.
        """
        actions = self._actions(fwd_hooks, bwd_hooks, on_error, allow_shape)
        return self._hook_context(actions, reset_hooks_end, clear_contexts, is_one_pass=False)

    def _hook_context(
        self, actions: list[HookAction], resets: bool, clears: bool, *, is_one_pass: bool
    ) -> Run | StayingHooks:
        on_exit = self.clear_contexts if clears else None
        if not resets:
            return StayingHooks(actions, on_exit)
        held = self._points.held
        return Run(self._points.root, actions, is_one_pass=is_one_pass, on_exit=on_exit, held=held)

    def _hook_actions(self, fwd_hooks: HookList, bwd_hooks: HookList) -> list[HookAction]:
        return [
            point.action(hook, direction)
            for direction, pairs in (("fwd", fwd_hooks), ("bwd", bwd_hooks))
            for names, hook in hook_pairs(pairs, f"{direction}_hooks")
            for point in self._at(names)
        ]

    def _at(self, names: Any) -> list[HookPoint]:
        return names.declared(self._points) if isinstance(names, HookObject) else self._points.select(names)

    def _actions(
        self, fwd_hooks: HookList, bwd_hooks: HookList, on_error: OnError, allow_shape: bool = False
    ) -> list[HookAction]:
        """The actions of the hooks of a run, attached to the model."""
        check_on_error(on_error)
        actions = self._hook_actions(fwd_hooks, bwd_hooks)
        if allow_shape:
            self._allow_shape(actions)
        self._attach(actions)
        if on_error == "skip":
            for action in actions:
                if action.on_error is None:
                    action.skip_on_error()
        return actions

    def _allow_shape(self, actions: list[HookAction]) -> None:
        check_allows_shape(any(action.dir == "fwd" for action in actions), "there is no forward hook")
        for action in actions:
            action.allow_shape()

    def _attach(self, actions: list[HookAction]) -> None:
        """Check the hook objects among these hooks against their points, and tell them the model."""
        objects = {id(action.hook): action.hook for action in actions if isinstance(action.hook, HookObject)}
        for hook in objects.values():
            points = [action.point for action in actions if action.hook is hook]
            hook.check_points(points)
            hook.check_target(points, self._points)
            hook.attached(self)

    @property
    def last_errors(self) -> list[HookError]:
        """The errors skipped in the last `run_with_hooks` or `run_with_cache` in this thread, of hooks given to it.

        `registry.errors()` has those of registered hooks.
        """
        return getattr(self._points.last_run, "errors", [])

    def run_with_hooks(
        self,
        *args: Any,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        on_error: OnError = "raise",
        allow_shape: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the model's output with these hooks active for this one forward pass.

            >>> net.run_with_hooks(x, fwd_hooks=[("fc2", torch.zeros_like)])
            tensor([[0., 0.]])

        With `on_error="skip"` a hook that fails has no effect, and the run continues: `net.last_errors` has the errors.
        With `allow_shape` what forward hooks return may have another shape, at the inputs and outputs of modules.
        """
        if kwargs:
            self._check_options(kwargs)
        is_plain = reset_hooks_end and on_error == "raise" and not (bwd_hooks or clear_contexts or processes)
        is_plain = is_plain and not allow_shape
        planned = planned_from(fwd_hooks) if is_plain and self._plans_once else None
        ready = None if planned is None else hook_run(self._points, planned, fwd_hooks)  # type: ignore[arg-type]
        if ready is not None:
            run: Run | StayingHooks = ready.run
        else:
            actions = self._actions(fwd_hooks, bwd_hooks, on_error, allow_shape)
            run = self._hook_context(actions, reset_hooks_end, clear_contexts, is_one_pass=True)
            if planned is not None:
                modules = run.modules() if all(is_exact(name) for name, _ in fwd_hooks) else None  # type: ignore
                numbers = [number for number, (name, _) in enumerate(fwd_hooks) for _ in self._at(name)]  # type: ignore
                ready = HookRun(run, numbers, self._points.lineage(modules))  # type: ignore[arg-type]
        try:
            with run:
                output = self(*args, **kwargs)
        finally:
            self._points.last_run.errors = run.errors
        if ready is not None and ready.empty():
            self._points.ready_runs.keep(planned, ready)
        return output

    def _one_pass(self, actions: Iterable[Action]) -> Run:
        return Run(self._points.root, actions, is_one_pass=True)

    def run_with_cache(
        self,
        *args: Any,
        names_filter: Filter = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        remove_batch_dim: bool = False,
        pos_slice: Any = None,
        incl_bwd: bool = False,
        loss_fn: Callable[[Any], Tensor] | None = None,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        on_error: OnError = "raise",
        local: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ActivationCache]:
        """Return the model's output, and the activations at the points that `names_filter` selects (None: all).

            >>> output, cache = net.run_with_cache(x, names_filter="fc*")
            >>> list(cache)
            ['fc1.input', 'fc1', 'fc2.input', 'fc2']

        Hooks may be given as for `run_with_hooks`; the cache has the values after them. With `incl_bwd` it also has the
        gradients of the output (a loss), or of `loss_fn(output)`, as `name_grad`; parameters' `.grad` are not touched.
        `pos_slice` selects the positions to keep: an index, a slice, `last`, … (see `positions.py`). They are positions
        in the text; activations of images are kept whole, unless only those are selected. With `local`, on a model that
        is sharded over processes, the cache has only the heads and neurons of this process: see `LocalCache`.
        """
        if kwargs:
            self._check_options(kwargs)
        if incl_bwd or loss_fn is not None:
            check_backward(incl_bwd, loss_fn)
        is_full, is_whole = names_filter is None, device is None and dtype is None and pos_slice is None
        is_named = is_full or isinstance(names_filter, str)
        chosen: Any = names_filter if is_named else self._points.select(names_filter)  # which may be an iterator
        is_plain = is_whole and on_error == "raise" and not (incl_bwd or local) and self._graphs is None
        is_plain = is_plain and is_none(fwd_hooks) and is_none(bwd_hooks)
        ready = recording_run(self._points, chosen) if is_plain else None
        run: Run
        if ready is not None:
            recorder, run = ready.recorder, ready
        else:
            points = chosen if isinstance(chosen, list) else self._points.select(chosen)
            spans = dict(own_points(points, skips=is_full)) if local else {}
            actions: list[Action] = [*self._actions(fwd_hooks, bwd_hooks, on_error)]
            recorder = Recorder(
                points, device, dtype, pos_slice, skips_missing=is_full, defers=is_full and not incl_bwd
            )
            actions += [(OwnRecord if local else Record)(point, recorder) for point in spans or points]
            actions += [GradientRecord(point, recorder) for point in spans or points] if incl_bwd else []
            run = self._one_pass(actions)
        try:
            with run:
                output = self(*args, **kwargs)
                tensors = recorder.values()
                if incl_bwd:
                    tensors.update(recorder.backward(loss_of(output, loss_fn)))
        finally:
            self._points.last_run.errors = run.errors
        cache = self._cache(recorder, tensors, LocalCache if local else None, remove_batch_dim=remove_batch_dim)
        if local and isinstance(cache, LocalCache):
            cache.spans = {point.name: own for point, own in spans.items()}
        if ready is not None:
            self._points.ready_runs.keep(ready.planned_from, ready)
        return output, cache

    def cache(
        self,
        *args: Any,
        names_filter: Filter = None,
        stop_early: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        remove_batch_dim: bool = False,
        pos_slice: Any = None,
        **kwargs: Any,
    ) -> ActivationCache:
        """Return the activations only. With `stop_early` nothing runs after every selected point has fired once.

        `stop_early` is for networks that call each module once: it does not wait for later calls.
        """
        self._check_options(kwargs)
        points = self._points.select(names_filter)
        is_full = names_filter is None
        recorder = Recorder(points, device, dtype, pos_slice, skips_missing=is_full, stops=stop_early, defers=is_full)
        with self._one_pass([Record(point, recorder) for point in points]), suppress(StopForward):
            self(*args, **kwargs)
        return self._cache(recorder, recorder.values(), remove_batch_dim=remove_batch_dim)

    def _check_options(self, kwargs: dict[str, Any]) -> None:
        """Raise if a keyword for the model's forward is a misspelled option of ours, or would have no effect."""
        root = self._points.root
        for name in kwargs:
            if name not in parameters_of(root)[0] and name not in self._call_arguments():
                check_option(root, name, self._call_arguments())

    def _call_arguments(self) -> frozenset[str]:
        """The arguments that calling the wrapper takes, beside those of the module's forward."""
        return own_arguments(type(self))  # type: ignore[arg-type]

    def _cache(
        self,
        recorder: Recorder,
        tensors: MutableMapping[str, Tensor],
        made: type[ActivationCache] | None = None,
        *,
        remove_batch_dim: bool,
    ) -> ActivationCache:
        cache = (made or self._cache_class)(tensors, self._points)
        cache.forward_pass, cache.positions = recorder.forward_pass, recorder.positions
        recorder.clear()
        return cache.remove_batch_dim() if remove_batch_dim else cache

    def plan(
        self,
        names_filter: Filter = None,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        input: Any = None,
    ) -> Plan:
        """Return what a run would touch, without running it: points, modules, and with an `input` shapes and bytes.

        `input` is what the model would be called with: a tensor, a tuple of arguments or a dict of keywords. The shapes
        come from a forward pass on tensors without data, which takes no memory.
        """
        uses = [(action.point, "hook") for action in self._hook_actions(fwd_hooks, bwd_hooks)]
        if names_filter is not None or not uses:
            uses += [(point, "cache") for point in self._points.select(names_filter)]
        return make_plan(self._points, uses, input)

    def points(
        self, names_filter: Filter = None, input: Any = None, *, type: builtins.type[nn.Module] | None = None
    ) -> Plan:
        """Return the points as a table: name, module, and with an `input` their shapes.

        `type` selects the outputs of all modules of exactly this class: `net.points(type=nn.Linear)`.
        """
        if type is not None and names_filter is not None:
            raise HooklineError("points(…) takes names_filter or type, not both")
        chosen = self._points.select(names_filter if type is None else type)
        return make_plan(self._points, [(point, "") for point in chosen], input)

    def add_hook(
        self,
        name: Filter,
        hook: HookFunction,
        dir: Direction = "fwd",
        *,
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        allow_shape: bool = False,
    ) -> AddedHooks:
        """Add a hook at a point, or at all points of a filter, until it is removed or reset.

        It is active in every thread and for every way of calling the model. With `allow_shape` it may return another
        shape. Returns a handle: call it, call its `remove()`, or use it in a `with` statement to remove the hook.
        """
        actions = [point.action(hook, dir, prepend=prepend) for point in self._points.select(name)]
        if allow_shape:
            self._allow_shape(actions)
        self._attach(actions)
        for action in actions:
            action.registration.is_permanent, action.registration.level = is_permanent, level
        return AddedHooks([(action.point, action) for action in actions])

    def add_perma_hook(self, name: Filter, hook: HookFunction, dir: Direction = "fwd") -> AddedHooks:
        """`add_hook` with `is_permanent=True`."""
        return self.add_hook(name, hook, dir, is_permanent=True)

    def remove_all_hook_fns(
        self,
        direction: Literal["fwd", "bwd", "both"] = "both",
        *,
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove every hook that was added; the hooks of open contexts end with their contexts."""
        self._points.remove_hooks(direction, including_permanent=including_permanent, level=level)

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        *,
        including_permanent: bool = False,
    ) -> None:
        """`remove_all_hook_fns`, and empty every point's `ctx`."""
        self.remove_all_hook_fns(direction, including_permanent=including_permanent)
        if clear_contexts:
            self.clear_contexts()

    def detach_all(self) -> None:
        """End everything still open on this model in this thread, however it was left.

        That is every `hooks(…)` context, every run, `start_at_layer` and `processed_weights()`. They end with their
        block, but two interrupts in quick succession, or a context that was entered by hand, can leave something
        behind. Added hooks stay: see `reset_hooks` and `restore_weights`.
        """
        end_all(self._points.root)
        self._points.permanent.settle()

    def clear_contexts(self) -> None:
        """Empty the `ctx` of every point."""
        for point in self._points.known():
            point.clear_context()

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model, and report added hooks that did not fire."""
        if pausing.is_traced() and pausing.leaves_hooks_out():
            return forward(*args, **kwargs)  # the graph runs only while no hooks are attached
        if not open_runs():
            output = run_and_report(self._points, forward, args, kwargs)
        else:
            begun = begin_sharing(self._points.root, (args, kwargs), self._points.held)
            try:
                output = run_and_report(self._points, forward, args, kwargs)
            finally:
                end_sharing(begun)
        watch_gradients(self._points.root, forward, output)
        return output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        raise NotImplementedError
