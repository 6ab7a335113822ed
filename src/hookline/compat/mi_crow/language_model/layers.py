"""The layers of a language model: hookline's registry, with mi-crow's other ways to ask it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookline.engine.callbacks import HookFunction
from hookline.engine.lenses import First
from hookline.engine.names import Filter
from hookline.engine.order import Kind
from hookline.errors import HooklineError, UnknownHookPointError
from hookline.hooks import Controller, Detector, Hook, HookType, Registry
from hookline.hooks.hook import hook_type_of

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
        self.context = lm.context
        self.store = lm.store

    def register_hook(
        self,
        layer_signature: Filter,
        hook: HookFunction,
        hook_type: HookType | str | None = None,
        *,
        hook_id: str | None = None,
        prepend: bool = False,
    ) -> str:
        """Keep a hook at a layer, and give its id. Any number may share a layer."""
        signature = self.resolved(layer_signature)
        if isinstance(hook, Hook):
            hook.layer_signature = self.resolved(hook.layer_signature)
        new = super().register_hook(signature, hook, hook_type, hook_id=hook_id, prepend=prepend)
        if isinstance(hook, Hook):
            hook.used_on(self._model._points.root, self.context)
            hook.layer_signature = layer_signature if layer_signature is not None else hook.layer_signature
        return new

    def unregister_hook(self, hook_or_id: Any) -> bool:
        """Take a hook out; False if there is none like that."""
        return super().unregister_hook(hook_or_id) if hook_or_id in self else False

    def resolved(self, layer_signature: Any) -> Any:
        """An index, or a name of mi-crow's, as the path of the module; `layer_3` as the number of a block."""
        if isinstance(layer_signature, int) and not isinstance(layer_signature, bool):
            paths = [path for _, path, _ in self._flattened()]
            if layer_signature not in range(len(paths)):
                raise UnknownHookPointError(
                    f"layer {layer_signature} is the index of a module, and this model has {len(paths)}, 0 to "
                    f"{len(paths) - 1}: see get_layer_names(). A block goes by 'layer_{layer_signature}'"
                )
            return paths[layer_signature]
        if not isinstance(layer_signature, str) or layer_signature in self.list_layers():
            return layer_signature
        if match := _NUMBERED.fullmatch(layer_signature):
            return int(match[1])
        return {name: path for name, path, _ in self._flattened()}.get(layer_signature, layer_signature)

    def _flattened(self) -> list[tuple[str, str, nn.Module]]:
        """All modules in mi-crow's order, each with its name there and its path."""
        root = self._model._points.root

        def below(module: nn.Module, name: str, path: str) -> Iterator[tuple[str, str, nn.Module]]:
            for key, child in module.named_children():
                entry = f"{name}_{key}".replace(".", "_"), f"{path}.{key}".lstrip("."), child
                yield entry
                yield from below(child, *entry[:2])

        return [*below(root, type(root).__name__.lower(), "")]

    @property
    def name_to_layer(self) -> dict[str, nn.Module]:
        """The modules by mi-crow's names."""
        return {name: module for name, _, module in self._flattened()}

    @property
    def idx_to_layer(self) -> dict[int, nn.Module]:
        """The modules by their index."""
        return {index: module for index, (_, _, module) in enumerate(self._flattened())}

    def get_layer_names(self) -> list[str]:
        """The names of the modules as mi-crow has them; `list_layers()` are their paths."""
        return list(self.name_to_layer)

    def register_forward_hook_for_layer(
        self, layer_signature: Any, hook: Callable[..., Any], hook_args: dict[str, Any] | None = None
    ) -> RemovableHandle:
        """Put a torch hook on a layer, beside hookline; it is no hook of the registry."""
        return self._module(layer_signature).register_forward_hook(hook, **(hook_args or {}))

    def register_pre_forward_hook_for_layer(
        self, layer_signature: Any, hook: Callable[..., Any], hook_args: dict[str, Any] | None = None
    ) -> RemovableHandle:
        """Put a torch hook before a layer, beside hookline; it is no hook of the registry."""
        return self._module(layer_signature).register_forward_pre_hook(hook, **(hook_args or {}))

    def _module(self, layer_signature: Any) -> nn.Module:
        point = self._point(self.resolved(layer_signature), None)
        if point.site.kind is not Kind.OUTPUT or not isinstance(point.site.lens, First):
            raise HooklineError(f"a torch hook is for a module, and {point.name!r} is a value: name the module")
        return point.site.module

    def get_hooks(self, layer_signature: Any = None, hook_type: HookType | str | None = None) -> list[Any]:
        """The registered hooks, of one layer or one type if that is given."""
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
        """Print the names of the layers as mi-crow has them, each with what it is."""
        for name, module in self.name_to_layer.items():
            print(f"{name}: {type(module).__name__}")

    def enable_hook(self, hook_id: str) -> bool:
        """Switch a hook on; False if there is none like that."""
        if hook_id not in self:
            return False
        self._switchable(hook_id).enable()
        return True

    def disable_hook(self, hook_id: str) -> bool:
        """Switch a hook off, without taking it out; False if there is none like that."""
        if hook_id not in self:
            return False
        self._switchable(hook_id).disable()
        return True

    def enable_all_hooks(self) -> None:
        """Switch all of them on."""
        for hook_id in self.ids():
            self.enable_hook(hook_id)

    def disable_all_hooks(self) -> None:
        """Switch all of them off."""
        for hook_id in self.ids():
            self.disable_hook(hook_id)

    def _switchable(self, hook_id: str) -> Hook:
        hook = self.get(hook_id)
        if not isinstance(hook, Hook):
            raise HooklineError(f"{hook_id!r} is a function or an edit, which cannot be switched: unregister it")
        return hook
