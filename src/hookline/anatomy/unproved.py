"""Points that are not what their names say on some architectures. Written by `docs/make_models.py`; not by hand."""

UNPROVED: dict[str, dict[str, str]] = {
    "beam": {"hook_mlp_out": "the stream plus it is not the stream after it"},
    "convbert": {
        "encoder.attn.hook_attn_scores": "fires 2 times in a forward pass",
        "encoder.attn.hook_pattern": "fires 2 times in a forward pass",
        "encoder.attn.hook_rot_k": "fires 0 times in a forward pass",
        "encoder.attn.hook_rot_q": "fires 0 times in a forward pass",
        "encoder.hook_attn_in": "it does not do what the stream itself would do there",
    },
    "cpmant": {"hook_resid_pre": "it is not the hidden state that the model reports"},
    "deepseek_v4": {
        "hook_attn_out": "there is no stream to add it to",
        "hook_mlp_out": "there is no stream to add it to",
        "hook_resid_mid": "raises RuntimeError: The size of tensor a (4) must match the size of tensor b "
        "(7) at non-singleton dimension 2",
        "hook_resid_post": "it has 4 axes, not b p d",
        "hook_resid_pre": "it has 4 axes, not b p d",
        "mlp.hook_router": "it does not decide which experts are chosen",
    },
    "diffllama": {
        "attn.hook_attn_scores": "fires 2 times in a forward pass",
        "attn.hook_pattern": "fires 2 times in a forward pass",
        "attn.hook_rot_k": "fires 2 times in a forward pass",
        "attn.hook_rot_q": "fires 2 times in a forward pass",
    },
    "doge": {"hook_mlp_out": "the stream plus it is not the stream after it"},
    "embedding_gemma2_text": {
        "encoder.attn.hook_v": "the pattern does not mix it into z",
        "encoder.attn.hook_z": "it is not the values as the pattern mixes them",
        "encoder.hook_mlp_out": "the stream plus it is not the stream after it",
    },
    "falcon_h1": {"hook_mlp_out": "the stream plus it is not the stream after it"},
    "gemma3n_text": {
        "attn.hook_v": "the pattern does not mix it into z",
        "attn.hook_z": "it is not the values as the pattern mixes them",
        "hook_attn_out": "there is no stream to add it to",
        "hook_mlp_out": "there is no stream to add it to",
        "hook_resid_mid": "it has 4 axes, not b p d",
        "hook_resid_post": "it has 4 axes, not b p d",
        "hook_resid_pre": "it has 4 axes, not b p d",
    },
    "gemma4_text": {"hook_mlp_out": "the stream plus it is not the stream after it"},
    "gemma4_unified_text": {"hook_mlp_out": "the stream plus it is not the stream after it"},
    "gpt_neox_japanese": {"hook_mlp_out": "the stream plus it is not the stream after it"},
    "hy_v4": {
        "hook_attn_out": "there is no stream to add it to",
        "hook_mlp_out": "there is no stream to add it to",
        "hook_resid_mid": "raises RuntimeError: The size of tensor a (4) must match the size of tensor b (7) at "
        "non-singleton dimension 2",
        "hook_resid_post": "it has 4 axes, not b p d",
        "hook_resid_pre": "it has 4 axes, not b p d",
    },
    "inkling_text": {"hook_mlp_out": "the stream plus it is not the stream after it"},
    "jetmoe": {"attn.hook_rot_k": "an identity edit changes the logits"},
    "led": {
        "decoder.hook_attn_in": "a zeroing edit has no effect",
        "decoder.hook_k_input": "a zeroing edit has no effect",
        "decoder.hook_mlp_out": "the stream plus it is not the stream after it",
        "decoder.hook_q_input": "a zeroing edit has no effect",
        "decoder.hook_v_input": "a zeroing edit has no effect",
        "encoder.attn.hook_attn_scores": "fires 2 times in a forward pass",
        "encoder.attn.hook_pattern": "fires 2 times in a forward pass",
        "encoder.attn.hook_rot_k": "fires 0 times in a forward pass",
        "encoder.attn.hook_rot_q": "fires 0 times in a forward pass",
        "encoder.hook_embed": "fires 2 times in a forward pass",
        "encoder.hook_resid_pre": "it is not the hidden state that the model reports",
        "encoder.hook_tokens": "fires 2 times in a forward pass",
    },
    "lilt": {
        "encoder.attn.hook_attn_scores": "fires 2 times in a forward pass",
        "encoder.attn.hook_pattern": "fires 2 times in a forward pass",
    },
    "longformer": {
        "encoder.attn.hook_attn_scores": "fires 2 times in a forward pass",
        "encoder.attn.hook_pattern": "fires 2 times in a forward pass",
        "encoder.attn.hook_rot_k": "fires 0 times in a forward pass",
        "encoder.attn.hook_rot_q": "fires 0 times in a forward pass",
        "encoder.hook_attn_in": "raises RuntimeError: The size of tensor a (2) must match the size of "
        "tensor b (8) at non-singleton dimension 1",
        "encoder.hook_k_input": "raises RuntimeError: The size of tensor a (2) must match the size of "
        "tensor b (8) at non-singleton dimension 1",
        "encoder.hook_q_input": "raises RuntimeError: The size of tensor a (2) must match the size of "
        "tensor b (8) at non-singleton dimension 1",
        "encoder.hook_resid_pre": "it is not the hidden state that the model reports",
        "encoder.hook_v_input": "raises RuntimeError: The size of tensor a (2) must match the size of "
        "tensor b (8) at non-singleton dimension 1",
    },
    "minimax": {"hook_mlp_out": "the stream plus it is not the stream after it"},
    "mllama_text_model": {"hook_mlp_out": "the stream plus it is not the stream after it"},
    "mobilebert": {
        "encoder.hook_attn_in": "raises RuntimeError: mat1 and mat2 shapes cannot be multiplied (14x16 and 32x16)",
        "encoder.hook_attn_out": "there is no stream to add it to",
        "encoder.hook_k_input": "it does not do what the stream itself would do there",
        "encoder.hook_mlp_out": "fires 0 times in a forward pass",
        "encoder.hook_v_input": "raises RuntimeError: mat1 and mat2 shapes cannot be multiplied (14x16 and 32x16)",
        "encoder.mlp.hook_in": "fires 0 times in a forward pass",
    },
    "musicgen_decoder": {
        "hook_embed": "fires 0 times in a forward pass",
        "hook_tokens": "fires 0 times in a forward pass",
        "unembed.hook_in": "fires 0 times in a forward pass",
        "unembed.hook_out": "fires 0 times in a forward pass",
    },
    "musicgen_melody_decoder": {
        "hook_embed": "fires 0 times in a forward pass",
        "hook_tokens": "fires 0 times in a forward pass",
        "unembed.hook_in": "fires 0 times in a forward pass",
        "unembed.hook_out": "fires 0 times in a forward pass",
    },
    "nanochat": {
        "ln_final.hook_in": "fires 2 times in a forward pass",
        "ln_final.hook_normalized": "fires 2 times in a forward pass",
        "ln_final.hook_out": "fires 2 times in a forward pass",
        "ln_final.hook_scale": "fires 2 times in a forward pass",
    },
    "nystromformer": {
        "encoder.attn.hook_v": "the pattern does not mix it into z",
        "encoder.attn.hook_z": "it is not the values as the pattern mixes them",
    },
    "openai-gpt": {
        "attn.hook_k": "a zeroing edit has no effect",
        "attn.hook_q": "a zeroing edit has no effect",
        "attn.hook_rot_k": "a zeroing edit has no effect",
        "attn.hook_rot_q": "a zeroing edit has no effect",
        "hook_k_input": "a zeroing edit has no effect",
        "hook_q_input": "a zeroing edit has no effect",
    },
    "openai_privacy_filter": {
        "encoder.attn.hook_pattern": "it is not the attention that the model reports, nor does it mix the values into z"
    },
    "pegasus_x": {
        "decoder.hook_attn_out": "there is no stream to add it to",
        "decoder.hook_mlp_out": "there is no stream to add it to",
        "encoder.attn.hook_attn_scores": "raises RuntimeError: unflatten: Provided sizes [-1, 4] don't "
        "multiply up to the size of dim 0 (2) in the input tensor",
        "encoder.attn.hook_k": "fires 2 times in a forward pass",
        "encoder.attn.hook_pattern": "raises RuntimeError: unflatten: Provided sizes [-1, 4] don't multiply "
        "up to the size of dim 0 (2) in the input tensor",
        "encoder.attn.hook_q": "fires 2 times in a forward pass",
        "encoder.attn.hook_result": "fires 2 times in a forward pass",
        "encoder.attn.hook_rot_k": "fires 0 times in a forward pass",
        "encoder.attn.hook_rot_q": "fires 0 times in a forward pass",
        "encoder.attn.hook_v": "fires 2 times in a forward pass",
        "encoder.attn.hook_z": "fires 2 times in a forward pass",
        "encoder.hook_attn_in": "raises RuntimeError: The size of tensor a (12) must match the size of "
        "tensor b (8) at non-singleton dimension 1",
        "encoder.hook_attn_out": "there is no stream to add it to",
        "encoder.hook_k_input": "raises RuntimeError: The size of tensor a (12) must match the size of "
        "tensor b (8) at non-singleton dimension 1",
        "encoder.hook_mlp_in": "fires 2 times in a forward pass",
        "encoder.hook_mlp_out": "fires 2 times in a forward pass",
        "encoder.hook_q_input": "raises RuntimeError: The size of tensor a (12) must match the size of "
        "tensor b (8) at non-singleton dimension 1",
        "encoder.hook_resid_mid": "raises RuntimeError: The size of tensor a (8) must match the size of "
        "tensor b (12) at non-singleton dimension 1",
        "encoder.hook_v_input": "raises RuntimeError: The size of tensor a (12) must match the size of "
        "tensor b (8) at non-singleton dimension 1",
        "encoder.ln2.hook_normalized": "fires 2 times in a forward pass",
        "encoder.ln2.hook_scale": "fires 2 times in a forward pass",
        "encoder.mlp.hook_post": "fires 2 times in a forward pass",
        "encoder.mlp.hook_pre": "fires 2 times in a forward pass",
    },
    "prophetnet": {
        "attn.hook_attn_scores": "raises RuntimeError: unflatten: Provided sizes [-1, 4] don't multiply up "
        "to the size of dim 0 (2) in the input tensor",
        "attn.hook_pattern": "raises RuntimeError: unflatten: Provided sizes [-1, 4] don't multiply up to "
        "the size of dim 0 (2) in the input tensor",
        "attn.hook_result": "fires 2 times in a forward pass",
        "attn.hook_rot_k": "fires 0 times in a forward pass",
        "attn.hook_rot_q": "fires 0 times in a forward pass",
        "attn.hook_z": "fires 2 times in a forward pass",
        "decoder.attn.hook_attn_scores": "raises RuntimeError: unflatten: Provided sizes [-1, 4] don't "
        "multiply up to the size of dim 0 (2) in the input tensor",
        "decoder.attn.hook_pattern": "raises RuntimeError: unflatten: Provided sizes [-1, 4] don't "
        "multiply up to the size of dim 0 (2) in the input tensor",
        "decoder.attn.hook_result": "fires 2 times in a forward pass",
        "decoder.attn.hook_rot_k": "fires 0 times in a forward pass",
        "decoder.attn.hook_rot_q": "fires 0 times in a forward pass",
        "decoder.attn.hook_z": "fires 2 times in a forward pass",
        "decoder.cross_attn.hook_pattern": "it is not the attention that the model reports, nor does it "
        "mix the values into z",
        "decoder.cross_attn.hook_rot_k": "fires 0 times in a forward pass",
        "decoder.cross_attn.hook_rot_q": "fires 0 times in a forward pass",
        "decoder.hook_resid_pre": "it is not the hidden state that the model reports",
        "encoder.attn.hook_pattern": "it is not the attention that the model reports, nor does it mix the "
        "values into z",
        "encoder.attn.hook_rot_k": "fires 0 times in a forward pass",
        "encoder.attn.hook_rot_q": "fires 0 times in a forward pass",
        "encoder.hook_mlp_out": "the stream plus it is not the stream after it",
        "hook_resid_pre": "it is not the hidden state that the model reports",
        "unembed.hook_in": "it has 4 axes, not b p d",
        "unembed.hook_out": "it has 4 axes, not b p V",
    },
    "qwen4_exp_text": {
        "attn.hook_q": "[2, 7, 4, 48], but [2, 7, 4, 24] meet",
        "attn.hook_v": "the pattern does not mix it into z",
        "attn.hook_z": "it is not the values as the pattern mixes them",
        "hook_attn_out": "there is no stream to add it to",
        "hook_mlp_out": "there is no stream to add it to",
        "hook_resid_mid": "raises RuntimeError: The size of tensor a (64) must match the size of "
        "tensor b (32) at non-singleton dimension 2",
    },
    "reformer": {
        "attn.hook_attn_scores": "fires 0 times in a forward pass",
        "attn.hook_in": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "attn.hook_pattern": "fires 0 times in a forward pass",
        "attn.hook_result": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "attn.hook_rot_k": "raises RuntimeError: unflatten: Provided sizes [-1, 4] don't multiply up to the "
        "size of dim 0 (2) in the input tensor",
        "attn.hook_rot_q": "raises RuntimeError: unflatten: Provided sizes [-1, 4] don't multiply up to the "
        "size of dim 0 (2) in the input tensor",
        "attn.hook_z": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "encoder.attn.hook_attn_scores": "fires 0 times in a forward pass",
        "encoder.attn.hook_in": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "encoder.attn.hook_pattern": "fires 0 times in a forward pass",
        "encoder.attn.hook_result": "raises HooklineError: incl_bwd=True, but none of the points asked for "
        "has a gradient",
        "encoder.attn.hook_rot_k": "raises RuntimeError: unflatten: Provided sizes [-1, 4] don't multiply up "
        "to the size of dim 0 (2) in the input tensor",
        "encoder.attn.hook_rot_q": "raises RuntimeError: unflatten: Provided sizes [-1, 4] don't multiply up "
        "to the size of dim 0 (2) in the input tensor",
        "encoder.attn.hook_z": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "encoder.hook_attn_out": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "encoder.hook_mlp_out": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "encoder.hook_resid_mid": "raises HooklineError: incl_bwd=True, but none of the points asked for has "
        "a gradient",
        "encoder.hook_resid_post": "raises HooklineError: incl_bwd=True, but none of the points asked for "
        "has a gradient",
        "encoder.hook_resid_pre": "raises HooklineError: incl_bwd=True, but none of the points asked for has "
        "a gradient",
        "encoder.mlp.hook_in": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "hook_attn_out": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "hook_embed": "raises AssertionError: If you want to train `ReformerModel` and its variations, make "
        "sure to use `model.train()` to put the model into training mode.",
        "hook_mlp_out": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "hook_pos_embed": "raises AssertionError: If you want to train `ReformerModel` and its variations, "
        "make sure to use `model.train()` to put the model into training mode.",
        "hook_resid_mid": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "hook_resid_post": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "hook_resid_pre": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
        "hook_tokens": "raises RuntimeError: `inputs` argument to `grad()` cannot be empty.",
        "mlp.hook_in": "raises HooklineError: incl_bwd=True, but none of the points asked for has a gradient",
    },
    "roformer": {
        "hook_pos_embed": "raises RuntimeError: The size of tensor a (4) must match the size of tensor b (2) "
        "at non-singleton dimension 2"
    },
    "rwkv": {
        "hook_attn_out": "raises RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation: [torch.FloatTensor [2, 32]], which is output 0 of "
        "AsStrided, is at version 4; expected version 3 instead. Hint: enable anomaly detection "
        "to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "hook_embed": "raises RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation: [torch.FloatTensor [2, 32]], which is output 0 of "
        "AsStrided, is at version 4; expected version 3 instead. Hint: enable anomaly detection to "
        "find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "hook_mlp_in": "raises RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation: [torch.FloatTensor [2, 32]], which is output 0 of "
        "AsStrided, is at version 4; expected version 3 instead. Hint: enable anomaly detection "
        "to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "hook_mlp_out": "raises RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation: [torch.FloatTensor [2, 32]], which is output 0 of "
        "AsStrided, is at version 4; expected version 3 instead. Hint: enable anomaly detection "
        "to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "hook_resid_mid": "raises RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation: [torch.FloatTensor [2, 32]], which is output 0 of "
        "AsStrided, is at version 4; expected version 3 instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "hook_resid_post": "raises RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation: [torch.FloatTensor [2, 32]], which is output 0 of "
        "AsStrided, is at version 4; expected version 3 instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "hook_resid_pre": "raises RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation: [torch.FloatTensor [2, 32]], which is output 0 of "
        "AsStrided, is at version 4; expected version 3 instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "hook_tokens": "raises RuntimeError: `inputs` argument to `grad()` cannot be empty.",
        "ln1.hook_normalized": "raises RuntimeError: one of the variables needed for gradient computation has "
        "been modified by an inplace operation: [torch.FloatTensor [2, 32]], which is "
        "output 0 of AsStrided, is at version 4; expected version 3 instead. Hint: enable "
        "anomaly detection to find the operation that failed to compute its gradient, "
        "with torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "ln1.hook_scale": "raises RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation: [torch.FloatTensor [2, 32]], which is output 0 of "
        "AsStrided, is at version 4; expected version 3 instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "ln2.hook_normalized": "raises RuntimeError: one of the variables needed for gradient computation has "
        "been modified by an inplace operation: [torch.FloatTensor [2, 32]], which is "
        "output 0 of AsStrided, is at version 4; expected version 3 instead. Hint: enable "
        "anomaly detection to find the operation that failed to compute its gradient, "
        "with torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "ln2.hook_scale": "raises RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation: [torch.FloatTensor [2, 32]], which is output 0 of "
        "AsStrided, is at version 4; expected version 3 instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False).",
        "mlp.hook_in": "raises RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation: [torch.FloatTensor [2, 32]], which is output 0 of "
        "AsStrided, is at version 4; expected version 3 instead. Hint: enable anomaly detection "
        "to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False).",
    },
    "squeezebert": {
        "encoder.attn.hook_k": "raises RuntimeError: unflatten: Provided sizes [4, -1] don't multiply up "
        "to the size of dim 2 (7) in the input tensor",
        "encoder.attn.hook_pattern": "it is not the attention that the model reports, nor does it mix the "
        "values into z",
        "encoder.attn.hook_q": "raises RuntimeError: unflatten: Provided sizes [4, -1] don't multiply up "
        "to the size of dim 2 (7) in the input tensor",
        "encoder.attn.hook_v": "raises RuntimeError: unflatten: Provided sizes [4, -1] don't multiply up "
        "to the size of dim 2 (7) in the input tensor",
        "encoder.hook_attn_in": "raises RuntimeError: unflatten: Provided sizes [4, -1] don't multiply up "
        "to the size of dim 2 (7) in the input tensor",
        "encoder.hook_attn_out": "there is no stream to add it to",
        "encoder.hook_k_input": "raises RuntimeError: unflatten: Provided sizes [4, -1] don't multiply up "
        "to the size of dim 2 (7) in the input tensor",
        "encoder.hook_q_input": "raises RuntimeError: unflatten: Provided sizes [4, -1] don't multiply up "
        "to the size of dim 2 (7) in the input tensor",
        "encoder.hook_resid_post": "fires 0 times in a forward pass",
        "encoder.hook_resid_pre": "fires 0 times in a forward pass",
        "encoder.hook_v_input": "raises RuntimeError: unflatten: Provided sizes [4, -1] don't multiply up "
        "to the size of dim 2 (7) in the input tensor",
    },
    "xmod": {
        "encoder.hook_mlp_out": "the stream plus it is not the stream after it",
        "encoder.ln2.hook_normalized": "fires 2 times in a forward pass",
        "encoder.ln2.hook_scale": "fires 2 times in a forward pass",
        "hook_mlp_out": "the stream plus it is not the stream after it",
        "ln2.hook_normalized": "fires 2 times in a forward pass",
        "ln2.hook_scale": "fires 2 times in a forward pass",
    },
    "yoso": {
        "encoder.attn.hook_attn_scores": "fires 0 times in a forward pass",
        "encoder.attn.hook_pattern": "fires 0 times in a forward pass",
        "encoder.attn.hook_rot_k": "no gradient reaches it",
        "encoder.attn.hook_rot_q": "no gradient reaches it",
    },
    "zaya": {
        "hook_mlp_out": "the stream plus it is not the stream after it",
        "mlp.hook_expert_indices": "a zeroing edit has no effect",
        "mlp.hook_router": "it does not decide which experts are chosen",
    },
}
