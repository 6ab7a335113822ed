"""The base class of hooks, under mi-crow's path."""

from typing import Any, TypeAlias

from hookline.hooks import Hook, HookError, HookType

HOOK_FUNCTION_INPUT: TypeAlias = tuple[Any, ...]
HOOK_FUNCTION_OUTPUT: TypeAlias = Any

__all__ = ["Hook", "HookType", "HookError", "HOOK_FUNCTION_INPUT", "HOOK_FUNCTION_OUTPUT"]
