"""Megatron modules: configuration, precision, graphs, sharded state dicts and value heads."""

from mcore.modules._version import __version__
from mcore.modules.config import (
    ConfigFieldError,
    TransformerConfig,
    init_method_normal,
    is_using_quantization_scales,
    mup_scaled_init_method_normal,
    scaled_init_method_normal,
)
from mcore.modules.float16 import Float16Module
from mcore.modules.freezing import (
    _freeze_parameter_if_present,
    freeze_moe_router,
    freeze_parameters,
)
from mcore.modules.graphs.graphable import GraphableMegatronModule
from mcore.modules.graphs.runner import GraphInputMismatch, GraphStateError
from mcore.modules.last_layer import (
    LinearForLastLayer,
    _register_linear_for_last_layer_mapping,
)
from mcore.modules.mamba import (
    MambaInferenceStateConfig,
    get_mamba_inference_state_config_from_model,
)
from mcore.modules.megatron_entries import (
    from_megatron_sharded_state_dict,
    to_megatron_sharded_state_dict,
)
from mcore.modules.module import MegatronModule
from mcore.modules.precision import (
    _BF16_TYPES,
    _FLOAT_TYPES,
    _HALF_TYPES,
    conversion_helper,
    convert_module_to_dtype_except_fp32_marked,
    float16_to_fp32,
    fp32_to_float16,
    keep_in_fp32,
    mark_keep_in_fp32,
)
from mcore.modules.sharding import sharded_state_dict_of
from mcore.modules.value_head import create_value_head_hook, make_value_model, untie_embeddings
from mcore.modules.wrappers import (
    AttributeNotFoundError,
    ModelHook,
    ModelList,
    ModelListError,
    ModelType,
    _ensure_model_list,
    ensure_model_list,
    find_megatron_fsdp,
    get_attr_wrapped_model,
    get_model_config,
    get_model_type,
    get_model_xattn,
    is_submodule,
    register_model_wrapper,
    unwrap_model,
)
from mcore.tensor.param_flags import param_is_not_shared

__all__ = [
    "_BF16_TYPES",
    "_FLOAT_TYPES",
    "_HALF_TYPES",
    "AttributeNotFoundError",
    "ConfigFieldError",
    "Float16Module",
    "GraphInputMismatch",
    "GraphStateError",
    "GraphableMegatronModule",
    "LinearForLastLayer",
    "MambaInferenceStateConfig",
    "MegatronModule",
    "ModelHook",
    "ModelList",
    "ModelListError",
    "ModelType",
    "TransformerConfig",
    "__version__",
    "_ensure_model_list",
    "_freeze_parameter_if_present",
    "_register_linear_for_last_layer_mapping",
    "conversion_helper",
    "convert_module_to_dtype_except_fp32_marked",
    "create_value_head_hook",
    "ensure_model_list",
    "find_megatron_fsdp",
    "float16_to_fp32",
    "fp32_to_float16",
    "freeze_moe_router",
    "freeze_parameters",
    "from_megatron_sharded_state_dict",
    "get_attr_wrapped_model",
    "get_mamba_inference_state_config_from_model",
    "get_model_config",
    "get_model_type",
    "get_model_xattn",
    "init_method_normal",
    "is_submodule",
    "is_using_quantization_scales",
    "keep_in_fp32",
    "make_value_model",
    "mark_keep_in_fp32",
    "mup_scaled_init_method_normal",
    "param_is_not_shared",
    "register_model_wrapper",
    "scaled_init_method_normal",
    "sharded_state_dict_of",
    "to_megatron_sharded_state_dict",
    "untie_embeddings",
    "unwrap_model",
]
