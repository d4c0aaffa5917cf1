"""The command line on checkpoints: tables, JSON, damage, differences, files for torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore.parallel.checkpoint import (
    ShardedObject,
    make_tp_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.__main__ import main
from mcore.parallel.checkpoint.files.index import plain_value, read_index
from mcore.parallel.checkpoint.inspection.contents import Output, escaped, short_repr, size_text
from mcore.parallel.checkpoint.inspection.diff import boxes, compare_tensors
from rank_testing import run_ranks

HOSTILE = "a\x1b[31m\n\u202eb\\"


def whole_state() -> dict[str, Any]:
    """Values of many dtypes in one piece each, also under a name that a terminal would obey."""
    return {
        "rows": torch.arange(12, dtype=torch.int64).view(4, 3),
        "columns": torch.arange(40.0).view(5, 8),
        "half": torch.tensor([1.5, float("nan"), float("inf")]).bfloat16(),
        "eighth": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "flag": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "values": {"step": 7, HOSTILE: "text"},
        "object": ShardedObject("object", [1, "two"], (1,), (0,)),
        "list": [{"a": torch.ones(1)}, {"a": torch.zeros(1)}],
    }


def save_on_two_ranks(root: str) -> None:
    """Save the same values as two tensor-parallel ranks hold them, with torch too."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, world = dist.get_rank(), dist.group.WORLD
    state = whole_state()
    state["object"].replica_id = rank
    for name, axis in (("rows", 0), ("columns", 1)):
        own = state[name].chunk(2, axis)[rank].contiguous()
        state[name] = make_tp_sharded_tensor_for_checkpoint(own, name, axis, tp_group=world)
    save_sharded_state_dict(state, Path(root) / "step_2")
    mesh = init_device_mesh("cpu", (2,))
    plain = {name: value for name, value in whole_state().items() if name != "object"}
    plain["columns"] = distribute_tensor(plain["columns"], mesh, [Shard(1)])
    dcp.save(plain, checkpoint_id=Path(root) / "stock")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the same values in one piece, in shards of two ranks, and saved by torch."""
    root = tmp_path_factory.mktemp("run")
    save_sharded_state_dict(whole_state(), root / "step_1")
    run_ranks(save_on_two_ranks, 2, str(root))
    (root / "logs").mkdir()
    return root


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command and return its exit code and what it printed, from JSON where asked for."""

    def call(*words: object) -> tuple[int, Any]:
        code = main([*map(str, words)])
        printed = capsys.readouterr()
        if code == 2:
            return code, printed.err
        return code, json.loads(printed.out) if "--json" in words else printed.out

    return call


