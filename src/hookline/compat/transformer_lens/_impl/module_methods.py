"""The methods of nn.Module on a HookedTransformer: names of TransformerLens, attached modules included.

Parameters and buffers are those of the transformers model and of attached modules. Torch hooks on the model itself are
its own: they get its arguments and what it returns, such as the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.attaching import Attached, LensPoints, module_at
from hookline.compat.transformer_lens._impl.parts import parts_of
from hookline.engine import Delegate, HookPoint
from hookline.errors import HooklineError
from hookline.model import HookedModel

_PARTS = ("embed", "pos_embed", "blocks", "ln_final", "unembed")
OWN_STATE = tuple(name for name in vars(nn.Module()) if name != "training")
"""Attributes of an nn.Module that the model has beside those of the transformers model."""
OWN_TENSORS = ("_parameters", "_buffers", "_non_persistent_buffers_set")
"""Those of them that hold the parameters and buffers that a user has set on the model itself."""


class LensModule(HookedModel):
    """A HookedTransformer as an nn.Module. A mixin."""

    _points: LensPoints
    _points_class = LensPoints
    _attached: Attached

    def _begin_state(self) -> None:
        """State of its own, beside that of the transformers model: torch hooks, and what users attach."""
        empty = vars(nn.Module())
        vars(self).update({name: empty[name] for name in OWN_STATE}, _attached=Attached(self._points))

    @property
    def index(self) -> LensPoints:
        """The points, found by any of their names."""
        return self._points

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """All points by name, in the order in which they fire."""
        self._points.keep_up()
        return super().hook_dict

    def setup(self) -> None:
        """Find the points again, after modules were attached. TransformerLens requires this call, hookline does not.

        A module that was attached to a point itself (`hook.hook_grad = HookPoint()`) is found only by this call.
        """
        for name, point in self._points.own.items():
            for child, module in point._modules.items():
                if module is not None:
                    self._points.attached.setdefault(f"{name}.{child}", module)
                    self._points.adopted.setdefault(name, point)
        self._points.outdate()

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self)
        if "_attached" in attributes:
            if (module := attributes["_attached"].get(name)) is not None:
                return module
            if name in _PARTS:
                parts = parts_of(self)  # type: ignore[arg-type]
                if name not in parts:
                    raise AttributeError(f"this model has no {name}")
                return parts[name]
            for kind in ("_parameters", "_buffers"):
                if name in attributes[kind]:
                    return attributes[kind][name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module" and name in vars(self):
            raise HooklineError(
                "module is the transformers model, and cannot be replaced: make another model around it"
            )
        if "_attached" not in vars(self) or name == "tokenizer":
            super().__setattr__(name, value)
        elif isinstance(value, nn.Module):
            self._attached.put(name, value)
        elif isinstance(value, nn.Parameter):
            self._parameters[name] = value
        elif name in self._buffers and (value is None or isinstance(value, Tensor)):
            self._buffers[name] = value
        elif name in self._attached.modules:
            raise HooklineError(f"{name} is an attached module: delete it first (del model.{name})")
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if "_attached" in vars(self) and self._attached.get(name) is not None:
            self._attached.remove(name)
        elif name in vars(self).get("_parameters", ()):
            del self._parameters[name]
        elif name in vars(self).get("_buffers", ()):
            del self._buffers[name]
            self._non_persistent_buffers_set.discard(name)
        else:
            super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Attach a module under this name."""
        setattr(self, name, module)

    register_module = add_module

    def _others(self) -> Iterator[tuple[str, nn.Module]]:
        """Attached modules by path."""
        yield from self._attached.modules.items()

    def _own_tensors(self) -> nn.Module:
        """A module with the parameters and buffers that were set on the model itself; it shares their dicts."""
        holder = nn.Module()
        vars(holder).update({name: vars(self)[name] for name in OWN_TENSORS})
        return holder

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The components, points and attached modules by the names of TransformerLens, and the modules inside them.

        Inside a parent module, the modules of the transformers model by their own names, as for `hookline.hook`.
        """
        if memo is not None or prefix:
            memo = set() if memo is None else memo
            yield from super().named_modules(memo, prefix, remove_duplicate)
            for path, module in self._others():
                yield from module.named_modules(memo, f"{prefix}.{path}" if prefix else path, remove_duplicate)
            return
        yield "", self
        paths, anatomy = self._component_paths(), self.anatomy
        for own_name, module in list(self.module.named_modules())[1:]:
            head, tail = own_name, ""
            while head and head not in paths:
                head, _, last = head.rpartition(".")
                tail = f"{last}.{tail}" if tail else last
            name = ".".join(filter(None, (paths.get(head, head), tail)))
            is_part = not tail and (name in _PARTS or module_at(anatomy, name) is module or name.startswith("blocks."))
            yield name, (self._component(name) if is_part else module)
        for name, point in self._points.hook_dict.items():
            if self._is_usual(name) and name not in self._points.placed:
                yield name, point
        for path, module in self._others():
            seen: set[nn.Module] = set()
            yield from (
                (name, submodule)
                for name, submodule in module.named_modules(seen, path)
                if not isinstance(submodule, Delegate)
            )

    def _component_paths(self) -> dict[str, str]:
        """The names of components of TransformerLens, by the names of their modules in the transformers model."""
        anatomy, module_names = self.anatomy, {module: name for name, module in self.module.named_modules()}
        parts = ["embed", "pos_embed", "ln_final", "unembed"]
        of_block = ("attn", "mlp", "ln1", "ln1_post", "ln2", "ln2_post")
        parts += [f"blocks.{layer}.{name}" for layer in range(len(anatomy.blocks)) for name in of_block]
        paths = {module_names[module]: path for path in parts if (module := module_at(anatomy, path)) in module_names}
        paths |= {module_names[block.module]: f"blocks.{layer}" for layer, block in enumerate(anatomy.blocks)}
        return paths | {module_names[anatomy.blocks[0].module].rpartition(".")[0]: "blocks"}

    def _component(self, path: str) -> Any:
        """The component of that path, even if another module is in its place."""
        first, *rest = path.split(".")
        component: Any = parts_of(self)[first]  # type: ignore[arg-type]
        if rest:
            component = component[int(rest[0])]
        return component.part(rest[1]) if len(rest) > 1 else component

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The components, points and attached modules at the top level."""
        yield from ((name, module) for name, module in self.named_modules() if name and "." not in name)

    def children(self) -> Iterator[nn.Module]:
        """`named_children` without names."""
        yield from (module for _, module in self.named_children())

    def modules(self) -> Iterator[nn.Module]:  # type: ignore[override]
        """`named_modules` without names."""
        yield from (module for _, module in self.named_modules())

    def get_submodule(self, target: str) -> nn.Module:
        """The module at that path: a component, a point, or one that is attached."""
        module: Any = self
        for part in filter(None, target.split(".")):
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        return module

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All parameters: of the transformers model, and of attached modules."""
        seen: set[int] = set()
        others = [module.parameters() for _, module in self._others()] if recurse else []
        for parameters in (self.module.parameters(recurse), self._own_parameters().values(), *others):
            for parameter in parameters:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter is not None}

    def _other_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of attached modules by path."""
        model_ids = {id(parameter) for parameter in self.module.parameters()}
        attached_parameters = {
            f"{path}.{name}": parameter
            for path, module in self._others()
            for name, parameter in module.named_parameters()
        }
        return {
            name: parameter
            for name, parameter in (self._own_parameters() | attached_parameters).items()
            if id(parameter) not in model_ids
        }

    def _other_state(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers of attached modules by path, and those set on the model itself."""
        inside = {id(tensor) for tensor in self.module.state_dict(keep_vars=True).values()}
        state: dict[str, Tensor] = self._own_tensors().state_dict(keep_vars=True)
        for path, module in self._others():
            state |= {f"{path}.{name}": tensor for name, tensor in module.state_dict(keep_vars=True).items()}
        return {
            name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor) and id(tensor) not in inside
        }

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """All buffers by name: of the transformers model by its own names, and of attached modules."""
        start = f"{prefix}." if prefix else ""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)
        inside = {id(buffer) for buffer in self.module.buffers()}
        parts = [
            (prefix, self._own_tensors()),
            *((f"{start}{path}", module) for path, module in self._others() if recurse),
        ]
        for path, module in parts:
            buffers = module.named_buffers(path, recurse, remove_duplicate)
            yield from ((name, buffer) for name, buffer in buffers if id(buffer) not in inside)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """`named_buffers` without names."""
        yield from (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], strict: bool,  # noqa: ARG002
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load everything from the `state_dict` of a parent module: torch finds no submodules here by itself."""
        state = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        others = self._other_state()
        try:
            assign = local_metadata.get("assign_to_params_buffers", False)
            inside = {name: value for name, value in state.items() if name not in others}
            missing, unexpected = self.module.load_state_dict(inside, strict=False, assign=assign)
            with torch.no_grad():
                for name in set(others) & set(state):
                    others[name].copy_(state[name])
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        missing_keys += [f"{prefix}{name}" for name in (*missing, *(name for name in others if name not in state))]
        unexpected_keys += [f"{prefix}{name}" for name in unexpected]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self._on_all("zero_grad", set_to_none)

    def train(self, mode: bool = True) -> Self:
        """Set training mode."""
        return self._on_all("train", mode)

    def eval(self) -> Self:
        """Set evaluation mode."""
        return self._on_all("train", False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether gradients of the parameters are computed."""
        return self._on_all("requires_grad_", requires_grad)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function with every module of the transformers model, and with attached modules."""
        return self._on_all("apply", fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self._on_all("_apply", fn, recurse)

    def _on_all(self, method: str, *args: Any) -> Self:
        """Call a method of the transformers model and of attached modules."""
        getattr(self.module, method)(*args)
        if method != "apply":
            getattr(self._own_tensors(), method)(*args)
        for _, module in self._others():
            getattr(module, method)(*args)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`, with torch hooks on the model."""
        return nn.Module._call_impl(self, *args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_module(*args, **kwargs)

    def _call_arguments(self) -> frozenset[str]:
        return super()._call_arguments() | _arguments_of_forward(type(self))  # type: ignore[arg-type]

    def _replicate_for_data_parallel(self) -> Any:
        return Delegate._replicate_for_data_parallel(self)


@cache
def _arguments_of_forward(model: type) -> frozenset[str]:
    """The arguments of `forward`, of a subclass and of the classes that its own may call."""
    functions = [vars(base)["forward"] for base in model.__mro__ if isinstance(vars(base).get("forward"), FunctionType)]
    return frozenset(name for function in functions for name in inspect.signature(function).parameters)


for _name in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
              "register_full_backward_pre_hook", "register_backward_hook", "_get_backward_hooks",
              "_get_backward_pre_hooks", "_maybe_warn_non_full_backward_hook", "_call_impl", "_wrapped_call_impl",
              "register_parameter", "register_buffer"):  # fmt: skip
    setattr(LensModule, _name, getattr(nn.Module, _name))
