"""The flags that TransformerLens requires for some points; hookline offers these points without flags."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookline.compat.transformer_lens._impl.ungrouping import Ungrouped
from hookline.engine import Hooked, HookObject, HookPoint
from hookline.types import Filter

_FLAGS = {
    "attn.hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
    "hook_tokens": "use_hook_tokens",
}
"""Points that TransformerLens has only with a flag; without it, they are available by name."""

_OTHERS = ("ln_final.hook_in", "ln_final.hook_out", "attn.hook_in", "mlp.hook_in", "mlp.hook_router")
"""Points that a HookedTransformer of TransformerLens does not have."""


class LensFlags(Hooked):
    """The flags. A mixin: it needs the model's `cfg`."""

    cfg: Any

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Include the output of each head in caches without a filter."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Likewise for the inputs of each head's queries, keys and values."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Likewise for the input of each head."""
        self.cfg.use_attn_in = use_attn_in

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Likewise for the input of the MLP."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Give each head its own keys and values, as rows of `hook_k` and `hook_v`; False puts the groups back.

        Meanwhile the weights of keys and values are copies, one per head.
        """
        ungrouped: Ungrouped | None = vars(self).get("_ungrouped")
        if ungroup_grouped_query_attention and ungrouped is None and self.cfg.n_key_value_heads is not None:
            vars(self)["_ungrouped"] = Ungrouped(self)  # type: ignore[arg-type]
        elif not ungroup_grouped_query_attention and ungrouped is not None:
            ungrouped.undo()
            vars(self)["_ungrouped"] = None
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention

    def _meant(self, names: Filter) -> Filter:
        """The points that a predicate selects among those of TransformerLens with the current flags.

        If a predicate selects only other points, these are returned.
        """
        if not callable(names) or isinstance(names, nn.Module | Hooked | HookObject):
            return names
        self._points.keep_up()
        selected = [name for name in self._points.hook_dict if names(name)]
        return [name for name in selected if self._is_usual(name)] or selected or names

    def _is_usual(self, name: str) -> bool:
        """Whether TransformerLens has this point with the current flags, or a user has placed it."""
        if name in getattr(self._points, "placed", ()):
            return True
        flag = next((flag for ending, flag in _FLAGS.items() if name.endswith(ending)), None)
        if flag is not None:
            return getattr(self.cfg, flag)
        is_rotated = "hook_rot_" in name
        return not name.endswith(_OTHERS) and (not is_rotated or self.cfg.positional_embedding_type == "rotary")

    def _to_cache(self, names_filter: Filter, start: int | None, stop: int | None) -> Filter:
        """The filter for a run of these layers; by default, all usual points."""
        is_all = names_filter is None
        if is_all and not any(getattr(self.cfg, flag) for flag in set(_FLAGS.values()) - {"use_hook_tokens"}):
            return None
        chosen: Any = self._meant((lambda _: True) if is_all else names_filter)
        if chosen is names_filter:
            return chosen
        layers = range(self.cfg.n_layers)[start:stop]
        return [name for name in chosen if _runs(name, layers, start, stop)] or chosen

    def _is_in_cache(self, name: str, start: int | None, stop: int | None) -> bool:
        """Whether a cache without a filter of a run of these layers has this point."""
        return self._is_usual(name) and _runs(name, range(self.cfg.n_layers)[start:stop], start, stop)

    def _at(self, names: Any) -> list[HookPoint]:
        return super()._at(self._meant(names))

    def add_hook(self, name: Filter, *args: Any, **kwargs: Any) -> Any:
        """Add a hook at a point, or at all points of a filter, until it is removed or reset."""
        return super().add_hook(self._meant(name), *args, **kwargs)


def _runs(name: str, layers: range, start: int | None, stop: int | None) -> bool:
    """Whether a point is in the layers that run."""
    part, _, rest = name.partition(".")
    if part == "blocks":
        return int(rest.partition(".")[0]) in layers
    return (start if part.startswith("hook_") else stop) is None
