"""Keywords: checks that a model uses the keyword arguments that it is called with.

Most models of transformers take `**kwargs` and pass them to their layers and attention functions, which ignore the
names that they do not know. So a name is looked up in the parameters and strings of all of that code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from hookline.errors import HooklineError
from hookline.functions.signatures import code_of, code_or_none, parameters_of

_GENERIC = (
    "torch.", "transformers.modeling_utils", "transformers.generation", "transformers.integrations",
    "transformers.utils", "transformers.distributed", "builtins",
)  # fmt: skip
"""Modules with the base classes of all models, whose methods save, load and generate: not called by a forward."""

_NOT_IN_A_FORWARD = ("__init__", "_init_weights", "prepare_inputs_for_generation", "from_pretrained")

_HARMLESS = ("return_dict", "use_cache", "token_type_ids")
"""Names that every model accepts: the first two select the output, the last is all zeros from some tokenizers."""

_of_class: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()
_accepted: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


OPTIONS = (
    "names_filter", "fwd_hooks", "bwd_hooks", "incl_bwd", "loss_fn", "remove_batch_dim", "stop_early",
    "reset_hooks_end", "clear_contexts", "pos_slice", "return_type", "loss_per_token", "prepend_bos", "padding_side",
    "start_at_layer", "stop_at_layer", "decoder_input", "attention_mask", "on_error",
)  # fmt: skip
"""The options of the methods that run a model."""


@cache
def own_arguments(model: type) -> frozenset[str]:
    """The arguments of a wrapper's own `__call__`."""
    return frozenset(inspect.signature(model.__call__).parameters)


def is_of_transformers(root: nn.Module) -> bool:
    """Whether it is a model of transformers, which ignores keywords that nothing in it takes."""
    return hasattr(type(root), "get_output_embeddings")


def check_option(root: nn.Module, name: str, others: Iterable[str]) -> None:
    """Raise if a keyword for a model's forward is a misspelled option, or if nothing in the model takes it.

    `others` are further names that it may be a misspelling of.
    """
    near = get_close_matches(name, OPTIONS, n=1, cutoff=0.85)
    if near:
        hint = "this method does not take it" if name == near[0] else f"did you mean {near[0]!r}?"
        raise HooklineError(f"{name!r} is not an argument of the model's forward: {hint}")
    known = _accepted.setdefault(root, set())
    if name in known or not is_of_transformers(root) or not _takes_any(root):
        return  # a forward without **kwargs raises by itself
    names = _names_in(root)
    if name in names:
        known.add(name)
        return
    own = [each for each in parameters_of(root)[0] if each != "kwargs"]
    near = get_close_matches(name, [*own, *others, *OPTIONS, *names], n=1, cutoff=0.7)
    advice = f"did you mean {near[0]!r}?" if near else f"its own arguments are {', '.join(own)}"
    raise HooklineError(
        f"{name!r} is not an argument of {type(root).__name__}.forward or of anything that it calls, and would have no "
        f"effect: {advice}"
    )


def is_dropped(root: nn.Module, name: str) -> bool:
    """Whether the forward accepts a keyword of that name, but nothing uses it."""
    return name not in parameters_of(root)[0] and _takes_any(root) and name not in _names_in(root, accepted=())


def _takes_any(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def _names_in(root: nn.Module, accepted: tuple[str, ...] = _HARMLESS) -> set[str]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils.generic import TransformersKwargs

    functions: list[Any] = [*ALL_ATTENTION_FUNCTIONS.values(), getattr(root, "loss_function", None)]
    names = {*TransformersKwargs.__annotations__, *accepted}
    for kind in {type(each) for each in root.modules()}:
        if kind not in _of_class:
            _of_class[kind] = frozenset(_names_of_class(kind))
        names |= _of_class[kind]
    return names.union(*(_names_of(each) for each in functions if isinstance(each, FunctionType)))


def _names_of_class(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if base.__module__.startswith(_GENERIC):
            continue
        for name, member in vars(base).items():
            function = getattr(member, "__func__", member)
            if name not in _NOT_IN_A_FORWARD and isinstance(function, FunctionType):
                yield from _names_of(function)
                yield from _names_in_callees(function)


def _names_in_callees(function: Callable[..., Any]) -> Iterator[str]:
    """The names in functions of the same file that it calls with any keyword, such as attention functions."""
    inner: Any = inspect.unwrap(function)
    for name in code_of(inner).co_names:
        callee = inner.__globals__.get(name)
        if isinstance(callee, FunctionType) and code_of(callee).co_flags & inspect.CO_VARKEYWORDS:
            yield from _names_of(callee)


def _names_of(function: Any) -> Iterator[str]:
    """The parameters of a function, and the names that it may look up in its keywords: `kwargs.get("name")`."""
    while function is not None:
        code = code_or_none(function)
        if code is not None:
            yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            yield from (each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
        function = getattr(function, "__wrapped__", None)
