"""find_nonfinite: the first module call that computes a NaN or an infinite value, forward or backward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hookline.engine import (
    Hooked,
    HookPoint,
    Kind,
    PermanentHooks,
    PointAction,
    Record,
    Run,
    Site,
    compiling,
    lens_of,
    pass_state,
    undo,
)
from hookline.errors import NonFiniteError, warn
from hookline.loading import hook
from hookline.values.structures import tensors_in


def find_nonfinite(net: nn.Module | Hooked, *, raises: bool = True) -> FindNonFinite:
    """Find the first module call whose output, or whose gradient, has a NaN or an infinite value.

        with find_nonfinite(net) as found:
            train_step(net)

    It raises a `NonFiniteError` that names the innermost module, with the ranges of its inputs. With `raises=False` the
    run continues, and `found.first` has what was found; it is None as long as all is finite. Every output is looked at
    as soon as it is there, which waits for the device: use it to find a mistake, not all the time.

    Examples:
        >>> with hookline.training.find_nonfinite(net, raises=False) as found:
        ...     output = net(x / 0)
        >>> found.first.point, found.first.what
        ('fc1', 'output')
    """
    return FindNonFinite(net, raises=raises)


What: TypeAlias = Literal["output", "gradient of the output", "gradient of the input", "gradient"]


@dataclass(frozen=True)
class NonFinite:
    """The first value that was not finite."""

    point: str
    """The path of the module; for "gradient", of the parameter."""
    what: What
    values: str
    """How many values were not finite."""
    inputs: tuple[str, ...]
    """The shapes and ranges of the tensors that went into the call."""

    def __str__(self) -> str:
        inputs = "; ".join(self.inputs) or "no tensors"
        if self.what == "gradient of the input":
            return (
                f"the backward pass of {self.point!r} got a finite gradient and computed one with {self.values}. "
                f"Inputs of the module: {inputs}"
            )
        return f"the {self.what} of {self.point!r} has {self.values}. Inputs of the module: {inputs}"


class FindNonFinite(undo.UndoBlock):
    """The context of `find_nonfinite`; `first` has what was found."""

    def __init__(self, net: nn.Module | Hooked, *, raises: bool) -> None:
        hooked: Any = hook(net)  # type: ignore[arg-type]
        self._root: nn.Module = hooked.index.root
        self._outer: nn.Module = vars(hooked).get("_outer", hooked.module)
        self._raises = raises
        self.first: NonFinite | None = None
        self._arguments: dict[nn.Module, list[Tensor]] = {}
        self._handles: list[Any] = []
        modules = [
            (path.replace("_orig_mod.", ""), module)
            for path, module in self._root.named_modules()
            if not isinstance(module, HookPoint | torch.jit.ScriptModule)
        ]
        actions = [action for path, module in modules for action in self._actions(path, module, hooked.index.permanent)]
        for action in actions:
            action.must_fire = False
        self._run = Run(self._root, actions)

    def _actions(self, path: str, module: nn.Module, standing: PermanentHooks) -> list[PointAction]:
        output, entry = (
            HookPoint.at_site(path or "output", Site(module, kind, lens_of(module, kind)), standing)
            for kind in (Kind.OUTPUT, Kind.INPUT)
        )
        return [
            _Check(output, self),
            output.backward_action(partial(self._check_gradient, output, "gradient of the output")),
            entry.backward_action(partial(self._check_gradient, output, "gradient of the input")),
        ]

    def open(self) -> FindNonFinite:
        """Look at every output from now on."""
        if any(map(compiling.is_compiled, self._outer.modules())):
            warn("the model is compiled, and runs uncompiled in find_nonfinite: its graphs may compute something else")
        self.first = None
        self._run.__enter__()
        owners = dict(self._root.named_modules())
        for name, parameter in self._root.named_parameters():
            if parameter.requires_grad:
                check = partial(self._check_parameter, name, owners[name.rpartition(".")[0]])
                self._handles.append(parameter.register_post_accumulate_grad_hook(check))
        return self

    def close(self) -> None:
        """Stop looking."""
        while self._handles:
            self._handles.pop().remove()
        self._arguments.clear()
        if self._run.is_open:
            self._run.__exit__(*sys.exc_info())

    def is_on(self, root: nn.Module) -> bool:
        """Whether it looks at this network."""
        return self._root is root

    def check_output(self, point: HookPoint, value: Any) -> None:
        """Look at what a module call returned."""
        arguments = tensors_in(pass_state.arguments)
        if torch.is_grad_enabled():
            self._arguments[point.site.module] = [x.detach() for x in arguments]
        for x in tensors_in(value):
            self._look(x, point.name, "output", arguments)

    def _check_gradient(self, point: HookPoint, what: What, grad: Tensor) -> None:
        self._look(grad, point.name, what, self._arguments.get(point.site.module, []))

    def _check_parameter(self, name: str, owner: nn.Module, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self._look(parameter.grad, name, "gradient", self._arguments.get(owner, []))

    @torch.no_grad()
    def _look(self, x: Tensor, name: str, what: What, arguments: Sequence[Tensor]) -> None:
        if self.first is not None or _is_finite(x):
            return
        self.first = NonFinite(name, what, _wrong_values(x), tuple(map(_range_text, arguments)))
        if self._raises:
            raise NonFiniteError(str(self.first), first=self.first)


class _Check(PointAction):
    """Looks at all tensors that a module call returns."""

    phase = Record.phase
    is_late = True
    is_replayed = False
    only_reads = True

    def __init__(self, point: HookPoint, finder: FindNonFinite) -> None:
        super().__init__(point)
        self._finder = finder

    def __call__(self, value: Any) -> Any:
        """Look at the value, which continues unchanged."""
        self.fired = True
        if not pass_state.hooks:
            self._finder.check_output(self.point, value)
        return value


def _is_finite(x: Tensor) -> bool:
    has_numbers = (x.is_floating_point() or x.is_complex()) and x.numel() > 0 and not x.is_meta
    return not has_numbers or bool(_flat(x).isfinite().all())


def _flat(x: Tensor) -> Tensor:
    """The numbers of a tensor: of a nested or sparse one, its values."""
    if x.is_nested:
        return x.values() if x.layout is torch.jagged else torch.cat([part.flatten() for part in x.unbind()])
    return x if x.layout is torch.strided else x.to_dense()


def _wrong_values(x: Tensor) -> str:
    flat = _flat(x)
    counts = {"NaN": int(flat.isnan().sum()), "infinite": int(flat.isinf().sum())}
    return " and ".join(f"{count} {kind}" for kind, count in counts.items() if count) + f" of {flat.numel():,} values"


def _range_text(x: Tensor) -> str:
    about = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    flat = _flat(x)
    if x.dtype == torch.bool or x.is_complex() or not flat.numel():
        return about
    finite = flat[flat.isfinite()] if x.is_floating_point() else flat
    wrong = "" if _is_finite(x) else f", with {_wrong_values(x)}"
    if not finite.numel():
        return f"{about}{wrong}"
    low, high = finite.float().aminmax()
    return f"{about} from {low.item():.4g} to {high.item():.4g}{wrong}"
