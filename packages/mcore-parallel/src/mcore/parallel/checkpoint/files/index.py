"""The index of a checkpoint: read from its manifest, or else from torch's ``.metadata``.

``.metadata`` is a pickle. Unpickling can call any function and change the classes that the pickle
refers to. The interpreter here runs nothing: names stay names, no module is imported, no class is
looked up, and the results are plain records.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch

from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    describe_error,
    find_passing,
    is_lasting,
)
from mcore.parallel.checkpoint.files.manifest import (
    DTYPES,
    MANIFEST_FILE,
    MANIFEST_START,
    Index,
    Piece,
    StoredKey,
    decode_manifest,
    is_inside,
    is_plain_name,
)
from mcore.parallel.checkpoint.files.pieces import FileSlice, Scratch, checksum_in
from mcore.parallel.checkpoint.files.places import (
    Place,
    RemotePath,
    open_regular,
    read_regular,
    size_problems,
    without_damage,
)
from mcore.parallel.checkpoint.objects import object_kind
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.torch_compat import METADATA_FILE

OUR_MARK = "mcore.parallel.checkpoint"
"""In the ``modules`` of a ``.metadata`` whose checkpoint has a manifest."""
PICKLE_START = b"\x80"

_DCP = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"  # Megatron-LM keeps the plans of a save
_RECORDS = {
    *((_DCP, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata")),
    *((_DCP, name) for name in ("MetadataIndex", "StorageMeta", "TensorProperties")),
    (_DCP, "TensorStorageMetadata"),
    *((_PLANNER, name) for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData")),
    (_PLANNER, "WriteItem"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_CALLS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    (_PLANNER, "WriteItemType"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
}
# The instructions that are kept as they are: they move values, and GLOBAL calls find_class.
_HARMLESS = (
    pickle.PROTO, pickle.STOP, pickle.POP, pickle.POP_MARK, pickle.NONE, pickle.NEWTRUE,
    pickle.NEWFALSE, pickle.INT, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG,
    pickle.LONG1, pickle.BINFLOAT, pickle.UNICODE, pickle.BINUNICODE, pickle.SHORT_BINUNICODE,
    pickle.EMPTY_TUPLE, pickle.LIST, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.GET, pickle.BINGET,
    pickle.LONG_BINGET, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT,
)  # fmt: skip
# Those that need more memory than their bytes allow, with the bytes that each may need.
_COSTS = {
    pickle.MARK: 88, pickle.EMPTY_LIST: 88, pickle.EMPTY_DICT: 232, pickle.TUPLE: 64,
    pickle.TUPLE1: 64, pickle.TUPLE2: 64, pickle.TUPLE3: 64,
}  # fmt: skip
_RECORD_COST = 64
# Indices of torch need 8 to 11 of these bytes, and half an instruction, for each of their bytes.
_MOST_COST, _MOST_STEPS, _FREE = 16, 0.6, 100_000
_MOST_AXES = 64
_MOST_TRANSFORMS = 16


class _Name(NamedTuple):
    """The name of a class or function that a pickle may refer to."""

    module: str
    name: str


class _Record:
    """An instance of a class in a pickle: the name of the class and the state of the instance.

    The keys of a state that is a dict are shared by all records that have them.
    """

    __slots__ = ("fields", "name", "state")

    def __init__(self, name: _Name) -> None:
        self.name = name.name
        self.fields: tuple[str, ...] = ()
        self.state: Any = ()

    def get(self, field: str) -> Any:
        return self[field] if field in self.fields else None

    def __getitem__(self, field: str) -> Any:
        return self.state[self.fields.index(field)]


class _Memo(list[Any]):
    """The memo of a pickle: a list, which needs less memory than a dict."""

    most = 0  # places

    def __setitem__(self, place: Any, value: Any) -> None:
        if len(self) <= place < self.most:
            self.extend([None] * (place + 1 - len(self)))
        super().__setitem__(place, value)


_Interpreter: Any = pickle._Unpickler  # type: ignore[attr-defined,unused-ignore]


def _bound(handle: Callable[[Any], None], cost: int) -> Callable[[Any], None]:
    """Refuse an instruction after more memory than an index of this size needs."""

    def handle_bounded(unpickler: Any) -> None:
        unpickler.cost_left -= cost
        if unpickler.cost_left < 0:
            raise pickle.UnpicklingError("it holds too many containers for its size")
        handle(unpickler)

    return handle_bounded


@contextmanager
def pause_collection() -> Iterator[None]:
    """Collect no garbage: among millions of new objects in use, the search takes half the time."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