def key_table(state: dict[str, Any]) -> dict[str, tuple[str, list[int], int]]:
    """Dtype, shape and bytes of the tensors of a state."""
    return {
        name: (str(value.dtype).removeprefix("torch."), list(value.shape), value.nbytes)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("name", ["step_1", "step_2", "stock"])
def test_keys_have_dtype_shape_size_and_writers(name: str, root: Path, run: Any) -> None:
    code, listed = run("ls", root / name, "--json")
    assert code == 0
    found = {key["key"]: (key["dtype"], key["shape"], key["bytes"]) for key in listed["keys"]}
    assert key_table(whole_state()).items() <= found.items()
    assert found["values.step"][:2] == ("object", [])
    files = {key["key"]: key["files"] for key in listed["keys"]}
    both = ["__0_0.distcp", "__1_0.distcp"]
    assert files["columns"] == (both[:1] if name == "step_1" else both)
    _, text = run("ls", root / name, "col*")
    assert text.splitlines()[1].split()[:5] == ["columns", "float32", "[5,", "8]", "160"]
    assert ("ranks 0-1" in text) == (name != "step_1")
    assert text.splitlines()[-1] == "1 key, 160 bytes"


def test_a_run_lists_its_checkpoints_and_what_is_wrong_with_them(root: Path, run: Any) -> None:
    broken = shutil.copytree(root / "step_2", root / "step_10")
    (broken / "__1_0.distcp").unlink()
    code, listed = run("ls", root, "--json")
    assert [one["name"] for one in listed["checkpoints"]] == [
        "step_1",
        "step_2",
        "step_10",
        "stock",
    ]
    states = [one["state"] for one in listed["checkpoints"]]
    assert (states[:2], states[3]) == (["complete"] * 2, "complete")
    assert "__1_0.distcp cannot be read (No such file" in states[2]
    assert code == 0
    assert run("ls", root)[1].splitlines()[0].split() == ["checkpoint", "state", "keys", "size"]
    code, text = run("verify", root)
    assert code == 1
    assert text.count(": as it was saved (") == 3
    assert "key 'columns' in __1_0.distcp: " in text
    shutil.rmtree(broken)
    assert run("verify", root)[0] == 0
    assert run("diff", root, root / "step_1") == (
        2,
        f"error: {root} is a folder with 3 checkpoints. Give one of them, such as {root}/stock\n",
    )


def test_show_describes_files_and_pieces(root: Path, run: Any) -> None:
    _, shown = run("show", root / "step_2", "--json")
    sizes = {path.name: path.stat().st_size for path in (root / "step_2").iterdir()}
    del sizes["manifest.json"]
    assert {one["file"]: one["bytes"] for one in shown["files"]} == sizes
    assert shown["dtypes"]["int64"] == {"keys": 1, "bytes": 96}
    assert (shown["problem"], shown["keys"]) == (None, 12)
    _, text = run("show", root / "step_2")
    assert "written by mcore-parallel, version 3" in text
    [line] = [line for line in text.splitlines() if line.startswith("__1_0.distcp")]
    assert line.endswith("rank 1")
    _, shown = run("show", root / "step_2", "columns", "--json")
    [columns] = shown["keys"]
    stored = read_index(root / "step_2").keys["columns"]
    assert [(one["file"], one["start"], one["shape"]) for one in columns["pieces"]] == [
        ("__0_0.distcp", [0, 0], [5, 4]),
        ("__1_0.distcp", [0, 4], [5, 4]),
    ]
    assert [one["checksum"] for one in columns["pieces"]] == [one.checksum for one in stored.pieces]
    assert "torch.distributed.checkpoint" in run("show", root / "stock")[1]
    assert "values.step: object, 1.2 KiB = 7" in run("show", root / "step_1", "values.step")[1]
    assert "= [1, 'two']" in run("show", root / "step_1", "object*")[1]
    code, text = run("show", root / "stock", "colum")
    assert (code, "has no key 'colum'" in text) == (2, True)


def test_nothing_in_a_name_reaches_the_terminal(root: Path, run: Any, tmp_path: Path) -> None:
    path = shutil.copytree(root / "step_1", tmp_path / "x\x1b]0;title\x07")
    for words in (["ls"], ["show"], ["verify"], ["show", HOSTILE.replace("[", "[[]")]):
        text = str(run(words[0], path, *words[1:])[1])
        assert text.replace("\n", "").isprintable(), words
    name = f"values.{HOSTILE}"
    assert r"values.a\x1b[31m\n\u202eb\\" in run("ls", path)[1]
    assert name in [key["key"] for key in run("ls", path, "--json")[1]["keys"]]
    assert escaped(name).encode().decode("unicode_escape") == name
    assert run("ls", tmp_path / "\x1b[2J")[1].replace("\n", "").isprintable()


@pytest.mark.parametrize("name", ["step_2", "stock"])
def test_each_damaged_key_is_named(name: str, root: Path, run: Any, tmp_path: Path) -> None:
    path = shutil.copytree(root / name, tmp_path / name)
    index = read_index(path)
    assert run("verify", path, "--json")[1] == {
        "path": str(path),
        "ok": True,
        "bytes": sum(piece.span for key in index.keys.values() for piece in key.pieces),
        "pieces": sum(len(key.pieces) for key in index.keys.values()),
        "damaged": [],
    }
    piece = index.keys["columns"].pieces[1]
    content = bytearray((path / piece.file).read_bytes())
    content[content.index(struct.pack("<2f", 4, 5), piece.at)] ^= 64
    (path / piece.file).write_bytes(content)
    code, found = run("verify", path, "--json")
    assert (code, found["ok"]) == (1, False)
    assert {(one["key"], one["file"]) for one in found["damaged"]} == {("columns", piece.file)}
    assert "DAMAGED" in run("verify", path)[1]
    (path / "manifest.json").write_text("{") if name == "step_2" else (
        path / ".metadata"
    ).write_bytes(b"")
    code, found = run("verify", path, "--json")
    assert (code, found["damaged"][0]["key"]) == (1, "")


def test_large_checkpoints_are_read_by_processes(
    run: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    from mcore.parallel.checkpoint.inspection import verify

    monkeypatch.setattr(verify, "_FEW_BYTES", 1)
    monkeypatch.setattr(verify, "_BATCH_BYTES", 1 << 12)
    save_sharded_state_dict({f"w{n}": torch.zeros(1000) for n in range(9)}, tmp_path / "step_1")
    assert run("verify", tmp_path / "step_1", "--workers", 2)[0] == 0
    path = tmp_path / "step_1" / "__0_0.distcp"
    piece = read_index(tmp_path / "step_1").keys["w5"].pieces[0]
    content = bytearray(path.read_bytes())
    content[piece.at + (piece.elements or 0)] = 1
    path.write_bytes(content)
    _, found = run("verify", tmp_path / "step_1", "--workers", 2, "--json")
    problem = "its checksum differs"
    assert found["damaged"] == [{"key": "w5", "file": "__0_0.distcp", "problem": problem}]


def test_layouts_make_no_difference_but_values_do(root: Path, run: Any, tmp_path: Path) -> None:
    code, found = run("diff", root / "step_1", root / "step_2", "--json")
    assert (code, found["unchanged"]) == (0, 12)
    code, found = run("diff", root / "step_1", root / "stock", "--json")
    assert (code, found["removed"]) == (1, ["object/shard_0_1"])
    assert [one["key"] for one in found["changed"]] == []
    state = whole_state()
    state["rows"][3, 2] += 5
    state["columns"][4, 7] = 1.25
    state["columns"][0, 0] = -0.5
    state["half"][1] = 2
    state["half"][2] = 2
    state["eighth"] = state["eighth"].float() + 0.5
    state["scalar"] = torch.zeros(2)
    state["values"]["step"] = 8
    del state["flag"]
    state["added"] = torch.zeros(1)
    save_sharded_state_dict(state, tmp_path / "step_3")
    code, found = run("diff", root / "step_2", tmp_path / "step_3", "--json")
    assert (code, found["added"], found["removed"]) == (1, ["added"], ["flag"])
    changed = {
        one["key"]: (one.get("different"), one["largest_difference"]) for one in found["changed"]
    }
    assert changed == {
        "rows": (1, 5),
        "columns": (2, 39 - 1.25),
        "half": (2, "nan"),
        "eighth": (2, 0.5),
        "scalar": (None, None),
        "values.step": (None, None),
    }
    _, text = run("diff", root / "step_2", tmp_path / "step_3")
    assert "float8_e4m3fn -> float32" in text
    assert "float32 [] -> float32 [2]" in text
    assert " 7 -> 8" in text
    assert text.splitlines()[-1] == "1 added, 1 removed, 6 changed, 5 keys unchanged"
    _, found = run("diff", root / "step_2", tmp_path / "step_3", "--keys", "r*", "--json")
    assert [one["key"] for one in found["changed"]] == ["rows"]


@pytest.mark.parametrize(
    ("dtype", "one", "other", "largest"),
    [
        (torch.int64, [-(2**63), 0], [2**63 - 1, 0], 2**64 - 1),
        (torch.uint64, [2**64 - 1, 3], [1, 3], 2**64 - 2),
        (torch.uint8, [255, 1], [0, 1], 255),
        (torch.bool, [True, False], [False, False], 1),
        (torch.complex64, [3j, 1], [4, 1], 5.0),
        (torch.float32, [0.0, 1.0], [-0.0, 1.0], 0.0),
        (torch.float64, [float("inf"), 1.0], [1.0, 1.0], float("inf")),
        (torch.float8_e5m2, [1.0, 2.0], [2.0, 2.0], 1.0),
    ],
)
def test_largest_differences_are_exact(
    dtype: torch.dtype, one: Sequence[Any], other: Sequence[Any], largest: float
) -> None:
    tensors = [torch.tensor(values, dtype=dtype) for values in (one, other)]
    assert compare_tensors(*tensors) == (1, largest)
    assert compare_tensors(tensors[0], tensors[0]) == (0, 0)


def test_blocks_make_up_a_tensor_and_are_small() -> None:
    for shape in [(), (0, 3), (7,), (4, 5, 6), (2, 1000), (1, 1, 30)]:
        covered = torch.zeros(shape, dtype=torch.int64)
        for start, sizes in boxes(shape, 13):
            region = tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))
            assert covered[region].numel() <= 13
            covered[region] += 1
        assert torch.equal(covered, torch.ones(shape, dtype=torch.int64))


