"""Which functions may be traced into a graph: those without state.

The compiler traces more than these. But it runs a function once for many calls, and a graph is also called to prove it
and after a text has ended. So a function that counts its calls, keeps what it sees, or asks for a value on the host
must be called by the engine instead. `check_stateless` looks at everything that a function refers to in which Python
could keep state. Tensors are among that, to be read: `check_writes` finds in the traced graph whether it writes to one.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.compiled.not_compiled import NotCompiled
from hookline.errors import a_type
from hookline.values.structures import tensors_in

_STORES = {"STORE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_SUBSCR", "IMPORT_NAME", "YIELD_VALUE"}
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME"}
_STATISTICS = {"batch_norm", "instance_norm"}
"""Functions that write to a tensor, which torch's own schema of them does not say."""
_UNDECLARED = {"running_mean", "running_var"}
"""Arguments to which operators may write, which their schemas do not say."""
_HOST = {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "is_nonzero", "backward", "requires_grad_"}
_OF_POINTS = {"ctx", "step", "positions", "call", "add_hook", "remove_hooks", "fwd_hooks", "has_hooks"}
"""Attributes of a point that are different in every pass."""
_RANDOM = {"rand", "randn", "rand_like", "randn_like", "randint", "normal", "normal_", "uniform_", "bernoulli"}
_RANDOM |= {"bernoulli_", "multinomial", "randperm", "dropout", "exponential_", "manual_seed"}
_HARMLESS = {"abs", "float", "int", "isinstance", "len", "max", "min", "range", "slice", "sum", "tuple", "zip"}
_IMMUTABLE = bool | int | float | complex | str | slice | torch.dtype | torch.device


def check_stateless(hook: Any, users: tuple[Any, ...] = ()) -> None:
    """Raise NotCompiled if a function, which these functions use, cannot be traced."""
    while isinstance(hook, partial):
        for argument in (*hook.args, *hook.keywords.values()):
            _check_value(argument, "an argument of partial", users)
        hook = hook.func
    if isinstance(hook, BuiltinFunctionType) and (hook.__module__ or "").startswith("torch"):
        _check_not_random(hook.__name__)
        return
    if not isinstance(hook, FunctionType):
        raise NotCompiled(f"it is {a_type(hook)}, not a plain function")
    for name, value in vars(hook).items():
        _check_value(value, f"{hook.__name__}.{name}", users)
    if hook in users:
        raise NotCompiled(f"{hook.__name__} refers to itself")
    _check_function(hook, (*users, hook))


def _check_not_random(name: str) -> None:
    if name in _RANDOM:
        raise NotCompiled(f"{name} is random")


