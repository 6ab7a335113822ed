"""Refactoring: factor the QK and OV matrices of each head by SVD, with the same output.

Queries and keys get factors of equal size, values the singular values, and the output a rotation; the values' biases
are moved into the output's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.entries import find_entry
from hookline.errors import HooklineError
from hookline.weights.factored import FactoredMatrix
from hookline.weights.matrices import linear, weight
from hookline.weights.processing.swaps import Swaps

if TYPE_CHECKING:
    from hookline.compat.transformer_lens._impl.hooked_transformer import HookedTransformer


def refactor(model: HookedTransformer, swaps: Swaps) -> None:
    """Replace the weights of all heads by their new factors."""
    cfg = model.cfg
    if cfg.positional_embedding_type not in ("standard", "none") or cfg.n_key_value_heads is not None:
        raise HooklineError(
            "refactor_factored_attn_matrices needs queries and keys without rotary, one key per query: "
            f"this model has {cfg.positional_embedding_type} positions and "
            f"{cfg.n_key_value_heads or cfg.n_heads} keys for {cfg.n_heads} queries"
        )
    for layer in range(cfg.n_layers):
        path = f"{model.index.layer(layer)}.attn"
        new = _factored({name: weight(model.index, layer, name).detach() for name in _NAMES})
        for part in "QKVO":
            module = model.index.find(f"{path}.hook_{'z' if part == 'O' else part.lower()}").site.module
            _make_own(module, swaps, has_bias=bool(new[f"b_{part}"].abs().max() > 1e-6))
        for name, value in new.items():
            entry = find_entry(model, f"{path}.{name}")
            if entry is not None and entry.parameter is not None:
                entry.write(name, value.to(entry.own))


_NAMES = tuple(f"{kind}_{part}" for part in "QKVO" for kind in "Wb")


def _factored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The new factors, at least in single precision: there is no SVD in half precision."""
    wide_weights = {name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in weights.items()}
    with_biases = [torch.cat([wide_weights[f"W_{name}"], wide_weights[f"b_{name}"][:, None]], 1) for name in "QK"]
    even = FactoredMatrix(with_biases[0], with_biases[1].mT).make_even()
    u, s, v = FactoredMatrix(wide_weights["W_V"], wide_weights["W_O"]).svd()
    new = {"W_Q": even.A[:, :-1], "b_Q": even.A[:, -1], "W_K": even.B.mT[:, :-1], "b_K": even.B.mT[:, -1]}
    new |= {"W_V": u * s[:, None], "b_V": torch.zeros_like(wide_weights["b_V"]), "W_O": v.mT}
    new["b_O"] = wide_weights["b_O"] + torch.einsum("he,hed->d", wide_weights["b_V"], wide_weights["W_O"])
    return new


def _make_own(module: nn.Module, swaps: Swaps, *, has_bias: bool) -> None:
    """Replace the parameters of a projection by copies that can be overwritten, and add a bias if it needs one."""
    matrix, bias = linear(module)
    swaps.put(module, "weight", module.weight)  # type: ignore[arg-type]
    if bias is not None or has_bias:
        swaps.put(module, "bias", torch.zeros_like(matrix[0]) if bias is None else bias)
