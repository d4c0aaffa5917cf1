"""A default device that the tensors are not on changes no result: nothing is made there unasked."""

import inspect
import sys
from types import SimpleNamespace

import torch

import mcore.modules as package
from mcore.modules import (
    Float16Module,
    GraphableMegatronModule,
    LinearForLastLayer,
    MegatronModule,
    TransformerConfig,
)
from mcore.modules.value_head import _broadcast
from rank_testing import run_ranks

WITHOUT_TENSORS = {
    "AttributeNotFoundError", "ConfigFieldError", "GraphInputMismatch", "GraphStateError",
    "ModelHook", "ModelList", "ModelListError", "ModelType", "TransformerConfig", "__version__",
    "_BF16_TYPES",
    "_FLOAT_TYPES", "_HALF_TYPES", "from_megatron_sharded_state_dict",
    "to_megatron_sharded_state_dict",
}  # fmt: skip


class ModelOfDefaultDevice(MegatronModule):
    def __init__(self):
        super().__init__(SimpleNamespace(hidden_size=3))
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(2, 3, generator=generator, device="cpu")
        self.output_layer = torch.nn.Linear(3, 2, device="cpu")
        self.output_layer.weight.data.copy_(weight)
        self.output_layer.bias.data.zero_()
        self.router = torch.nn.Linear(3, 2, bias=False, device="cpu")
        self.router.weight.data.fill_(1)
        self.model_type = package.ModelType.encoder_or_decoder
        self.xattn_needed = True

    def forward(self, x):
        return self.output_layer(x) + self.router(x)


class Holder:
    held = None


def of_precision():
    x = torch.arange(6.0, device="cpu").view(2, 3)
    config = SimpleNamespace(bf16=True, fp16=False)
    wrapped = Float16Module(config, ModelOfDefaultDevice())
    yield wrapped(x)
    yield from (
        package.fp32_to_float16([x], torch.Tensor.half),
        package.float16_to_fp32([x.half()]),
    )
    yield package.conversion_helper((x, [x]), lambda value: value * 2)
    model = ModelOfDefaultDevice()
    package.keep_in_fp32(model, "router.weight")
    package.mark_keep_in_fp32(model.output_layer.bias)
    package.convert_module_to_dtype_except_fp32_marked(model, torch.bfloat16)
    yield list(model.parameters())


def of_models():
    model = ModelOfDefaultDevice()
    yield len(package.unwrap_model([model])), len(package._ensure_model_list(model))
    yield package.get_attr_wrapped_model(model, "xattn_needed"), package.get_model_xattn(model)
    yield package.get_model_type(model), package.get_model_config(model)
    yield package.is_using_quantization_scales(SimpleNamespace(fp8=False, fp4="e2m1"))
    yield package.ensure_model_list(model) == [model], package.find_megatron_fsdp(model)
    yield package.get_mamba_inference_state_config_from_model(SimpleNamespace())
    yield package.MambaInferenceStateConfig(["M"], (2,), (3,)).conv_states_shape
    yield (
        package.is_submodule(model.router, model),
        package.param_is_not_shared(model.router.weight),
    )
    package._freeze_parameter_if_present(model.router, "weight")
    yield model.router.weight.requires_grad
    package.freeze_moe_router([model])
    package.freeze_parameters(model, "output_layer.*")
    package.untie_embeddings(model)
    yield [weight.requires_grad for weight in model.parameters()]
    package.register_model_wrapper(Holder, "held")
    yield {
        key: part.data
        for key, part in package.sharded_state_dict_of(ModelOfDefaultDevice(), "m.").items()
    }


def of_initialisation():
    for init in (
        package.init_method_normal(0.1),
        package.scaled_init_method_normal(0.1, 2),
        package.mup_scaled_init_method_normal(0.1, 2, 2.0),
    ):
        torch.manual_seed(0)
        yield init(torch.empty(3, device="cpu"))
    head = LinearForLastLayer(3, 1, False, device="cpu", init_method=lambda w: w.fill_(2.0))
    yield head(torch.ones(2, 3, device="cpu"))
    package._register_linear_for_last_layer_mapping()
    for make in (package.create_value_head_hook(3, False), package.make_value_model(3, False)):
        (model,) = make([ModelOfDefaultDevice()])
        yield model.output_layer.weight.device, model.output_layer.weight.shape


def of_layers():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    config.bf16 = True
    layer = GraphableMegatronModule(config)
    layer.weight = torch.nn.Parameter(torch.ones(1, device="cpu"))
    yield layer.get_layer_static_inputs(4, 2)


def test_results_do_not_depend_on_the_default_device():
    for use in (of_precision, of_models, of_initialisation, of_layers):
        expected = list(use())
        with torch.device("meta"):  # what torch.set_default_device does
            found = list(use())
        assert repr(found) == repr(expected), use.__name__
        assert "meta" not in repr(found)


def test_every_public_function_is_called():
    source = inspect.getsource(sys.modules[__name__])
    uses = source[source.index("def of_precision") :]
    names = set(package.__all__) - WITHOUT_TENSORS
    assert [name for name in names if name not in uses] == []


def broadcast_while_a_graph_holds_the_weight():
    head = LinearForLastLayer(2, 1, False, tp_group=torch.distributed.group.WORLD)
    loss = (head.weight * head.weight).sum()
    _broadcast(head)
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)


def test_autograd_notices_that_a_weight_was_broadcast():
    assert run_ranks(broadcast_while_a_graph_holds_the_weight, 2) == [True, True]
