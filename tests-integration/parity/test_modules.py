"""mcore.modules on configurations and models of megatron-core, against its own functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import mcore.modules as ours
from mcore.modules.wrappers import is_data_parallel_wrapper
from mcore.parallel.checkpoint import load_sharded_state_dict, save_sharded_state_dict

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True, "params_dtype": torch.bfloat16},
    "fp16": {"fp16": True, "params_dtype": torch.float16},
    "fp8": {"bf16": True, "fp8": "hybrid"},
    "graphs": {"bf16": True, "cuda_graph_impl": "local"},
}
PRECISIONS = [name for name, options in OPTIONS.items() if options.get("bf16", "fp16" in options)]


def peer(module: str) -> Any:
    """A module of megatron-core, imported where a test needs it."""
    return import_module(f"megatron.core.{module}")


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    """A process group of this process alone, known to megatron-core, which wants a CUDA device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        peer("parallel_state").initialize_model_parallel(create_gloo_process_groups=False)
        yield
        peer("parallel_state").destroy_model_parallel()
        dist.destroy_process_group()


def config_of(name: str) -> Any:
    """A configuration of megatron-core."""
    return peer("transformer").TransformerConfig(**SIZES, **OPTIONS[name])


class Trunk(torch.nn.Module):
    """Keeps the dtype it was called with; carries what the lookups look for."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = config
        self.model_type = "a model type"
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen = x.dtype
        return self.linear(x) * self.scale, ids


def leaves(value: Any) -> list[Any]:
    """What tuples and lists hold, flat, with the types on the way."""
    if isinstance(value, (list, tuple)):
        return [type(value), *(leaf for item in value for leaf in leaves(item))]
    return [value]


def assert_equal(mine: Any, theirs: Any) -> None:
    """Same structure, dtypes and values."""
    for one, other in zip(leaves(mine), leaves(theirs), strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("name", PRECISIONS)
def test_float16_module_on_their_config(name: str) -> None:
    config = config_of(name)
    mine = ours.Float16Module(config, Trunk(config))
    theirs = peer("transformer.module").Float16Module(config, Trunk(config))
    inputs = (torch.randn(3, 8), torch.arange(3))
    assert_equal(mine(*inputs), theirs(*inputs))
    assert_equal(mine(*inputs, fp32_output=False), theirs(*inputs, fp32_output=False))
    assert mine.module.seen == theirs.module.seen
    state, expected = mine.state_dict(), theirs.state_dict()
    assert list(state) == list(expected)
    assert_equal(list(state.values()), list(expected.values()))


@pytest.mark.parametrize("name", PRECISIONS)
def test_our_wrapper_holds_their_modules(name: str) -> None:
    config = config_of(name)

    class TheirLayer(peer("transformer.module").MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config)
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x)
            return out

    layer = TheirLayer()
    mine = ours.Float16Module(config, copy.deepcopy(layer))
    theirs = peer("transformer.module").Float16Module(config, layer)
    x = torch.randn(2, 8)
    assert torch.equal(mine(x), theirs(x))
    assert mine.sharded_state_dict().keys() == theirs.sharded_state_dict().keys()
    saved = mine.state_dict_for_save_checkpoint(prefix="a.")
    assert list(saved) == list(theirs.state_dict_for_save_checkpoint(prefix="a."))


NESTED = (torch.randn(3), [torch.ones(2, dtype=torch.int64), None, 3, "text"], (torch.ones(1),))


@pytest.mark.parametrize("convertor", [torch.Tensor.half, torch.Tensor.bfloat16])
def test_casts_of_tuples_and_lists(convertor: Callable[[Any], Any]) -> None:
    low = ours.fp32_to_float16(NESTED, convertor)
    assert_equal(low, peer("transformer.module").fp32_to_float16(NESTED, convertor))
    assert_equal(ours.float16_to_fp32(low), peer("transformer.module").float16_to_fp32(low))
    assert_equal(
        ours.conversion_helper(NESTED, str),
        peer("transformer.module").conversion_helper(NESTED, str),
    )


def plain(config: Any) -> tuple[Any, Any]:
    trunk = Trunk(config)
    return trunk, trunk


def their_wrapper(config: Any) -> tuple[Any, Any]:
    trunk = Trunk(config)
    return peer("transformer.module").Float16Module(config, trunk), trunk


def our_wrapper(config: Any) -> tuple[Any, Any]:
    trunk = Trunk(config)
    return ours.Float16Module(config, trunk), trunk


def their_data_parallel(config: Any) -> tuple[Any, Any]:
    wrapper, trunk = their_wrapper(config)
    options = peer("distributed").DistributedDataParallelConfig()
    return peer("distributed").DistributedDataParallel(config, options, wrapper), trunk


def torch_data_parallel(config: Any) -> tuple[Any, Any]:
    wrapper, trunk = their_wrapper(config)
    return torch.nn.parallel.DistributedDataParallel(wrapper), trunk


MODELS = [plain, their_wrapper, our_wrapper, their_data_parallel, torch_data_parallel]


@pytest.mark.parametrize("make", MODELS)
def test_lookups_find_what_theirs_find(make: Callable[[Any], tuple[Any, Any]]) -> None:
    model, trunk = make(config_of("bf16"))
    for function in ("get_model_config", "get_model_type", "get_model_xattn"):
        assert getattr(ours, function)(model) is getattr(peer("utils"), function)(model)
    for attr in ("linear", "seen", "config", "scale"):
        for options in ({}, {"return_model_obj": True}):
            mine = ours.get_attr_wrapped_model(model, attr, **options)
            theirs = peer("utils").get_attr_wrapped_model(model, attr, **options)
            assert mine is theirs
    with pytest.raises(RuntimeError):
        peer("utils").get_attr_wrapped_model(model, "nowhere")
    with pytest.raises(RuntimeError):
        ours.get_attr_wrapped_model(model, "nowhere")
    for module, strict in ((trunk.linear, True), (trunk, True), (trunk, False), (model, False)):
        for parent in (model, trunk):
            assert ours.is_submodule(module, parent, strict) is peer("utils").is_submodule(
                module, parent, strict
            )


@pytest.mark.parametrize("make", MODELS)
def test_unwrapping_with_their_classes(make: Callable[[Any], tuple[Any, Any]]) -> None:
    model, trunk = make(config_of("bf16"))
    classes = (
        peer("distributed").DistributedDataParallel,
        torch.nn.parallel.DistributedDataParallel,
        peer("transformer.module").Float16Module,
        ours.Float16Module,
    )
    assert ours.unwrap_model(model, classes) is peer("utils").unwrap_model(model, classes) is trunk
    assert ours.unwrap_model([model, trunk], classes) == peer("utils").unwrap_model(
        [model, trunk], classes
    )
    for cls in classes[:3]:
        ours.register_model_wrapper(cls)
    assert ours.unwrap_model(model) is trunk
    if make in (plain, their_wrapper, their_data_parallel):  # theirs know no other wrapper
        assert peer("utils").unwrap_model(model) is trunk


WRAPPERS = [
    ("distributed", "DistributedDataParallel"),
    ("distributed", "TorchFullyShardedDataParallel"),
    ("distributed.fsdp.mcore_fsdp_adapter", "FullyShardedDataParallel"),
    ("distributed.fsdp.src.megatron_fsdp.megatron_fsdp", "MegatronFSDP"),
    ("transformer.module", "Float16Module"),
]


@pytest.mark.parametrize(("module", "name"), WRAPPERS)
def test_their_wrappers_are_known_by_name(module: str, name: str) -> None:
    """Their constructors need a GPU, so each wrapper gets its model without them."""
    kind = getattr(peer(module), name)
    wrapper = kind.__new__(kind)
    torch.nn.Module.__init__(wrapper)
    trunk = wrapper.module = Trunk(config_of("bf16"))
    group = peer("parallel_state").get_data_parallel_group(with_context_parallel=True)
    holder = ours.MegatronModule(None)
    holder.inner = wrapper
    assert ours.unwrap_model(wrapper) is trunk
    assert is_data_parallel_wrapper(wrapper) is (name != "Float16Module")
    assert ours.get_attr_wrapped_model(wrapper, "model_type") == "a model type"
    assert ours.get_model_config(wrapper) is trunk.config
    assert (ours.find_megatron_fsdp(wrapper) is wrapper) is (name == "MegatronFSDP")
    keys = sorted(trunk.state_dict())
    assert sorted(ours.sharded_state_dict_of(wrapper, metadata={"dp_cp_group": group})) == keys
    found = holder.sharded_state_dict(metadata={"dp_cp_group": group})
    assert sorted(found) == [f"inner.{key}" for key in keys]


def tree(kind: Any, config: Any) -> Any:
    """Layers some of which have the mark."""
    torch.manual_seed(0)
    root = kind(config)
    for number in range(3):
        layer = kind(config)
        layer.linear = torch.nn.Linear(2, 3)
        layer.norm = torch.nn.BatchNorm1d(3)
        if number != 1:
            layer.linear.is_first_microbatch = False
        root.add_module(f"layer{number}", layer)
    return root


@pytest.mark.parametrize("name", OPTIONS)
def test_first_microbatch_marks(name: str) -> None:
    found = []
    for kind in (ours.MegatronModule, peer("transformer.module").MegatronModule):
        root = tree(kind, config_of(name))
        root.set_is_first_microbatch()
        found.append([getattr(m, "is_first_microbatch", None) for m in root.modules()])
    assert found[0] == found[1]
    assert (True in found[0]) is (name == "fp8")


@pytest.mark.parametrize("offsets", [(), ((0, 1, 4),)])
def test_sharded_state_dicts_describe_the_same(offsets: tuple[tuple[int, int, int], ...]) -> None:
    group = peer("parallel_state").get_data_parallel_group(with_context_parallel=True)
    described = []
    for kind in (ours.MegatronModule, peer("transformer.module").MegatronModule):
        sharded = tree(kind, config_of("fp32")).sharded_state_dict(
            "m.", offsets, {"dp_cp_group": group}
        )
        described.append(
            {
                key: (
                    entry.key,
                    entry.dtype,
                    entry.local_shape,
                    entry.global_shape,
                    entry.global_offset,
                    entry.axis_fragmentations,
                    entry.replica_id,
                    entry.prepend_axis_num,
                )
                for key, entry in sharded.items()
            }
        )
    assert described[0] == described[1]
    assert "m.layer0.linear.weight" in described[0]


def test_a_mixed_model_is_saved_and_loaded_by_theirs(tmp_path: Path) -> None:
    """Their checkpoint holds the tensors of our modules, and our loader those of their modules."""
    checkpointing = peer("dist_checkpointing")
    group = peer("parallel_state").get_data_parallel_group(with_context_parallel=True)

    def mixed(seed: int) -> Any:
        torch.manual_seed(seed)
        root = peer("transformer.module").MegatronModule(config_of("fp32"))
        for name, kind in (("ours", ours.MegatronModule), ("theirs", type(root))):
            child = kind(config_of("fp32"))
            child.linear = torch.nn.Linear(2, 3)
            root.add_module(name, child)
        return root

    def described(model: Any) -> dict[str, Any]:
        entries: dict[str, Any] = model.sharded_state_dict(metadata={"dp_cp_group": group})
        assert len({type(entry) for entry in entries.values()}) == 2
        return entries

    first = mixed(0)
    saved = ours.to_megatron_sharded_state_dict(described(first))
    common, *_ = peer("dist_checkpointing.utils").extract_matching_values(
        saved, lambda value: not isinstance(value, checkpointing.ShardedTensor)
    )
    assert common == {}
    (tmp_path / "theirs").mkdir()
    checkpointing.save(saved, str(tmp_path / "theirs"))
    second = mixed(1)
    target = ours.to_megatron_sharded_state_dict(described(second))
    second.load_state_dict(checkpointing.load(target, str(tmp_path / "theirs")))
    save_sharded_state_dict(
        ours.from_megatron_sharded_state_dict(described(first)), tmp_path / "ours"
    )
    third = mixed(2)
    target = ours.from_megatron_sharded_state_dict(described(third))
    third.load_state_dict(load_sharded_state_dict(target, tmp_path / "ours"))
    for loaded in (second, third):
        for name, value in first.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value)


def their_gpt(**stage: bool) -> Any:
    """A small GPT of megatron-core with experts, whose embedding and output layer are tied."""
    config = peer("transformer").TransformerConfig(
        **SIZES,
        num_moe_experts=2,
        add_bias_linear=False,
        moe_router_load_balancing_type="none",
        use_cpu_initialization=True,
    )
    specs = peer("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(num_experts=2)
    return peer("models.gpt").GPTModel(
        config, specs, 16, 8, share_embeddings_and_output_weights=True, **stage
    )


def test_their_models_become_value_models_with_frozen_routers_through_their_wrapper() -> None:
    gpt = their_gpt()
    config = config_of("bf16")
    wrapper = peer("transformer.module").Float16Module(config, gpt)
    ours.make_value_model(8, False)(wrapper)
    ours.freeze_moe_router(wrapper)
    assert isinstance(gpt.output_layer, ours.LinearForLastLayer)
    assert not hasattr(wrapper, "output_layer")
    assert gpt.share_embeddings_and_output_weights is False
    frozen = [name for name, value in gpt.named_parameters() if not value.requires_grad]
    assert frozen == [f"decoder.layers.{number}.mlp.router.weight" for number in range(2)]
    group = peer("parallel_state").get_data_parallel_group(with_context_parallel=True)
    saved = gpt.sharded_state_dict(metadata={"dp_cp_group": group})["output_layer.weight"]
    assert (saved.key, saved.global_shape) == ("output_layer.weight", (1, 8))


def test_entries_of_their_factories_are_put_together_by_theirs(tmp_path: Path) -> None:
    """A gated layer is one parameter, and two entries in the file."""
    checkpointing, lists = peer("dist_checkpointing"), peer("dist_checkpointing.dict_utils")
    mapping = peer("dist_checkpointing.mapping")

    def split(data: torch.Tensor) -> dict[str, Any]:
        def build(key: str, data: Any, replica_id: Any, _: Any) -> list[Any]:
            make = checkpointing.ShardedTensor.from_rank_offsets
            return [make(f"{key}{i}", part) for i, part in enumerate(data.chunk(2))]

        return {
            "gated": mapping.ShardedTensorFactory("gated", data, build, torch.cat),
            "plain": checkpointing.ShardedTensor.from_rank_offsets("plain", data[0].clone()),
        }

    whole = torch.arange(12.0).reshape(4, 3)
    save_sharded_state_dict(ours.from_megatron_sharded_state_dict(split(whole)), tmp_path / "a")
    target = split(torch.zeros(4, 3))
    loaded = load_sharded_state_dict(ours.from_megatron_sharded_state_dict(target), tmp_path / "a")
    factories, _ = lists.extract_matching_values(
        target, lambda one: isinstance(one, mapping.ShardedTensorFactory)
    )
    merged = mapping.apply_factory_merges(loaded, factories)
    assert torch.equal(merged["gated"], whole)
    assert torch.equal(merged["plain"], whole[0])


def test_their_tied_embeddings_are_untied() -> None:
    gpt = their_gpt()
    embedding = gpt.embedding.word_embeddings.weight
    assert gpt.shared_embedding_or_output_weight() is embedding
    ours.untie_embeddings(gpt)
    output = gpt.output_layer.weight
    assert output is not embedding
    hidden = torch.randn(3, 1, 8)
    logits, _ = gpt.output_layer(hidden)
    assert torch.equal(logits, hidden @ embedding.T)


def test_graphable_layers_on_their_config() -> None:
    class Layer(ours.GraphableMegatronModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(8, 8).bfloat16()

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(hidden_states)
            return out

    eager, graphed = Layer(config_of("bf16")), Layer(config_of("graphs"))
    inputs = eager.get_layer_static_inputs(4, 2)
    assert inputs["hidden_states"].shape == (4, 2, 8)
    assert inputs["hidden_states"].dtype is torch.bfloat16
    for _ in range(5):
        for layer in (eager, graphed):
            layer(**inputs).sum().backward()
    assert graphed.cudagraph_manager.num_graphs == 1
    assert not hasattr(eager, "cudagraph_manager")
    assert_equal(eager.linear.weight.grad, graphed.linear.weight.grad)


@pytest.mark.parametrize(("sigma", "layers", "multiplier"), [(0.02, 8, 2.0), (1.0, 3, 1.0)])
def test_initial_weights_are_the_same_numbers(sigma: float, layers: int, multiplier: float) -> None:
    pairs = [
        (ours.init_method_normal(sigma), peer("utils").init_method_normal(sigma)),
        (
            ours.scaled_init_method_normal(sigma, layers, multiplier),
            peer("utils").scaled_init_method_normal(sigma, layers, multiplier),
        ),
    ]
    for mine, theirs in pairs:
        drawn = []
        for fill in (mine, theirs):
            torch.manual_seed(5)
            drawn.append(fill(torch.empty(7, 3)))
        assert torch.equal(*drawn)


class Decoder(torch.nn.Module):
    """Mamba layers between others."""

    def __init__(self, layers: list[str]) -> None:
        super().__init__()
        self.layer_type_list = layers

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (4, 8), (2, 4, 8)


@pytest.mark.parametrize("layers", [["M", "*", "-", "M"], ["*", "-"]])
def test_mamba_state_shapes(layers: list[str]) -> None:
    model = torch.nn.Module()
    model.config = config_of("fp32")
    model.decoder = Decoder(layers)
    wrapped = SimpleNamespace(module=model)
    mine = ours.get_mamba_inference_state_config_from_model(wrapped)
    theirs = peer("utils").get_mamba_inference_state_config_from_model(wrapped)
    assert (mine is None) is (theirs is None)
    if mine is not None:
        for field in ("layer_type_list", "mamba_conv_states_shape", "mamba_ssm_states_shape"):
            assert getattr(mine, field) == getattr(theirs, field)
