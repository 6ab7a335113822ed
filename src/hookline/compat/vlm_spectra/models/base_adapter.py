"""ModelAdapter: the modules and sizes of the language model, by vlm-spectra's names."""

from __future__ import annotations

from torch import nn

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.text.image_tokens import image_token
from hookline.transformer.roles import Block


class ModelAdapter:
    """The modules of any model that hookline supports; one adapter serves all of them."""

    def __init__(self, hooked: HookedModel) -> None:
        self._hooked = hooked

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self._hooked.module

    @property
    def lm_num_layers(self) -> int:
        """The number of layers."""
        return self._hooked.cfg.n_layers

    @property
    def lm_num_heads(self) -> int:
        """The number of heads per layer."""
        return self._hooked.cfg.n_heads

    @property
    def lm_num_kv_heads(self) -> int:
        """The number of key/value heads."""
        return self._hooked.cfg.n_kv_heads

    @property
    def lm_hidden_dim(self) -> int:
        """The width of the residual stream."""
        return self._hooked.cfg.d_model

    @property
    def lm_head_dim(self) -> int:
        """The width of a head."""
        return self._hooked.cfg.d_head

    @property
    def lm_mlp_dim(self) -> int:
        """The hidden width of the MLP."""
        return self._hooked.cfg.d_mlp

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
        return _there(self._hooked._anatomy.main.ln_final, "final norm", None)

    def get_lm_head(self) -> nn.Module:
        """The unembedding."""
        return _there(self._hooked._anatomy.unembed, "head", None)

    def get_image_token_id(self) -> int:
        """The id of the image token."""
        return image_token(self.model.config)

    def _block(self, index: int) -> Block:
        blocks = self._hooked._anatomy.blocks
        if index not in range(-len(blocks), len(blocks)):
            raise HooklineError(f"layer {index} is out of range: layers are 0 to {len(blocks) - 1}")
        return blocks[index]


def _there(module: nn.Module | None, what: str, layer: int | None) -> nn.Module:
    if module is None:
        raise HooklineError(f"{'this model' if layer is None else f'layer {layer}'} has no {what}")
    return module