@pytest.mark.parametrize("name", ["step_2", "stock"])
def test_torch_loads_what_is_converted(name: str, root: Path, run: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    assert run("to-torch", root / name, file)[0] == 0
    loaded = torch.load(file, weights_only=True)
    for key, value in whole_state().items():
        if isinstance(value, torch.Tensor):
            assert loaded[key].dtype == value.dtype
            assert loaded[key].tolist() == value.tolist() or key == "half"
    if name == "stock":  # which says how its keys were nested
        assert loaded["values"] == {"step": 7, HOSTILE: "text"}
        assert loaded["list"][1]["a"].tolist() == [0.0]
    code, text = run("to-torch", root / name, file)
    assert (code, text) == (2, f"error: {file} already exists and is not overwritten\n")
    assert run("to-torch", root / name, tmp_path / "no" / "one.pt") == (
        2,
        f"error: cannot write {tmp_path}/no/one.pt: there is no folder {tmp_path}/no\n",
    )
    assert run("to-torch", root / name, tmp_path / "one.pt", "--keys", "columns")[0] == 0
    assert list(torch.load(tmp_path / "one.pt")) == ["columns"]
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "one.pt"]


def test_progress_is_for_terminals() -> None:
    sizes = [size_text(n) for n in (1, 1023, 1536, 5 << 40)]
    assert sizes == ["1 byte", "1023 bytes", "1.5 KiB", "5.0 TiB"]
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal, open(os.devnull, "w") as nowhere:
        with Output(nowhere, nowhere).progress("read", 2) as report:
            report(1)
        with Output(nowhere, terminal).progress("step\n1", 1024) as report:
            report(512)
    shown = ""
    with contextlib.suppress(OSError):  # Linux's word for the end of a terminal
        while piece := os.read(master, 1000):  # which hands on in pieces
            shown += piece.decode()
    os.close(master)
    assert "read" not in shown
    assert "step\\n1:  50%" in shown
    assert "512/1.02k" in shown


