"""ActivationCache: activations by `(name, layer)`, or by name if the name includes the layer."""

from __future__ import annotations

import re
from typing import TypeAlias

import torch
from torch import Tensor

from hookline.errors import UnknownPointError

Key: TypeAlias = tuple[str, int] | str


class ActivationCache(dict[Key, Tensor]):
    """The cached activations of the last forward pass.

    cache[("lm.layer.post", 3)]             # requested as "lm.layer.post"
    cache["lm.blocks.3.hook_resid_post"]    # requested as "lm.blocks.*.hook_resid_post"
    """

    def __missing__(self, key: Key) -> Tensor:
        keys = ", ".join(map(repr, list(self)[:12])) + (", …" if len(self) > 12 else "")
        raise UnknownPointError(f"{key!r} is not in this cache, which contains {keys or 'nothing'}")

    def keys(self) -> list[Key]:  # type: ignore[override]
        """All keys."""
        return list(self)

    def values(self) -> list[Tensor]:  # type: ignore[override]
        """All activations."""
        return list(super().values())

    def get_all_layers(self, hook_name: str) -> dict[int, Tensor]:
        """The activations of one name, by layer."""
        return {key[1]: x for key, x in self.items() if isinstance(key, tuple) and key[0] == hook_name}

    def stack_layers(self, hook_name: str) -> Tensor:
        """The activations of one name, from the first layer to the last: [layers, …]."""
        layers = self.get_all_layers(hook_name)
        return self._stacked([layers[layer] for layer in sorted(layers)], hook_name)

    def stack(self, pattern: str) -> Tensor:
        """The activations whose names match a pattern, by layer: `cache.stack("lm.blocks.*.hook_resid_post")`."""
        regex = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
        candidates = [(regex.fullmatch(key), x) for key, x in self.items() if isinstance(key, str)]
        matches = sorted(
            ((match, x) for match, x in candidates if match), key=lambda pair: [*map(int, pair[0].groups())]
        )
        return self._stacked([x for _, x in matches], pattern)

    def _stacked(self, tensors: list[Tensor], pattern: str) -> Tensor:
        if not tensors:
            raise UnknownPointError(f"{pattern!r} is not in this cache at any layer; the keys are {self.keys()[:12]}")
        return torch.stack([x.to(tensors[0].device) for x in tensors])

    def detach(self) -> None:
        """Detach all tensors. Tensors cached by a run are detached already."""
        self.update({key: x.detach() for key, x in self.items()})

    def __repr__(self) -> str:
        rows = [f"  {key!r}  {list(x.shape)}" for key, x in self.items()]
        return "\n".join([f"ActivationCache: {len(self)} activations", *rows])
