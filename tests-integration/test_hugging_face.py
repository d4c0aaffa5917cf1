"""Folders of Hugging Face: transformers reads them with the logits of the source, and back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mcore.parallel.checkpoint import (
    CheckpointingException,
    gpt2_names,
    llama_names,
    load_hf,
    make_tp_sharded_tensor_for_checkpoint,
    save_hf,
)
from rank_testing import preload, run_ranks

# Ranks would import them for seconds.
preload(
    "mcore.parallel.checkpoint",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)

pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it
TOKENS = torch.arange(12).view(2, 6) * 7


def make_model(kind: str, seed: int = 0) -> Any:
    """A model with random values everywhere, also in biases and norms."""
    import transformers  # here: not in each worker that lists the tests

    torch.manual_seed(seed)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=98, n_embd=24, n_layer=2, n_head=4, n_positions=16
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=98, hidden_size=24, intermediate_size=36, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, attention_bias=True,
                tie_word_embeddings=kind == "tied_llama",
            )
        )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def read_logits(kind: str, folder: Path) -> torch.Tensor:
    import transformers

    model = transformers.GPT2LMHeadModel if kind == "gpt2" else transformers.LlamaForCausalLM
    with torch.no_grad():
        return model.from_pretrained(folder).eval()(TOKENS).logits


def expected_logits(kind: str) -> torch.Tensor:
    with torch.no_grad():
        return make_model(kind)(TOKENS).logits


def shard_model(model: Any, layout: str) -> None:
    """Shard a model of transformers as torch does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    size = dist.get_world_size()
    sizes = {"fsdp": (size, 1), "tp": (1, size), "2d": (2, size // 2)}[layout]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    if layout != "fsdp":
        columns, rows = (
            ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
            ("o_proj", "down_proj"),
        )
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                plan: dict[str, Any] = {
                    one: ColwiseParallel() for one in columns if hasattr(part, one)
                }
                plan |= {one: RowwiseParallel() for one in rows if hasattr(part, one)}
                parallelize_module(part, mesh["tp"], plan)
    if layout != "tp":
        blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
        for block in blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


def save_sharded(kind: str, layout: str, folder: str) -> None:
    model = make_model(kind)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    shard_model(model, layout)
    save_hf(folder, model, config=config, max_shard_size="20KB")


def load_sharded(kind: str, layout: str, folder: str) -> Any:
    model = make_model(kind, seed=1)
    shard_model(model, layout)
    report = load_hf(folder, model)
    again = f"{folder}-{layout}"
    save_hf(again, model, config=f"{folder}/config.json")
    return len(report.loaded), report.missing, report.unused


CASES = [
    ("llama", "fsdp", 2),
    ("tied_llama", "tp", 2),
    ("gpt2", "fsdp", 4),
    ("llama", "2d", 4),
]


@pytest.mark.parametrize(("kind", "layout", "ranks"), CASES)
def test_sharded_models_of_transformers_come_back(
    kind: str, layout: str, ranks: int, tmp_path: Path
) -> None:
    run_ranks(save_sharded, ranks, kind, layout, str(tmp_path / "model"))
    files = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(files["weight_map"].values())) > 2
    assert ("lm_head.weight" in files["weight_map"]) == (kind == "llama")
    assert torch.equal(read_logits(kind, tmp_path / "model"), expected_logits(kind))

    written = tmp_path / "written"
    make_model(kind).save_pretrained(written, max_shard_size="20KB")
    assert len(list(written.glob("*.safetensors"))) > 2
    [first, *others] = run_ranks(load_sharded, ranks, kind, layout, str(written))
    assert first == (len(files["weight_map"]), [], [])
    assert others == [first] * len(others)
    assert torch.equal(read_logits(kind, Path(f"{written}-{layout}")), expected_logits(kind))


def megatron_state(kind: str, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The values of a model of transformers in the fused tensors of megatron-core's GPTModel."""
    model = make_model(kind, seed)
    given = {name: one.detach() for name, one in model.state_dict().items()}
    is_gpt2 = kind == "gpt2"
    layer_name = "transformer.h" if is_gpt2 else "model.layers"
    state = {}
    if is_gpt2:
        state["embedding.word_embeddings.weight"] = given["transformer.wte.weight"]
        state["embedding.position_embeddings.weight"] = given["transformer.wpe.weight"]
        for end in ("weight", "bias"):
            state[f"decoder.final_layernorm.{end}"] = given[f"transformer.ln_f.{end}"]
    else:
        state["embedding.word_embeddings.weight"] = given["model.embed_tokens.weight"]
        state["decoder.final_layernorm.weight"] = given["model.norm.weight"]
        state["output_layer.weight"] = given["lm_head.weight"]
    for number in range(2):
        own, name = f"decoder.layers.{number}", f"{layer_name}.{number}"
        for end in ("weight", "bias"):
            if is_gpt2:
                fused = given[f"{name}.attn.c_attn.{end}"]
                heads = [one.unflatten(-1, (4, 6)) for one in fused.chunk(3, dim=-1)]
                qkv = torch.stack(heads, dim=-2).flatten(-3).T  # per head
                state[f"{own}.self_attention.linear_qkv.layer_norm_{end}"] = given[
                    f"{name}.ln_1.{end}"
                ]
                state[f"{own}.mlp.linear_fc1.layer_norm_{end}"] = given[f"{name}.ln_2.{end}"]
                for key, other in (
                    ("self_attention.linear_proj", "attn.c_proj"),
                    ("mlp.linear_fc1", "mlp.c_fc"),
                    ("mlp.linear_fc2", "mlp.c_proj"),
                ):
                    state[f"{own}.{key}.{end}"] = given[f"{name}.{other}.{end}"].T
            else:
                parts = [given[f"{name}.self_attn.{one}_proj.{end}"] for one in "qkv"]
                groups = [one.unflatten(0, (2, -1)) for one in parts]  # of two key-value heads
                qkv = torch.cat(groups, dim=1).flatten(0, 1)
            state[f"{own}.self_attention.linear_qkv.{end}"] = qkv
        if not is_gpt2:
            attention = "self_attention.linear_proj"
            for end in ("weight", "bias"):
                state[f"{own}.{attention}.{end}"] = given[f"{name}.self_attn.o_proj.{end}"]
            gate_up = [given[f"{name}.mlp.{one}_proj.weight"] for one in ("gate", "up")]
            state[f"{own}.mlp.linear_fc1.weight"] = torch.cat(gate_up)
            state[f"{own}.mlp.linear_fc2.weight"] = given[f"{name}.mlp.down_proj.weight"]
            state[f"{own}.input_layernorm.weight"] = given[f"{name}.input_layernorm.weight"]
            norm = given[f"{name}.post_attention_layernorm.weight"]
            state[f"{own}.pre_mlp_layernorm.weight"] = norm
    return state, model.config.to_dict()


def split_over_ranks(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A tensor-parallel rank's part, by columns and by rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    split: dict[str, Any] = {}
    for key, value in state.items():
        is_row = "linear_proj.weight" in key or "linear_fc2.weight" in key
        is_column = any(one in key for one in ("linear_qkv", "linear_fc1", "word_emb", "output"))
        if is_row or (is_column and "layer_norm" not in key):
            part = value.chunk(size, int(is_row))[rank].clone()
            split[key] = make_tp_sharded_tensor_for_checkpoint(
                part, key, int(is_row), tp_group=dist.group.WORLD
            )
        else:
            split[key] = value.clone()
    return split


def convert_tensor_parallel(kind: str, folder: str) -> Any:
    state, config = megatron_state(kind)
    names = gpt2_names(config) if kind == "gpt2" else llama_names(config)
    own = split_over_ranks(state)
    save_hf(folder, own, names, config=config, max_shard_size=10_000)
    other = split_over_ranks(megatron_state(kind, seed=1)[0])
    report = load_hf(folder, other, names)
    for key in report.loaded:
        assert torch.equal(other[key].data, own[key].data), key
    return sorted(report.loaded) == sorted(own.keys() - {*report.left}), report.unused


@pytest.mark.parametrize(("kind", "ranks"), [("llama", 2), ("gpt2", 2), ("tied_llama", 2)])
def test_tensor_parallel_megatron_models_are_read_by_transformers(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    found = run_ranks(convert_tensor_parallel, ranks, kind, str(tmp_path / "model"))
    assert found == [(True, [])] * ranks
    assert torch.equal(read_logits(kind, tmp_path / "model"), expected_logits(kind))
    names = {name for file in tmp_path.glob("model/*.safetensors") for name in load_file(file)}
    assert ("lm_head.weight" in names) == (kind == "llama")


def test_names_that_transformers_changes_in_its_files_are_hinted_at(tmp_path: Path) -> None:
    """The hint named strict=False only. It has a mapping that works."""
    import transformers

    sizes = {"vocab_size": 98, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 1}
    config = transformers.GPTNeoXConfig(**sizes, num_attention_heads=4)
    model, other = transformers.GPTNeoXForCausalLM(config), transformers.GPTNeoXForCausalLM(config)
    model.save_pretrained(tmp_path / "renamed")
    with pytest.raises(CheckpointingException, match="unused name closest") as caught:
        load_hf(tmp_path / "renamed", other)
    found = re.search(r"mapping=lambda key: (\{.*?\})\.get", str(caught.value))
    assert found
    assert eval(found[1]) == {"lm_head.weight": "embed_out.weight"}
    load_hf(tmp_path / "renamed", other, lambda key: eval(found[1]).get(key, key))
    with torch.no_grad():
        assert torch.equal(model.eval()(TOKENS).logits, other.eval()(TOKENS).logits)

    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2
        )
    )
    experts.save_pretrained(tmp_path / "split")
    with pytest.raises(CheckpointingException, match="HFTensor for parts") as caught:
        load_hf(tmp_path / "split", experts)
    layer = "model.layers.0"
    assert (
        f"lambda key: {{'{layer}.mlp.gate.weight': '{layer}.block_sparse_moe.gate.weight'}}"
        in str(caught.value)
    )
    assert f"'{layer}.mlp.experts.gate_up_proj'" in str(caught.value)
