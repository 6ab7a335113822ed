"""x-transformers: its wrappers, and its options one at a time."""

from collections.abc import Iterator
from typing import Any

import torch
import x_transformers as xt
from zoo.network import Built, Network, image, tokens

LAYERS: dict[str, dict[str, Any]] = {
    name: {name: value}
    for name, value in {
        "attn_flash": True,
        "attn_num_mem_kv": 4,
        "use_scalenorm": True,
        "use_rmsnorm": True,
        "use_simple_rmsnorm": True,
        "ff_glu": True,
        "ff_swish": True,
        "ff_relu_squared": True,
        "ff_post_act_ln": True,
        "ff_no_bias": True,
        "attn_sparse_topk": 4,
        "attn_talking_heads": True,
        "attn_one_kv_head": True,
        "attn_kv_heads": 2,
        "attn_on_attn": True,
        "sandwich_coef": 1,
        "macaron": True,
        "rel_pos_bias": True,
        "dynamic_pos_bias": True,
        "alibi_pos_bias": True,
        "rotary_pos_emb": True,
        "rotary_xpos": True,
        "residual_attn": True,
        "shift_tokens": 1,
        "sandwich_norm": True,
        "resi_dual": True,
        "attn_qk_norm": True,
        "attn_qk_norm_dim_scale": True,
        "gate_residual": True,
        "scale_residual": True,
        "attn_gate_values": True,
        "attn_value_dim_head": 12,
        "attn_add_zero_kv": True,
        "attn_head_scale": True,
        "zero_init_branch_output": True,
        "num_residual_streams": 2,
        "attn_laser": True,
        "attn_learned_value_residual_mix": True,
        "add_value_residual": True,
        "attn_softclamp_logits": True,
        "use_adaptive_layernorm": True,
        "attn_cog_signed": True,
        "attn_selective": True,
        "attn_custom_attn_fn": None,
        "weight_tie_layers": True,
        "use_dynamic_tanh": True,
        "attn_data_dependent_alibi": True,
        "cross_attend": False,
        "pre_norm": False,
        "attn_hybrid_module": None,
        "rotary_pos_emb_": True,
        "polar_pos_emb": True,
        "attn_use_mono_exp": True,
        "ff_solu": True,
        "use_derf": True,
        "attn_gate_value_heads": True,
    }.items()
    if value is not None and not name.endswith("_")
}


def language_model(stack: Any = xt.Decoder, **options: Any) -> Built:
    """A small language model."""
    layers = stack(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    module = xt.TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)
    return module, (tokens(16, rows=2),), {}


def image_model() -> Built:
    return (
        xt.ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=5, attn_layers=xt.Encoder(dim=32, depth=2, heads=4)
        ),
        (image(32),),
        {},
    )


def continuous() -> Built:
    return (
        xt.ContinuousTransformerWrapper(
            dim_in=8, dim_out=4, max_seq_len=32, attn_layers=xt.Encoder(dim=32, depth=2, heads=4)
        ),
        (torch.randn(2, 16, 8),),
        {},
    )


def pair() -> Built:
    sizes = {
        "enc_num_tokens": 50,
        "enc_depth": 2,
        "enc_heads": 2,
        "enc_max_seq_len": 32,
        "dec_num_tokens": 50,
        "dec_depth": 2,
        "dec_heads": 2,
        "dec_max_seq_len": 32,
    }
    return xt.XTransformer(dim=32, **sizes), (tokens(12, 50), tokens(10, 50)), {}


def autoregressive() -> Built:
    module, args, _ = language_model()
    return xt.AutoregressiveWrapper(module), args, {}


def memories() -> Built:
    layers = xt.Decoder(dim=32, depth=2, heads=4, rel_pos_bias=True)
    module = xt.TransformerWrapper(
        num_tokens=100, max_seq_len=32, max_mem_len=16, attn_layers=layers, memory_tokens=4, num_memory_tokens=4
    )
    return module, (tokens(16),), {}


def networks() -> Iterator[Network]:
    """One row per wrapper, and per option of a decoder and an encoder."""
    for name, build in {
        "image": image_model,
        "continuous": continuous,
        "pair": pair,
        "autoregressive": autoregressive,
    }.items():
        yield Network(name, build)
    for name, options in LAYERS.items():
        yield Network(f"decoder {name}", lambda options=options: language_model(**options))
        yield Network(f"encoder {name}", lambda options=options: language_model(xt.Encoder, **options))
