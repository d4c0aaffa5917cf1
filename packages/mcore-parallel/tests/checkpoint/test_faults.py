"""Whatever goes wrong on one rank, all ranks raise one error that names it, and nothing changes."""

from __future__ import annotations

import os
import pickle
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore.parallel.checkpoint import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedSavePlanner,
    ShardedTensor,
    is_complete_checkpoint,
    list_checkpoints,
    load_sharded_state_dict,
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.files.pieces import checksum_of
from rank_testing import run_ranks


class Unpicklable:
    """Raises an error that cannot be pickled itself."""

    def __reduce__(self) -> Any:
        error = RuntimeError("refuses to be pickled")
        error.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
        raise error


def replicated(key: str, value: float, replica_id: int, size: int = 4) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(
        key, torch.full((size,), value), replica_id=(0, 0, replica_id)
    )


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except CheckpointingException as error:
        return str(error)
    return "no error"


def broken_saves(folder: str) -> dict[str, str]:
    from torch import distributed as dist

    rank, root = dist.get_rank(), Path(folder)
    good = {"w": replicated("w", 1.0, rank), "n": 1}
    save_sharded_state_dict(good, root / "step_1")
    file = root / "file"
    if rank == 0:
        file.write_text("")
    dist.barrier()
    uneven = torch.ones(4 + rank) if rank else torch.ones(4)
    cases: dict[str, tuple[Any, Path]] = {
        "two writers": ({"norm": replicated("norm", 1.0, 0)}, root / "a"),
        "no writer": ({"norm": replicated("norm", 1.0, rank + 1)}, root / "b"),
        "exists": (good, root / "step_1"),
        "below a file": (good, file / "deep" / "step_2"),
        "is a file": (good, file),
        "other paths": (good, root / f"step_{rank}_of_2"),
        "raises on rank 1": (
            {**good, "bad": ShardedObject("bad", Unpicklable() if rank else 1, (2,), (rank,))},
            root / "c",
        ),
        "no dict on rank 1": ([] if rank else good, root / "d"),
        "no data": (
            {"w": replicated("w", 1.0, rank).without_data()},
            root / "e",
        ),
        "meta": (
            {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2, device="meta"), (0, rank, 2))},
            root / "f",
        ),
        "shapes": (
            {"w": ShardedTensor.from_rank_offsets("w", uneven, (0, rank, 2))},
            root / "g",
        ),
        "module": ({"net": torch.nn.Linear(1, 1)}, root / "h"),
        "clash": ({"w": replicated("a.b", 1.0, rank), "a": {"b": 1}}, root / "i"),
        "unfinished name": (good, root / ".x.incomplete-0123456789abcdef"),
    }
    texts = {name: error_of(save_sharded_state_dict, *case) for name, case in cases.items()}
    with_handle = error_of(save_sharded_state_dict, *cases["exists"], async_=True)
    assert with_handle == texts["exists"]
    handle = save_sharded_state_dict(*cases["two writers"], async_=True)
    assert handle is not None
    texts["two writers, async"] = error_of(handle.result)
    dist.barrier()
    return texts


EXPECTED_IN_SAVES = {
    "two writers": ["'norm'", "ranks 0-1 write the same shard"],
    "two writers, async": ["'norm'", "ranks 0-1 write the same shard"],
    "no writer": ["'norm'", "0 elements", "has 4", "ranks 0-1", "replica_id 0"],
    "exists": ["step_1 already exists"],
    "below a file": ["rank 0", "NotADirectoryError", "file"],
    "is a file": ["file already exists"],
    "other paths": ["different paths", "step_0_of_2 on rank 0", "step_1_of_2 on rank 1"],
    "raises on rank 1": ["rank 1", "'bad/shard_1_2'", "refuses to be pickled"],
    "no dict on rank 1": ["rank 1", "must be a dict, got list"],
    "no data": ["rank 0", "'w' has no data"],
    "meta": ["ranks 0-1", "'w' is on the meta device"],
    "shapes": ["'w'", "global_shape differs", "(8,) on rank 0", "(10,) on rank 1"],
    "module": ["'net' is a Linear", "state_dict()"],
    "clash": ["'a.b' names a common and a tensor entry"],
    "unfinished name": ["name of an unfinished checkpoint"],
}


