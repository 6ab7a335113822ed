"""ModelAdapter: the modules and sizes of the language model, by vlm-spectra's names."""

from __future__ import annotations

from torch import nn

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.text.image_tokens import image_token
from hookline.transformer.anatomy import Block


def _size(name: str, doc: str) -> property:
    return property(lambda self: getattr(self._hooked.cfg, name), doc=doc)


class ModelAdapter:
    """The modules and sizes of any model that hookline supports; one adapter serves all of them."""

    SUPPORTED_MODELS = (
        *(f"HuggingFaceTB/SmolVLM-{size}Instruct" for size in ("", "256M-", "500M-")),
        *(f"Qwen/Qwen2.5-VL-{size}-Instruct" for size in ("3B", "7B", "72B")),
        *("Qwen/Qwen3-VL-8B-Instruct", "ByteDance-Seed/UI-TARS-1.5-7B"),
        *("llava-hf/llava-1.5-7b-hf", "llava-hf/llava-1.5-13b-hf"),
    )
    """The models that vlm-spectra names."""

    def __init__(self, hooked: HookedModel) -> None:
        self._hooked = hooked

    lm_num_layers = _size("n_layers", "The number of layers.")
    lm_num_heads = _size("n_heads", "The number of heads per layer.")
    lm_num_kv_heads = _size("n_kv_heads", "The number of key/value heads.")
    lm_hidden_dim = _size("d_model", "The width of the residual stream.")
    lm_head_dim = _size("d_head", "The width of a head.")
    lm_mlp_dim = _size("d_mlp", "The hidden width of the MLP.")

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self._hooked.module

    def get_lm_layer(self, layer_idx: int) -> nn.Module:
        """A decoder layer."""
        return self._block(layer_idx).module

    def get_lm_attn(self, layer_idx: int) -> nn.Module:
        """The attention of a layer."""
        return _there(self._block(layer_idx).attn, "attention", layer_idx)

    def get_lm_o_proj(self, layer_idx: int) -> nn.Module:
        """The output projection of attention."""
        return _there(self._block(layer_idx).o, "output projection", layer_idx)

    def get_lm_mlp(self, layer_idx: int) -> nn.Module:
        """The MLP of a layer."""
        return _there(self._block(layer_idx).mlp, "MLP", layer_idx)

    def get_lm_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return _there(self._hooked.anatomy.main.ln_final, "final norm", None)

    def get_lm_head(self) -> nn.Module:
        """The unembedding."""
        return _there(self._hooked.anatomy.unembed, "head", None)

    def get_image_token_id(self) -> int:
        """The id of the image token."""
        return image_token(self.model.config)

    def _block(self, index: int) -> Block:
        blocks = self._hooked.anatomy.blocks
        if index not in range(-len(blocks), len(blocks)):
            raise HooklineError(f"layer {index} is out of range: layers are 0 to {len(blocks) - 1}")
        return blocks[index]


def _there(module: nn.Module | None, what: str, layer: int | None) -> nn.Module:
    if module is None:
        raise HooklineError(f"{'this model' if layer is None else f'layer {layer}'} has no {what}")
    return module
