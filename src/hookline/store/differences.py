"""What differs between two harvests, in words: why one cannot go on with what the other has stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.store.manifest import About, differences

_APART = ("id", "hooks", "modules")
"""The id is a name, and what goes by it is compared by itself; the others have parts."""


def unlike(here: About, there: About) -> list[str]:
    """What of the model, the hooks and the options is not the same, as lines to read."""
    return [
        *differences(_rest(here.model), _rest(there.model)),
        *_modules(here.model.get("modules") or {}, there.model.get("modules") or {}),
        *_hooks(here.model["hooks"], there.model["hooks"]),
        *differences(here.options, there.options),
    ]


def _rest(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name not in _APART}


def _modules(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    if here == there:
        return []
    return [f"the model's modules have another {_changed(here, there)}"]


def _hooks(here: list[Any], there: list[Any]) -> list[str]:
    if [_key(each) for each in here] == [_key(each) for each in there]:
        return []
    if [_label(each) for each in here] != [_label(each) for each in there]:
        return [f"hooks: {_listed(here)} here, but {_listed(there)} in the store"]
    lines = []
    for one, other in zip(here, there, strict=True):
        if _key(one) != _key(other):
            opaque = one["opaque"] or other["opaque"]
            why = f" (it has a {opaque}, which cannot be compared)" if opaque else ""
            what = _changed(one["parts"], other["parts"]) or "state"
            lines.append(f"hooks: {_label(one)} has another {what} here than in the store{why}")
    return lines


def _changed(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return ", ".join(names[:4]) + (f" (and {len(names) - 4} more)" if len(names) > 4 else "")


def _key(hook: Any) -> Any:
    return (hook["at"], hook["hook"], hook["sum"]) if isinstance(hook, dict) else hook


def _label(hook: Any) -> str:
    return f"{hook['hook']} at {hook['at']!r}" if isinstance(hook, dict) else str(hook)


def _listed(hooks: list[Any]) -> str:
    return ", ".join(map(_label, hooks)) or "none"
