import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mcore.modules import (
    Float16Module,
    LinearForLastLayer,
    MegatronModule,
    _register_linear_for_last_layer_mapping,
    create_value_head_hook,
    make_value_model,
    register_model_wrapper,
    untie_embeddings,
)
from mcore.parallel import ProcessGroups, use_process_groups
from mcore.parallel.checkpoint import load_sharded_state_dict, save_sharded_state_dict
from rank_testing import run_ranks


class Model(torch.nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.output_layer = torch.nn.Linear(4, 10)
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.usefixtures("on_each_device")
def test_a_single_model_becomes_a_list_with_a_head():
    model = SimpleNamespace(output_layer=None)
    result = create_value_head_hook(4, False)(model)
    assert result == [model]
    head = model.output_layer
    assert type(head) is LinearForLastLayer
    assert (head.in_features, head.out_features, head.sequence_parallel) == (4, 1, False)


@pytest.mark.usefixtures("on_each_device")
def test_a_list_is_returned_as_the_same_object():
    chunks = [Model()]
    assert create_value_head_hook(4, True, 3)(chunks) is chunks
    assert chunks[0].output_layer.out_features == 3
    assert chunks[0].output_layer.weight.sequence_parallel is True


@pytest.mark.usefixtures("on_each_device")
def test_make_value_model_has_one_output():
    [model] = make_value_model(4, True)(Model())
    assert (model.output_layer.out_features, model.output_layer.sequence_parallel) == (1, True)


@pytest.mark.usefixtures("on_each_device")
def test_the_head_takes_device_dtype_and_mode_of_what_it_replaces():
    model = Model().bfloat16().eval()
    model.body.float()
    create_value_head_hook(4, False)(model)
    assert model.output_layer.weight.dtype is torch.bfloat16
    assert model.output_layer.training is False
    meta = Model()
    meta.output_layer = None
    create_value_head_hook(4, False)(meta.to("meta"))
    assert meta.output_layer.weight.is_meta


@pytest.mark.usefixtures("on_each_device")
def test_inside_a_float16_module():
    model = Model()
    wrapper = Float16Module(SimpleNamespace(bf16=True), model)
    assert create_value_head_hook(4, False)(wrapper) == [wrapper]
    assert type(model.output_layer) is LinearForLastLayer
    assert not hasattr(wrapper, "output_layer")


class Anything(torch.nn.Module):
    """A wrapper that no list knows."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Holder:
    def __init__(self, model):
        self.inner = model


class Forwards(torch.nn.Module):
    """A wrapper of which only attribute access tells that there is a model inside."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    "wrap", [Anything, torch.compile, lambda model: Anything(torch.compile(Anything(model)))]
)
def test_inside_wrappers_that_no_list_knows(wrap):
    model = Model()
    wrapper = wrap(model)
    create_value_head_hook(4, False)(wrapper)
    assert type(model.output_layer) is LinearForLastLayer
    assert [name for name, _ in wrapper.named_modules() if name.endswith("output_layer")] == [
        name for name, part in wrapper.named_modules() if part is model.output_layer
    ]


@pytest.mark.usefixtures("on_each_device")
def test_wrappers_whose_attribute_has_another_name():
    model = Model()
    with pytest.raises(ValueError, match=r"Forwards only forwards 'output_layer'"):
        create_value_head_hook(4, False)(Forwards(model))
    assert type(model.output_layer) is torch.nn.Linear
    register_model_wrapper(Holder, attr="inner")
    create_value_head_hook(4, False)(Holder(model))
    assert type(model.output_layer) is LinearForLastLayer


@pytest.mark.usefixtures("on_each_device")
def test_a_model_with_a_child_called_module_gets_the_head_itself():
    model = Model(module=torch.nn.Linear(1, 1))
    create_value_head_hook(4, False)(model)
    assert type(model.output_layer) is LinearForLastLayer


