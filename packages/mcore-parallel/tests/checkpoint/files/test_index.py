"""Files that somebody made on purpose: none of them runs code, none changes a class."""

from __future__ import annotations

import gc
import io
import itertools
import json
import pathlib
import pickle
import pickletools
import random
import re
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import filesystem, metadata

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedObject,
    is_complete_checkpoint,
    latest_checkpoint,
    load_sharded_state_dict,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.files.index import (
    _PlainUnpickler,
    parse_index,
    read_index,
    read_nested_paths,
)
from mcore.parallel.checkpoint.files.manifest import (
    Piece,
    StoredKey,
    decode_manifest,
    encode_manifest,
    key_with_boxes,
)

WATCHED = (
    pathlib.Path,
    pathlib.PurePath,
    pathlib.PosixPath,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
    dict,
)


def state() -> dict[str, Any]:
    """A tensor, an object and a value."""
    return {"w": torch.zeros(5), "o": ShardedObject("o", {"a": 1}, (1,), (0,)), "n": 3}


def attributes() -> list[dict[str, int]]:
    """What instances get from the watched classes; Python fills in some other names late."""
    hooks = ("__init__", "__new__", "__setstate__", "__getattr__", "__reduce__", "__hash__")
    return [
        {
            name: id(value)
            for name, value in vars(one).items()
            if name in hooks or not name.startswith("__")
        }
        for one in WATCHED
    ]


@pytest.fixture
def unchanged_classes() -> Iterator[None]:
    """Nothing of the classes that an index refers to may change."""
    before = attributes()
    yield
    assert attributes() == before


