"""HookPoint: vlm-spectra's names of points, taken apart and put together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

_NAME = re.compile(r"lm\.blocks\.(\d+|\*)\.(.+)")


class HookNameError(ValueError):
    """A name that vlm-spectra does not have."""


@dataclass(frozen=True)
class HookConfig:
    """The method of the adapter that returns the module, and on which side of the module the point is.

    A virtual point is not the input or output of any module.
    """

    module_getter: str
    is_pre: bool = False
    is_virtual: bool = False


class HookPoint:
    """The names `lm.blocks.{layer}.{hook_type}`, where the layer may be `*`."""

    HOOK_CONFIGS: ClassVar = {
        "hook_resid_pre": HookConfig("get_lm_layer", is_pre=True),
        "hook_resid_post": HookConfig("get_lm_layer"),
        "attn.hook_in": HookConfig("get_lm_attn", is_pre=True),
        "attn.hook_mask": HookConfig("get_lm_attn", is_pre=True),
        "attn.hook_q": HookConfig("get_lm_q_proj"),
        "attn.hook_k": HookConfig("get_lm_k_proj"),
        "attn.hook_v": HookConfig("get_lm_v_proj"),
        "attn.hook_scores": HookConfig("get_lm_attn", is_virtual=True),
        "attn.hook_pattern": HookConfig("get_lm_attn", is_virtual=True),
        "attn.hook_z": HookConfig("get_lm_o_proj", is_pre=True),
        "attn.hook_head_out": HookConfig("get_lm_o_proj", is_virtual=True),
        "attn.hook_out": HookConfig("get_lm_o_proj"),
        "mlp.hook_in": HookConfig("get_lm_mlp", is_pre=True),
        "mlp.hook_pre": HookConfig("get_lm_gate_proj"),
        "mlp.hook_pre_linear": HookConfig("get_lm_up_proj"),
        "mlp.hook_post": HookConfig("get_lm_down_proj", is_pre=True),
        "mlp.hook_out": HookConfig("get_lm_mlp"),
    }

    @classmethod
    def parse(cls, name: str) -> tuple[str, int | str]:
        """The type and the layer of a name: ("attn.hook_z", 5), or ("attn.hook_z", "*")."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise HookNameError(f"Invalid hook name format: {name!r} is not of the form 'lm.blocks.5.hook_resid_post'")
        cls.get_config(match[2])
        return match[2], match[1] if match[1] == "*" else int(match[1])

    @classmethod
    def expand(cls, name: str, num_layers: int) -> list[str]:
        """The names of all layers, if the layer is `*`."""
        hook_type, layer = cls.parse(name)
        return [cls.format(hook_type, layer_index) for layer_index in range(num_layers)] if layer == "*" else [name]

    @classmethod
    def format(cls, hook_type: str, layer: int) -> str:
        """The name of a type at a layer."""
        cls.get_config(hook_type)
        return f"lm.blocks.{layer}.{hook_type}"

    @classmethod
    def get_config(cls, hook_type: str) -> HookConfig:
        """Where a type of point is."""
        if hook_type not in cls.HOOK_CONFIGS:
            raise HookNameError(f"Unknown hook type: {hook_type!r}. The types are {', '.join(cls.HOOK_CONFIGS)}")
        return cls.HOOK_CONFIGS[hook_type]

    @classmethod
    def is_virtual(cls, hook_type: str) -> bool:
        """Whether it is not the input or output of any module."""
        return cls.get_config(hook_type).is_virtual

    @classmethod
    def is_pre_hook(cls, hook_type: str) -> bool:
        """Whether it is the input of its module."""
        return cls.get_config(hook_type).is_pre

    @classmethod
    def get_module_getter(cls, hook_type: str) -> str:
        """The method of the adapter that returns its module."""
        return cls.get_config(hook_type).module_getter

    @classmethod
    def matches_pattern(cls, name: str, pattern: str) -> bool:
        """Whether a name matches a pattern with `*` as the layer."""
        return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None