def test_broken_saves_raise_on_all_ranks_and_leave_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(broken_saves, 2, str(tmp_path), timeout_s=300)
    assert first.keys() == EXPECTED_IN_SAVES.keys()
    for name, words in EXPECTED_IN_SAVES.items():
        assert [word for word in words if word not in first[name]] == [], first[name]
        if name != "other paths":
            assert first[name] == second[name]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "step_1"]
    loaded = load_sharded_state_dict({"w": replicated("w", 0.0, 0), "n": 0}, tmp_path / "step_1")
    assert torch.equal(loaded["w"], torch.ones(4))


def full_disk_on_rank_1(folder: str) -> str:
    from torch import distributed as dist

    shard = make_tp_sharded_tensor_for_checkpoint(
        torch.ones(10_000), "w", tp_group=dist.group.WORLD
    )
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return error_of(save_sharded_state_dict, {"w": shard}, Path(folder) / "step_1")


def test_rank_that_cannot_write_stops_all(tmp_path: Path) -> None:
    first, second = run_ranks(full_disk_on_rank_1, 2, str(tmp_path))
    assert first == second
    assert "__1_0.distcp cannot be written at key 'w' (OSError: [Errno 27] File too" in first
    assert list(tmp_path.iterdir()) == []


def disagreeing_common_state(folder: str) -> tuple[list[str], Any]:
    import warnings

    from torch import distributed as dist

    rank = dist.get_rank()
    common = {"lr": 0.1 + rank, "same": [1, 2], "opt": {"step": torch.tensor(rank)}}
    state = {"w": replicated("w", 1.0, rank), **common}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_sharded_state_dict(state, Path(folder) / "step_1")
    texts = [str(w.message) for w in caught if "differ" in str(w.message)]
    loaded = load_sharded_state_dict(
        {"lr": 0, "same": None, "opt": {"step": None}}, Path(folder) / "step_1"
    )
    return texts, loaded


def test_disagreeing_common_state_is_warned_of_and_the_first_rank_wins(tmp_path: Path) -> None:
    (texts, loaded), (other_texts, other) = run_ranks(disagreeing_common_state, 2, str(tmp_path))
    assert len(texts) == 1
    assert other_texts == []
    assert "(2 keys)" in texts[0]
    assert "- lr\n" in texts[0]
    assert "- opt.step" in texts[0]
    assert "same" not in texts[0]
    assert loaded == other == {"lr": 0.1, "same": [1, 2], "opt": {"step": torch.tensor(0)}}


def make_good(root: Path, manifest: bool = True) -> Path:
    path = root / "step_1"
    state = {
        "w": make_sharded_tensor_for_checkpoint(torch.arange(4000.0), "w"),
        "v": make_sharded_tensor_for_checkpoint(torch.arange(8), "v"),
        "o": ShardedObject("o", {"a": 1}, (1,), (0,)),
        "n": 3,
    }
    if manifest:
        save_sharded_state_dict(state, path)
    else:
        dcp.save(state, checkpoint_id=path, planner=ShardedSavePlanner(), no_dist=True)
    return path


def targets() -> dict[str, Any]:
    return {
        "v": make_sharded_tensor_for_checkpoint(torch.full((8,), -1), "v"),
        "w": make_sharded_tensor_for_checkpoint(torch.full((4000,), -1.0), "w"),
        "o": ShardedObject("o", None, (1,), (0,)),
        "n": 0,
    }


def assert_refused(state: dict[str, Any], path: Path, *words: str, **options: Any) -> None:
    options.setdefault("verify", "before")
    before = {name: v.data.clone() for name, v in state.items() if isinstance(v, ShardedTensor)}
    with pytest.raises(CheckpointingException) as caught:
        load_sharded_state_dict(state, path, **options)
    assert [word for word in (str(path), *words) if word not in str(caught.value)] == []
    for name, content in before.items():
        assert torch.equal(state[name].data, content), name