@pytest.mark.usefixtures("on_each_device")
def test_options_of_the_head():
    model = Model().bfloat16()
    fill = lambda tensor: tensor.fill_(0.5)  # noqa: E731
    options = {"bias": True, "dropout": 0.25, "fp32_head": True, "init_method": fill}
    make_value_model(4, False, **options)(model)
    head = model.output_layer
    assert (head.dropout.p, head.bias.tolist()) == (0.25, [0.0])
    assert head.weight.tolist() == [[0.5] * 4]
    assert head.weight.dtype is torch.float32
    wrapper = Float16Module(SimpleNamespace(bf16=True), model)
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    assert {p.dtype for p in wrapper.bfloat16().module.output_layer.parameters()} == {torch.float32}
    assert model.body.weight.dtype is torch.bfloat16
    with pytest.raises(ValueError, match="dropout"):
        make_value_model(4, False, dropout=2.0)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tensor_model_parallel_size": 2}, "2 tensor-parallel ranks"),
        ({"pipeline_model_parallel_size": 2}, "2 pipeline stages"),
    ],
)
def test_a_layout_of_the_configuration_without_its_groups_is_refused(fields, text):
    model = Model(config=SimpleNamespace(**fields), share_embeddings_and_output_weights=True)
    with pytest.raises(ValueError, match=text):
        create_value_head_hook(4, False)(Anything(model))
    assert type(model.output_layer) is torch.nn.Linear
    assert model.share_embeddings_and_output_weights


def test_a_head_that_is_not_broadcast_needs_no_group():
    model = Model(config=SimpleNamespace(tensor_model_parallel_size=2))
    create_value_head_hook(4, False, broadcast_init=False)(model)
    assert type(model.output_layer) is LinearForLastLayer


@pytest.mark.usefixtures("on_each_device")
def test_post_process_says_enough_about_the_pipeline():
    config = SimpleNamespace(pipeline_model_parallel_size=2)
    chunks = [Model(config=config, post_process=flag) for flag in (False, True)]
    for chunk in chunks:
        create_value_head_hook(4, False)(chunk)
    assert [type(chunk.output_layer).__name__ for chunk in chunks] == [
        "Linear",
        "LinearForLastLayer",
    ]


def tied(on_last_stage):
    """A stage with embeddings tied to the output layer, as Megatron's models have it."""
    model = Model(share_embeddings_and_output_weights=True)
    if on_last_stage:
        model.output_layer.weight.shared = model.output_layer.weight.shared_embedding = True
        return model
    model.embedding = torch.nn.Module()
    model.embedding.word_embeddings = torch.nn.Embedding(10, 4)
    model.embedding.word_embeddings.weight.tensor_model_parallel = True
    model.output_layer.weight = None
    return model


@pytest.mark.usefixtures("on_each_device")
def test_embeddings_are_untied_on_every_stage():
    chunks = [Anything(tied(on_last_stage=False)), tied(on_last_stage=True)]
    assert untie_embeddings(chunks) is chunks
    first, last = chunks[0].module, chunks[1]
    assert not first.share_embeddings_and_output_weights
    assert not last.share_embeddings_and_output_weights
    embedding = first.embedding.word_embeddings.weight
    assert torch.equal(first.output_layer.weight, embedding)
    assert first.output_layer.weight is not embedding
    assert first.output_layer.weight.tensor_model_parallel is True
    assert "output_layer.weight" in dict(first.named_parameters())
    assert vars(last.output_layer.weight) == {}
    with pytest.raises(TypeError, match="DataParallel"):
        untie_embeddings(torch.nn.DataParallel(tied(on_last_stage=True)))


def test_the_copy_of_a_frozen_embedding_is_frozen():
    model = tied(on_last_stage=False)
    model.embedding.word_embeddings.weight.requires_grad_(False)
    assert not untie_embeddings(model)[0].output_layer.weight.requires_grad


class Tying(torch.nn.Module):
    """Ties its layers whenever it is asked to, while its configuration says so, as transformers."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.wte, self.lm_head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
        self.tie_weights()

    def get_input_embeddings(self):
        return self.wte

    def get_output_embeddings(self):
        return self.lm_head

    def tie_weights(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight


@pytest.mark.usefixtures("on_each_device")
def test_models_that_tie_by_their_configuration_stay_untied():
    model = Tying()
    create_value_head_hook(4, False, output_layer_path="lm_head")(Anything(model))
    model.tie_weights()
    assert (model.lm_head.weight.shape, model.wte.weight.shape) == ((1, 4), (10, 4))
    model = Tying()
    untie_embeddings(model)
    model.tie_weights()
    assert model.lm_head.weight is not model.wte.weight
    assert torch.equal(model.lm_head.weight, model.wte.weight)


class TiedStage(MegatronModule):
    """Saves its output layer as the embedding's replica while both are tied, as Megatron does."""

    def __init__(self, groups):
        super().__init__(SimpleNamespace(pipeline_model_parallel_size=2))
        self.pg_collection = groups
        self.share_embeddings_and_output_weights = True
        if groups.rank("pp") == 0:
            self.embedding = torch.nn.Embedding(10, 4)
        else:
            self.output_layer = torch.nn.Linear(4, 10, bias=False)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.share_embeddings_and_output_weights and "output_layer.weight" in entries:
            entry = entries.pop("output_layer.weight")
            entry.key, entry.replica_id = "embedding.weight", (1, 0, 0)
            entries["output_layer.weight"] = entry
        return entries


