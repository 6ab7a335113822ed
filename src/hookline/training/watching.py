"""watch: statistics of activations, gradients and updates while a network is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import Hooked, HookPoint, Points, Run, compiling, undo
from hookline.errors import HooklineError, NeverFiredWarning, UnavailablePointError, UnknownPointError, warn
from hookline.loading import hook
from hookline.training.measuring import Measure, is_plain_output, measure_activation
from hookline.training.record import MeasuredRow, TrainingRecord
from hookline.training.steps import MeasuredStep, WeightsBefore
from hookline.types import Filter


def watch(net: nn.Module | Hooked, points: Filter = None, every: int = 50, to: Any = None) -> Watch:
    """TrainingRecord statistics of activations and gradients at every so many steps of a training.

        with watch(net, every=50, to="watch.csv") as record:
            train(net)
        record.to_dataframe(); record.warnings; record.dead_units()

    A step is one forward pass in training mode with gradients, counted from 0. At a due step the record gets, for each
    point, statistics of its activation and of its gradient, and for each parameter those of its gradient; the update of
    each parameter relative to its norm is in `record.updates`. In between nothing is attached to the network but a
    counter. Statistics stay on the device until the step has ended, and are then copied together.

    `points` are the outputs of all modules without submodules, or those that a filter selects, with the parameters
    of their modules; names of parameters (`fc.weight`) may be among them. `to` is the path of a CSV file, a
    `SummaryWriter` of TensorBoard, or a run of Weights & Biases.

    Examples:
        >>> with hookline.training.watch(net, every=1) as record:
        ...     net(x).sum().backward()
        >>> [(row.point, row.kind) for row in record.rows if row.point == "fc2"]
        [('fc2', 'activation'), ('fc2', 'gradient')]
    """
    return Watch(net, points, every, to)


class Watch(undo.UndoBlock):
    """The context of `watch`: entering it returns the `TrainingRecord`."""

    def __init__(self, net: nn.Module | Hooked, points: Filter, every: int, to: Any) -> None:
        if not isinstance(every, int) or every < 1:
            raise HooklineError(f"every= is a number of steps, at least 1, not {every!r}")
        self._net = hook(net)  # type: ignore[arg-type]
        self._root = self._net.index.root
        self._counted = _counted_module(self._net)
        self._every, self._is_default = every, points is None
        self._points, self._parameters = _selected(self._net, points)
        self._has_series = any(isinstance(module, nn.Conv1d) for module in self._root.modules())
        self.record = TrainingRecord(to)
        self.record.unfinished = self._unfinished
        self._is_open, self._steps = False, 0
        self._step: MeasuredStep | None = None
        self._ended: MeasuredStep | None = None
        self._weights: WeightsBefore | None = None
        self._run: Run | None = None
        self._handles: list[Any] = []
        self._torch_hooks = self._begin, self._end_forward

    def open(self) -> TrainingRecord:
        """Begin to count steps."""
        self._is_open = True
        self.record.begin()
        self._counted.register_forward_pre_hook(self._torch_hooks[0])
        return self.record

    def close(self) -> None:
        """Stop, with what was measured until now."""
        if not self._is_open:
            return
        undo.remove_hook(self._counted, self._torch_hooks[0])
        self._leave_run(has_succeeded=False)
        self._advance(is_last=True)
        self._advance(is_last=True)
        self._weights, self._is_open = None, False
        if not self._steps and sys.exc_info()[0] is None:
            warn(
                f"watch saw no step: {type(self._counted).__name__} had no forward pass in training mode",
                NeverFiredWarning,
            )

    def is_on(self, root: nn.Module) -> bool:
        """Whether it watches this network."""
        return self._root is root

    def callback(self) -> Any:
        """A callback for the `Trainer` of transformers or of Lightning, which opens and closes this context.

        Trainer(model, arguments, train_dataset=data, callbacks=[watch(model, every=100, to="watch.csv").callback()])
        """
        from hookline.training.trainer_callback import WatchCallback  # imports transformers

        return WatchCallback(self)

    @compiling.outside_compiler
    def _begin(self, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        if self._run is not None or not (self._root.training and torch.is_grad_enabled()):
            return
        if self._ended is not None or self._step is not None or self._weights is not None:
            self._advance()
        number, self._steps = self._steps, self._steps + 1
        if number % self._every == 0:
            self._begin_step(number)

    def _begin_step(self, number: int) -> None:
        step = self._step = MeasuredStep(number, self.record)
        if self._weights is not None:
            self.record.add_updates([*self._weights.read()])
        self._weights = WeightsBefore(number, self._parameters)
        for name, parameter in self._parameters:
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(_note_gradient, step, name)))
        actions = [action for point in self._points for action in self._actions(point, step)]
        self._run = Run(self._root, actions, is_one_pass=True)
        self._run.__enter__()
        self._counted.register_forward_hook(self._torch_hooks[1], always_call=True)  # the last one

    def _actions(self, point: HookPoint, step: MeasuredStep) -> list[Any]:
        actions: list[Any] = (
            [Measure(point, step, self._has_series)] if is_plain_output(point) else self._hooks(point, step)
        )
        for action in actions:
            action.must_fire = not self._is_default
        return actions

    def _hooks(self, point: HookPoint, step: MeasuredStep) -> list[Any]:
        def note_activation(x: Tensor) -> None:
            measure_activation(step, point.name, x, self._has_series)

        def note_gradient(grad: Tensor) -> None:
            step.note(point.name, "gradient", grad)

        return [point.action(note_activation), point.backward_action(note_gradient)]

    @compiling.outside_compiler
    def _end_forward(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self._leave_run(has_succeeded=output is not None)

    def _leave_run(self, *, has_succeeded: bool) -> None:
        run, self._run = self._run, None
        if run is not None:
            undo.remove_hook(self._counted, self._torch_hooks[1])
            run.__exit__(None if has_succeeded else RuntimeError, None, None)

    def _unfinished(self) -> list[MeasuredRow]:
        return [row for step in (self._ended, self._step) if step is not None for row in step.rows()]

    def _advance(self, *, is_last: bool = False) -> None:
        """Read the numbers that are on their way to the host, and send those of the step that has ended.

        A step ends with its backward pass, before which there may be other forward passes.
        """
        if self._ended is not None:
            ended, self._ended = self._ended, None
            self.record.add_step(ended.rows())
        if self._weights is not None:
            updates = self._weights.read()
            self.record.add_updates([*updates])
            self._weights = None if updates else self._weights
        is_due = is_last or self._steps % self._every == 0
        if self._step is not None and (is_due or self._step.has_gradients):
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._ended, self._step = self._step, None
            self._ended.end()
        if self._weights is not None:
            self._weights.compare()


def _note_gradient(step: MeasuredStep, name: str, parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        step.note(name, "gradient", parameter.grad)


def _counted_module(net: Any) -> nn.Module:
    """The module whose calls are steps: the network itself, or what `torch.compile` has put around it."""
    root = net.index.root
    outer = vars(net).get("_outer", net.module)
    around = [module for module in outer.modules() if any(inner is root for inner in module.modules())]
    counted = next((module for module in around if compiling.is_compiled(module)), root)
    if counted is root and compiling.is_compiled(root):
        raise HooklineError(
            f"watch cannot count the steps of {type(root).__name__}: it was compiled in place, with module.compile(), "
            f"and compiled code ignores new hooks. Train torch.compile(module) instead, and watch that"
        )
    return counted


def _selected(net: Any, points: Filter) -> tuple[list[HookPoint], list[tuple[str, nn.Parameter]]]:
    """The points and the parameters to watch."""
    index = net.index
    parameters = [(name, weight) for name, weight in index.root.named_parameters() if weight.requires_grad]
    if points is None:
        return [*_leaves(index)], parameters
    listed: list[Any] = [*points] if isinstance(points, list | tuple) else [points]
    patterns = [name for name in listed if isinstance(name, str)]
    named = {name for name, _ in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)}
    filters = [name for name in listed if not (isinstance(name, str) and _is_for_parameters(index, name, named))]
    selected = index.select(filters) if filters else []
    owned = {id(weight) for point in selected for weight in point.site.module.parameters(recurse=False)}
    return selected, [(name, weight) for name, weight in parameters if name in named or id(weight) in owned]


def _leaves(index: Points) -> Iterator[HookPoint]:
    """The outputs of the modules without submodules that can be called."""
    for name, module in index.root.named_modules():
        if not list(module.children()):
            with suppress(UnavailablePointError):  # an empty ModuleList, a ParameterList, a ScriptModule
                yield index.find(name or "output")


def _is_for_parameters(index: Points, pattern: str, named: set[str]) -> bool:
    """Whether a name or glob is one of parameters, and of no point."""
    if not any(fnmatchcase(name, pattern) for name in named):
        return False
    try:
        index.select(pattern)
    except UnknownPointError:
        return True
    return False