@pytest.mark.parametrize("manifest", [True, False])
def test_missing_and_truncated_files_are_refused_before_anything_is_read(
    tmp_path: Path, manifest: bool
) -> None:
    path = make_good(tmp_path, manifest)
    payload = path / "__0_0.distcp"
    whole = payload.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 0):
        payload.write_bytes(whole[:size])
        assert_refused(targets(), path, str(payload), f"has {size} bytes", "Take another")
        assert not is_complete_checkpoint(path)
    payload.unlink()
    assert_refused(targets(), path, str(payload), "No such file")
    payload.write_bytes(whole)
    index = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(index[: len(index) // 2])
    reason = "it is truncated" if manifest else "cannot be read"
    assert_refused(targets(), path, ".metadata", reason)
    assert not is_complete_checkpoint(path)
    (path / ".metadata").unlink()
    reason = "No such file" if manifest else "is not a checkpoint"
    assert_refused(targets(), path, reason, ".metadata")
    assert list_checkpoints(tmp_path) == []


def test_a_file_that_grew_is_refused(tmp_path: Path) -> None:
    path = make_good(tmp_path)
    with (path / "__0_0.distcp").open("ab") as stream:
        stream.write(b"x")
    assert_refused(targets(), path, "__0_0.distcp", "was changed")


@pytest.mark.parametrize("key", ["w", "v", "o/shard_0_1", "n"])
def test_a_flipped_bit_is_refused_before_anything_is_read(tmp_path: Path, key: str) -> None:
    path = make_good(tmp_path)
    with (path / ".metadata").open("rb") as stream:
        places = pickle.load(stream).storage_data
    [place] = [place for index, place in places.items() if index.fqn == key]
    payload = path / place.relative_path
    content = bytearray(payload.read_bytes())
    content[place.offset + place.length // 2] ^= 4
    payload.write_bytes(content)
    assert_refused(targets(), path, str(payload), f"key {key!r} has changed")


def test_broken_manifest_and_foreign_directories_are_refused(tmp_path: Path) -> None:
    path = make_good(tmp_path)
    (path / "manifest.json").write_text("{")
    assert_refused(targets(), path, "manifest.json has changed", "it begins with b'{'")
    (path / "manifest.json").write_text('{"format": "mcore sharded checkpoint", "version": 99}')
    assert_refused(targets(), path, "another version")
    (path / "manifest.json").write_text('{"format": "mcore sharded checkpoint", "version": 2}')
    assert_refused(targets(), path, "manifest.json has version 2, but")
    start = b'{"format": "mcore sharded checkpoint", "version": 3, "content": [\n{"files": 5}\n'
    end = f'], "checksum": "{checksum_of(start)}"}}\n'.encode()
    (path / "manifest.json").write_bytes(start + end)
    assert_refused(targets(), path, "manifest.json contradicts itself")
    (path / "manifest.json").unlink()
    assert_refused(targets(), path, "manifest.json is missing", "nothing of this checkpoint can")
    assert not is_complete_checkpoint(path)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.pt").write_bytes(b"x")
    assert_refused(targets(), foreign, "is not a checkpoint")
    assert_refused(targets(), tmp_path / "none", "does not exist")
    assert_refused(targets(), foreign / "model.pt", "cannot be read")
    shutil.copytree(path, tmp_path / ".x.incomplete-0123456789abcdef")
    assert_refused(
        targets(), tmp_path / ".x.incomplete-0123456789abcdef", "leftover of an unfinished save"
    )


def test_what_does_not_fit_is_refused_with_all_keys(tmp_path: Path) -> None:
    path = make_good(tmp_path)
    state = targets() | {
        "w": make_sharded_tensor_for_checkpoint(torch.full((4000,), -1), "w"),
        "v": make_sharded_tensor_for_checkpoint(torch.full((9,), -1), "v"),
        "o": ShardedObject("o", None, (2,), (0,)),
        "new": 1,
        "t": make_sharded_tensor_for_checkpoint(torch.ones(1), "o/shard_0_1"),
        "u": {"n": make_sharded_tensor_for_checkpoint(torch.ones(1), "n")},
    }
    assert_refused(
        state,
        path,
        "key 'w': the checkpoint has dtype torch.float32, expected torch.int64",
        "key 'v': the checkpoint has global shape (8,), expected (9,)",
        "key 'o/shard_0_2' is missing",
        "key 'new' is missing in the checkpoint. Pass strict=False",
        "key 'o/shard_0_1': the checkpoint has an object, not a tensor",
        "key 'n': the checkpoint has an object, not a tensor",
    )
    state = {"n": make_sharded_tensor_for_checkpoint(torch.ones(1), "none")}
    assert_refused(state, path, "key 'none' is missing")


def test_empty_and_wrong_state_dicts(tmp_path: Path) -> None:
    save_sharded_state_dict({}, tmp_path / "a")
    assert is_complete_checkpoint(tmp_path / "a")
    assert load_sharded_state_dict({"deep": {}}, tmp_path / "a") == {"deep": {}}
    with pytest.raises(CheckpointingException, match="must be a dict, got list"):
        load_sharded_state_dict([], tmp_path / "a")  # type: ignore[arg-type]


def test_plain_tensors_are_filled_in_place(tmp_path: Path) -> None:
    save_sharded_state_dict({"t": torch.arange(3.0), "n": torch.tensor(2)}, tmp_path / "a")
    local = torch.zeros(3, dtype=torch.float64)
    loaded = load_sharded_state_dict({"t": local, "n": None}, tmp_path / "a")
    assert loaded["t"] is local
    assert local.dtype == torch.float64
    assert local.tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(loaded["n"], torch.tensor(2))
    weight = torch.nn.Parameter(torch.zeros(3))
    load_sharded_state_dict({"t": weight, "n": None}, tmp_path / "a")
    assert weight.tolist() == [0.0, 1.0, 2.0]
    on_meta = load_sharded_state_dict({"t": torch.zeros(3, device="meta"), "n": 0}, tmp_path / "a")
    assert on_meta["t"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(CheckpointingException, match=r"key 't': .* \(3,\), expected \(4,\)"):
        load_sharded_state_dict({"t": torch.zeros(4)}, tmp_path / "a")


def test_not_strict_keeps_what_the_checkpoint_lacks(tmp_path: Path) -> None:
    path = make_good(tmp_path)
    state = targets() | {
        "new": 5,
        "fresh": make_sharded_tensor_for_checkpoint(torch.full((2,), 7.0), "fresh"),
        "bare": replicated("bare", 1.0, 0).without_data(),
        "other": ShardedObject("other", "mine", (1,), (0,)),
    }
    loaded = load_sharded_state_dict(state, path, strict=False)
    assert loaded["new"] == 5
    assert loaded["other"] == "mine"
    assert loaded["fresh"] is state["fresh"].data
    assert loaded["bare"] is None
    assert torch.equal(loaded["fresh"], torch.full((2,), 7.0))
    assert torch.equal(loaded["w"], torch.arange(4000.0))


def test_floating_point_tensors_are_cast_with_one_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_good(tmp_path)
    target = make_sharded_tensor_for_checkpoint(torch.zeros(4000, dtype=torch.bfloat16), "w")
    with caplog.at_level("INFO", "mcore.parallel.checkpoint"):
        loaded = load_sharded_state_dict({"w": target}, path)
    assert torch.equal(loaded["w"], torch.arange(4000.0).bfloat16())
    [record] = [one for one in caplog.records if "change their dtype" in one.getMessage()]
    assert record.levelname == "INFO"
    assert "'w' from torch.float32 to torch.bfloat16" in record.getMessage()


@pytest.mark.parametrize(("rows", "expected"), [(6, [0.0, 1, 2, 3, 0, 0]), (2, [0.0, 1])])
def test_another_global_shape_reads_what_overlaps(
    tmp_path: Path, rows: int, expected: list[float]
) -> None:
    save_sharded_state_dict(
        {"w": make_sharded_tensor_for_checkpoint(torch.arange(4.0), "w")}, tmp_path / "a"
    )
    target = make_sharded_tensor_for_checkpoint(
        torch.full((rows,), 9.0), "w", allow_shape_mismatch=True
    )
    loaded = load_sharded_state_dict({"w": target}, tmp_path / "a")
    assert loaded["w"].tolist() == expected
    other_axes = make_sharded_tensor_for_checkpoint(
        torch.ones(2, 2), "w", allow_shape_mismatch=True
    )
    assert_refused({"w": other_axes}, tmp_path / "a", "global shape (4,), expected (2, 2)")


def test_a_hole_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = make_good(tmp_path, manifest=False)
    with (path / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([3999])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(targets(), path, "key 'w': the checkpoint has 3999 of the 4000 elements")


def test_half_a_tensor_saved_by_one_process_is_refused(tmp_path: Path) -> None:
    half = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))
    with pytest.raises(CheckpointingException, match="have 2 elements and the global shape"):
        save_sharded_state_dict({"w": half}, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


class Opaque:
    """An object that plain values cannot stand for."""


def test_objects_that_run_code_need_an_explicit_yes(tmp_path: Path) -> None:
    saved = {"o": ShardedObject("o", Opaque(), (1,), (0,))}
    save_sharded_state_dict(saved, tmp_path / "a", weights_only=False)
    state = {"o": ShardedObject("o", None, (1,), (0,))}
    assert_refused(state, tmp_path / "a", "'o/shard_0_1'", "weights_only=False")
    loaded = load_sharded_state_dict(state, tmp_path / "a", weights_only=False)
    assert isinstance(loaded["o"], Opaque)


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_an_index_that_runs_code_is_refused(tmp_path: Path) -> None:
    path = make_good(tmp_path, manifest=False)
    with (path / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    metadata.planner_data = Bomb(str(tmp_path / "boom"))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(targets(), path, "refers to posix.mkdir")
    assert not is_complete_checkpoint(path)
    assert not (tmp_path / "boom").exists()


def loads_that_fail_on_one_rank(folder: str) -> dict[str, Any]:
    from torch import distributed as dist

    rank, root = dist.get_rank(), Path(folder)
    whole = torch.arange(8.0)
    path = root / "step_1"
    save_sharded_state_dict(
        {"w": make_tp_sharded_tensor_for_checkpoint(whole.chunk(2)[rank], "w", tp_group=WORLD())},
        path,
    )

    def target() -> Any:
        return make_tp_sharded_tensor_for_checkpoint(torch.zeros(4), "w", tp_group=WORLD())

    results: dict[str, Any] = {}
    for name, extra in {
        "missing": {"extra": replicated("only.rank.1", 1.0, 0)} if rank else {},
        "dtype": {"w2": ShardedTensor.from_rank_offsets("w", torch.zeros(8, dtype=torch.int8))}
        if rank
        else {},
    }.items():
        shard = target()
        results[name] = error_of(load_sharded_state_dict, {"w": shard, **extra}, path)
        results[f"{name} untouched"] = shard.data.tolist() == [0.0] * 4
    victim = sorted(path.glob("*.distcp"))[1]
    dist.barrier()
    if rank == 0:
        os.truncate(victim, victim.stat().st_size - 10)
    dist.barrier()
    shard = target()
    results["truncated"] = error_of(load_sharded_state_dict, {"w": shard}, path)
    results["truncated untouched"] = shard.data.tolist() == [0.0] * 4
    return results


def WORLD() -> Any:  # noqa: N802 - looks up torch's name in the rank
    from torch import distributed as dist

    return dist.group.WORLD


def test_load_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(loads_that_fail_on_one_rank, 2, str(tmp_path))
    assert first == second
    assert all(value is True for name, value in first.items() if name.endswith("untouched"))
    assert re.search(r"rank 1: .*\n.*key 'only.rank.1' is missing", first["missing"])
    assert re.search(
        r"rank 1: .*\n.*key 'w': the checkpoint has dtype torch.float32", first["dtype"]
    )
    assert "__1_0.distcp has" in first["truncated"]


def test_a_key_can_be_loaded_into_several_tensors_of_one_rank(tmp_path: Path) -> None:
    path = make_good(tmp_path)
    state = {
        "input": make_sharded_tensor_for_checkpoint(torch.zeros(4000), "w"),
        "output": make_sharded_tensor_for_checkpoint(torch.zeros(4000), "w"),
        "half": ShardedTensor.from_rank_offsets("w", torch.zeros(2000), (0, 1, 2)),
    }
    loaded = load_sharded_state_dict(state, path)
    assert torch.equal(loaded["input"], torch.arange(4000.0))
    assert torch.equal(loaded["output"], torch.arange(4000.0))
    assert torch.equal(loaded["half"], torch.arange(2000.0, 4000.0))


def test_local_values_and_missing_data_on_load(tmp_path: Path) -> None:
    path = make_good(tmp_path)
    bare = make_sharded_tensor_for_checkpoint(torch.zeros(8, dtype=torch.int64), "v")
    state = {"v": bare.without_data(), "x": LocalNonpersistentObject(3)}
    loaded = load_sharded_state_dict(state, path)
    assert torch.equal(loaded["v"], torch.arange(8))
    assert loaded["x"] == 3
    assert state["v"].data is None
    meta = make_sharded_tensor_for_checkpoint(torch.zeros(8, device="meta"), "w")
    with pytest.raises(CheckpointingException, match="'w' is on the meta device"):
        load_sharded_state_dict({"w": meta}, path)
