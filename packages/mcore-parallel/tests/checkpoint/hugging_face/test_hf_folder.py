"""Folders of Hugging Face from and into ranks, against files of the library safetensors."""

from __future__ import annotations

import json
import os
import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mcore.parallel.checkpoint import (
    CheckpointingException,
    DamagedCheckpointError,
    HFTensor,
    ShardedObject,
    load_hf,
    make_tp_sharded_tensor_for_checkpoint,
    save_hf,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.__main__ import main
from mcore.parallel.checkpoint.hugging_face.hf_folder import _parse_size
from rank_testing import run_ranks
from rank_testing.scripts import run_script

MAPPING = {
    "embedding": "wte",
    "qkv": HFTensor(("q", "k", "v"), ratio=(2, 1, 1), groups=2),
    "linear": HFTensor("conv", transpose=True),
    "norm": "ln",
    "half": "half",
    "step": "step",
    "extra": None,
}


def whole_state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "embedding": torch.randn(10, 6),
        "qkv": torch.randn(16, 6),
        "linear": torch.randn(8, 6),
        "norm": torch.randn(6),
        "half": torch.randn(5, 2).bfloat16(),
        "step": torch.tensor(seed + 3),
    }


def stored_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """The same in names of the folder, by plain torch."""
    own = whole_state(seed)
    heads = own["qkv"].view(2, 4, 2, 6)
    return {
        "wte": own["embedding"],
        "q": heads[:, :2].reshape(8, 6),
        "k": heads[:, 2].reshape(4, 6),
        "v": heads[:, 3].reshape(4, 6),
        "conv": own["linear"].T.contiguous(),
        "ln": own["norm"],
        "half": own["half"],
        "step": own["step"],
    }


