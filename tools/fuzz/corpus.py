"""Inputs that have caused a crash, a hang or much memory, and plain ones to begin with."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

FOUND = Path(__file__).parent / "found"  # a folder for each target, with files of the fuzzer
_NESTED = b"[" * 200_000
_REQUEST = b"POST /off HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def read_corpus(target: str, folder: Path) -> list[bytes]:
    """All inputs of a target. ``folder`` is for scratch files."""
    found = sorted((FOUND / target).glob("*"))
    return [b"", *MADE[target](folder), *(path.read_bytes() for path in found)]


def _make_manifests(folder: Path) -> list[bytes]:
    # Imported here, after the fuzzer has begun to instrument imports.
    from mcore.parallel.checkpoint import (
        make_sharded_tensor_for_checkpoint,
        save_sharded_state_dict,
    )

    entries = {"a": make_sharded_tensor_for_checkpoint(torch.zeros(2, 3), "a"), "b": [1]}
    save_sharded_state_dict(entries, folder / "ours")
    lines = (folder / "ours" / "manifest.json").read_bytes().splitlines(keepends=True)[1:-1]
    files = b'{"files":{"a":[NaN,""]}},\n'
    numbers = [files.replace(b"NaN", number) for number in (b"NaN", b"1e400", b"9" * 4000)]
    return [_NESTED, *numbers, b"{}\n", b"".join(lines)]


def _make_indices(folder: Path) -> list[bytes]:
    save({"a": torch.zeros(2, 3), "b": 1}, checkpoint_id=folder / "plain", no_dist=True)
    plain = (folder / "plain" / ".metadata").read_bytes()
    nested: list[object] = []
    for _ in range(40):  # small here, and large for a reader that follows each reference
        nested = [nested] * 10
    made = [plain, pickle.dumps(nested), b"\x80\x02" + b"]" * 300_000 + b"."]
    hostile = [((math.nan,), 1, 0), ((10**400, -1), 1, 0), ((2, 3), 20_000, 0), ((2, 3), 1, nested)]
    for sizes, count, planner_data in hostile:
        index = pickle.loads(plain)
        tensor = index.state_dict_metadata["a"]
        tensor.size = tensor.chunks[0].sizes = sizes
        tensor.chunks *= count
        index.planner_data = planner_data
        made.append(pickle.dumps(index))
    return made


def _make_spools(folder: Path) -> list[bytes]:
    counts = (
        {"arrived": [[10**13, 1]]},  # less than nothing, so the next line seems to be possible
        {"arrived": [[1, 10**12]]},
        {"step": 10**400},
        {"number": float("nan")},
        {"facts": 1},
    )
    line = {"step": 1, "time_ms": 0, "number": 1, "metrics": {"a": 1.0}}
    lines = [json.dumps(one | more).encode() + b"\n" for more in counts for one in ({}, line)]
    return [_NESTED + b"\n", *lines, b"".join(lines)]


def _make_requests(folder: Path) -> list[bytes]:
    headers = (b"Content-Length: -1", b"Content-Length: " + b"9" * 5000, b"a: b\r\n" * 1000)
    plain = [_REQUEST + header + b"\r\n\r\nbody" for header in headers]
    return [
        _NESTED,
        *plain,
        b"GET /ui/data?from=-1&to=1e9 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ]


def _make_facts(folder: Path) -> list[bytes]:
    kinds = ("<u1", "O", "V8", "<u2,<u2", "M8[1000000000D]", ["O"])
    counts = (64, -1, 10**30, math.nan, math.inf)
    facts = [{"kind": kind, "count": count, "crc32": 0} for kind in kinds for count in counts]
    return [_NESTED, *(json.dumps(one).encode() for one in facts)]


def _make_configs(folder: Path) -> list[bytes]:
    from pretrain.settings import Settings

    settings = b'{"settings": {"data": "/etc/passwd", "lr": NaN, "tp": 1e9}}'
    plain = json.dumps({"settings": vars(Settings())}).encode()
    return [_NESTED, b"null", settings, settings.replace(b"1e9", b"9" * 5000), plain]


def _make_metrics(folder: Path) -> list[bytes]:
    return [_NESTED + b"\n", b'{"step": 1e999}\n{"step": 1, "a": NaN}\n', b'{"step": true}']


MADE: dict[str, Callable[[Path], list[bytes]]] = {
    "manifest": _make_manifests, "index": _make_indices, "spool": _make_spools,
    "metrics": _make_metrics, "http": _make_requests, "cache": _make_facts,
    "config": _make_configs,
}  # fmt: skip