def _check_function(function: FunctionType, users: tuple[Any, ...]) -> None:
    if (function.__module__ or "").split(".")[0] == "torch":
        _check_not_random(function.__name__)
        return
    code = function.__code__
    try:
        cells = list(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    except ValueError:
        raise NotCompiled("it uses a variable that has no value yet") from None
    defaults = [
        ("a default", default)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    ]
    for name, value in (*cells, *defaults):
        _check_value(value, name, users)
    for code_object in _codes(code):
        _check_code(code_object, function, users)


def _codes(code: CodeType) -> list[CodeType]:
    """A function's code, and that of the functions and comprehensions inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *(deep for nested in inner for deep in _codes(nested))]


def _check_code(code: CodeType, function: FunctionType, users: tuple[Any, ...]) -> None:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    value: Any = None  # the module or class that the last instruction looked up
    for line in dis.get_instructions(code):
        name, holder, value = line.argval, value, None
        if line.opname in _STORES or (line.opname == "STORE_DEREF" and name in function.__code__.co_freevars):
            raise NotCompiled(f"it imports {name!r}" if "IMPORT" in line.opname else f"it writes to {name!r} outside")
        if line.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if name in _HOST:
                raise NotCompiled(f".{name}() needs the value on the host")
            if name in _OF_POINTS:
                raise NotCompiled(f"it uses .{name}, which differs from pass to pass")
            _check_not_random(name)
            if name in _STATISTICS:
                raise NotCompiled(f"{name} may write to running statistics")
            value = getattr(holder, name, None) if isinstance(holder, ModuleType | type) else None
            if isinstance(value, Tensor | list | dict | set) or (isinstance(value, type) and _may_hold(value)):
                raise NotCompiled(f"'{holder.__name__}.{name}' is {a_type(value)}, which may hold state")
        if line.opname == "LOAD_DEREF" and name in cells:
            value = cells[name].cell_contents
        if line.opname in _GLOBAL:
            if name not in function.__globals__:
                if hasattr(builtins, name) and name not in _HARMLESS and not name[0].isupper():
                    raise NotCompiled(f"it calls {name}()")
            else:
                value = function.__globals__[name]
                _check_value(value, name, users)


def _check_value(value: Any, name: str, users: tuple[Any, ...]) -> None:
    """Raise NotCompiled if a value that a function refers to may be state."""
    if isinstance(value, tuple):
        for part in value:
            _check_value(part, name, users)
    elif type(value) in (Tensor, torch.nn.Parameter):
        if value.requires_grad:
            raise NotCompiled(f"{name!r} requires gradients")
    elif isinstance(value, ModuleType):
        if value.__name__.split(".")[0] not in ("torch", "math"):
            raise NotCompiled(f"it uses the module {name!r}")
    elif isinstance(value, type):
        if _may_hold(value):
            raise NotCompiled(f"{name!r} is a class, which may hold state")
    elif isinstance(value, FunctionType | BuiltinFunctionType | partial):
        check_stateless(value, users)
    elif value is not None and not isinstance(value, _IMMUTABLE):
        raise NotCompiled(f"{name!r} is {a_type(value)}, which may hold state")


def _may_hold(kind: type[Any]) -> bool:
    return kind.__module__.split(".")[0] not in ("torch", "builtins")


class _Writes(TorchDispatchMode):
    """Notes the memory to which operations write, as their schemas say."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, Any] = {}

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = [*zip(operator._schema.arguments, args, strict=False)]
        arguments += [
            (argument, kwargs[argument.name])
            for argument in operator._schema.arguments
            if argument.name in (kwargs or {})
        ]
        for argument, value in arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or argument.name in _UNDECLARED:
                self.memory |= {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors_in(value)}
        return operator(*args, **(kwargs or {}))


def check_writes(graph: fx.GraphModule, inputs: Sequence[Any], is_ours: Callable[[Tensor], bool]) -> None:
    """Raise NotCompiled if a graph writes to one of its inputs that is not ours. It runs on tensors without data."""
    examples = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    mode = next((example.fake_mode for example in examples if isinstance(example, FakeTensor)), None)
    if mode is None:
        return
    with mode:
        copies = [torch.empty_like(example) if isinstance(example, Tensor) else example for example in examples]
        with _Writes() as writes:
            graph.forward(*copies)
    for x, copy in zip(inputs, copies, strict=True):
        if isinstance(x, Tensor) and copy.untyped_storage()._cdata in writes.memory and not is_ours(x):
            raise NotCompiled(f"it writes to a tensor of the shape {list(x.shape)} outside it")


def constants_of(hook: Any) -> tuple[Any, ...]:
    """The values that a traceable function refers to and that become part of its graph: all but tensors."""
    if isinstance(hook, partial):
        bound_values = (*hook.args, *hook.keywords.items())
        return (*constants_of(hook.func), *(constant for value in bound_values for constant in _constants(value)))
    if not isinstance(hook, FunctionType):
        return ()
    lines = [line for code in _codes(hook.__code__) for line in dis.get_instructions(code) if line.opname in _GLOBAL]
    names = {line.argval for line in lines} & hook.__globals__.keys()
    held: list[tuple[Any, Any]] = [(name, hook.__globals__[name]) for name in sorted(names)]
    held += zip(hook.__code__.co_freevars, (cell.cell_contents for cell in hook.__closure__ or ()), strict=True)
    held += enumerate(hook.__defaults__ or ())
    held += (hook.__kwdefaults__ or {}).items()
    return tuple((name, constant) for name, value in held for constant in _constants(value))


def _constants(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return tuple(constant for part in value for constant in _constants(part))
    if isinstance(value, FunctionType | partial):
        return (value.__code__, *constants_of(value)) if isinstance(value, FunctionType) else constants_of(value)
    return () if isinstance(value, Tensor | ModuleType) else (value,)
