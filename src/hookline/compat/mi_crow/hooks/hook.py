"""The base class of hooks, under mi-crow's path."""

from typing import Any, TypeAlias

from hookline.hooks import Hook as Hook
from hookline.hooks import HookError as HookError
from hookline.hooks import HookType as HookType

HOOK_FUNCTION_INPUT: TypeAlias = tuple[Any, ...]
HOOK_FUNCTION_OUTPUT: TypeAlias = Any
