"""Refactoring: factor the QK and OV matrices of each head by SVD, with the same output.

Queries and keys get factors of even size, values the singular values, and the output a rotation; the values' biases go
into the output's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hookline.engine import compiling
from hookline.engine.taps import lock
from hookline.errors import HooklineError
from hookline.weights.factored import FactoredMatrix
from hookline.weights.matrices import is_reversed, linear, weight, without_first
from hookline.weights.processing.readers import Unhooked
from hookline.weights.processing.swaps import Swaps

if TYPE_CHECKING:
    from hookline.compat.transformer_lens.hooked_transformer import HookedTransformer


@torch.no_grad()
def refactor(model: HookedTransformer) -> Swaps:
    """Swap in the new factors, check on an example that the output is the same, and return the undo."""
    cfg = model.cfg
    if cfg.positional_embedding_type not in ("standard", "none") or cfg.n_key_value_heads is not None:
        raise HooklineError(
            "refactor_factored_attn_matrices needs queries and keys without rotary, one key per query: "
            f"this model has {cfg.positional_embedding_type} positions and "
            f"{cfg.n_key_value_heads or cfg.n_heads} keys for {cfg.n_heads} queries"
        )
    swaps = Swaps()
    with compiling.tracing_lock(), lock, Unhooked(model.module):
        before = model._outcome().double()
        try:
            for layer in range(cfg.n_layers):
                _refactor_layer(model, layer, swaps)
            change = (model._outcome().double() - before).norm() / before.norm()
            if not change <= (1e-4 if cfg.dtype in (torch.float32, torch.float64) else 5e-2):
                raise HooklineError(f"refactoring changes the output of this model by a relative error of {change:.1g}")
        except BaseException:
            swaps.undo()
            raise
    return swaps


def _refactor_layer(model: HookedTransformer, layer: int, swaps: Swaps) -> None:
    own = {name: weight(model._points, layer, name).detach() for name in _NAMES}
    with_biases = [torch.cat([own[f"W_{name}"], own[f"b_{name}"][:, None]], 1).float() for name in "QK"]
    even = FactoredMatrix(with_biases[0], with_biases[1].mT).make_even()
    u, s, v = FactoredMatrix(own["W_V"].float(), own["W_O"].float()).svd()
    new = {"W_Q": even.A[:, :-1], "b_Q": even.A[:, -1], "W_K": even.B.mT[:, :-1], "b_K": even.B.mT[:, -1]}
    new |= {"W_V": u * s[:, None], "b_V": torch.zeros_like(own["b_V"]), "W_O": v.mT}
    new["b_O"] = own["b_O"] + torch.einsum("he,hed->d", own["b_V"], own["W_O"])
    for module, (matrix, bias) in _written(model, layer, new).items():
        swaps.put(module, "weight", matrix if is_reversed(module) else matrix.T)
        if module._parameters.get("bias") is not None or bool(bias.abs().max() > 1e-6):
            swaps.put(module, "bias", bias)


_NAMES = tuple(f"{kind}_{part}" for part in "QKVO" for kind in "Wb")


def _written(model: HookedTransformer, layer: int, new: dict[str, Tensor]) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """The matrix and the bias of each projection, with these in them; one may be for queries, keys and values."""
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    prefix = model._points.layer(layer)
    for part in "QKV":
        site = model._points.find(f"{prefix}.attn.hook_{part.lower()}").site
        lens = without_first(site.lens)
        matrix, bias = found[site.module] if site.module in found else _copied(site.module)
        matrix = lens.put(matrix, new[f"W_{part}"].movedim(0, -2).to(matrix))
        found[site.module] = matrix, lens.put(bias, new[f"b_{part}"].to(bias))
    out = model._points.find(f"{prefix}.attn.hook_z").site.module
    found[out] = new["W_O"].flatten(0, 1), new["b_O"]
    return found


def _copied(module: nn.Module) -> tuple[Tensor, Tensor]:
    matrix, bias = linear(module)
    return matrix.detach().clone(), torch.zeros_like(matrix[0]) if bias is None else bias.detach().clone()