def layout(name: str, seed: int) -> dict[str, Any]:
    """A rank's part of the state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    state: dict[str, Any] = whole_state(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    if name == "tp":
        axes = {"embedding": 0, "qkv": 0, "linear": 1}
        for key, axis in axes.items():
            part = state[key].chunk(size, axis)[rank].contiguous()
            state[key] = make_tp_sharded_tensor_for_checkpoint(
                part, key, axis, tp_group=dist.group.WORLD
            )
    else:
        shape = (size,) if name == "fsdp" else (2, size // 2)
        mesh = init_device_mesh("cpu", shape)
        for key in ("embedding", "qkv", "linear", "norm", "half"):
            placements: list[Any] = [Shard(0)]
            if name == "2d":
                other = Shard(1) if state[key].ndim > 1 else Replicate()
                placements = [Shard(0), other]
            state[key] = distribute_tensor(state[key], mesh, placements)
    return {**state, "extra": {"not": "a tensor"}}


def save_layout(name: str, folder: str, size: int | str) -> list[str]:
    save_hf(folder, layout(name, 0), MAPPING, config={"a": 1}, max_shard_size=size)
    return sorted(os.listdir(folder))


def load_layout(name: str, folder: str) -> Any:
    """What a load into other numbers makes of them, as whole tensors."""
    state = layout(name, 1)
    report = load_hf(folder, state, MAPPING)
    for key, value in layout(name, 0).items():
        loaded = state[key]
        if key == "extra":
            continue
        if hasattr(value, "to_local"):
            loaded, value = loaded.to_local(), value.to_local()
        elif hasattr(value, "data") and not isinstance(value, torch.Tensor):
            loaded, value = loaded.data, value.data
        assert torch.equal(loaded, value), key
    return report.loaded, report.left, report.missing, report.unused


LAYOUTS = [("tp", 2), ("fsdp", 2), ("fsdp", 4), ("2d", 4)]
FILES = [["wte", "conv"], ["q", "half", "step"], ["k", "v", "ln"]]


def use_layouts(root: str) -> dict[str, Any]:
    """The files that a save of each layout of these ranks writes, and the reports of a load."""
    names = [name for name, ranks in LAYOUTS if ranks == dist.get_world_size()]
    return {
        name: (
            save_layout(name, f"{root}/{name}-{dist.get_world_size()}/model", 400),
            load_layout(name, f"{root}/stored"),
        )
        for name in names
    }


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[dict[str, Any]]]]:
    """The folder of all folders, and what ranks found, by their number."""
    root = tmp_path_factory.mktemp("hf")
    (root / "stored").mkdir()
    stored = stored_state()
    for number, inside in enumerate(FILES):
        save_file({key: stored[key] for key in inside}, root / "stored" / f"{number}.safetensors")
    files = {key: f"{n}.safetensors" for n, inside in enumerate(FILES) for key in inside}
    write_index(root / "stored", files)
    return root, {ranks: run_ranks(use_layouts, ranks, str(root)) for ranks in (2, 4)}


@pytest.mark.parametrize(("name", "ranks"), LAYOUTS)
def test_any_layout_writes_the_same_folder(used: Any, name: str, ranks: int) -> None:
    root, found_by_ranks = used
    folder = root / f"{name}-{ranks}" / "model"
    first, _ = found_by_ranks[ranks][0][name]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert first == ["config.json", *files, "model.safetensors.index.json"]
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    found: dict[str, torch.Tensor] = {}
    for file in files:
        inside = load_file(folder / file)
        assert [index["weight_map"][key] for key in inside] == [file] * len(inside)
        assert sum(one.nbytes for one in inside.values()) <= 400
        found |= inside
    expected = stored_state()
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in expected.values())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value), key
    assert json.loads((folder / "config.json").read_text()) == {"a": 1}
    assert os.listdir(folder.parent) == ["model"]


@pytest.mark.parametrize(("name", "ranks"), LAYOUTS)
def test_folders_of_the_library_are_loaded_into_any_layout(
    used: Any, name: str, ranks: int
) -> None:
    reports = [found[name][1] for found in used[1][ranks]]
    assert len(reports) == ranks
    for loaded, left, missing, unused in reports:
        assert loaded["qkv"] == "q, k, v"
        assert (len(loaded), left, missing, unused) == (6, ["extra"], [], [])


def write_index(folder: Path, files: Any) -> None:
    text = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(text)


def refused_on_ranks(action: Callable[[], object]) -> str:
    try:
        action()
    except CheckpointingException as error:
        return f"{type(error).__name__} {error}"
    return "nothing was refused"


def refuse_saves(root: str) -> list[str]:
    """The errors of saves that only one rank sees as wrong."""
    rank, state = dist.get_rank(), layout("tp", 0)
    world = dist.group.WORLD

    def save(**more: Any) -> Callable[[], object]:
        arguments = {"state": state, "mapping": MAPPING, **more}
        return lambda: save_hf(f"{root}/model", **arguments)

    unknown = dict(MAPPING) if rank == 0 else {"embedding": "wte"}
    other = {**state, "norm": state["norm"] + rank}
    complex_ = {**state, "half": torch.zeros(2, dtype=torch.complex64)}
    meta = {**state, "half": torch.zeros(2, device="meta") if rank else torch.zeros(2)}
    hole = {**state, "linear": state["embedding"]} if rank else state
    quarter = make_tp_sharded_tensor_for_checkpoint(torch.zeros(3), "qkv", tp_group=world)
    odd = {**state, "qkv": quarter}
    names = {**MAPPING, "norm": "half"}
    return [
        refused_on_ranks(action)
        for action in (
            save(mapping=unknown),
            save(state=other),
            save(state=complex_),
            save(state=meta),
            save(state=hole),
            save(state=odd),
            save(mapping=names),
            save(mapping={**MAPPING, "extra": "extra"}),
            save(max_shard_size="5 elephants"),
            save(max_shard_size=0),
            save(config=f"{root}/none.json"),
            lambda: save_hf(f"{root}/{rank}/../model{rank}", state, MAPPING),
            lambda: save_hf(root, state, MAPPING),
        )
    ]


def test_bad_saves_are_refused_on_all_ranks_and_leave_nothing(tmp_path: Path) -> None:
    found = [
        [text.replace(f"save {tmp_path}/{rank}/../model{rank}", "save model") for text in texts]
        for rank, texts in enumerate(run_ranks(refuse_saves, 2, str(tmp_path)))
    ]
    assert found[0] == found[1]
    expected = [
        "no name for key 'qkv'",
        "different bytes under one key",
        "key 'half' has torch.complex64, which safetensors lacks",
        "key 'half' is on the meta device",
        "do not make up whole tensors",
        "key 'qkv' of shape (6,)",
        "'half'",
        "key 'extra' is no parameter, buffer or tensor",
        "max_shard_size is bytes or such as '5GB', got '5 elephants'",
        "got 0",
        "none.json",
        "different folders",
        "already exists",
    ]
    for text, part in zip(found[0], expected, strict=True):
        assert text.startswith("CheckpointingException cannot save ")
        assert part in text, text
    assert os.listdir(tmp_path) == []


def save_with_a_full_disk(root: str) -> str:
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    state = layout("tp", 0)
    text = refused_on_ranks(lambda: save_hf(f"{root}/model", state, MAPPING))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    dist.barrier()
    assert os.listdir(root) == []
    save_hf(f"{root}/model", state, MAPPING)
    return text


def test_a_rank_that_cannot_write_ends_the_save_everywhere(tmp_path: Path) -> None:
    found = run_ranks(save_with_a_full_disk, 2, str(tmp_path))
    assert found[0] == found[1]
    assert "rank 1: OSError: [Errno 27] File too large" in found[0]
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == stored_state().keys()


def refuse_loads(root: str) -> list[str]:
    rank = dist.get_rank()
    state = layout("tp", 1)

    def load(folder: str, **more: Any) -> Callable[[], object]:
        arguments = {"state": state, "mapping": MAPPING, **more}
        return lambda: load_hf(f"{root}/{folder}", **arguments)

    names = {**MAPPING, "norm": "other"} if rank else MAPPING
    wide = {**state, "half": torch.zeros(5, 2)}
    number = {**state, "half": torch.zeros(5, 2, dtype=torch.int16)}
    shape = {**state, "half": torch.zeros(5, 3, dtype=torch.bfloat16)}
    folders = sorted(one for one in os.listdir(root) if one.startswith("bad"))
    found = [
        refused_on_ranks(action)
        for action in (
            load("good", mapping=names),
            load("good", state=wide),
            load("good", state=number, cast=True),
            load("good", state=shape),
            load("none"),
            *(load(folder) for folder in folders),
        )
    ]
    for key, value in layout("tp", 1).items():  # nothing was filled
        if key != "extra":
            assert torch.equal(state[key].data, value.data), key
    loaded = load("good", state=wide, cast=True)()
    assert torch.equal(wide["half"], whole_state()["half"].float())
    more = {**state, "new": torch.ones(2)}
    report = load("good", state=more, strict=False, mapping={**MAPPING, "new": "x", "norm": None})()
    assert (report.missing, report.left, report.unused) == (["new"], ["norm", "extra"], ["ln"])
    assert "half" in loaded.loaded
    return found


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start], "data_offsets": [start, end]}


def test_bad_folders_and_targets_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def make(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    stored = stored_state()
    save_file(stored, make("good") / "model.safetensors")
    contents = {
        "bad0": struct.pack("<Q", 2**63) + b"{}",
        "bad1": header({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        "bad2": header({"a": entry(0, 8)}, bytes(4)),
        "bad3": b"12",
        "bad4": header({"a": entry(0, 8, "F9")}, bytes(8)),
        "bad5": b"",
    }
    for name, content in contents.items():
        (make(name) / "model.safetensors").write_bytes(content)
    save_file(stored, tmp_path / "outside.safetensors")
    write_index(make("bad6"), dict.fromkeys(stored, "../outside.safetensors"))
    write_index(make("bad7"), dict.fromkeys(stored, str(tmp_path / "outside.safetensors")))
    write_index(make("bad8"), dict.fromkeys(stored, "gone.safetensors"))
    write_index(make("bad9"), dict.fromkeys(stored, 5))
    write_index(make("bada"), {**dict.fromkeys(stored, "a.safetensors"), "lost": "a.safetensors"})
    save_file(stored, tmp_path / "bada" / "a.safetensors")
    (make("badb") / "model.safetensors.index.json").write_text("[" * 100_000)
    os.mkfifo(make("badc") / "model.safetensors")
    found = run_ranks(refuse_loads, 2, str(tmp_path))
    assert found[0] == found[1]
    expected = [
        "key 'norm' has no tensor 'other'",
        "'half': torch.bfloat16 to torch.float32",
        "key 'half'",
        "key 'half'",
        "No such file",
        "bad0/model.safetensors is unreadable (SafetensorError",
        "bad1/model.safetensors is unreadable (SafetensorError",
        "bad2/model.safetensors is unreadable (SafetensorError",
        "bad3/model.safetensors is unreadable (SafetensorError",
        "bad4/model.safetensors is unreadable (SafetensorError",
        "bad5/model.safetensors is unreadable (",
        "names '../outside.safetensors', outside of it",
        "outside.safetensors', outside of it",
        "gone.safetensors cannot be read",
        "model.safetensors.index.json is unreadable (TypeError",
        "bada/a.safetensors is unreadable (KeyError: 'lost'",
        "model.safetensors.index.json",
        "not a regular file",
    ]
    for text, part in zip(found[0], expected, strict=True):
        assert part in text, text
        assert "cannot load " in text
    assert all(text.startswith("DamagedCheckpointError") for text in found[0][4:])


def test_without_the_library_the_extra_is_named(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('safetensors', *sys.modules):\n"
        "    if name.partition('.')[0] == 'safetensors': sys.modules[name] = None\n"
        "import torch, mcore.parallel.checkpoint as ckpt\n"
        f"for call in (lambda: ckpt.save_hf({str(tmp_path / 'a')!r}, {{'w': torch.ones(1)}}),\n"
        f"             lambda: ckpt.load_hf({str(tmp_path)!r}, {{'w': torch.ones(1)}})):\n"
        "    try: call()\n"
        "    except ckpt.CheckpointingException as error: print(error)\n"
    )
    done = run_script(code)
    assert done.stdout.count('pip install "mcore-parallel[safetensors]"') == 2, done.stderr
    assert os.listdir(tmp_path) == []


def test_tied_tensors_are_stored_once_and_loaded(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5))
    model[1].weight = model[0].weight
    save_hf(tmp_path / "model", model)
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == {"0.weight", "1.bias"}
    expected = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    report = load_hf(tmp_path / "model", model)
    assert torch.equal(model[1].weight, expected)
    assert (report.missing, report.unused) == ([], [])


def test_sizes_are_as_in_the_libraries_of_hugging_face() -> None:
    assert [_parse_size(one) for one in ("5GB", "1.5 kb", "2MiB", "100", 7, "3B")] == [
        5 * 10**9,
        1500,
        2 << 20,
        100,
        7,
        3,
    ]
    for wrong in ("", "GB", "-1", "1e3", "5XB", None, True, "5BB"):
        with pytest.raises(CheckpointingException, match="max_shard_size"):
            _parse_size(wrong)  # type: ignore[arg-type]


def test_commands_convert_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2).bfloat16()}}
    save_sharded_state_dict({**state, "step": 3}, tmp_path / "step_3")
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    words = [
        "--prefix",
        "model.",
        "--config",
        str(tmp_path / "config.json"),
        "--max-shard-size",
        "1KB",
    ]
    folder, back = str(tmp_path / "hf"), str(tmp_path / "back")
    assert main(["to-hf", str(tmp_path / "step_3"), folder, *words]) == 0
    assert capsys.readouterr().out == f"{folder}: 2 tensors\n"
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == {"a", "b"}
    assert all(torch.equal(found[name], state["model"][name]) for name in found)
    assert main(["to-hf", str(tmp_path / "step_3"), str(tmp_path / "all")]) == 2
    assert "key 'step' is no parameter" in capsys.readouterr().err
    assert main(["from-hf", folder, back, "--prefix", "model."]) == 0
    assert main(["diff", str(tmp_path / "step_3"), back, "--keys", "model.a"]) == 0
    assert main(["from-hf", str(tmp_path), str(tmp_path / "none")]) == 2
    assert main(["to-hf", back, folder, "--prefix", "model."]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["to-hf", back, str(tmp_path / "none"), "--prefix", "modle."]) == 2
    assert "no key that starts with 'modle.'" in capsys.readouterr().err


def test_a_save_and_a_load_are_one_line_of_the_log_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {f"w{number}": torch.zeros(5000) for number in range(4)}
    with caplog.at_level("INFO", "mcore.parallel.checkpoint"):
        save_hf(tmp_path / "a", state, config={"a": 1}, max_shard_size="40KB")
        load_hf(tmp_path / "a", state)
    saved, loaded = [record.getMessage() for record in caplog.records]
    num_files = len(os.listdir(tmp_path / "a"))
    assert num_files == 4  # two of tensors, their index and the config
    assert re.fullmatch(
        rf"saved {tmp_path}/a: 0.00 GB in {num_files} files, .*describe .*decide .*write .*publish "
        r".* GB/s, training waited \d.*",
        saved,
    )
    assert re.fullmatch(
        rf"loaded {tmp_path}/a: 0.00 GB in 2 files, .*index .*plan .*read .* GB/s, .*", loaded
    )


def load_with_little_memory(folder: str, num_bytes: int) -> list[str]:
    """Load a file that one mapping of the library fits into memory, or two, or none."""
    found = []
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for share in (0.5, 1.5):
        most = pages * resource.getpagesize() + int(share * num_bytes)
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        try:
            load_hf(folder, {"w": torch.empty(num_bytes // 4, device="meta")})
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_lack_of_memory_to_map_a_file_is_no_damage(tmp_path: Path) -> None:
    size = 1 << 32
    entry = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    header = json.dumps(entry).encode()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + size)  # a hole
    [errors] = run_ranks(load_with_little_memory, 1, str(tmp_path), size, init=None)
    assert len(errors) == 2
    for error in errors:
        # The class depends on the release of safetensors: 0.5 raises OSError.
        assert error.startswith(("MemoryError: ", "OSError: ", "RuntimeError: "))
        assert "Cannot allocate memory" in error


def test_objects_need_a_none_in_the_mapping(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "x._extra_state": ShardedObject("x._extra_state", b"", (1,), (0,))}
    with pytest.raises(CheckpointingException, match=r"'x\._extra_state' is no parameter"):
        save_hf(tmp_path / "a", state)
    save_hf(tmp_path / "a", state, {"w": "w", "*._extra_state": None})
    with pytest.raises(DamagedCheckpointError, match="No such file"):
        load_hf(tmp_path / "b", state)