def save_and_load(folder, how):
    """A tied model of two stages, made a value model, saved and loaded into another."""
    torch.manual_seed(dist.get_rank())
    groups = ProcessGroups.from_sizes(pp=2)

    def value_model():
        stage = TiedStage(groups)
        if how == "default":
            stage.pg_collection = None
        with use_process_groups(groups if how == "default" else None):
            make_value_model(4, False)(stage)
        stage.pg_collection = groups
        return stage

    stages = [value_model() for _ in range(2)]
    save_sharded_state_dict(stages[0].sharded_state_dict(), folder)
    loaded = load_sharded_state_dict(stages[1].sharded_state_dict(), folder)
    stages[1].load_state_dict(loaded)
    saved = stages[0].state_dict()
    same = all(torch.equal(saved[key], value) for key, value in stages[1].state_dict().items())
    return same, {key: tuple(value.shape) for key, value in saved.items()}


def save_and_load_both(folder):
    return [save_and_load(f"{folder}/{how}", how) for how in ("default", "chunk")]


def test_a_tied_model_of_two_stages_becomes_a_value_model_that_saves_its_head(tmp_path):
    assert run_ranks(save_and_load_both, 2, str(tmp_path)) == [
        [(True, {"embedding.weight": (10, 4)})] * 2,
        [(True, {"output_layer.weight": (1, 4)})] * 2,
    ]


def head_of_a_group_without_rank_zero():
    torch.manual_seed(dist.get_rank())
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    model = Model()
    create_value_head_hook(4, False, tp_group=group)(model)
    return model.output_layer.weight.detach()


def test_the_head_comes_from_the_first_rank_of_its_group_not_of_the_world():
    _, first, second = run_ranks(head_of_a_group_without_rank_zero, 3)
    assert torch.equal(first, second)


@pytest.mark.usefixtures("on_each_device")
def test_a_dotted_path():
    model = SimpleNamespace(language_model=Model())
    hook = create_value_head_hook(4, False, output_layer_path="language_model.output_layer")
    hook(model)
    assert type(model.language_model.output_layer) is LinearForLastLayer
    with pytest.raises(ValueError, match=r"does not exist: SimpleNamespace has no 'vision'"):
        create_value_head_hook(4, False, output_layer_path="vision.output_layer")(model)


@pytest.mark.usefixtures("on_each_device")
def test_a_path_that_leads_nowhere_is_refused_and_changes_nothing():
    model = Model(share_embeddings_and_output_weights=True)
    with pytest.raises(ValueError, match=r"Model has no 'lm_head'.*\['body', 'output_layer'\]"):
        create_value_head_hook(4, False, output_layer_path="lm_head")(Anything(model))
    assert model.share_embeddings_and_output_weights
    assert type(model.output_layer) is torch.nn.Linear


def make_llama():
    transformers = pytest.importorskip("transformers")  # absent in isolated installations
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "vocab_size": 8}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.xdist_group("transformers")
@pytest.mark.usefixtures("on_each_device")
def test_logits_of_a_model_of_transformers_are_a_tensor():
    model = make_llama()
    create_value_head_hook(4, False, output_layer_path="lm_head")(model)
    values = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    hidden = model.model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state
    assert torch.equal(values, hidden @ model.lm_head.weight.T)


@pytest.mark.parametrize("post_process", [True, False])
def test_post_process_decides_without_a_group(post_process):
    model = SimpleNamespace(post_process=post_process)
    create_value_head_hook(4, False)(model)
    assert hasattr(model, "output_layer") is post_process


@pytest.mark.parametrize(
    ("count", "options"), [(2, {}), (0, {}), (2, {"vp_size": 2})], ids=["two", "none", "no group"]
)
def test_a_number_of_chunks_that_does_not_fit_is_refused(count, options):
    chunks = [SimpleNamespace() for _ in range(count)]
    with pytest.raises(ValueError, match=rf"^Model list length is {count}, but 1"):
        create_value_head_hook(4, False, **options)(chunks)
    assert all(not vars(chunk) for chunk in chunks)


