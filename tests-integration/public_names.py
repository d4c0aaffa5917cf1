"""The public names of the libraries, each with an object and a use of it that gives a result."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch

import mcore
from mcore import modules, parallel, tensor, versioning


class Row(NamedTuple):
    """A public name: its object, a use of the object, and refusals by operation."""

    make: Callable[[], Any]
    use: Callable[[Any], Any]
    refusals: Mapping[str, str] = MappingProxyType({})  # the remedy in the text of the error
    input: Callable[[], torch.Tensor] | None = None  # of a module


def config(**fields: Any) -> Any:
    return modules.TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=2, **fields)


def seeded(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return make(*args, **options)


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


class Layer(modules.MegatronModule):
    def __init__(self) -> None:
        super().__init__(config())
        self.linear = torch.nn.Linear(4, 4)
        self.norm = modules.keep_in_fp32(torch.nn.LayerNorm(4), "weight")
        self.register_buffer("shift", torch.ones(4))

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return self.linear(hidden_states) + self.shift * self.norm.weight


class GraphableLayer(modules.GraphableMegatronModule):
    def __init__(self) -> None:
        super().__init__(config(cuda_graph_impl="local"))
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return self.linear(hidden_states)


class Old:
    def __init__(self, size: int = 1) -> None:
        self.size = size


Marked = versioning.deprecated("1.0.0", category=None)(type("Marked", (Old,), {}))
Gated = versioning.experimental_cls("0.1.0")(type("Gated", (Old,), {}))
Refusing = versioning.deprecate_args("size")(type("Refusing", (Old,), {}))
for made in (Marked, Gated, Refusing):
    made.__module__ = __name__


@versioning.deprecated("1.0.0", category=None)
def marked(x: int) -> int:
    return x + 1


@versioning.experimental_fn("0.1.0")
def gated(x: int) -> int:
    return x + 1


@versioning.deprecate_args("y")
def refusing(x: int, y: int = 0) -> int:
    return x + y


@versioning.internal_api
def internal(x: int) -> int:
    return x + 1


@versioning.experimental_api
def draft(x: int) -> int:
    return x + 1


def make_gated() -> Any:
    with versioning.experimental_enabled():
        return Gated(3)


def text_of(function: Callable[..., Any], *args: Any) -> str:
    """Return the result as text, or that of its documented refusal."""
    try:
        return str(function(*args))
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    except versioning.ExperimentalNotEnabledError as error:
        return f"{type(error).__name__}: {error}"


def call(*args: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda function: function(*args, **options)


def function(name: str, use: Callable[[Any], Any]) -> Row:
    package, _, short = name.partition(".")
    return Row(lambda: getattr(getattr(mcore, package), short), use)


def error_row(cls: Any) -> Row:
    return Row(lambda: cls("a text"), lambda error: (type(error).__name__, str(error)))


def value_row(name: str) -> Row:
    return function(name, lambda value: value)


def state(model: torch.nn.Module) -> Any:
    marks = ("sequence_parallel", "keep_in_fp32")
    return {
        name: (one, [getattr(one, mark, None) for mark in marks])
        for name, one in [*model.named_parameters(), *model.named_buffers()]
    }


def run(model: torch.nn.Module) -> Any:
    return model(batch()), state(model)


def frozen(freeze: Callable[..., Any], *args: Any) -> Any:
    model = Layer()
    model.router = torch.nn.Linear(4, 2)
    return [p.requires_grad for p in freeze(model, *args)[0].parameters()]


def fill(function: Callable[..., Any]) -> torch.Tensor:
    return seeded(function, torch.empty(2, 3))


def buffers() -> Any:
    made = tensor.GlobalMemoryBuffer()
    made.get_tensor((2,), torch.float32, "kept", device="cpu").fill_(1)
    return made


def shape_of_request(made: Any) -> Any:
    return made.get_tensor((2, 3), torch.float32, "scratch", device="cpu").fill_(2)


def wrapped_norm(wrapped: Any) -> Any:
    return wrapped.unwrap()


def sharded_keys(entries: dict[str, Any]) -> Any:
    return {key: (entry.global_shape, entry.data) for key, entry in entries.items()}


def with_value_head(hook: Callable[..., Any]) -> Any:
    model = SimpleNamespace(output_layer=None)
    return [type(seeded(hook, model)[0].output_layer).__name__, model.output_layer.weight]


def views(function: Callable[..., Any]) -> Any:
    made = function(torch.arange(6.0).view(2, 3)[1:], False, True)
    return made, made._base is None


class Wrapper:
    def __init__(self, module: Any) -> None:
        self.module = module


PAIR = {"a": torch.ones(2), "b": [torch.ones(1, dtype=torch.bfloat16), 3]}
VERSIONS = ["get_torch_version", "get_te_version", "get_fa_version", "get_mamba_version"]
VERSIONS += ["get_causal_conv1d_version", "get_flashinfer_version"]
VERSIONS += ["get_emerging_optimizers_version", "check_mamba_sequence_packing_support"]
CHECKS = [f"is_{name}_min_version" for name in ("torch", "te", "fa", "mamba", "causal_conv1d")]
CHECKS += ["is_flashinfer_min_version", "is_emerging_optimizers_min_version"]
NO_PICKLE = dict.fromkeys(("pickle", "save", "spawn"), "save_sharded_state_dict")
NO_COPY = dict.fromkeys(("copy", "pickle", "save", "spawn"), "cannot be copied or pickled")

ROWS: dict[str, Row] = {
    **{f"versioning.{name}": function(f"versioning.{name}", text_of) for name in VERSIONS},
    **{f"versioning.{name}": function(f"versioning.{name}", call("2.0.0")) for name in CHECKS},
    "versioning.DeprecationInfo": Row(
        lambda: versioning.DeprecationInfo("1.0.0", None, "new", None, "old is deprecated"), tuple
    ),
    "versioning.ExperimentalNotEnabledError": error_row(versioning.ExperimentalNotEnabledError),
    "versioning.__version__": value_row("versioning.__version__"),
    "versioning.accepts_parameter": function("versioning.accepts_parameter", call(refusing, "y")),
    "versioning.clear_version_cache": function("versioning.clear_version_cache", call()),
    "versioning.create_updated_function_signature": function(
        "versioning.create_updated_function_signature",
        lambda function: str(function(refusing, verbose=True)),
    ),
    "versioning.deprecate_args": Row(
        lambda: [refusing, Refusing()],
        lambda pair: (text_of(pair[0], 1, 2), pair[1].size, text_of(type(pair[1]), 2)),
    ),
    "versioning.deprecate_inference_params": function(
        "versioning.deprecate_inference_params", call("context", None)
    ),
    "versioning.deprecated": Row(
        lambda: [marked, Marked(2)], lambda pair: (pair[0](1), pair[1].size)
    ),
    "versioning.experimental_api": Row(lambda: draft, call(1)),
    "versioning.experimental_cls": Row(
        make_gated, lambda one: (one.size, one.is_experimental, text_of(type(one)))
    ),
    "versioning.experimental_enabled": Row(
        lambda: versioning.experimental_enabled, lambda enabled: run_gated(enabled)
    ),
    "versioning.experimental_fn": Row(lambda: gated, lambda function: text_of(function, 1)),
    "versioning.get_deprecation": function("versioning.get_deprecation", call(marked)),
    "versioning.get_package_version": function(
        "versioning.get_package_version", lambda function: str(function("torch"))
    ),
    "versioning.internal_api": Row(lambda: internal, call(1)),
    "versioning.is_experimental_api": function("versioning.is_experimental_api", call(draft)),
    "versioning.is_experimental_enabled": function("versioning.is_experimental_enabled", call()),
    "versioning.is_internal_api": function("versioning.is_internal_api", call(internal)),
    "versioning.is_package_min_version": function(
        "versioning.is_package_min_version", call("torch", "2.0.0")
    ),
    "versioning.null_decorator": Row(
        lambda: versioning.null_decorator(1), lambda decorator: decorator(internal)(1)
    ),
    "versioning.set_experimental_flag": function("versioning.set_experimental_flag", call(False)),
    "tensor.DivisibilityError": error_row(tensor.DivisibilityError),
    "tensor.GlobalMemoryBuffer": Row(buffers, shape_of_request),
    "tensor.GlobalSymmetricMemoryBuffer": Row(
        lambda: tensor.GlobalSymmetricMemoryBuffer(1, None),
        lambda made: (made.available, made.maybe_get_tensor((2,), torch.float32)),
    ),
    "tensor.MakeViewlessTensor": Row(
        lambda: tensor.MakeViewlessTensor, lambda cls: views(lambda x, *_: cls.apply(x, True))
    ),
    "tensor.WrappedTensor": Row(lambda: tensor.WrappedTensor(batch()), wrapped_norm, NO_COPY),
    "tensor.__version__": value_row("tensor.__version__"),
    "tensor._kernel_make_viewless_tensor": function(
        "tensor._kernel_make_viewless_tensor", call(batch()[1:], False)
    ),
    "tensor.assert_viewless_tensor": function(
        "tensor.assert_viewless_tensor", lambda function: function(batch().clone())
    ),
    "tensor.calc_norm": function("tensor.calc_norm", call([batch()])),
    "tensor.current_device": function("tensor.current_device", lambda function: str(function())),
    "tensor.destroy_global_memory_buffer": function("tensor.destroy_global_memory_buffer", call()),
    "tensor.divide": function("tensor.divide", call(8, 2)),
    "tensor.ensure_divisibility": function(
        "tensor.ensure_divisibility", lambda function: text_of(function, 5, 2)
    ),
    "tensor.ensure_params_ready": function("tensor.ensure_params_ready", call([batch()])),
    "tensor.get_data_parallel_group_if_dtensor": function(
        "tensor.get_data_parallel_group_if_dtensor", call(batch())
    ),
    "tensor.get_full_tensor_if_necessary": function(
        "tensor.get_full_tensor_if_necessary", call(batch())
    ),
    "tensor.get_global_memory_buffer": Row(
        lambda: tensor.get_global_memory_buffer(), shape_of_request
    ),
    "tensor.is_dtensor": function("tensor.is_dtensor", call(batch())),
    "tensor.local_multi_tensor_applier": function(
        "tensor.local_multi_tensor_applier",
        lambda function: function(tensor.local_multi_tensor_l2_norm, None, [[batch()]], True),
    ),
    "tensor.local_multi_tensor_l2_norm": function(
        "tensor.local_multi_tensor_l2_norm", call(1, None, [[batch()]], False)
    ),
    "tensor.local_multi_tensor_scale": function(
        "tensor.local_multi_tensor_scale", lambda function: scaled(function)
    ),
    "tensor.make_viewless_tensor": function("tensor.make_viewless_tensor", views),
    "tensor.mark_param_shared": function("tensor.mark_param_shared", lambda f: f(batch())),
    "tensor.maybe_cat": function("tensor.maybe_cat", call(batch(), batch(), 1)),
    "tensor.param_is_not_shared": function("tensor.param_is_not_shared", call(batch())),
    "tensor.param_is_shared": function("tensor.param_is_shared", call(batch())),
    "tensor.resolve_data_parallel_group": function(
        "tensor.resolve_data_parallel_group", call([batch()])
    ),
    "tensor.resolve_device": function(
        "tensor.resolve_device", lambda function: str(function("cpu:0"))
    ),
    "tensor.round_up_to_nearest_multiple": function(
        "tensor.round_up_to_nearest_multiple", call(50257, 128)
    ),
    "tensor.safely_set_viewless_tensor_data": function(
        "tensor.safely_set_viewless_tensor_data", call(batch().clone(), batch())
    ),
    "tensor.to_local_if_dtensor": function("tensor.to_local_if_dtensor", call(batch())),
    "modules._BF16_TYPES": value_row("modules._BF16_TYPES"),
    "modules._FLOAT_TYPES": value_row("modules._FLOAT_TYPES"),
    "modules._HALF_TYPES": value_row("modules._HALF_TYPES"),
    "modules.AttributeNotFoundError": error_row(modules.AttributeNotFoundError),
    "modules.ConfigFieldError": error_row(modules.ConfigFieldError),
    "modules.GraphInputMismatch": error_row(modules.GraphInputMismatch),
    "modules.GraphStateError": error_row(modules.GraphStateError),
    "modules.ModelListError": error_row(modules.ModelListError),
    "modules.Float16Module": Row(
        lambda: modules.Float16Module(config(bf16=True), seeded(Layer)), run, input=batch
    ),
    "modules.GraphableMegatronModule": Row(lambda: seeded(GraphableLayer), run, input=batch),
    "modules.LinearForLastLayer": Row(
        lambda: seeded(modules.LinearForLastLayer, 4, 2, True, True), run, input=batch
    ),
    "modules.MegatronModule": Row(lambda: seeded(Layer), run, input=batch),
    "modules.MambaInferenceStateConfig": Row(
        lambda: modules.MambaInferenceStateConfig(["M"], (8, 4), (2, 16, 8), torch.bfloat16),
        lambda made: vars(made),
    ),
    "modules.ModelHook": Row(lambda: modules.ModelHook, str),
    "modules.ModelList": Row(lambda: modules.ModelList, str),
    "modules.ModelType": Row(lambda: modules.ModelType.encoder_or_decoder, lambda one: one.name),
    "modules.TransformerConfig": Row(
        lambda: config(bf16=True),
        lambda made: (made == config(bf16=True), made.params_dtype, fill(made.init_method)),
    ),
    "modules.__version__": value_row("modules.__version__"),
    "modules._ensure_model_list": function("modules._ensure_model_list", call("model")),
    "modules._freeze_parameter_if_present": function(
        "modules._freeze_parameter_if_present", call(torch.nn.Linear(1, 1), "weight")
    ),
    "modules._register_linear_for_last_layer_mapping": function(
        "modules._register_linear_for_last_layer_mapping", call()
    ),
    "modules.conversion_helper": function(
        "modules.conversion_helper", lambda function: function([1, (2,)], str)
    ),
    "modules.convert_module_to_dtype_except_fp32_marked": function(
        "modules.convert_module_to_dtype_except_fp32_marked",
        lambda function: state(function(seeded(Layer), torch.bfloat16)),
    ),
    "modules.create_value_head_hook": Row(
        lambda: modules.create_value_head_hook(4, False, bias=True), with_value_head
    ),
    "modules.ensure_model_list": function("modules.ensure_model_list", call("model")),
    "modules.find_megatron_fsdp": function("modules.find_megatron_fsdp", call(Wrapper(None))),
    "modules.float16_to_fp32": function("modules.float16_to_fp32", call(PAIR)),
    "modules.fp32_to_float16": function(
        "modules.fp32_to_float16", lambda function: function(PAIR, torch.Tensor.half)
    ),
    "modules.freeze_moe_router": function("modules.freeze_moe_router", frozen),
    "modules.freeze_parameters": function(
        "modules.freeze_parameters", lambda function: frozen(function, "linear.*")
    ),
    "modules.from_megatron_sharded_state_dict": function(
        "modules.from_megatron_sharded_state_dict", lambda function: text_of(function, {})
    ),
    "modules.get_attr_wrapped_model": function(
        "modules.get_attr_wrapped_model", call(Wrapper(SimpleNamespace(kind=2)), "kind")
    ),
    "modules.get_mamba_inference_state_config_from_model": function(
        "modules.get_mamba_inference_state_config_from_model", call(Wrapper(None))
    ),
    "modules.get_model_config": function(
        "modules.get_model_config", call(Wrapper(SimpleNamespace(config="c")))
    ),
    "modules.get_model_type": function(
        "modules.get_model_type", lambda function: text_of(function, Wrapper(None))
    ),
    "modules.get_model_xattn": function("modules.get_model_xattn", call(Wrapper(None))),
    "modules.init_method_normal": Row(lambda: modules.init_method_normal(0.1), fill),
    "modules.is_submodule": function(
        "modules.is_submodule", lambda function: function(torch.nn.Identity(), Layer())
    ),
    "modules.is_using_quantization_scales": function(
        "modules.is_using_quantization_scales", call(SimpleNamespace(fp8="hybrid"))
    ),
    "modules.keep_in_fp32": Row(
        lambda: modules.keep_in_fp32(seeded(torch.nn.Linear, 2, 2), "bias"),
        lambda made: state(
            modules.convert_module_to_dtype_except_fp32_marked(made, torch.bfloat16)
        ),
    ),
    "modules.make_value_model": Row(lambda: modules.make_value_model(4, False), with_value_head),
    "modules.mark_keep_in_fp32": function(
        "modules.mark_keep_in_fp32", lambda function: function(batch()).keep_in_fp32
    ),
    "modules.mup_scaled_init_method_normal": Row(
        lambda: modules.mup_scaled_init_method_normal(0.1, 2, 4.0), fill
    ),
    "modules.param_is_not_shared": function("modules.param_is_not_shared", call(batch())),
    "modules.register_model_wrapper": function(
        "modules.register_model_wrapper",
        lambda function: (function(Wrapper), modules.unwrap_model(Wrapper(3))),
    ),
    "modules.scaled_init_method_normal": Row(
        lambda: modules.scaled_init_method_normal(0.1, 2), fill
    ),
    "modules.sharded_state_dict_of": Row(
        lambda: modules.sharded_state_dict_of(seeded(Layer), "m."), sharded_keys, NO_PICKLE
    ),
    "modules.to_megatron_sharded_state_dict": function(
        "modules.to_megatron_sharded_state_dict", lambda function: text_of(function, {})
    ),
    "modules.untie_embeddings": function(
        "modules.untie_embeddings",
        lambda function: vars(
            function(SimpleNamespace(share_embeddings_and_output_weights=True))[0]
        ),
    ),
    "modules.unwrap_model": function("modules.unwrap_model", call(3)),
    "parallel.ProcessGroups": Row(
        lambda: parallel.ProcessGroups.from_sizes(), lambda made: (str(made), made.tp)
    ),
    "parallel.ProcessGroupCollection": Row(
        lambda: parallel.ProcessGroupCollection.from_sizes(), lambda made: (str(made), made.pp)
    ),
    "parallel.CudaRNGStatesTracker": Row(
        lambda: parallel.CudaRNGStatesTracker(), lambda made: sorted(made.get_states())
    ),
    "parallel.cp_zigzag_index": function("parallel.cp_zigzag_index", call(8, 2, 0)),
    "parallel.get_pg_size": function("parallel.get_pg_size", call()),
    "parallel.get_pg_rank": function("parallel.get_pg_rank", call()),
    "parallel.get_pg_src_rank": function("parallel.get_pg_src_rank", call()),
    "parallel.copy_to_tensor_model_parallel_region": function(
        "parallel.copy_to_tensor_model_parallel_region", call(batch())
    ),
    "parallel.make_sharded_tensor_for_checkpoint": Row(
        lambda: parallel.make_sharded_tensor_for_checkpoint(batch(), "key"),
        lambda shard: (shard.key, shard.global_shape, shard.data),
        NO_PICKLE,
    ),
}


def run_gated(enabled: Callable[[], Any]) -> Any:
    with enabled():
        return gated(1)


def scaled(function: Callable[..., Any]) -> torch.Tensor:
    flag, out = torch.zeros(1, dtype=torch.int), torch.empty(3, 4)
    function(1, flag, [[batch()], [out]], 2.0)
    return out


def plain(value: Any) -> Any:
    """Return a result as data that compares by value, also between processes."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.requires_grad, value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value) if isinstance(value, (Enum, torch.dtype, torch.device)) else repr(type(value))


def use(row: Row, made: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plain(row.use(made))


def use_all(made: dict[str, Any]) -> dict[str, Any]:
    """Return the result of each object, or the error of its use."""
    found = {}
    for name, one in made.items():
        try:
            found[name] = use(ROWS[name], one)
        except Exception:
            found[name] = traceback.format_exc()
    return found
