"""The measured items. The docstring of each is its text on the page."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.peers import simulated_world
from mcore import parallel
from mcore.observe.straggler.exchange import ELAPSED, ETPT, GatheredRows, encode_row
from mcore.observe.straggler.outliers import PastReports
from mcore.observe.straggler.ranges import SectionStats
from mcore.observe.straggler.report import RankComparison
from mcore.observe.straggler.server.routes import ControllerState, Router
from mcore.parallel import agreement
from mcore.parallel import check_param_hashes_across_dp_replicas as check
from mcore.parallel.checkpoint import ShardedLoadPlanner, ShardedTensor, describe_shards
from mcore.parallel.checkpoint.errors import merge_reports
from mcore.parallel.checkpoint.files import manifest as manifests
from mcore.parallel.checkpoint.files.places import place_of
from mcore.parallel.checkpoint.files.reader import CheckedReader
from mcore.parallel.checkpoint.planning.description import describe_leaves, encode_records
from mcore.parallel.checkpoint.planning.staging import list_candidates
from mcore.parallel.checkpoint.planning.writers import GlobalPlan
from mcore.parallel.checkpoint.state_tree import flatten_state_dict
from scale.meter import Item, Meter
from scale.processes import real_ranks

_TENSORS, _ROWS, _WIDTH = 20, 4, 8  # of each rank
_SECTIONS = ("compute", "data", "forward", "backward")


def from_sizes(meter: Meter) -> None:
    """`ProcessGroups.from_sizes` with tp 8, cp 2, pp 8, ep 8, on every rank.

    Every rank computes the members of all groups of the world, to count and share them. It calls
    torch's `new_group` for its own groups only.
    """
    with simulated_world(meter.ranks), meter.role("each"):
        parallel.ProcessGroups.from_sizes(tp=8, cp=2, pp=8, ep=8, expt_tp=1)


def from_mesh(meter: Meter) -> None:
    """`ProcessGroups.from_mesh` of five dimensions, after torch's `init_device_mesh` of them.

    Every rank lists the members of all groups of the world, in torch's part and in ours.
    """
    names, sizes = ("pp", "dp_replicate", "dp_shard", "cp", "tp"), (8, 2, meter.ranks // 256, 2, 8)
    with simulated_world(meter.ranks):
        with meter.role("torch, the mesh"):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        with meter.role("each"):
            parallel.ProcessGroups.from_mesh(mesh)


def fsdp_index(meter: Meter) -> None:
    """`FSDPDistributedIndex` of a hybrid mesh, on every rank."""
    sizes = (4, meter.ranks // 32, 8)
    with simulated_world(meter.ranks):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_outer", "dp_shard", "tp"))
        hybrid = mesh["dp_outer", "dp_shard"]._flatten("hybrid").get_group()
        with meter.role("each"):
            parallel.FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", "tp", hybrid)


def save_plan(meter: Meter) -> None:
    """The plan of a save of 20 tensors a rank: descriptions, then writers and checks on rank 0.

    Rank 0 decodes and compares the descriptions of all ranks, one object for each tensor and rank.
    """
    data = torch.empty(_ROWS, _WIDTH, device="meta")
    names, cut = [f"layer.{number}" for number in range(_TENSORS)], (0, 0, meter.ranks)
    tree = {name: ShardedTensor.from_rank_offsets(name, data, cut) for name in names}
    with meter.role("common, describe_shards"):
        records = describe_shards(tree)
    with meter.role("common, describe"):
        entries = flatten_state_dict(tree)
        own = describe_leaves(entries, list_candidates(entries), meter.ranks, {})
        payload = pickle.dumps(own)
        meter.sent_bytes = len(payload)
    payloads = []
    for rank in range(meter.ranks):
        moved = [one._replace(global_offset=(_ROWS * rank, 0)) for one in records]
        payloads.append(pickle.dumps(own._replace(written=encode_records(moved))))
    with meter.role("busiest, choose writers"):
        plan = GlobalPlan([pickle.loads(one) for one in payloads])
        meter.sent_bytes = sum(map(len, plan.flags))
    with meter.role("busiest, validate"):
        plan.require_whole()
    _require(plan.count_writes() == (_TENSORS, 0), "a rank does not write its 20 tensors")


def manifest(meter: Meter) -> None:
    """The manifest of 20 pieces a rank: written by rank 0, and read by each rank.

    Each rank parses all pieces of the manifest to plan its reads.
    """
    keys, files = list_pieces(_TENSORS, meter.ranks)
    with meter.role("busiest, write"):
        raw = manifests.encode_manifest(keys, files, {})
        meter.sent_bytes = len(raw)
    del files, keys
    with meter.role("each, read"):
        index = manifests.decode_manifest(place_of("manifest.json"), raw)
    _require(len(index.files) == meter.ranks, "the manifest lacks files")
    data, planner = torch.empty(_ROWS, _WIDTH), ShardedLoadPlanner()
    target = {"layer.0": ShardedTensor.from_rank_offsets("layer.0", data, (0, 3, meter.ranks))}
    with meter.role("common, plan of a load"):
        planner.take(target)
        stored = manifests.key_with_boxes(index.keys, "layer.0", planner.boxes["layer.0"])
        reader = CheckedReader(place_of("."), index, {"layer.0": stored}, False)
        planner.set_up_planner(target, reader.metadata, False)
        _require(len(planner.create_local_plan().items) == 1, "a rank reads one piece of a key")


def straggler(meter: Meter) -> None:
    """The report with the verdict on each rank, and the server's answers, on rank 0.

    `/metrics` formats a line of text for each rank and metric, 0.6 kB a rank. With `ranks=all` it
    is 1.4 kB: 182 MB of 131,072 ranks, packed to 17 MB. Two fifths of the time are gzip's.
    """
    state = ControllerState(rank=0, world_size=meter.ranks, enabled=True)
    router = Router(state, token=None, allow_get_toggle=False)
    comparisons = _compare(meter.ranks)
    for _ in range(8):  # a verdict needs several reports
        state.applied(True, next(comparisons))
    with meter.role("busiest, report"):
        state.applied(True, comparison := next(comparisons))
        slow = [one.rank for one in comparison.stragglers]
    _require(slow == [3], f"rank 3 is slow, found {slow}")
    for path, query in (("/ui/data", ""), ("/metrics", ""), ("/metrics", "ranks=all")):
        with meter.role(f"busiest, {path} {query}".rstrip()):
            answer = router.answer("GET", path, query)
            meter.sent_bytes = len(answer.packed or "")
        _require(answer.status == 200, f"{path}: {answer.body[:200]}")


def collectives(meter: Meter) -> None:
    """Collectives of all ranks. One rank's work is timed, without the network.

    Messages have a fixed size, but if a load or a save fails, every rank receives a byte of each
    rank, and 4,096 bytes of each of the first 16 that failed.
    """
    group: Any = dist.group
    calls: dict[str, Callable[[], Any]] = {
        "agreement": lambda: agreement.require_equal({"seed": 1}, [], group.WORLD),
        "a rank's error": lambda: agreement.max_or_raise((), [ValueError("lost")], group.WORLD),
        "log step": lambda: parallel.reduce_step_stats({"loss": 1.0}, {"ok": True}, group.WORLD),
        "replicas": lambda: check(torch.nn.Linear(4, 4), True, dp_group=group.WORLD),
    }
    with simulated_world(meter.ranks):
        calls["agreement"]()  # torch imports modules at its first collective
        for name, call in calls.items():
            with meter.role(f"common, {name}"), suppress(ValueError):
                call()
        # Every rank fails: the maximum over the ranks has this rank's byte for each of them.
        with (
            patch.multiple(dist, all_reduce=lambda tensor, **_: tensor.fill_(int(tensor.max()))),
            meter.role("common, all ranks' errors"),
        ):
            reports = agreement.gathered_reports("lost", group.WORLD)
            merge_reports(reports)
    _require(len(reports) == meter.ranks, "a failed rank is not named")


ITEMS: dict[str, Item] = {
    item.__name__.replace("_", "-"): item
    for item in (
        *(from_sizes, from_mesh, fsdp_index, save_plan, manifest, straggler, collectives),
        real_ranks,
    )
}


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise RuntimeError(f"the measured work has a wrong result: {problem}")


def list_pieces(
    num_keys: int, ranks: int
) -> tuple[dict[str, manifests.StoredKey], dict[str, list[tuple[str, manifests.Piece]]]]:
    """The keys and the files of a checkpoint in which each rank has a piece of every key."""
    pieces: dict[str, list[manifests.Piece]] = {f"layer.{at}": [] for at in range(num_keys)}
    files = {}
    for rank in range(ranks):
        name = f"__{rank}_0.distcp"
        sizes, box = (448, 428, 448), ((_ROWS * rank, 0), (_ROWS, _WIDTH))
        for at, held in enumerate(pieces.values()):
            held.append(manifests.Piece(name, at * sizes[0], *sizes[1:], f"{at:016x}", 300, *box))
        files[name] = [(key, held[-1]) for key, held in pieces.items()]
    shape = (_ROWS * ranks, _WIDTH)
    keys = {key: manifests.StoredKey(torch.float32, shape, held) for key, held in pieces.items()}
    return keys, files


def _compare(ranks: int) -> Iterator[RankComparison]:
    """Yield the comparisons of the reports of a job in which rank 3 is slow."""
    stats = {kind: SectionStats(10, 1000.0, 100.0, 101.0) for kind in range(len(_SECTIONS))}
    row = encode_row(0.0, stats, 4, enabled=True, wanted=True, log_interval=10, total_flops=1e15)
    usual = torch.tensor([100.0, 5.0, 60.0, 400.0, 97.0, 1980.0, 33.0], dtype=torch.float64)
    hosts = tuple(f"node{rank // 8}" for rank in range(ranks))
    past, generator = PastReports(_SECTIONS), torch.Generator().manual_seed(0)
    while True:
        matrix = row.repeat(ranks, 1)
        noise = torch.randn(ranks, len(usual), generator=generator, dtype=torch.float64)
        matrix[:, ELAPSED : ETPT + 1] = usual * (1 + 0.002 * noise)
        matrix[3, ELAPSED] *= 1.3
        rows = GatheredRows(matrix, tuple(range(ranks)))
        yield RankComparison(rows, unix_time=0.0, hosts=hosts, names=_SECTIONS, past=past)
