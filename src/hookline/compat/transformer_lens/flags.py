"""The flags that TransformerLens wants set before some points can be used: here they are there anyway."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookline.actions import HookAction
from hookline.errors import HooklineError
from hookline.names import Filter
from hookline.verbs import Hooked, HookList

_FLAGS = {
    "attn.hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_attn_in": "use_attn_in",
}
"""The points with a vector for each head, and the flag with which they are cached without being asked for by name."""


class LensFlags(Hooked):
    """The flags. A mixin: it needs the model's `cfg`."""

    cfg: Any

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether each head's output is cached along with all else."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether the copies of the stream for each head's queries, keys and values are."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether the copy of the stream for each head is."""
        self.cfg.use_attn_in = use_attn_in

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Remembered; the copy of the stream for the MLP is always there."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Refused where heads share their keys and values: they are computed once for each group."""
        if ungroup_grouped_query_attention and self.cfg.n_key_value_heads is not None:
            raise HooklineError(
                f"keys and values are computed once for each of {self.cfg.n_key_value_heads} groups of heads, not for "
                f"each head: hook_k and hook_v have a row for each group. To change what one head takes from its keys, "
                f"hook its row of hook_attn_scores or hook_pattern; from its values, hook_z"
            )
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention

    def _meant(self, names: Filter) -> Filter:
        """What a predicate selects of the points that TransformerLens would have now.

        Those are not the tokens, nor points with a vector for each head, unless their flag is set. If a predicate
        selects nothing but such points, they are meant.
        """
        if not callable(names) or isinstance(names, nn.Module | Hooked):
            return names
        found = [point.listed for point in self._points.select(names)]
        return [name for name in found if self._is_usual(name)] or found

    def _is_usual(self, name: str) -> bool:
        if name == "hook_tokens":
            return self.cfg.use_hook_tokens
        flagged = tuple(point for point, flag in _FLAGS.items() if getattr(self.cfg, flag))
        return not self._points.is_on_request(name) or name.endswith(flagged)

    def _to_cache(self, names_filter: Filter, start: int | None, stop: int | None) -> Filter:
        """The filter for what is to be cached in a run of these layers; without one, all usual points."""
        is_all = names_filter is None
        if is_all and not any(getattr(self.cfg, flag) for flag in _FLAGS.values()):
            return None
        chosen: Any = self._meant((lambda _: True) if is_all else names_filter)
        if chosen is names_filter:
            return chosen
        layers = range(self.cfg.n_layers)[start:stop]
        return [name for name in chosen if _runs(name, layers, start, stop)] or chosen

    def _hook_actions(self, fwd_hooks: HookList, bwd_hooks: HookList) -> list[HookAction]:
        return super()._hook_actions(self._meant_each(fwd_hooks), self._meant_each(bwd_hooks))

    def _meant_each(self, pairs: HookList) -> HookList:
        """The same hooks; what is no list of pairs is for others to refuse."""
        if not isinstance(pairs, list | tuple):
            return pairs
        is_pair = [isinstance(pair, tuple | list) and len(pair) == 2 and callable(pair[1]) for pair in pairs]
        return [(self._meant(pair[0]), pair[1]) if ok else pair for pair, ok in zip(pairs, is_pair, strict=True)]


def _runs(name: str, layers: range, start: int | None, stop: int | None) -> bool:
    """Whether a point is in what is run."""
    part, _, rest = name.partition(".")
    if part == "blocks":
        return int(rest.partition(".")[0]) in layers
    return (start if part.startswith("hook_") else stop) is None