class _PlainUnpickler(_Interpreter):  # type: ignore[misc]
    """Python's interpreter of pickles with few instructions, none of which calls anything."""

    def __init__(self, content: bytes) -> None:
        stream = io.BytesIO(content)
        super().__init__(stream)
        self.read, self.readline, self.memo = stream.read, stream.readline, _Memo()
        self.memo.most = len(content)
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.proto = 0
        self.append = self.stack.append
        self.cost_left = _MOST_COST * len(content) + _FREE
        self.steps = int(_MOST_STEPS * len(content)) + _FREE
        self._fields: dict[tuple[str, ...], tuple[str, ...]] = {}

    def load(self) -> Any:
        """Return the value. The loop of the base class has no bound, and reads through frames."""
        dispatch, read = self.dispatch, self.read
        try:
            with pause_collection():
                for _ in range(self.steps):
                    dispatch[read(1)[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined,unused-ignore]
            return stop.value
        raise pickle.UnpicklingError("it has too many instructions for its size")

    def load_memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def load_frame(self) -> None:
        self.read(8)  # its length, which only matters to readers of streams

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) in _RECORDS or (module, name) in _CALLS:
            return _Name(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    def load_newobj(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not _Name or name not in _RECORDS or arguments != ():
            _refuse()
        self.stack.append(_Record(name))

    def load_reduce(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not _Name or name not in _CALLS or type(arguments) is not tuple:
            _refuse()
        if name.name == "OrderedDict":
            self.stack.append({})
        else:
            self.stack.append(arguments[0] if name.name == "Size" else arguments)

    def load_build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if type(record) is not _Record:
            _refuse()
        if type(state) is dict:
            fields = tuple(state)
            record.fields = self._fields.setdefault(fields, fields)
            state = tuple(state.values())
        record.state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        keys = items[::2]
        # Hashing a key of another type, such as a deeply nested tuple, may never end.
        if type(self.stack[-1]) is not dict or not {type(key) for key in keys} <= {str, _Record}:
            _refuse()
        self.stack[-1].update(zip(keys, items[1::2], strict=True))

    def _load_append(self) -> None:
        self._extend([self.stack.pop()])

    def _load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            _refuse()
        self.stack[-1].extend(values)

    dispatch = {  # noqa: RUF012 - as in the base class
        **{code[0]: _Interpreter.dispatch[code[0]] for code in _HARMLESS},
        **{code[0]: _bound(_Interpreter.dispatch[code[0]], cost) for code, cost in _COSTS.items()},
        pickle.FRAME[0]: load_frame,
        pickle.MEMOIZE[0]: load_memoize,
        pickle.NEWOBJ[0]: _bound(load_newobj, _RECORD_COST),
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.APPEND[0]: _load_append,
        pickle.APPENDS[0]: _load_appends,
    }


class _ValueUnpickler(_PlainUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def plain_value(content: bytes) -> Any:
    """Unpickle numbers, text, lists and dicts of text. Any other content raises an error."""
    return _ValueUnpickler(content).load()


def _refuse() -> NoReturn:
    raise pickle.UnpicklingError("it holds instructions that no index needs")


def _unpickle_metadata(content: bytes) -> _Record:
    root = _PlainUnpickler(content).load()
    if type(root) is not _Record or root.name != "Metadata":
        raise pickle.UnpicklingError("it is not the index of a checkpoint")
    return root


def read_nested_paths(directory: Place) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each key in nested dicts and lists, as far as torch's index has it."""
    try:
        content = read_regular(directory / METADATA_FILE, PICKLE_START)
        paths = _unpickle_metadata(content).get("planner_data")
    except Exception as error:  # a damaged or hostile pickle can raise anything
        if find_passing(error):
            raise
        return {}
    return {
        name: path
        for name, path in (paths.items() if type(paths) is dict else ())
        if type(name) is str
        and type(path) is tuple
        and len(path) <= _MOST_AXES
        and {type(step) for step in path} in ({str}, {int}, {str, int})
    }


def read_index(directory: Place) -> Index:
    """Return the index of a checkpoint, as one process."""
    return parse_index(directory, read_index_file(directory))


def read_index_file(directory: Place) -> bytes:
    """Read the manifest of a checkpoint or, if there is none, torch's index."""
    manifest, metadata = directory / MANIFEST_FILE, directory / METADATA_FILE
    if _has_name(manifest):
        return read_regular(manifest, MANIFEST_START)
    if _has_name(metadata):
        return read_regular(metadata, PICKLE_START)
    if not _has_name(directory):
        problem = "does not exist. list_checkpoints(...) lists the checkpoints of a run"
    elif not directory.is_dir():
        problem = "cannot be read: it is not a directory"
    else:
        problem = f"is not a checkpoint: it has no file {MANIFEST_FILE} or {METADATA_FILE}"
    raise CheckpointingException(f"{directory} {problem}")


def parse_index(directory: Place, raw: bytes) -> Index:
    """Return the index in the bytes of :func:`read_index_file`, checked, without running code."""
    if raw.startswith(MANIFEST_START):
        return decode_manifest(directory / MANIFEST_FILE, raw)
    try:
        root = _unpickle_metadata(raw)
        keys = _list_keys(root)
        meta = root.get("storage_meta")
        is_ours = type(meta) is _Record and OUR_MARK in (meta.get("modules") or ())
    except Exception as error:  # a damaged or hostile pickle can raise anything
        raise CheckpointingException(
            f"{directory / METADATA_FILE} cannot be read ({describe_error(error)}). Take another "
            "checkpoint"
        ) from error
    if is_ours:
        raise CheckpointingException(
            f"{directory / MANIFEST_FILE} is missing, and without it nothing of this checkpoint "
            "can be checked. Take another checkpoint"
        )
    sizes: dict[str, int] = {}
    for piece in (piece for stored in keys.values() for piece in stored.pieces):
        sizes[piece.file] = max(piece.at + piece.length, sizes.get(piece.file, 0))
    return Index(keys, sizes, has_checksums=False)


def file_problems(directory: Place, index: Index) -> Iterator[tuple[str, str]]:
    """Yield the name of each file that is missing or has another size, and the problem."""
    return size_problems(directory, index.files, at_least=not index.has_checksums)


def whole_file_problems(directory: Place, index: Index) -> Iterator[tuple[str, str]]:
    """Yield the name of each file without pieces that has changed, and the problem."""
    for name, checksum in index.whole_files.items():
        try:
            with open_regular(directory / name) as stream:
                found = checksum_in(stream, 0, index.files[name], Scratch())
        except (OSError, EOFError) as error:
            if without_damage(directory / name, error) is not None:
                raise
            yield name, describe_error(error)
        else:
            if found != checksum:
                yield name, "its checksum differs"


def piece_problem(
    stream: Any, key: str, piece: Piece, has_checksums: bool, scratch: Scratch
) -> str | None:
    """Compare the content of a piece with its checksum, or with those in its archive."""
    if has_checksums:
        found = checksum_in(stream, piece.at, piece.span, scratch)
        return None if found == piece.checksum else "its checksum differs"
    if piece.transforms or not object_kind(key).is_archive:
        return None
    try:
        with zipfile.ZipFile(FileSlice(stream, piece.at, piece.length)) as archive:
            damaged = archive.testzip()
    except Exception as error:
        return describe_error(error)
    return None if damaged is None else f"checksum of {damaged}"


def format_keys(keys: Iterable[str]) -> str:
    """Name the first key of some content, and the number of further keys."""
    first, *others = dict.fromkeys(keys)
    return f"it holds key {first!r}" + (f" and {len(others)} more" if others else "")


def _has_name(path: Place) -> bool:
    """Return whether a name exists; a broken link counts."""
    try:
        if isinstance(path, RemotePath):
            return path.exists()
        os.lstat(path)
    except OSError as error:
        if is_lasting(error):
            return False
        raise CheckpointingException(f"{path} cannot be read ({error.strerror})") from error
    return True


def _list_keys(root: _Record) -> dict[str, StoredKey]:
    if not isinstance(root["storage_data"], dict):
        raise ValueError("the locations of the content are missing")
    places: dict[str, dict[bytes | None, _Record]] = {}
    for index, place in root["storage_data"].items():
        offset = index.get("offset")
        start = None if offset is None else _pack(_check_shape(offset))
        places.setdefault(_check_text(index["fqn"]), {})[start] = place
    return {
        _check_text(name): _describe_key(described, places.get(name, {}))
        for name, described in root["state_dict_metadata"].items()
    }


def _pack(shape: Shape) -> bytes:
    """Return the bytes of a shape, for a dict: a file can choose tuples with equal hashes."""
    return array("q", shape).tobytes()


def _describe_key(described: _Record, places: Mapping[bytes | None, _Record]) -> StoredKey:
    if described.name == "BytesStorageMetadata":
        [place] = places.values()
        return StoredKey(None, (), (_describe_piece(place, (), ()),))
    if described.name != "TensorStorageMetadata":
        raise ValueError(f"{described.name} is not a tensor")
    properties = described["properties"]
    dtype = properties["dtype"] if properties.fields else properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no dtype")
    whole, pieces = _check_shape(described["size"]), []
    if len(described["chunks"]) > len(places):  # a pickle can name one shard many times
        raise ValueError("a tensor has more shards than places")
    for chunk in described["chunks"]:
        start, shape = _check_shape(chunk["offsets"]), _check_shape(chunk["sizes"])
        if not is_inside(start, shape, whole):
            raise ValueError(f"a shard {start} {shape} is outside its tensor {whole}")
        pieces.append(_describe_piece(places[_pack(start)], start, shape))
    return StoredKey(dtype, whole, tuple(pieces))


def _describe_piece(place: _Record, start: Shape, shape: Shape) -> Piece:
    name, at, length = _check_text(place["relative_path"]), place["offset"], place["length"]
    if not is_plain_name(name):
        raise ValueError(f"{name!r} is not the plain name of a file")
    at, length = _check_shape((at, length))
    transforms = place.get("transform_descriptors") or ()
    if len(transforms) > _MOST_TRANSFORMS:
        raise ValueError("a shard has too many transforms")
    transforms = tuple(map(_check_text, transforms))
    return Piece(name, at, length, length, "", None, start, shape, transforms)


def _check_shape(numbers: Any) -> Shape:
    if not isinstance(numbers, list | tuple) or len(numbers) > _MOST_AXES:
        raise ValueError("a shape or position has no or too many axes")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("a shape or position is not made of sizes")
    return tuple(numbers)


def _check_text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("a name is not text")
    return value