@pytest.mark.parametrize("sizes", [(0, 1), (4, 0), (4.5, 1), (4, "1")])
def test_sizes_are_checked_when_the_hook_is_made(sizes):
    with pytest.raises(ValueError, match=r"_size is (0|4.5|'1')\. Pass a whole number >= 1"):
        create_value_head_hook(sizes[0], False, sizes[1])


@pytest.mark.usefixtures("on_each_device")
def test_wrapping_for_data_parallelism_comes_later():
    chunks = [torch.nn.DataParallel(Model())]
    with pytest.raises(TypeError, match="DataParallel"):
        create_value_head_hook(4, False)(chunks)
    assert type(chunks[0].module.output_layer) is torch.nn.Linear


def heads(how, vp_size):
    world = dist.group.WORLD
    collection = SimpleNamespace(pp=world, tp=None)
    options = {"pp_group": world} if how == "argument" else {}
    if how == "collection":
        options["pg_collection"] = collection
    own = {"pg_collection": collection} if how == "chunk" else {}
    chunks = [SimpleNamespace(**own) for _ in range(vp_size or 1)]
    create_value_head_hook(4, False, vp_size=vp_size, **options)(chunks)
    return [hasattr(chunk, "output_layer") for chunk in chunks]


def wrong_number_of_chunks():
    hook = create_value_head_hook(4, False, pp_group=dist.group.WORLD, vp_size=2)
    try:
        hook([SimpleNamespace()])
    except ValueError as error:
        return str(error)
    return None


def head_weights(broadcast, how):
    torch.manual_seed(dist.get_rank())
    world = dist.group.WORLD
    options = {"tp_group": world} if how == "argument" else {}
    if how == "collection":
        options["pg_collection"] = SimpleNamespace(tp=world, pp=None)
    own = {"pg_collection": SimpleNamespace(tp=world, pp=None)} if how == "chunk" else {}
    model = Model(**own)
    create_value_head_hook(4, True, broadcast_init=broadcast, **options)(model)
    assert model.output_layer.tp_group is world
    return model.output_layer.weight.detach()


def meta_head(broadcast):
    model = Model().to("meta")
    hook = create_value_head_hook(4, True, tp_group=dist.group.WORLD, broadcast_init=broadcast)
    try:
        return hook(model)[0].output_layer.weight.is_meta
    except ValueError as error:
        return str(error)


HOWS = ("argument", "collection", "chunk")


def all_hooks():
    return {
        "stages": [heads(how, None) for how in HOWS],
        "chunks": heads("argument", 2),
        "too few": wrong_number_of_chunks(),
        "equal": [head_weights(True, how) for how in HOWS],
        "unequal": head_weights(False, "argument"),
        "meta": [meta_head(broadcast) for broadcast in (False, True)],
    }


@pytest.fixture(scope="module")
def two_ranks():
    """What the hooks did on each of two ranks."""
    return run_ranks(all_hooks, 2)


def test_only_the_last_chunk_of_the_last_pipeline_rank_gets_a_head(two_ranks):
    assert [rank["stages"] for rank in two_ranks] == [[[False]] * 3, [[True]] * 3]
    assert [rank["chunks"] for rank in two_ranks] == [[False, False], [False, True]]
    for rank in two_ranks:
        assert rank["too few"].startswith("Model list length is 1, but 2")


def test_ranks_with_different_seeds_get_one_head(two_ranks):
    first, second = two_ranks
    for ours, theirs in zip(first["equal"], second["equal"], strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(first["unequal"], second["unequal"])


def test_a_build_on_the_meta_device_must_not_broadcast(two_ranks):
    for rank in two_ranks:
        is_meta, text = rank["meta"]
        assert is_meta is True
        assert "broadcast_init=False" in text


def test_an_imported_bridge_is_told_too(monkeypatch):
    told = []
    mapping = SimpleNamespace(register_module_type=lambda *arguments: told.append(arguments))
    name = "megatron.bridge.models.conversion.param_mapping"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(AutoMapping=mapping))
    _register_linear_for_last_layer_mapping()
    assert told == [("LinearForLastLayer", "replicated")]
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    _register_linear_for_last_layer_mapping()
