"""Module paths of TransformerLens whose contents are elsewhere here: `utilities.tensors`, `cache.key_value_cache`.

The modules are made when the package is imported. A module has the names that the table says, or all public names of
the module behind it, and raises for a name that is not available, with what to use instead.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from hookline.compat.transformer_lens._impl.absent import refusing

PACKAGE = "hookline.compat.transformer_lens"

UTILITIES = {
    "activation_functions": "gelu_new gelu_fast solu",
    "attribute_utils": "get_nested_attr set_nested_attr",
    "components_utils": "get_act_name",
    "defaults_utils": "LocallyOverridenDefaults USE_DEFAULT_VALUE override_or_use_default_value",
    "devices": "ModelWithCfg get_device move_to_and_update_config warn_if_mps",
    "exploratory_utils": "test_prompt",
    "gpu_utils": "print_gpu_mem",
    "hf_utils": (
        "clear_huggingface_cache download_file_from_hf enable_hf_retry get_rotary_pct_from_config keep_single_column "
        "select_compatible_kwargs"
    ),
    "initialization_utils": (
        "calc_fan_in_and_fan_out init_kaiming_normal_ init_kaiming_uniform_ init_xavier_normal_ init_xavier_uniform_"
    ),
    "library_utils": "is_library_available",
    "lm_utils": "lm_accuracy lm_cross_entropy_loss",
    "logits_utils": "_apply_repetition_penalty logits_to_df sample_logits",
    "matrix": "composition_scores get_matrix_corner",
    "multi_gpu": "",
    "slice": "Slice SliceInput",
    "tensors": (
        "check_structure filter_dict_by_prefix get_corner get_cumsum_along_dim get_offset_position_ids "
        "is_lower_triangular is_square remove_batch_dim repeat_along_head_dimension to_numpy transpose"
    ),
    "tokenize_utils": (
        "get_attention_mask get_input_with_manually_prepended_bos get_tokenizer_with_bos get_tokens_with_bos_removed "
        "tokenize_and_concatenate"
    ),
    "typed_module_list": "TypedModuleList",
}

PATHS: dict[str, tuple[str, str]] = {
    "BertNextSentencePrediction": ("_impl.encoders.bert", "BertNextSentencePrediction"),
    "HookedEncoder": ("_impl.encoders.bert", "HookedEncoder"),
    "HookedEncoderDecoder": ("_impl.encoders.t5", "HookedEncoderDecoder"),
    "HookedRootModule": ("hook_points", "HookedRootModule"),
    "SVDInterpreter": ("_impl.svd_interpreter", "SVDInterpreter OUTPUT_EMBEDDING VECTOR_TYPES"),
    "cache.key_value_cache": ("_impl.kv_cache", "TransformerLensKeyValueCache"),
    "cache.key_value_cache_entry": ("_impl.kv_cache", "TransformerLensKeyValueCacheEntry"),
    "config": ("_impl.tl_config", "HookedTransformerConfig TransformerLensConfig"),
    "config.transformer_lens_config": ("_impl.tl_config", "TransformerLensConfig"),
    "config.hooked_transformer_config": ("_impl.tl_config", "HookedTransformerConfig"),
    "loading_from_pretrained": ("loading", ""),
    "model_bridge.bridge": ("model_bridge", "TransformerBridge"),
    "model_bridge.sources": ("model_bridge", "TransformerBridge"),
    "model_bridge.sources.transformers": ("model_bridge", "TransformerBridge"),
    "model_bridge.transformer_bridge": ("model_bridge", "TransformerBridge"),
    "past_key_value_caching": ("_impl.kv_cache", "HookedTransformerKeyValueCache HookedTransformerKeyValueCacheEntry"),
    "supported_models": ("loading", "DEFAULT_MODEL_ALIASES MODEL_ALIASES OFFICIAL_MODEL_NAMES get_official_model_name"),
    "utilities.cache": ("_impl.kv_cache", "get_pos_offset"),
    "tools": ("_impl.analysis", ""),
    "tools.analysis": ("_impl.analysis", ""),
    "tools.analysis.direct_logit_attribution": ("_impl.analysis", "DirectLogitAttribution direct_logit_attribution"),
    "tools.analysis.direct_path_patching": (
        "_impl.direct_paths",
        "get_act_patch_direct_path get_act_patch_direct_path_all_sources _check_fold_ln",
    ),
    "tools.training": ("train", "train"),
    **{f"utilities.{name}": ("utils", names) for name, names in UTILITIES.items()},
}
"""Paths, the module behind each, and its names; no names mean all that the module behind it has."""


def make_modules() -> None:
    """Make the modules of the table importable, without hiding a class of the same name in the package."""
    for path, (source, names) in PATHS.items():
        module = ModuleType(f"{PACKAGE}.{path}", f"`transformer_lens.{path}`: names of `{source}`.")
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []  # it may have submodules of the table
        attributes = vars(import_module(f"{PACKAGE}.{source}"))
        exports = names.split() or [name for name in attributes if not name.startswith("_")]
        vars(module).update({name: attributes[name] for name in exports if name in attributes})
        module.__getattr__ = refusing(f"transformer_lens.{path}")  # type: ignore[method-assign]
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        if last not in vars(sys.modules[parent]):
            setattr(sys.modules[parent], last, module)
