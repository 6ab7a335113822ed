"""Delegate: an nn.Module that wraps another module and has no state of its own.

Parameters, buffers, submodules, training mode and torch hooks are the wrapped module's, under the same names and
without a prefix. So code that takes an nn.Module (an optimizer, a parent module, DistributedDataParallel, accelerate,
peft, Trainer) gets the wrapped module's parameters, and a `state_dict` of either loads into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from hookline.engine._torch.stance import WRAPPED
from hookline.errors import HooklineError

_LISTED = 90
"""How many names without an underscore `dir` lists; a subclass may add ten."""
_LIBRARIES = ("torch.", "transformers.", "builtins.")
"""Where classes are from whose methods `dir` does not list."""
_TYPED = (
    "bfloat16", "children", "compile", "cpu", "cuda", "eval", "float", "forward", "half", "load_state_dict", "modules",
    "named_modules", "named_parameters", "parameters", "requires_grad_", "state_dict", "to", "train", "zero_grad",
)  # fmt: skip
"""What people type of an `nn.Module`: the methods that tutorials use."""


class _Forward:
    """The attribute `forward`: it has the signature of the wrapped module's, and calls the module so that hooks fire.

    It is a descriptor because tools read the signature of a model's `forward` to find its inputs, and some, such as
    accelerate, replace `forward` on the instance.
    """

    def __get__(self, delegate: Delegate | None, owner: type) -> Callable[..., Any]:
        if delegate is None:
            return _any_forward

        @wraps(delegate.module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return delegate._run_module(*args, **kwargs)

        return forward


def _any_forward(self: Delegate, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
    # `labels` is a parameter because Trainer reads the class's signature to find out whether a model computes a loss.
    return self.forward(*args, **kwargs if labels is None else {**kwargs, "labels": labels})


class Delegate(nn.Module):
    """Wraps `module`. `nn.Module.__init__` is not called: every attribute that it would set is the module's."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        vars(self)["module"] = module

    if not TYPE_CHECKING:
        forward = _Forward()

    @staticmethod
    def original(module: nn.Module) -> nn.Module:
        """A module itself, without the wrapper that `torch.compile` or `hookline.hook` puts around it."""
        if isinstance(module, Delegate):
            return Delegate.original(module.module)
        if WRAPPED in module._modules:
            return Delegate.original(module._modules[WRAPPED])  # type: ignore[arg-type]
        return module

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module itself."""
        return self.module(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """`forward`, without the cost of the descriptor unless somebody has replaced it."""
        replaced = vars(self).get("forward")
        return (replaced if replaced is not None else self._run_module)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "module" not in vars(self):
            raise AttributeError(name)
        try:
            value = getattr(self.module, name)
        except AttributeError as error:
            if error.name == name and error.obj is self.module:
                error.obj = self  # among whose names Python looks for a similar one
            raise
        return self._returning_self(value)

    def _returning_self(self, value: Any) -> Any:
        """Make methods that return the module, such as `net.to("cuda")`, return the wrapper."""
        if not (isinstance(value, MethodType) and value.__self__ is self.module):
            return value

        @wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return self if result is self.module else result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        # `net.fc1 = other` sets the module's fc1, and a new submodule or parameter is registered there too. `forward`
        # is replaced on the wrapper, where whoever replaces it has read it.
        target = vars(self).get("module")
        is_own = target is None or name in vars(self) or name == "forward" or name.startswith("__")
        if not is_own and (hasattr(target, name) or isinstance(value, nn.Module | nn.Parameter)):
            setattr(target, name, value)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        """What the wrapper adds, what people type of `nn.Module`, and the module's parts; all else stays reachable."""
        private = {name for name in object.__dir__(self) if name.startswith("_")}
        names = {name for cls in type(self).__mro__ if cls not in _GENERAL for name in vars(cls)}
        names |= {*vars(self), *_TYPED}
        module = self.module
        classes = [cls for cls in type(module).__mro__ if not f"{cls.__module__}.".startswith(_LIBRARIES)]
        parts = [*module._modules, *module._parameters, *module._buffers, *vars(module)]
        parts += [name for cls in classes for name in vars(cls)]
        public = [name for name in dict.fromkeys([*sorted(names), *parts]) if name.isidentifier() and name[0] != "_"]
        return sorted({*private, *public[: max(_LISTED, len(names))]})

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of the module, with the wrapper in its place, as among the children of a parent module."""
        for name, module in self.module.named_modules(memo, prefix, remove_duplicate):
            yield name, self if module is self.module else module

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise HooklineError(
            "nn.DataParallel on several devices copies modules for every call, and the copies have no hooks: use "
            "DistributedDataParallel, or hookline.hook(nn.DataParallel(model)) on one device"
        )


def _delegated(name: str) -> Callable[..., Any]:
    @wraps(getattr(nn.Module, name))
    def method(self: Delegate, *args: Any, **kwargs: Any) -> Any:
        return self._returning_self(getattr(self.module, name))(*args, **kwargs)

    return method


for _name, _value in vars(nn.Module).items():
    if callable(_value) and not _name.startswith("__") and _name not in (*vars(Delegate), "modules"):
        setattr(Delegate, _name, _delegated(_name))


_GENERAL = (Delegate, nn.Module, object)
"""Classes of a wrapper that add nothing that people type."""
