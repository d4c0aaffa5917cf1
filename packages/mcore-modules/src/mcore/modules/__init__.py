"""Megatron modules: configuration, precision, graphs, sharded state dicts and value heads."""

from mcore.modules._version import __version__
from mcore.modules.config import TransformerConfig
from mcore.modules.config_fields import (
    GraphConfigLike,
    ModuleConfigLike,
    is_switched_on,
    read_field,
)
from mcore.modules.errors import (
    AttributeNotFoundError,
    ConfigFieldError,
    GraphInputMismatch,
    GraphStateError,
    ModelListError,
)
from mcore.modules.float16 import Float16Module
from mcore.modules.fp32_marks import (
    convert_module_to_dtype_except_fp32_marked,
    keep_in_fp32,
    mark_keep_in_fp32,
)
from mcore.modules.graph_capture import (
    capture_graphs,
    delete_graphs,
    num_graphs_needed,
    set_current_microbatch,
)
from mcore.modules.graphable import GraphableMegatronModule
from mcore.modules.graphs import (
    EagerGraphRunner,
    GraphedCallable,
    GraphRunner,
    GraphSpec,
    LocalGraphManager,
    TEGraphRunner,
    TorchGraphRunner,
    graph_capturing,
    is_graph_capturing,
    resolve_graph_runner,
)
from mcore.modules.init_methods import (
    init_method_normal,
    mup_scaled_init_method_normal,
    scaled_init_method_normal,
)
from mcore.modules.inspection import (
    ModelType,
    get_attr_wrapped_model,
    get_model_config,
    get_model_type,
    get_model_xattn,
    is_submodule,
)
from mcore.modules.mamba import (
    MambaInferenceStateConfig,
    get_mamba_inference_state_config_from_model,
)
from mcore.modules.model_list import (
    ModelHook,
    ModelList,
    _ensure_model_list,
    ensure_model_list,
)
from mcore.modules.module import MegatronModule
from mcore.modules.module_parallelism import (
    _register_linear_for_last_layer_mapping,
    get_module_parallelism,
    register_module_parallelism,
)
from mcore.modules.moe import _freeze_parameter_if_present, freeze_moe_router
from mcore.modules.precision import (
    _BF16_TYPES,
    _FLOAT_TYPES,
    _HALF_TYPES,
    conversion_helper,
    float16_to_fp32,
    fp32_to_float16,
)
from mcore.modules.sharding import sharded_state_dict_of
from mcore.modules.value_head import LinearForLastLayer
from mcore.modules.value_head_hook import create_value_head_hook, make_value_model
from mcore.modules.wrappers import register_model_wrapper, unwrap_model
from mcore.parallel.checkpoint import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_object_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from mcore.tensor.param_flags import param_is_not_shared

__all__ = [
    "_BF16_TYPES",
    "_FLOAT_TYPES",
    "_HALF_TYPES",
    "AttributeNotFoundError",
    "ConfigFieldError",
    "EagerGraphRunner",
    "Float16Module",
    "GraphConfigLike",
    "GraphInputMismatch",
    "GraphRunner",
    "GraphSpec",
    "GraphStateError",
    "GraphableMegatronModule",
    "GraphedCallable",
    "LinearForLastLayer",
    "LocalGraphManager",
    "MambaInferenceStateConfig",
    "MegatronModule",
    "ModelHook",
    "ModelList",
    "ModelListError",
    "ModelType",
    "ModuleConfigLike",
    "TEGraphRunner",
    "TorchGraphRunner",
    "TransformerConfig",
    "__version__",
    "_ensure_model_list",
    "_freeze_parameter_if_present",
    "_register_linear_for_last_layer_mapping",
    "capture_graphs",
    "conversion_helper",
    "convert_module_to_dtype_except_fp32_marked",
    "create_value_head_hook",
    "delete_graphs",
    "ensure_metadata_has_dp_cp_group",
    "ensure_model_list",
    "float16_to_fp32",
    "fp32_to_float16",
    "freeze_moe_router",
    "get_attr_wrapped_model",
    "get_mamba_inference_state_config_from_model",
    "get_model_config",
    "get_model_type",
    "get_model_xattn",
    "get_module_parallelism",
    "graph_capturing",
    "init_method_normal",
    "is_graph_capturing",
    "is_submodule",
    "is_switched_on",
    "keep_in_fp32",
    "make_sharded_object_for_checkpoint",
    "make_sharded_tensors_for_checkpoint",
    "make_value_model",
    "mark_keep_in_fp32",
    "mup_scaled_init_method_normal",
    "num_graphs_needed",
    "param_is_not_shared",
    "read_field",
    "register_model_wrapper",
    "register_module_parallelism",
    "resolve_graph_runner",
    "scaled_init_method_normal",
    "set_current_microbatch",
    "sharded_state_dict_default",
    "sharded_state_dict_of",
    "unwrap_model",
]