def test_commands_need_no_tqdm(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setitem(sys.modules, "tqdm", None)
    with Output(io.StringIO(), terminal := Terminal()).progress("read", 2) as report:
        report(1)
    assert terminal.getvalue() == ""
    assert "pip install 'mcore-parallel[progress]'" in caplog.text


def test_the_command_ends_well_whatever_it_is_given(
    root: Path,
    tmp_path: Path,
    run: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that goes away; paths that are none; questions."""
    state = {f"key.{n:06}": torch.zeros(()) for n in range(1000)}
    save_sharded_state_dict(state, tmp_path / "step_1")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert main(["ls", str(tmp_path / "step_1")]) == 141
    assert capsys.readouterr().err == ""
    for words, text in (
        (["verify", tmp_path / "none"], "does not exist"),
        (["ls", root / "logs"], "is not a checkpoint"),
        (["ls", tmp_path / "step_1" / ".metadata"], "is not a directory"),
    ):
        code, error = run(*words)
        assert (code, text in error) == (2, True), error
    monkeypatch.setenv("NO_COLOR", "1")  # which Python 3.14 asks, and before it FORCE_COLOR
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"    {name} " in shown for name in ("ls", "show", "verify", "diff", "to-torch"))
    assert max(map(len, shown.splitlines())) <= 100
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_values_that_hold_themselves_again_and_again_are_shown_in_part() -> None:
    """Lists in lists in lists, each ten times: their text would fill all memory."""
    value: Any = "x"
    for _ in range(60):
        value = [value] * 10
    text = short_repr(plain_value(pickle.dumps(value, protocol=2)))
    assert text.startswith("[[[[...], [...],")
    assert len(text) < 2000
    for other in (Path("x"), {1: 2}, {1, 2}, print):
        with pytest.raises(pickle.UnpicklingError):
            plain_value(pickle.dumps(other, protocol=2))
