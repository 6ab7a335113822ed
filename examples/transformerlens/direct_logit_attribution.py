"""Direct logit attribution: the direct contribution of each component, and of each head, to the logits.

The final residual stream is the sum of the outputs of all components, and the map from it to the logits is linear if
the scale of the final norm is held fixed. So the contributions sum to the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline
from hookline import last

PROMPT = "When Mary and John went to the store, John gave a drink to"


@torch.no_grad()
def main() -> tuple[dict[str, float], float, Tensor]:
    """Print the contributions to the logit difference; return those of components, the total, and those of heads."""
    model = hookline.load("tinyworld")
    layers = range(model.cfg.n_layers)
    parts = ["hook_embed", "hook_pos_embed"]
    parts += [f"blocks.{layer}.{part}" for layer in layers for part in ("hook_attn_out", "hook_mlp_out")]
    logits, cache = model.run_with_cache(
        PROMPT, names_filter=[*parts, "blocks.*.attn.hook_result", "ln_final.hook_scale"], pos_slice=last
    )
    mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")
    norm, unembed = model.module.transformer.ln_f, model.module.lm_head.weight
    direction = unembed[mary] - unembed[john]

    def share(written: Tensor) -> Tensor:
        centered = written - written.mean(-1, keepdim=True)
        return centered / cache["ln_final.hook_scale"][0] * norm.weight @ direction

    shares = {part: share(cache[part][0]).item() for part in parts}
    shares["ln_final's bias"] = (norm.bias @ direction).item()
    logit_diff = (logits[0, -1, mary] - logits[0, -1, john]).item()
    heads = torch.stack([share(cache["result", layer][0]) for layer in layers])

    for part, value in shares.items():
        print(f"{part:24} {value:+6.2f}")
    print(f"{'sum':24} {sum(shares.values()):+6.2f}, and the logit difference of Mary and John is {logit_diff:+.2f}\n")
    print("heads     " + "".join(f"{head:7}" for head in range(model.cfg.n_heads)))
    for layer in layers:
        print(f"  layer {layer} " + "".join(f"{value:+7.2f}" for value in heads[layer]))
    return shares, logit_diff, heads


if __name__ == "__main__":
    main()
