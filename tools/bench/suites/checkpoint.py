"""Sharded checkpoints against ``torch.distributed.checkpoint`` and the disk. Hashes of replicas.

- A save is synced to disk before its rename, and every byte of it has a checksum. A load compares
  the checksums while it copies, or with ``verify="before"`` in a separate pass before it changes a
  tensor. The stock loader checks no content: ``verify=False`` compares like with like.
- Files on disk: the page cache is emptied of them for all sides. The disk's speed varies from hour
  to hour. A save was 0.75 to 1.4 times as fast as the stock save, synced, in many runs.
- One rank reads a manifest, each parses it. The limit is 2 s. Most of the time is that of ``json``,
  line by line, since all lines at once need ten times the memory. The rest makes columns.
- megatron-core's hash check calls ``.cuda()``, which does nothing here. The gain beyond the CPU
  time is due to hashing on all idle cores.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.measure import Row, alternate, compare
from bench.replicas import compare_replicas
from mcore.parallel.checkpoint import (
    ShardedTensor,
    load_sharded_state_dict,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.files.index import read_index
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE, encode_manifest
from mcore.parallel.tensor_memory import memory_of
from rank_testing import run_ranks
from scale.items import list_pieces

_NUM_TENSORS, _ROWS, _COLUMNS = 64, 4096, 1024  # 16 MiB of float32 each, half of it on a rank
_SIZE = "1 GiB on 2 ranks"
_NUM_SMALL, _SMALL = 5000, 256  # 1 KiB each
_NUM_PIECES, _PIECES_A_KEY = 500_000, 100
_STOCK = f"torch {torch.__version__.partition('+')[0]} distributed.checkpoint"
_RAW = "raw files of the same bytes"
_REPEATS = 9
Work = Callable[[int], object]


def run() -> Iterable[Row]:
    """Yield the rows. Results are compared before each timing."""
    yield from _compare_checkpoints()
    yield from _compare_small_tensors()
    yield _compare_manifest()
    yield from compare_replicas()


def _compare_checkpoints() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="mcore-bench-") as folder:
        measured = run_ranks(_measure, 2, folder, timeout_s=600)
    if not all(agrees for agrees, _ in measured):
        yield Row.disagreement(f"save and load {_SIZE}", _STOCK, "loaded values")
        return
    (_, first), (_, second) = measured
    for case, sides in first.items():
        slower = {name: max(sides[name], second[case][name]) for name in sides}
        yield from _make_rows(case, slower)


_OTHERS = {"ours, before": 'verify="before"', "ours, unchecked": "verify=False"}
_TARGETS = {"load, files in memory": 2.0, "load, files on disk": 1.25}


def _make_rows(case: str, seconds: Mapping[str, float]) -> Iterator[Row]:
    """One row for each peer, and for our load with other checks."""
    name, agreement = f"{case}, {_SIZE}", "values, each reads the other's files"
    ours = seconds["ours"]
    for peer in [side for side in seconds if side.startswith("stock")]:
        target = 1.0 if peer == "stock, synced" else _TARGETS.get(case)
        named = _STOCK + peer.removeprefix("stock")
        yield Row(name, ours, named, seconds[peer], target, agreement)
    for side, setting in _OTHERS.items():
        if side in seconds:
            named, stock = f"{name}, {setting}", seconds["stock"]
            yield Row(named, seconds[side], _STOCK, stock, None, agreement)
    rate = _NUM_TENSORS * _ROWS * _COLUMNS * 4 / seconds["raw"] / 1e9
    yield Row(name, ours, _RAW, seconds["raw"], None, agreement, f"raw: {rate:.2f} GB/s")


def _compare_small_tensors() -> Iterator[Row]:
    """Many small tensors on one rank: the cost of a key."""
    size = f"{_NUM_SMALL} tensors of 1 KiB, files in memory"
    with tempfile.TemporaryDirectory(prefix="mcore-bench-") as folder:
        [(agrees, seconds)] = run_ranks(_measure, 1, folder, is_small=True, timeout_s=600)
    if not agrees:
        yield Row.disagreement(f"save and load, {size}", _STOCK, "loaded values")
        return
    for case, place, peer, target in (
        ("save", "save", "stock, synced", 1.0), ("load", "load, files in memory", "stock", 1.5),
    ):  # fmt: skip
        sides = seconds[place]
        yield Row(f"{case}, {size}", sides["ours"], _STOCK, sides[peer], target, "values")


def _compare_manifest() -> Row:
    """A manifest of very many pieces, against the parsing of its JSON alone."""
    with tempfile.TemporaryDirectory(prefix="mcore-bench-") as folder:
        root = Path(folder)
        keys, files = list_pieces(_NUM_PIECES // _PIECES_A_KEY, ranks=_PIECES_A_KEY)
        (root / MANIFEST_FILE).write_bytes(encode_manifest(keys, files, {}))
        del keys, files
        num_pieces = len(read_index(root).keys["layer.7"].pieces)
        return compare(
            f"read a manifest of {_NUM_PIECES} pieces", lambda: read_index(root),
            "json.loads of its text", lambda: json.loads((root / MANIFEST_FILE).read_bytes()),
            agreement="number of pieces", repeats=3,
            difference="" if num_pieces == _PIECES_A_KEY else f"{num_pieces} pieces of a key",
        )  # fmt: skip


def _measure(folder: str, *, is_small: bool = False) -> tuple[bool, dict[str, dict[str, float]]]:
    """One rank: whether loads return the saved values, and the time of each side by case."""
    rank, root = dist.get_rank(), Path(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    num, *shape = (_NUM_SMALL, 1, _SMALL) if is_small else (_NUM_TENSORS, _ROWS // 2, _COLUMNS)
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(shape, generator=generator) for _ in range(num)]
    ours: dict[str, Any] = {f"layer.{i}.weight": tensor for i, tensor in enumerate(tensors)}
    stock = dict(ours)
    if not is_small:
        for key, tensor in ours.items():
            ours[key] = ShardedTensor.from_rank_offsets(key, tensor, (0, rank, 2))
            stock[key] = DTensor.from_local(tensor, mesh, [Shard(0)])

    def saved_by_stock(sync: bool) -> Work:
        return lambda turn: save(
            stock, storage_writer=FileSystemWriter(root / f"save-{turn}", sync_files=sync)
        )

    saves: dict[str, Work] = {
        "ours": lambda turn: save_sharded_state_dict(ours, root / f"save-{turn}"),
        "stock, synced": saved_by_stock(sync=True),
        "stock, not synced": saved_by_stock(sync=False),
        "raw": lambda turn: _write_raw(root / f"save-{turn}-{rank}", tensors),
    }
    if is_small:
        saves = {name: saves[name] for name in ("ours", "stock, synced")}
    seconds = {"save": _time_rounds(saves, _make_cleaner(root))}
    save_sharded_state_dict(ours, root / "ours")
    saved_by_stock(sync=True)(0)
    _run_on_first_rank(lambda: (root / "save-0").rename(root / "stock"))
    _write_raw(root / f"raw-{rank}", tensors)
    loads: dict[str, Work] = {
        "ours": lambda _: load_sharded_state_dict(ours, root / "ours"),
        "ours, before": lambda _: load_sharded_state_dict(ours, root / "ours", verify="before"),
        "ours, unchecked": lambda _: load_sharded_state_dict(ours, root / "ours", verify=False),
        "stock": lambda _: load(stock, checkpoint_id=root / "stock"),
        "raw": lambda _: _read_raw(root / f"raw-{rank}", tensors),
    }
    crossed: list[Callable[[], object]] = [
        lambda: load_sharded_state_dict(ours, root / "stock"),
        lambda: load(stock, checkpoint_id=root / "ours"),
    ]
    agrees = all(
        _check_load(tensors, work)
        for work in [*crossed, *(lambda work=work: work(0) for work in loads.values())]
    )
    if is_small:
        loads = {name: loads[name] for name in ("ours", "stock")}
    seconds["load, files in memory"] = _time_rounds(loads, lambda: None)
    if not is_small:
        seconds["load, files on disk"] = _time_rounds(
            loads, lambda: _run_on_first_rank(lambda: _forget(root))
        )
    return agrees, seconds


def _check_load(tensors: list[torch.Tensor], load: Callable[[], object]) -> bool:
    """Whether a load restores the values, which it leaves in the tensors."""
    sums = [tensor.view(torch.int32).sum() for tensor in tensors]
    first = [tensor[:, ::97].clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    load()
    return all(
        torch.equal(tensor.view(torch.int32).sum(), total) and torch.equal(tensor[:, ::97], some)
        for tensor, total, some in zip(tensors, sums, first, strict=True)
    )


def _time_rounds(sides: Mapping[str, Work], prepare: Callable[[], object]) -> dict[str, float]:
    """The shortest time of each side until all ranks are done."""
    turns = itertools.count(1)

    def time_once(work: Work) -> float:
        prepare()
        dist.barrier()
        started_s = time.perf_counter()
        work(next(turns))
        dist.barrier()
        return time.perf_counter() - started_s

    times = alternate([functools.partial(time_once, work) for work in sides.values()], _REPEATS)
    return dict(zip(sides, map(min, times), strict=True))


def _make_cleaner(root: Path) -> Callable[[], None]:
    """Delete earlier saves and wait until the disk is idle."""

    def clean() -> None:
        for path in root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()

    return lambda: _run_on_first_rank(clean)


def _run_on_first_rank(work: Callable[[], object]) -> None:
    """Do something on the first rank, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


_PIECE_BYTES = 1 << 24


def _forget(folder: Path) -> None:
    """Drop the files below a folder from the page cache: the next read uses the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # only written pages can be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _write_raw(path: Path, tensors: list[torch.Tensor]) -> None:
    """Write the bytes of tensors one after the other, and sync them to disk."""
    with path.open("xb", buffering=0) as stream:
        for tensor in tensors:
            content = memory_of(tensor)
            for start in range(0, len(content), _PIECE_BYTES):
                stream.write(content[start : start + _PIECE_BYTES])
        os.fsync(stream.fileno())


def _read_raw(path: Path, tensors: list[torch.Tensor]) -> None:
    """Read a file of ``_write_raw`` into the tensors."""
    with path.open("rb", buffering=0) as stream:
        for tensor in tensors:
            content = memory_of(tensor)
            done = 0
            while done < len(content):
                done += stream.readinto(content[done : done + _PIECE_BYTES])
