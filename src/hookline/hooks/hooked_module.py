"""Hooked modules: a wrapper for any nn.Module, and the base class for models with their own hook points."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from hookline.engine import Delegate, Hooked, HookPoint, PermanentHooks, Points, compiling, open_runs, sharding
from hookline.errors import HooklineError, how_many
from hookline.functions.signatures import parameters_of
from hookline.hooks.attention_check import AttentionReport, check_attention
from hookline.hooks.registry import Registry
from hookline.text.forward_pass import begin_pass

_TEXT = frozenset(["input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"])
"""Arguments that are texts."""


def note_text(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note where the text of an input is, in whose positions edits and caches count; contexts do so themselves."""
    runs = open_runs()
    if runs and False not in [run.is_one_pass for run in runs]:
        names = parameters_of(root)[0]
        if not _TEXT.isdisjoint(names) or (kwargs and not _TEXT.isdisjoint(kwargs)):
            begin_pass(root, dict(zip(names, args, strict=False)) | kwargs, is_only=True)


@compiling.verbs
class HookedModule(Hooked, Delegate):
    """Any nn.Module, wrapped but not changed: attributes that the wrapper does not define are the module's.

        net = hookline.hook(module)
        net(x)                   # the module's own forward
        net.fc1, net.eval()      # the module's own attributes and methods

    The module itself is `net.module`, and can be used on its own. The wrapper is an nn.Module that shares all state
    with it: see `delegate.py`.
    """

    _elsewhere: ClassVar[dict[str, str]] = {
        "trace": "run_with_cache(…) returns activations, and with model.hooks(fwd_hooks=[(name, edit)]): edits them",
        "edit": "add_hook(name, edit), or for some runs with model.hooks(fwd_hooks=[(name, edit)]):",
        "scan": "points(names_filter, input) lists shapes without running the model",
    }
    """Methods of other libraries, and what to type instead."""

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise HooklineError(f"hookline.hook takes an nn.Module, not {type(module).__name__}")
        if isinstance(module, torch.jit.ScriptModule):
            raise HooklineError("torch does not support hooks on a ScriptModule: wrap the original module")
        Delegate.__init__(self, module)
        self._points = self._find_points()

    def _find_points(self) -> Points:
        """The points of the module."""
        return Points(self.module, PermanentHooks.of(self.module))

    @property
    def registry(self) -> Registry:
        """Hooks that stay until they are removed: `net.registry.register_hook("fc1", hook)`. See `Registry`."""
        return Registry(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with the active hooks."""
        if kwargs and _is_of_transformers(self.module):
            self._check_options(kwargs)
        if not torch.compiler.is_compiling():  # no run is open in code that is being compiled
            note_text(self._points.root, args, kwargs)
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in self._elsewhere:
                raise
            message = f"{type(self).__name__} has no {name}: {self._elsewhere[name]}"
            raise AttributeError(message, name=name, obj=self) from error

    def verify(self, *args: Any, **kwargs: Any) -> AttentionReport:
        """Find the modules that compute attention on an input, and check the points inside it.

        report = net.verify(image)
        net.run_with_cache(image, names_filter=report.points)
        """
        return check_attention(self, args, kwargs)

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._called, args, kwargs)

    @property
    def _called(self) -> nn.Module:
        """The module, or the wrapper around it that was passed to `hookline.hook`."""
        return vars(self).get("_outer", self.module)

    def __getstate__(self) -> dict[str, Any]:
        sharding.check_not_sharded(self._points.root, "copying or pickling")
        return {name: value for name, value in vars(self).items() if name not in ("_points", "_store")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._points = self._find_points()

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __repr__(self) -> str:
        modules = sum(1 for _ in self.module.modules())
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        return (
            f"HookedModule({type(self.module).__name__}: {how_many(modules, 'module')}, "
            f"{how_many(parameters, 'parameter')}, {how_many(len(self.hook_dict), 'point')}"
            f"{self._points.added_hooks_text()})"
        )


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether it is a model of transformers, which silently drops unknown keyword arguments."""
    return hasattr(type(module), "get_output_embeddings")


class HookedRootModule(nn.Module, Hooked):
    """Base class for your own model with `HookPoint`s in it.

        class Net(HookedRootModule):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)
                self.hook_mid = HookPoint()
                self.setup()

            def forward(self, x):
                return self.hook_mid(self.fc(x))

    `hook_dict` has the placed points; every module's input and output is available by name as well.
    """

    def setup(self) -> None:
        """Name every placed point by its path. Call it at the end of `__init__`."""
        hidden = [name for name in self._modules if hasattr(type(self), name)]
        if hidden:
            raise HooklineError(f"HookedRootModule has its own attributes {hidden}: rename these modules")
        vars(self)["_hookline"] = Points(self, PermanentHooks.of(self), only_placed=True)
        for name, point in self.named_modules():
            if isinstance(point, HookPoint):
                point.name = name  # replaces the name that an inner model gave it

    @property
    def module(self) -> nn.Module:  # type: ignore[override]
        """The model itself."""
        return self

    @property
    def _points(self) -> Points:  # type: ignore[override]
        if "_hookline" not in vars(self):
            self.setup()
        return vars(self)["_hookline"]

    @property
    def mod_dict(self) -> dict[str, nn.Module]:
        """All modules by their paths."""
        return dict(self.named_modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with the active hooks."""
        note_text(self, args, kwargs)
        return self._run(super().__call__, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hookline"}
