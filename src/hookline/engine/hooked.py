"""The verbs: what can be done with any model whose points are known."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, Self, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hookline.engine.actions import Action, PointAction, Record
from hookline.engine.blocks import end_all
from hookline.engine.cache import ActivationCache
from hookline.engine.callbacks import HookFunction, HookObject, OnError, check_on_error, hook_pairs, refuse_class
from hookline.engine.gradients import GradientRecord
from hookline.engine.names import Filter, PointDict, Points
from hookline.engine.permanent import keep
from hookline.engine.plan import Plan, make_plan
from hookline.engine.points import Direction, HookPoint, check_direction, hook_action
from hookline.engine.recorder import Recorder, StopForward
from hookline.engine.reports import not_current, report_missed, report_silent
from hookline.engine.runs import Run, clear_state, open_runs
from hookline.engine.schedule import active
from hookline.engine.signatures import parameters_of
from hookline.engine.snapshots import begin_sharing, end_sharing, snapshot
from hookline.engine.structures import map_tensors
from hookline.errors import HookError, HooklineError

HookList: TypeAlias = Iterable[tuple[Filter, HookFunction] | HookObject]
"""Hooks, each with the name of its point; a hook object that says itself where it belongs may stand alone."""


class _Last(threading.local):
    """What was skipped in the last run of each model, in this thread."""

    def __init__(self) -> None:
        self.errors: WeakKeyDictionary[Points, list[HookError]] = WeakKeyDictionary()


_last = _Last()


class Hooked:
    """A model with points. It needs a `module` to run and the `Points` in it."""

    module: nn.Module
    _points: Points
    _cache_class: type[ActivationCache] = ActivationCache

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """All points by name, in the order in which they fire."""
        return PointDict(self._points)

    def hook_points(self) -> list[HookPoint]:
        """All points."""
        return [*self.hook_dict.values()]

    def point(self, name: str) -> HookPoint:
        """The point of that name, in any spelling: `net.point("fc1.input").add_hook(fn)`."""
        points = self._points.select(name)
        if len(points) != 1:
            raise HooklineError(f"{name!r} stands for {len(points)} points, not one: {[p.name for p in points][:8]}")
        return points[0]

    def hooks(
        self,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        *,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        on_error: OnError = "raise",
    ) -> Run | _Stay:
        """A context in which these hooks are active, in this thread or task.

            with net.hooks(fwd_hooks=[("fc1", torch.zeros_like)]):
                net(x)

        With `reset_hooks_end=False` they stay after it, as if added with `add_hook`. Backward hooks belong to the
        graphs of the forward passes made inside and fire whenever those are run backward. With `on_error="skip"` a
        hook that fails has no effect, and the run goes on: `errors` of the context has what went wrong.
        """
        actions = self._actions(fwd_hooks, bwd_hooks, on_error)
        if not reset_hooks_end:
            return _Stay(self, actions, clear_contexts=clear_contexts)
        return Run(self._points.root, actions, on_exit=self.clear_contexts if clear_contexts else None)

    def _hook_actions(self, fwd_hooks: HookList, bwd_hooks: HookList) -> list[HookAction]:
        return [
            hook_action(point, hook, direction)
            for direction, pairs in (("fwd", fwd_hooks), ("bwd", bwd_hooks))
            for names, hook in hook_pairs(pairs, f"{direction}_hooks")
            for point in self._at(names)
        ]

    def _at(self, names: Any) -> list[HookPoint]:
        return names.declared(self._points) if isinstance(names, HookObject) else self._points.select(names)

    def _actions(self, fwd_hooks: HookList, bwd_hooks: HookList, on_error: OnError) -> list[HookAction]:
        """The hooks of a run, told about the model and about what to do when they fail."""
        check_on_error(on_error)
        actions = self._hook_actions(fwd_hooks, bwd_hooks)
        _attach(actions, self)
        if on_error == "skip":
            for action in actions:
                if action.on_error is None:
                    action.skip_on_error()
        return actions

    @property
    def last_errors(self) -> list[HookError]:
        """What was skipped of the hooks given to the last `run_with_hooks` or `run_with_cache` in this thread.

        Registered hooks are not among them: see `layers.errors()`.
        """
        return _last.errors.get(self._points, [])

    def run_with_hooks(
        self,
        *args: Any,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        on_error: OnError = "raise",
        **kwargs: Any,
    ) -> Any:
        """The model's output with these hooks active for this one forward pass.

            net.run_with_hooks(x, fwd_hooks=[("fc1", lambda h: h * 2)])

        With `on_error="skip"` a hook that fails has no effect, and the run goes on: `net.last_errors` has what went
        wrong.
        """
        self._check_options(kwargs)
        actions = self._actions(fwd_hooks, bwd_hooks, on_error)
        run = (
            self._one_pass(actions, clear_contexts=clear_contexts)
            if reset_hooks_end
            else _Stay(self, actions, clear_contexts=clear_contexts)
        )
        try:
            with run:
                return self(*args, **kwargs)
        finally:
            self._note_errors(run, actions)

    def _one_pass(self, actions: Iterable[Action], *, clear_contexts: bool = False) -> Run:
        on_exit = self.clear_contexts if clear_contexts else None
        return Run(self._points.root, actions, is_one_pass=True, on_exit=on_exit)

    def _note_errors(self, run: Run | _Stay, hooks: Iterable[HookAction]) -> None:
        """Let `last_errors` be those of this run, which is over; runs that its hooks made are over before."""
        for hook in hooks:
            if hook.on_error == "skip":  # also for errors that come later, in a backward pass
                _last.errors[self._points] = run.errors
                return
        if _last.errors:
            _last.errors.pop(self._points, None)

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
        **kwargs: Any,
    ) -> tuple[Any, ActivationCache]:
        """The model's output, and what flowed out of each point that `names_filter` selects (None: all).

            output, cache = net.run_with_cache(x, names_filter="layer4.*")

        Hooks may be given as for `run_with_hooks`; the cache has what they made of it. With `incl_bwd` the gradients
        of the output (a loss), or of `loss_fn(output)`, are there too, under `name_grad`; parameters' `.grad` are not
        touched. `pos_slice` says which positions to keep: an index, a slice, `last`, … (see `positions.py`). They are
        those of the text; what is made of its pictures is kept whole, unless nothing else is asked for.
        """
        self._check_options(kwargs)
        if loss_fn is not None and not incl_bwd:
            raise HooklineError("loss_fn says what to differentiate: pass incl_bwd=True with it")
        points = self._points.select(names_filter)
        recorder = Recorder(device=device, dtype=dtype, positions=pos_slice, skips_missing=names_filter is None)
        recorder.only_images = all(point.stream == "image" for point in points)
        hooks = self._actions(fwd_hooks, bwd_hooks, on_error)
        actions: list[Action] = [*hooks]
        actions += [Record(point, recorder) for point in points]
        if incl_bwd:
            _check_grad_mode()
            actions += [GradientRecord(point, recorder) for point in points]
        run = self._one_pass(actions)
        try:
            with run:
                output = self(*args, **kwargs)
                tensors = recorder.values()
                if incl_bwd:
                    tensors |= recorder.backward(_loss(output, loss_fn))
        finally:
            self._note_errors(run, hooks)
        return output, self._cache(recorder, tensors, remove_batch_dim=remove_batch_dim)

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
        """The activations only. With `stop_early` nothing runs after every point asked for has fired once.

        `stop_early` is for networks that call each module once: later calls are not waited for.
        """
        self._check_options(kwargs)
        points = self._points.select(names_filter)
        recorder = Recorder(
            device=device,
            dtype=dtype,
            positions=pos_slice,
            skips_missing=names_filter is None,
            stops_after=points if stop_early else (),
        )
        recorder.only_images = all(point.stream == "image" for point in points)
        with self._one_pass([Record(point, recorder) for point in points]), suppress(StopForward):
            self(*args, **kwargs)
        return self._cache(recorder, recorder.values(), remove_batch_dim=remove_batch_dim)

    def _check_options(self, kwargs: dict[str, Any]) -> None:
        """What is left over goes to the model; a slip in one of our own options must not, or it would do nothing."""
        for name in kwargs:
            if name in parameters_of(self._points.root)[0] or name in _taken_by(type(self)):  # type: ignore[arg-type]
                continue
            near = get_close_matches(name, OPTIONS, n=1, cutoff=0.85)
            if near:
                hint = "this verb does not take it" if name == near[0] else f"did you mean {near[0]!r}?"
                raise HooklineError(f"{name!r} is no argument of the model's forward: {hint}")
            self._check_keyword(name)

    def _check_keyword(self, name: str) -> None:
        """Raise if the model's forward would drop a keyword of that name, where that can be known."""

    def _cache(self, recorder: Recorder, tensors: dict[str, Tensor], *, remove_batch_dim: bool) -> ActivationCache:
        cache = self._cache_class(tensors, self._points)
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
        """What a run would touch, without running: points, modules, and with an `input` shapes and bytes.

        `input` is what the model would be called with: a tensor, a tuple of arguments or a dict of keywords. Shapes
        come from a pass with tensors that have no data, so it costs no memory.
        """
        uses = [(action.point, "hook") for action in self._hook_actions(fwd_hooks, bwd_hooks)]
        if names_filter is not None or not uses:
            uses += [(point, "cache") for point in self._points.select(names_filter)]
        return make_plan(self._points, uses, input)

    def points(self, names_filter: Filter = None, input: Any = None) -> Plan:
        """The points as a table: name, module, and with an `input` their shapes."""
        return make_plan(self._points, [(point, "") for point in self._points.select(names_filter)], input)

    def add_hook(
        self,
        name: Filter,
        hook: HookFunction,
        dir: Direction = "fwd",
        *,
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> Callable[[], None]:
        """Keep a hook at a point, or at all that a filter selects, until it is removed or reset.

        It is there for every thread and for every way of calling the model. Returns the function that removes it.
        """
        points = self._points.select(name)
        refuse_class(hook)
        if isinstance(hook, HookObject):
            hook.check_points(points)
            hook.check_target(points, self._points)
            hook.attached(self)
        actions = [hook_action(point, hook, dir, prepend=prepend) for point in points]
        for action in actions:
            action.registration.is_permanent = is_permanent
        return keep(list(zip(points, actions, strict=True)))

    def add_perma_hook(self, name: Filter, hook: HookFunction, dir: Direction = "fwd") -> Callable[[], None]:
        """`add_hook` with `is_permanent=True`."""
        return self.add_hook(name, hook, dir, is_permanent=True)

    def remove_all_hook_fns(
        self, direction: Literal["fwd", "bwd", "both"] = "both", *, including_permanent: bool = False
    ) -> None:
        """Remove every hook that was added and stays; the hooks of open contexts end with their contexts."""
        check_direction(direction, "fwd", "bwd", "both")
        for standing in {self._points.permanent, *(point.permanent for point in self._points.known())}:
            standing.remove(
                lambda hook: (
                    self._points.has(hook.module)
                    and direction in (hook.dir, "both")
                    and (including_permanent or not hook.registration.is_permanent)
                )
            )

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
        """End what is still open on this model in this thread, whatever opened it and however it was left.

        That is every `hooks(…)` context, every run, `start_at_layer` and `processed_weights()`: nothing of them should
        be there after their block, but two interrupts in quick succession, or a context that was entered by hand, can
        leave something. Hooks that stay on purpose stay: see `reset_hooks` and `restore_weights`.
        """
        end_all(self._points.root)
        self._points.permanent.settle()

    def clear_contexts(self) -> None:
        """Empty the `ctx` of every point."""
        for point in self._points.known():
            point.clear_context()

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model; afterwards say of each hook that was added before and did not fire, once, that it did not."""
        if not open_runs():
            return self._run_reporting(forward, args, kwargs)
        begun = begin_sharing(self._points.root, (args, kwargs))
        try:
            return self._run_reporting(forward, args, kwargs)
        finally:
            end_sharing(begun)

    def _run_reporting(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._points.permanent.settle()
        if not self._points.permanent.steps:
            return forward(*args, **kwargs)
        standing, is_alone = self._points.permanent, all(run.is_one_pass for run in active.get())
        before = [(hook, hook.registration.switches, hook.registration.last_fired) for hook in standing.hooks()]
        if is_alone:
            standing.forget_missed()
        try:
            output = forward(*args, **kwargs)
        except StopForward:
            self._report_standing(before, has_ended=False)
            raise
        finally:
            clear_state()
        self._report_standing(before, has_ended=True)
        if is_alone:  # else more of the text may come in the context that is open, and it tells
            report_missed(standing.missed())
        return output

    def _report_standing(self, before: list[tuple[HookAction, int, object]], *, has_ended: bool) -> None:
        there, is_current = set(self._points.permanent.hooks()), self._points.is_current
        whole = [
            (hook, last) for hook, switches, last in before if hook in there and hook.registration.switches == switches
        ]
        silent = [hook for hook, _ in whole if has_ended and hook.must_fire]
        silent = [hook for hook in silent if not (hook.fired and is_current(hook.point))]
        stale = [hook for hook, last in whole if hook.registration.is_stale(last)]
        what = "its module was not called in this run" if has_ended else "the run stopped before it"
        why: dict[PointAction, str] = dict.fromkeys(stale, f"{what}, and what it holds is of an earlier one")
        why |= {hook: not_current(hook) for hook, _ in whole if not is_current(hook.point)}
        report_silent(dict.fromkeys([*silent, *stale]), has_run=True, why=why)
        for hook in silent:
            hook.must_fire = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        raise NotImplementedError


class _Stay:
    """The context of `hooks(reset_hooks_end=False)`: the hooks come with it and stay after it."""

    def __init__(self, model: Hooked, actions: list[HookAction], *, clear_contexts: bool) -> None:
        self._model, self._actions, self._clears = model, actions, clear_contexts
        self.errors: list[HookError] = []
        for action in actions:
            action.errors = self.errors

    def __enter__(self) -> Self:
        keep([(action.point, action) for action in self._actions])
        return self

    def __exit__(self, *_: object) -> None:
        if self._clears:
            self._model.clear_contexts()


OPTIONS = (
    "names_filter", "fwd_hooks", "bwd_hooks", "incl_bwd", "loss_fn", "remove_batch_dim", "stop_early",
    "reset_hooks_end", "clear_contexts", "pos_slice", "return_type", "loss_per_token", "prepend_bos", "padding_side",
    "start_at_layer", "stop_at_layer", "decoder_input", "attention_mask", "on_error",
)  # fmt: skip


@cache
def _taken_by(model: type[Hooked]) -> frozenset[str]:
    """What a kind of model takes when called, beside the arguments of the module's forward."""
    return frozenset(inspect.signature(model.__call__).parameters)


def _attach(actions: list[HookAction], model: Hooked) -> None:
    """Tell the hook objects among these where they are to be used."""
    objects = {id(action.hook): action.hook for action in actions if isinstance(action.hook, HookObject)}
    for hook in objects.values():
        points = [action.point for action in actions if action.hook is hook]
        hook.check_points(points)
        hook.check_target(points, model._points)
        hook.attached(model)


def _check_grad_mode() -> None:
    if not torch.is_grad_enabled():
        raise HooklineError(
            "incl_bwd=True needs gradients, but they are switched off: leave torch.no_grad() or inference_mode()"
        )


def _own_copy(output: Any) -> Any:
    """The output as snapshots: a function that writes to it must not change what the run returns."""
    return map_tensors(output, snapshot)


def _loss(output: Any, loss_fn: Callable[[Any], Tensor] | None) -> Tensor:
    """The number to differentiate."""
    loss = loss_fn(_own_copy(output)) if loss_fn is not None else output
    if loss_fn is None and not isinstance(loss, Tensor):
        loss = loss.get("loss") if isinstance(loss, Mapping) else getattr(loss, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise HooklineError(
            f"incl_bwd=True needs one number to differentiate, but has {what}: "
            f"pass loss_fn=lambda output: …, or let the model return its loss"
        )
    if not loss.requires_grad:
        raise HooklineError("incl_bwd=True found no gradient path from the loss back to any point")
    return loss.squeeze()
