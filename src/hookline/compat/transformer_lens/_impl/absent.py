"""Names of TransformerLens that are not available, by module, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hookline.errors import HooklineError

_AUDIO = "hookline.hook(model) wraps audio encoders, with encoder.… points"
_SWEEP = "hookline.experiments.patching.sweep patches any point"
_CONFIG = "use HookedTransformerConfig, or the config of the transformers model"
_TABLE = "results of hookline.experiments have labels, and to_dataframe()"
_PARTS = "the model runs transformers' own modules: model.blocks[0].attn, .mlp and .ln1 have its weights and points"
DEVICES = 'pass device_map="auto"; or load a tensor parallel model with transformers, and pass it as hf_model'
_LOADING = "from_pretrained loads and describes a model; model.cfg is its config"
_TYPES = "it is a type alias: write the type"

ABSENT: dict[str, dict[str, str]] = {
    "transformer_lens": {
        "HookedAudioEncoder": _AUDIO,
        "HookedSAETransformer": "hookline.sae has autoencoders, and runs the model with them",
        "TransformerBridgeConfig": _CONFIG,
        "conversion_utils": "weights are views of the model's own, and need no conversion",
        "factories": "transformers.activations.ACT2FN has activation functions by name",
        "lit": "model.explore() shows the model in a browser",
    },
    "transformer_lens.HookedTransformer": {
        **dict.fromkeys(("SingleLoss", "LossPerToken", "T"), _TYPES),
        "DTYPE_FROM_STRING": "getattr(torch, name)",
    },
    "transformer_lens.FactoredMatrix": {"TensorLike": _TYPES, "upcast_for_linalg": "x.float()"},
    **{f"transformer_lens.{name}": {"T": _TYPES} for name in ("HookedEncoder", "HookedEncoderDecoder")},
    "transformer_lens.config": {"TransformerBridgeConfig": _CONFIG},
    "transformer_lens.evals": {"MMLU_SUBJECTS": 'datasets.get_dataset_config_names("cais/mmlu")'},
    "transformer_lens.utils": {
        "get_dataset": "datasets.load_dataset(…), then utils.tokenize_and_concatenate",
        "check_structure": "compare the tensors themselves",
        "clear_huggingface_cache": "`hf cache delete`, which asks first",
        "NonlinearityType": _TYPES,
        **dict.fromkeys(("ActivationFunction", "SUPPORTED_ACTIVATIONS"), "transformers.activations.ACT2FN"),
        **dict.fromkeys(("SOFTCAP_DISABLED", "apply_softcap", "softcap_enabled"), "cap * torch.tanh(x / cap)"),
        "temporarily_swap_parameter": "model.process_weights_ and restore_weights swap parameters",
        **dict.fromkeys(
            (
                "SuccessRateInterval",
                "bootstrap_ci",
                "sign_flip_permutation_pvalue",
                "standard_error",
                "success_rate_ci",
            ),
            "scipy.stats",
        ),
        "derive_generator": "torch.Generator().manual_seed(seed)",
        **dict.fromkeys(
            (
                *("calculate_available_device_cuda_memory", "count_unique_devices", "find_embedding_device"),
                *("determine_available_memory_for_available_devices", "get_best_available_cuda_device"),
                *("get_best_available_device", "get_device_for_block_index", "resolve_device_map"),
                "sort_devices_based_on_available_memory",
            ),
            DEVICES,
        ),
    },
    "transformer_lens.head_detector": {"CACHE_WITH_SEQ_LIST_ERR": "the message of an error"},
    "transformer_lens.tools": {"model_registry": "any model of transformers can be tried, and verify() proves it"},
    "transformer_lens.loading_from_pretrained": {
        **dict.fromkeys(("get_basic_config", "Config"), _LOADING),
        **dict.fromkeys(("convert_hf_model_config", "convert_neel_model_config"), _LOADING),
        "get_pretrained_state_dict": "model.state_dict()",
        "get_num_params_of_pretrained": "model.n_params_total",
        **dict.fromkeys(("NON_HF_HOSTED_MODEL_NAMES", "NEED_REMOTE_CODE_MODELS"), "any model of transformers loads"),
    },
    "transformer_lens.model_bridge": {
        **dict.fromkeys(("ArchitectureAdapter", "ComponentMapping"), "architectures need no adapter classes"),
        **dict.fromkeys(
            (
                *("AttentionBridge", "BlockBridge", "EmbeddingBridge", "NormalizationBridge", "LinearBridge"),
                *("JointQKVAttentionBridge", "JointGateUpMLPBridge", "MLPBridge", "MoEBridge", "UnembeddingBridge"),
            ),
            _PARTS,
        ),
        **dict.fromkeys(
            (
                *("replace_remote_component", "set_original_components", "setup_blocks_bridge", "setup_components"),
                *("setup_submodules", "RemoteComponent", "RemoteModel", "RemotePath", "TransformerLensPath"),
                *("HookFunction", "HookRegistry", "build_alias_to_canonical_map", "RemoteBridge", "BridgeCore"),
            ),
            "the model is not taken apart: model.module is the transformers model",
        ),
    },
    "transformer_lens.patching": {
        "generic_activation_patch": _SWEEP,
        "make_df_from_ranges": _TABLE,
        "PatchingResult": _TABLE,
        **dict.fromkeys(
            ("Logits", "AxisNames", "CorruptedActivation", "PatchedActivation", "MetricFn", "Reduce"), _TYPES
        ),
        **dict.fromkeys(
            ("get_act_patch_direct_path", "get_act_patch_direct_path_all_sources"),
            "tools.analysis.direct_path_patching has it",
        ),
        **{
            f"layer_{what}_patch_setter": _SWEEP
            for what in ("pos", "pos_head_vector", "head_vector", "head_pattern", "head_pos_pattern")
        },
        "layer_head_dest_src_pos_pattern_patch_setter": _SWEEP,
    },
    "transformer_lens.tools.analysis": {
        **dict.fromkeys(("TokenInput", "AnswerTokens", "Unit"), _TYPES),
        **dict.fromkeys(
            ("EdgeAttributionConfig", "FaithfulnessConfig", "Node", "attribution_patch", "faithfulness"),
            "hookline.experiments.edges and .attribution",
        ),
        **dict.fromkeys(("logit_lens", "logit_readout"), "hookline.experiments.logit_lens"),
        **dict.fromkeys(
            (
                *("LearnedSubspace", "NormMatchedPlacebo", "SubspaceInterchange", "arbitrary_targets", "fit_das"),
                *("collect_activations", "intervened_logits", "mean_difference_basis", "neuron_basis", "probe_basis"),
                *(
                    "random_basis",
                    "random_init_bridge",
                    "random_neuron_basis",
                    "reinitialized",
                    "run_with_intervention",
                ),
            ),
            "write the intervention as a hook; hookline.store collects activations",
        ),
        **dict.fromkeys(
            ("JacobianLens", "solve_coordinate_patch", "JSpaceDecomposition", "get_sparse_decomposition"),
            "hookline.experiments.jacobian has the lens, its reads and its edits",
        ),
        **dict.fromkeys(
            (
                *("SubspaceBasis", "attention_head_subspace_affinity", "orthonormal_subspace", "projection_kernel"),
                "random_projection_kernel_moments",
            ),
            "model.OV and model.QK are factored matrices: torch.linalg has the rest",
        ),
        **dict.fromkeys(
            ("SparseProbeConvergenceError", "fit_sparse_probe", "sweep_sparse_probe"),
            "collect activations with hookline.store, and fit with scikit-learn",
        ),
    },
    "transformer_lens.tools.training": {"TrainConfig": "train.HookedTransformerTrainConfig"},
}

_LAYERS = "model.cfg.attn_types, and the points that a layer has: model.points()"
METHODS: dict[str, dict[str, str]] = {
    "ActivationCache": dict.fromkeys(
        ("ssm_layers", "compute_ssm_effective_attention", "compute_ssm_state"),
        "layers without softmax attention have the points of their modules, by native names",
    ),
    "HookedTransformer": {
        "get_pos_offset": "past_kv_cache.previous_attention_mask.shape[1]",
        "move_model_modules_to_device": DEVICES,
        "fill_missing_keys": "load_state_dict(…, strict=False)",
    },
    "HookPoint": {"enable_reshape": "points have one layout; reshape in the hook"},
    "TransformerBridge": {
        "boot_native": "HookedTransformer(cfg)",
        "clear_hook_registry": "reset_hooks()",
        **dict.fromkeys(("blocks_with", "stack_params_for", "layer_types", "block_hooks", "block_submodules"), _LAYERS),
        **dict.fromkeys(("QK_for_attn_layers", "OV_for_attn_layers", "composition_layer_indices"), "model.QK and .OV"),
        "attn_head_labels": "all_head_labels()",
        "prepare_multimodal_inputs": "hookline.hook(model).to_inputs(text, images)",
        **dict.fromkeys(("to_sentence_pair_tokens", "predict_next_sentence"), "BertNextSentencePrediction"),
        "encoder_output": "HookedEncoder has it",
        "diffusion_generate": "hookline.hook(model) wraps such a model; its own code generates",
    },
}
"""Methods of classes that are not available, and what to use instead."""


class AbsentNameError(HooklineError, ImportError):
    """A name of TransformerLens that is not available; the message says what to use instead."""


def refusing(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that raises, with what to use instead for names that are not available."""
    reasons = ABSENT.get(module, {})
    if module.startswith("transformer_lens.utilities"):
        reasons = ABSENT["transformer_lens.utils"]
    elif module.startswith("transformer_lens.tools.analysis."):
        reasons = ABSENT["transformer_lens.tools.analysis"]

    def refuse(name: str) -> Any:
        if name in reasons:
            raise AbsentNameError(f"{module}.{name} is not in hookline.compat: {reasons[name]}")
        raise AttributeError(f"module 'hookline.compat.{module}' has no attribute {name!r}")

    return refuse
