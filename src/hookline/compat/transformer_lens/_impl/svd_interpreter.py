"""SVDInterpreter: the directions that a head or an MLP writes most, as logits of tokens."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.compat.transformer_lens._impl.lens_errors import LensValueError, check

OUTPUT_EMBEDDING = "unembed.W_U"
VectorType = Literal["OV", "w_in", "w_out"]
VECTOR_TYPES = list(get_args(VectorType))


class SVDInterpreter:
    """Right singular vectors of the OV circuit of a head, or of W_in or W_out of an MLP, multiplied with W_U.

    SVDInterpreter(model).get_singular_vectors("OV", layer_index=5, head_index=1, num_vectors=10)
    """

    def __init__(self, model: Any) -> None:
        self.model, self.cfg = model, model.cfg

    def get_singular_vectors(
        self, vector_type: VectorType, layer_index: int, num_vectors: int = 10, head_index: int | None = None
    ) -> Float[Tensor, "d_vocab 1 vector"]:
        """The logits of every token for the largest singular vectors, in order; their signs are arbitrary."""
        if vector_type not in VECTOR_TYPES:
            raise LensValueError(f"vector_type must be one of {VECTOR_TYPES}, not {vector_type!r}")
        layers, heads = self.cfg.n_layers, self.cfg.n_heads
        check(vector_type != "OV" or head_index is not None, "OV needs head_index: only w_in and w_out have no heads")
        check(layer_index in range(layers), f"layer_index={layer_index} is out of range: layers are 0 to {layers - 1}")
        if vector_type == "OV":
            check(head_index in range(heads), f"head_index={head_index} is out of range: heads are 0 to {heads - 1}")
            vectors = self.model.OV[layer_index, head_index].svd()[2].T
        else:
            vectors = torch.linalg.svd(self._matrix(vector_type, layer_index).float())[2]
        return (vectors[:num_vectors].float() @ self.model.W_U.float()).T[:, None]

    def _matrix(self, vector_type: str, layer: int) -> Tensor:
        """W_out, or W_in as rows per neuron, with the weight of the norm before it."""
        if vector_type == "w_out":
            return self.model.W_out[layer]
        matrix = self.model.W_in[layer].T
        norm = self.model.state_dict().get(f"blocks.{layer}.ln2.w")
        return matrix if norm is None else matrix * norm