def rewrite_manifest(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the content of a manifest and give it the checksum that it then needs."""
    raw = (path / "manifest.json").read_text()
    lines = json.loads(raw)["content"]
    change(lines)
    text = raw[: raw.index("\n") + 1] + ",\n".join(map(json.dumps, lines)) + "\n"
    digest = xxhash.xxh3_64_hexdigest(text.encode())
    (path / "manifest.json").write_text(f'{text}], "checksum": "{digest}"' + "}\n")


def match_manifest(path: Path) -> None:
    """Make a manifest tell sizes and checksums that the files have now."""
    payload = (path / "__0_0.distcp").read_bytes()

    def change(lines: list[dict[str, Any]]) -> None:
        index = (path / ".metadata").read_bytes()
        lines[0]["files"][".metadata"] = [len(index), xxhash.xxh3_64_hexdigest(index)]
        [block] = (line for line in lines if "file" in line)
        at, digests = 0, ""
        for length in block["lengths"]:
            end = min(-(-(at + length) // 64) * 64, len(payload))
            digests += xxhash.xxh3_64_hexdigest(payload[at:end])
            at = end
        block["checksums"] = digests

    rewrite_manifest(path, change)


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> Any:
        return Path.mkdir, (Path(self.target),)


def build_on(module: str, name: str, value: bytes) -> bytes:
    """A pickle that sets an attribute of a class: BUILD with the state of slots."""
    return b"\x80\x04" + f"c{module}\n{name}\n".encode() + b"N}\x8c\x06unlink" + value + b"s\x86b."


DCP = "torch.distributed.checkpoint.metadata"
PICKLES: dict[str, Callable[[Path], bytes]] = {
    "a call": lambda target: pickle.dumps(Bomb(target)),
    "a call inside": lambda target: pickle.dumps(
        metadata.Metadata({}, planner_data=Bomb(target), storage_data={})
    ),
    "BUILD on a path": lambda _: build_on("pathlib", "PosixPath", b"N"),
    "BUILD on Path": lambda _: build_on("pathlib", "Path", b"ctorch\nSize\n"),
    "BUILD on Metadata": lambda _: build_on(DCP, "Metadata", b"N"),
    "BUILD on an enum": lambda _: build_on(DCP, "_MEM_FORMAT_ENCODING", b"N"),
    "BUILD on the result of a call": lambda _: b"\x80\x04cpathlib\nPosixPath\n(tR}\x8c\x01aNsb.",
    "any torch name": lambda _: b"\x80\x04ctorch\nload\n.",
    "a tensor class": lambda _: b"\x80\x04ctorch\nTensor\n.",
    "a name with dots": lambda _: b"\x80\x04\x8c\x05torch\x8c\x0fhub.load_urlstr\x93.",
    "the registry of copyreg": lambda _: b"\x80\x04\x82\x01.",
    "an instance of old": lambda _: b"\x80\x04(icollections\nOrderedDict\n.",
    "a memo of gigabytes": lambda _: b"\x80\x04Nr\xff\xff\xff\x7f0N.",
    "a byte array of terabytes": lambda _: b"\x80\x05\x96" + struct.pack("<Q", 1 << 42) + b".",
    "a key too deep to hash": lambda _: b"\x80\x04})" + b"\x85" * 20_000 + b"Ns.",
    "itself": lambda _: b"\x80\x04]\x94h\x00a.",
    "nothing": lambda _: b"",
    "no pickle": lambda _: b"\x80",
}


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.usefixtures("unchanged_classes")
def test_no_index_runs_code_or_changes_classes(name: str, tmp_path: Path) -> None:
    target = tmp_path / "boom"
    for kind in ("ours", "torchs"):
        path = tmp_path / kind / "step_1"
        if kind == "ours":
            save_sharded_state_dict(state(), path)
        else:
            dcp.save({"w": torch.zeros(5)}, checkpoint_id=path, no_dist=True)
        (path / ".metadata").write_bytes(PICKLES[name](target))
        if kind == "ours":
            match_manifest(path)
            # It is not even looked at.
            assert latest_checkpoint(path.parent) == path
            load_sharded_state_dict(state(), path)
        else:
            assert not is_complete_checkpoint(path)
            assert latest_checkpoint(path.parent) is None
            with pytest.raises(CheckpointingException, match=r"\.metadata (cannot be read|has ch)"):
                load_sharded_state_dict({"w": torch.zeros(5)}, path)
            with pytest.raises(CheckpointingException):
                load_sharded_state_dict({"w": torch.zeros(5)}, path, weights_only=False)
    assert not target.exists()


def test_a_name_that_no_index_needs_is_refused_where_nothing_looks_at_it(tmp_path: Path) -> None:
    path = tmp_path / "step_1"
    dcp.save({"w": torch.zeros(5)}, checkpoint_id=path, no_dist=True)
    index = pickle.loads((path / ".metadata").read_bytes())
    for value in (torch.float32, torch.Tensor, torch.device, torch.nn.Linear, metadata.dataclass):
        index.planner_data = {"w": value}
        (path / ".metadata").write_bytes(pickle.dumps(index))
        assert is_complete_checkpoint(path) == (value is torch.float32), value


@pytest.mark.parametrize("verify", ["while_reading", "before", False])
@pytest.mark.usefixtures("unchanged_classes")
def test_no_object_runs_code_even_with_a_manifest_made_to_match(
    verify: Any, tmp_path: Path
) -> None:
    path, target = tmp_path / "step_1", tmp_path / "boom"
    bomb = ShardedObject("o", Bomb(target), (1,), (0,))
    save_sharded_state_dict({**state(), "o": bomb}, path, weights_only=False)
    assert is_complete_checkpoint(path)
    targets = {**state(), "w": torch.full((5,), -7.0)}
    with pytest.raises(CheckpointingException, match="'o/shard_0_1' cannot be unpickled"):
        load_sharded_state_dict(targets, path, verify=verify)
    assert not target.exists()
    assert (targets["w"] == -7).all()


def column(name: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if name in line and ("file" in line or name in ("keys", "dtypes", "axes", "shapes")):
                line[name] = value(line[name]) if callable(value) else value
                return

    return change


LIES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "a dtype that is a function": column("dtypes", lambda old: [one and "load" for one in old]),
    "a file elsewhere": lambda lines: lines[0]["files"].update({"../evil": [1, "00"]}),
    "a file with escapes": lambda lines: lines[0]["files"].update({"\x1b[2J": [1, "00"]}),
    "an absolute file": lambda lines: lines[0]["files"].update({"/dev/zero": [1, "00"]}),
    "a size that is text": lambda lines: lines[0]["files"].update({"__0_0.distcp": ["1", ""]}),
    "keys out of order": column("keys", ["b", "a"]),
    "numbers as keys": column("keys", lambda old: list(range(len(old)))),
    "more axes": column("axes", lambda old: [one + 1 for one in old]),
    "a shape below zero": column("shapes", [-5]),
    "a shape of text": column("shapes", ["5"]),
    "a shape without end": column("shapes", [1 << 70]),
    "a shorter shape": column("shapes", [4]),
    "a box outside": column("boxes", [3, 5]),
    "too many boxes": column("boxes", [0, 5, 0, 5]),
    "elements outside": column("elements", lambda old: [one if one < 0 else 4000 for one in old]),
    "elements at text": column("elements", lambda old: ["x" for _ in old]),
    "no checksums": column("checksums", ""),
    "checksums of letters": column("checksums", lambda old: "zz" + old[2:]),
    "pieces of another length": column("lengths", lambda old: [one + 64 for one in old]),
    "lengths below zero": column("lengths", lambda old: [-one for one in old]),
    "a gap": column("at", 64),
    "no lines": lambda lines: lines.clear(),
    "lines of text": lambda lines: lines.append("text"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    path = tmp_path / "step_1"
    save_sharded_state_dict({"w": torch.ones(5)}, path)
    rewrite_manifest(path, LIES[lie])
    targets = {"w": torch.full((5,), -7.0)}
    with pytest.raises(CheckpointingException):
        load_sharded_state_dict(targets, path)
    assert (targets["w"] == -7).all()
    is_complete_checkpoint(path)  # whatever it is, it does not raise
    (path / "manifest.json").write_bytes(b'{"format": "mcore sharded checkpoint", "version": 3')
    assert not is_complete_checkpoint(path)


def test_a_shape_of_too_many_axes_is_refused(tmp_path: Path) -> None:
    save_sharded_state_dict({"w": torch.ones(5)}, tmp_path / "step_1")

    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "shapes" in line:
                line.update(axes=[1001], shapes=[5] + [1] * 1000)
            if "boxes" in line:
                line["boxes"] = [0] * 1001 + [5] + [1] * 1000

    rewrite_manifest(tmp_path / "step_1", change)
    with pytest.raises(CheckpointingException, match="a shape has over 1000 axes"):
        read_index(tmp_path / "step_1")


def test_a_flipped_bit_of_torchs_index_never_raises_in_a_listing(tmp_path: Path) -> None:
    path = tmp_path / "step_1"
    dcp.save({"w": torch.zeros(5), "n": 3}, checkpoint_id=path, no_dist=True)
    good = (path / ".metadata").read_bytes()
    outcomes = set()
    for at in range(0, len(good), 3):
        changed = bytearray(good)
        changed[at] ^= 1 << at % 8
        (path / ".metadata").write_bytes(changed)
        outcomes.add(latest_checkpoint(tmp_path) == path)
    assert outcomes == {True, False}
    (path / ".metadata").write_bytes(good)
    assert latest_checkpoint(tmp_path) == path


@pytest.mark.parametrize("version", ["2", "4", "x\xe9"])
def test_another_version_of_the_manifest_is_refused_by_name(version: str, tmp_path: Path) -> None:
    path = tmp_path / "step_1"
    save_sharded_state_dict({"w": torch.ones(5)}, path)
    manifest = (path / "manifest.json").read_bytes()
    changed = manifest.replace(b'"version": 3', b'"version": ' + version.encode("latin-1"), 1)
    (path / "manifest.json").write_bytes(changed)
    assert not is_complete_checkpoint(path)
    shown = version.encode("latin-1").decode("ascii", "backslashreplace")
    words = re.escape(f"manifest.json has version {shown}, but") + ".* reads version 3 only"
    with pytest.raises(CheckpointingException, match=words):
        load_sharded_state_dict({"w": torch.zeros(5)}, path)


def test_a_torch_reader_reads_what_is_written_though_it_must_trust_it(tmp_path: Path) -> None:
    save_sharded_state_dict({"w": torch.arange(5.0), "n": 3}, tmp_path / "step_1")
    target = {"w": torch.zeros(5), "n": 0}
    dcp.load(target, checkpoint_id=tmp_path / "step_1", no_dist=True)
    assert torch.equal(target["w"], torch.arange(5.0))
    assert target["n"] == 3
    with (tmp_path / "step_1" / ".metadata").open("rb") as stream:
        assert isinstance(pickle.load(io.BytesIO(stream.read())), metadata.Metadata)


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def memo(place: int) -> bytes:
    return b"r" + struct.pack("<I", place)


def recall(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def record(module: str, name: str, **fields: bytes) -> bytes:
    items = b"".join(text(field) + value for field, value in fields.items())
    return f"c{module}\n{name}\n".encode() + b")\x81}(" + items + b"ub"


def index_of_shared_parts(keys: int, chunks: int, axes: int) -> bytes:
    """An index with ``keys`` names of one tensor, which names one shard ``chunks`` times."""
    size = b"ctorch\nSize\n((" + number(0) * axes + b"ttR" + memo(1)
    chunk = record(DCP, "ChunkStorageMetadata", offsets=recall(1), sizes=recall(1)) + memo(2)
    tensor = record(
        DCP,
        "TensorStorageMetadata",
        properties=record(DCP, "TensorProperties", dtype=b"ctorch\nfloat32\n"),
        size=size,
        chunks=b"(" + chunk + recall(2) * (chunks - 1) + b"l",
    )
    place = record(
        "torch.distributed.checkpoint.filesystem",
        "_StorageInfo",
        relative_path=text("__0_0.distcp"),
        offset=number(0),
        length=number(0),
    )
    names = [f"k{key}" for key in range(keys)]
    described = b"".join(
        text(name) + (recall(3) if at else tensor + memo(3)) for at, name in enumerate(names)
    )
    places = b"".join(
        record(DCP, "MetadataIndex", fqn=text(name), offset=recall(1))
        + (recall(4) if at else place + memo(4))
        for at, name in enumerate(names)
    )
    paths = b"".join(
        text(name) + (recall(5) if at else b"(" + text("a") * chunks + b"t" + memo(5))
        for at, name in enumerate(names)
    )
    return (
        b"\x80\x02"
        + record(
            DCP,
            "Metadata",
            state_dict_metadata=b"}(" + described + b"u",
            planner_data=b"}(" + paths + b"u",
            storage_data=b"}(" + places + b"u",
        )
        + b"."
    )


MANY = 100_000
LARGE: dict[str, Callable[[], bytes]] = {
    "a shard of many names": lambda: index_of_shared_parts(1000, 20_000, 1),
    "a shape of many axes": lambda: index_of_shared_parts(1000, 1, 20_000),
    "dicts": lambda: b"\x80\x04(" + b"}" * MANY + b"l.",
    "lists in the memo": lambda: b"\x80\x04(" + b"]\x94" * (MANY // 2) + b"l.",
    "nested tuples": lambda: b"\x80\x04)" + b"\x85" * MANY + b".",
    "marks": lambda: b"\x80\x04" + b"(" * MANY + b".",
    "dicts of one item": lambda: b"\x80\x04\x8c\x01a\x94(" + b"}h\x00Ns" * (MANY // 5) + b"l.",
    "records": lambda: (
        f"\x80\x04c{DCP}\nMetadataIndex\n".encode("latin-1")
        + b"\x94("
        + b"h\x00)\x81" * (MANY // 4)
        + b"l."
    ),
    "texts": lambda: b"\x80\x04(" + b"\x8c\x02ab" * (MANY // 4) + b"l.",
    "values": lambda: b"\x80\x04(" + b"N" * MANY + b"l.",
    "steps back": lambda: b"\x80\x04" + b"N0" * (MANY // 2) + b".",
    "places in the memo": lambda: b"\x80\x04Nr\xff\x42\x0f\x00" + b"N" * MANY,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_index_costs_no_more_than_its_size_allows(name: str, tmp_path: Path) -> None:
    raw = LARGE[name]()
    (tmp_path / ".metadata").write_bytes(raw)
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    tracemalloc.start()
    try:
        assert not is_complete_checkpoint(tmp_path)
        read_nested_paths(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sys.setprofile(count)
    try:
        assert not is_complete_checkpoint(tmp_path)
    finally:
        sys.setprofile(None)
    assert peak < 30 * len(raw)  # 200 MB for 6 MB
    assert calls[0] < 10 * len(raw)


def index_of_positions(positions: Iterable[tuple[int, ...]]) -> bytes:
    """An index with many places of one name, and no tensor."""
    start = record(DCP, "MetadataIndex", fqn=text("a"), offset=b"(%bt")
    numbers = {one: b"\x8a\x08" + struct.pack("<q", one) for one in range(4)}
    numbers |= {one * HASH: b"\x8a\x08" + struct.pack("<q", one * HASH) for one in range(4)}
    places = b"".join(start % b"".join(map(numbers.__getitem__, one)) + b"N" for one in positions)
    empty = {"state_dict_metadata": b"}", "planner_data": b"N", "storage_meta": b"N"}
    return b"\x80\x02" + record(DCP, "Metadata", **empty, storage_data=b"}(" + places + b"u") + b"."


HASH = (1 << 61) - 1  # Python's hash of a number is its remainder


def test_positions_with_equal_hashes_are_read_as_quickly_as_others(tmp_path: Path) -> None:
    """Each of 25,000 was compared with all before it: 9 s for a file of 875 kB."""
    took = []
    for factor in (1, HASH):
        positions = itertools.islice(itertools.product(range(4), repeat=8), 20_000)
        raw = index_of_positions(tuple(factor * one for one in each) for each in positions)
        (tmp_path / ".metadata").write_bytes(raw)
        began = time.thread_time()
        assert is_complete_checkpoint(tmp_path)
        took.append(time.thread_time() - began)
    assert took[1] < 4 * took[0]


@pytest.mark.parametrize("is_collecting", [True, False])
def test_no_search_for_garbage_slows_an_index(is_collecting: bool) -> None:
    """With one for every 700 containers, a hostile index of 6 MB took 2.7 s, and an honest 2 s."""
    searches: list[object] = []
    (gc.enable if is_collecting else gc.disable)()
    gc.callbacks.append(lambda *found: searches.append(found))
    try:
        with pytest.raises(pickle.UnpicklingError, match="too many containers"):
            _PlainUnpickler(LARGE["lists in the memo"]()).load()
        during, is_collecting_after = len(searches), gc.isenabled()
    finally:
        del gc.callbacks[-1]
        gc.enable()
    assert is_collecting_after == is_collecting
    assert during < 10  # a few, after it has ended


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("shape", [(500, 1, 1), (75, 16, 2), (5, 100, 8), (1, 750, 1)])
def test_an_index_that_torch_makes_stays_within_the_bounds(
    shape: tuple[int, int, int], protocol: int
) -> None:
    """Half of what is allowed, whatever the number of its pieces, so larger ones are read too."""
    keys, shards, axes = shape
    described, places = {}, {}
    for key in range(keys):
        name = f"layers.{key}.weight"
        starts = [torch.Size([number, *[0] * (axes - 1)]) for number in range(shards)]
        properties = metadata.TensorProperties(dtype=torch.float32)
        size = torch.Size([1] * axes)
        chunks = [metadata.ChunkStorageMetadata(start, size) for start in starts]
        whole = torch.Size([shards, *size[1:]])
        described[name] = metadata.TensorStorageMetadata(properties, whole, chunks)
        for number, start in enumerate(starts):
            place = filesystem._StorageInfo(f"__{number}_0.distcp", key * 4096, 4000)
            places[metadata.MetadataIndex(name, start, number)] = place
    made = metadata.Metadata(described, {name: (name,) for name in described}, places)
    raw = pickle.dumps(made, protocol)
    reader = _PlainUnpickler(raw)
    before = reader.cost_left
    reader.load()
    assert before - reader.cost_left < 0.8 * 16 * len(raw)
    assert sum(1 for _ in pickletools.genops(raw)) < 0.9 * 0.6 * len(raw)
    found = parse_index(Path("/none"), raw)
    assert len(found.keys) == keys
    assert sum(len(stored.pieces) for stored in found.keys.values()) == keys * shards


def test_a_small_index_of_one_shard_is_read(tmp_path: Path) -> None:
    """The large ones above are refused for their size alone."""
    (tmp_path / ".metadata").write_bytes(index_of_shared_parts(3, 1, 1))
    (tmp_path / "__0_0.distcp").touch()
    assert is_complete_checkpoint(tmp_path)
    assert list(read_index(tmp_path).keys) == ["k0", "k1", "k2"]


@pytest.mark.parametrize("far", [0, 1 << 40], ids=["narrow numbers", "wide numbers"])
def test_a_load_looks_only_at_the_pieces_that_it_reads(far: int) -> None:
    generator = random.Random(0)
    pieces = [
        Piece(
            "a",
            64 * at,
            64,
            64,
            f"{at:016x}",
            0,
            (far + generator.randrange(9), generator.randrange(9)),
            (generator.randrange(4), generator.randrange(4)),
        )
        for at in range(200)
    ]
    named = [("k" if at % 3 else "other", piece) for at, piece in enumerate(pieces)]
    by_name = {name: [one for key, one in named if key == name] for name in ("k", "other")}
    keys = {name: StoredKey(torch.int8, (far + 20, 20), found) for name, found in by_name.items()}
    raw = encode_manifest(keys, {"a": named}, {})
    table = decode_manifest(Path("manifest.json"), raw).keys
    boxes = [((far + 2, 3), (2, 1)), ((far + 7, 0), (1, 20))]
    found = key_with_boxes(table, "k", boxes)

    def elements(offset: tuple[int, ...], shape: tuple[int, ...]) -> set[tuple[int, ...]]:
        axes = zip(offset, shape, strict=True)
        return set(itertools.product(*(range(start, start + size) for start, size in axes)))

    wanted = set().union(*(elements(*box) for box in boxes))
    expected = [one for one in by_name["k"] if elements(one.start, one.shape) & wanted]
    assert 0 < len(expected) < len(by_name["k"])
    # A piece without elements may be there too: it adds nothing.
    assert [one for one in found.pieces if elements(one.start, one.shape)] == expected
    assert key_with_boxes(table, "k", None) == table["k"]
    assert key_with_boxes(table, "k", [((0,), (1,))]) == table["k"]  # refused later, by name
    with torch.device("meta"):
        assert key_with_boxes(table, "k", boxes) == found


def test_a_load_refuses_a_piece_outside_of_its_tensor_where_it_reads_others() -> None:
    places = [*range(199), 201]
    named = [("k", Piece("a", 64 * at, 64, 64, "0" * 16, 0, (at,), (1,))) for at in places]
    named = [(key, one._replace(at=64 * at)) for at, (key, one) in enumerate(named)]
    keys = {"k": StoredKey(torch.int8, (200,), [piece for _, piece in named])}
    table = decode_manifest(Path("manifest.json"), encode_manifest(keys, {"a": named}, {})).keys
    with pytest.raises(CheckpointingException, match="'k': its pieces do not fit"):
        key_with_boxes(table, "k", [((0,), (4,))])
