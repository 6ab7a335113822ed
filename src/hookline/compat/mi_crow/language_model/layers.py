"""The layers of a language model: hookline's registry, with mi-crow's layer names and methods."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookline.compat.mi_crow.wrong_argument import WrongArgumentError
from hookline.engine import FIRST, Kind
from hookline.errors import HooklineError, UnavailablePointError, UnknownHookPointError, UnknownPointError
from hookline.hooks import Controller, Detector, Hook, HookType, Registry
from hookline.hooks.context import contexts
from hookline.hooks.hook import hook_type_of
from hookline.types import Filter, HookFunction

if TYPE_CHECKING:
    from hookline.compat.mi_crow.language_model.language_model import LanguageModel

_NUMBERED = re.compile(r"layer_(\d+)")


class LanguageModelLayers(Registry):
    """The hooks registered on a language model.

    A layer is a module by mi-crow's name (`gpt2lmheadmodel_transformer_h_0_mlp`) or its index among all modules, by
    its path (`transformer.h.0.mlp`), or by any other name of a point; `layer_N` is block N.
    """

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(lm.hooked)
        contexts[lm.hooked.index.root] = lm.context
        self.store, self.context = lm.store, lm.context
        self.name_to_layer = {name: module for name, _, module in self._flattened()}

    name_to_layer: dict[str, nn.Module]
    """The modules by mi-crow's names. Other names for modules may be added."""

    def register_hook(
        self, layer_signature: Filter, hook: HookFunction, hook_type: HookType | str | None = None, **options: Any
    ) -> str:
        """Register a hook at a layer and return its id. The options are those of `Registry.register_hook`."""
        signature = self.resolved(layer_signature)
        if isinstance(hook, Hook):
            hook.layer_signature = self.resolved(hook.layer_signature)
        new = super().register_hook(signature, hook, hook_type, **options)
        if isinstance(hook, Hook):
            hook.layer_signature = layer_signature if layer_signature is not None else hook.layer_signature
        return new

    def unregister_hook(self, hook_or_id: Any) -> bool:
        """Unregister a hook, given by its id or itself; False if it is not registered."""
        return super().unregister_hook(hook_or_id) if hook_or_id in self else False

    def resolved(self, layer_signature: Any) -> Any:
        """The path of a module given by its index or mi-crow's name; for `layer_3`, the number of the block."""
        if isinstance(layer_signature, int) and not isinstance(layer_signature, bool):
            paths = [path for _, path, _ in self._flattened()]
            if layer_signature not in range(len(paths)):
                raise UnknownHookPointError(
                    f"layer {layer_signature} is the index of a module, and this model has {len(paths)}, 0 to "
                    f"{len(paths) - 1}: see get_layer_names(). For a block, pass 'layer_{layer_signature}'"
                )
            return paths[layer_signature]
        if not isinstance(layer_signature, str) or layer_signature in self.list_layers():
            return layer_signature
        if match := _NUMBERED.fullmatch(layer_signature):
            return self._known(int(match[1]))
        if layer_signature not in self.name_to_layer:
            return self._known(layer_signature)
        module, root = self.name_to_layer[layer_signature], self._model.index.root
        paths = [
            path for name, path, layer_module in self._flattened() if name == layer_signature or layer_module is module
        ]
        return "output" if module is root else next(iter(paths), layer_signature)

    def _known(self, name: str | int) -> str | int:
        """A name that is not mi-crow's, or the number of a block, if points have it."""
        try:
            self._model.index.select(name)
        except UnavailablePointError:
            raise
        except UnknownPointError as error:
            raise UnknownHookPointError(str(error)) from error
        return name

    def _new_id(self, hook: Any, given: str | None) -> str:
        try:
            return super()._new_id(hook, given)
        except HooklineError as error:
            raise WrongArgumentError(str(error)) from error

    def _flattened(self) -> list[tuple[str, str, nn.Module]]:
        """All modules in mi-crow's order, each as (mi-crow's name, path, module)."""
        root = self._model.index.root
        prefix, modules = type(root).__name__.lower(), root.named_modules(remove_duplicate=False)
        return [(f"{prefix}_{path}".replace(".", "_"), path, module) for path, module in modules if path]

    @property
    def idx_to_layer(self) -> dict[int, nn.Module]:
        """The modules by their index."""
        return {index: module for index, (_, _, module) in enumerate(self._flattened())}

    def get_layer_names(self) -> list[str]:
        """mi-crow's names of the modules; `list_layers()` returns their paths."""
        return list(self.name_to_layer)

    def register_forward_hook_for_layer(
        self, layer_signature: Any, hook: Callable[..., Any], hook_args: dict[str, Any] | None = None
    ) -> RemovableHandle:
        """Add a plain torch hook to a layer, outside the registry."""
        return self._module(layer_signature).register_forward_hook(hook, **(hook_args or {}))

    def register_pre_forward_hook_for_layer(
        self, layer_signature: Any, hook: Callable[..., Any], hook_args: dict[str, Any] | None = None
    ) -> RemovableHandle:
        """Add a plain torch pre-hook to a layer, outside the registry."""
        return self._module(layer_signature).register_forward_pre_hook(hook, **(hook_args or {}))

    def _module(self, layer_signature: Any) -> nn.Module:
        point = self._point(self.resolved(layer_signature), None)
        if point.site.kind is not Kind.OUTPUT or point.site.lens != FIRST:
            raise HooklineError(f"a torch hook needs a module, but {point.name!r} is a value: name the module")
        return point.site.module

    def get_hooks(self, layer_signature: Any = None, hook_type: HookType | str | None = None) -> list[Any]:
        """The registered hooks, optionally of one layer or one type only."""
        hooks = self.hooks(self.resolved(layer_signature))
        if hook_type is None:
            return hooks
        kind = hook_type_of(hook_type)
        return [hook for hook in hooks if isinstance(hook, Hook) and hook.is_pre == (kind is HookType.PRE_FORWARD)]

    def get_detectors(self) -> list[Detector]:
        """The registered detectors."""
        return [hook for hook in self.hooks() if isinstance(hook, Detector)]

    def get_controllers(self) -> list[Controller]:
        """The registered controllers."""
        return [hook for hook in self.hooks() if isinstance(hook, Controller)]

    def print_layer_names(self) -> None:
        """Print mi-crow's name and the class of every module."""
        for name, module in self.name_to_layer.items():
            print(f"{name}: {type(module).__name__}")

    def enable_hook(self, hook_id: str) -> bool:
        """Enable a hook; False if there is none with that id."""
        return self._switched(hook_id, self.enable)

    def disable_hook(self, hook_id: str) -> bool:
        """Disable a hook, but keep it registered; False if there is none with that id."""
        return self._switched(hook_id, self.disable)

    def _switched(self, hook_id: str, switch: Callable[[str], None]) -> bool:
        is_known = hook_id in self
        if is_known:
            switch(hook_id)
        return is_known

    def enable_all_hooks(self) -> None:
        """Enable all registered hooks."""
        for hook_id in self.ids():
            self.enable(hook_id)

    def disable_all_hooks(self) -> None:
        """Disable all registered hooks, but keep them registered."""
        for hook_id in self.ids():
            self.disable(hook_id)
