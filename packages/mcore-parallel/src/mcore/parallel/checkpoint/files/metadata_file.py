"""The index file of torch.distributed.checkpoint, read as plain data: nothing of it is run.

A pickle may call whatever it names and change the classes that it refers to. Here its names stand
for themselves: no module is imported, no class looked up, and what it builds are plain records.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, cast

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.index import DTYPES, Index, Piece, StoredKey, is_inside
from mcore.parallel.checkpoint.files.regular_files import Place
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.torch_compat import METADATA_FILE

OUR_MARK = "mcore.parallel.checkpoint"
"""In the ``modules`` of an index whose checkpoint has a manifest."""
PICKLE_START = b"\x80"

_DCP = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"  # Megatron-LM keeps the plans of a save
_RECORDS = {
    (_DCP, "BytesStorageMetadata"),
    (_DCP, "ChunkStorageMetadata"),
    (_DCP, "Metadata"),
    (_DCP, "MetadataIndex"),
    (_DCP, "StorageMeta"),
    (_DCP, "TensorProperties"),
    (_DCP, "TensorStorageMetadata"),
    (_PLANNER, "BytesIOWriteData"),
    (_PLANNER, "SavePlan"),
    (_PLANNER, "TensorWriteData"),
    (_PLANNER, "WriteItem"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_CALLS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    (_PLANNER, "WriteItemType"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "PureWindowsPath"),
    ("pathlib._local", "Path"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("pathlib._local", "PurePosixPath"),
    ("pathlib._local", "PureWindowsPath"),
}
_HARMLESS = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.INT, pickle.BININT, pickle.BININT1,
    pickle.BININT2, pickle.LONG, pickle.LONG1, pickle.BINFLOAT, pickle.UNICODE,
    pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1,
    pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.LIST, pickle.EMPTY_DICT,
    pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.GET, pickle.BINGET, pickle.LONG_BINGET,
    pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE,
)  # fmt: skip


class _Name(NamedTuple):
    """A name that an index may refer to."""

    module: str
    name: str


class _Record:
    """What an index describes as an instance of a class: the name and the state of it."""

    __slots__ = ("name", "state")

    def __init__(self, name: _Name) -> None:
        self.name, self.state = name.name, cast("Any", {})

    def __getitem__(self, field: str) -> Any:
        return self.state[field]


_Interpreter: Any = pickle._Unpickler  # type: ignore[attr-defined,unused-ignore]


class _PlainUnpickler(_Interpreter):  # type: ignore[misc]
    """The interpreter of pickles, in Python, with few of its instructions and none that acts."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) in _RECORDS or (module, name) in _CALLS:
            return _Name(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    def load_newobj(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not _Name or tuple(name) not in _RECORDS or arguments != ():
            _refuse()
        self.stack.append(_Record(name))

    def load_reduce(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not _Name or tuple(name) not in _CALLS or type(arguments) is not tuple:
            _refuse()
        if name.name == "OrderedDict":
            self.stack.append({})
        else:
            self.stack.append(arguments[0] if name.name == "Size" else arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is not _Record:
            _refuse()
        self.stack[-1].state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        keys = items[::2]
        # Others may take without end to hash.
        if type(self.stack[-1]) is not dict or not {type(key) for key in keys} <= {str, _Record}:
            _refuse()
        self.stack[-1].update(zip(keys, items[1::2], strict=True))

    def _load_append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def _load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            _refuse()
        self.stack[-1].extend(values)

    dispatch = {  # noqa: RUF012 - as in the class that this one derives from
        **{code[0]: _Interpreter.dispatch[code[0]] for code in _HARMLESS},
        pickle.NEWOBJ[0]: load_newobj,
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
    """Return numbers, text, lists and dicts of text that a pickle holds; an error for any other."""
    return _ValueUnpickler(io.BytesIO(content)).load()


def _refuse() -> NoReturn:
    raise pickle.UnpicklingError("it holds instructions that no index needs")


def _root(content: bytes) -> _Record:
    root = _PlainUnpickler(io.BytesIO(content)).load()
    if type(root) is not _Record or root.name != "Metadata":
        raise pickle.UnpicklingError("it is not the index of a checkpoint")
    return root


def nested_paths(content: bytes) -> dict[str, tuple[str | int, ...]]:
    """Return where in nested dicts and lists an index says that keys were; it need not say."""
    try:
        paths = _root(content).state.get("planner_data")
    except Exception:  # whatever a damaged or hostile pickle makes of the interpreter
        return {}
    return {
        name: path
        for name, path in (paths.items() if type(paths) is dict else ())
        if type(name) is str
        and type(path) is tuple
        and {type(step) for step in path} in ({str}, {int}, {str, int})
    }


def stock_index(directory: Place, content: bytes) -> tuple[Index, bool]:
    """Return the keys of such an index, and whether its checkpoint should have a manifest."""
    path = directory / METADATA_FILE
    try:
        root = _root(content)
        keys = _stored_keys(root)
        meta = root.state.get("storage_meta")
        is_ours = type(meta) is _Record and OUR_MARK in meta.state.get("modules", ())
    except Exception as error:  # whatever a damaged or hostile pickle makes of the interpreter
        raise CheckpointingException(
            f"{path} cannot be read ({describe_error(error)}); take another checkpoint"
        ) from error
    return Index(keys, _needed_sizes(keys), ""), is_ours


def _stored_keys(root: _Record) -> dict[str, StoredKey]:
    if not isinstance(root["storage_data"], dict):
        raise ValueError("it does not say where the content is stored")
    places: dict[str, dict[Shape | None, _Record]] = {}
    for index, place in root["storage_data"].items():
        offset = index.state.get("offset")
        where = None if offset is None else _shape(offset)
        places.setdefault(_text(index["fqn"]), {})[where] = place
    return {
        _text(name): _stored_key(described, places.get(name, {}))
        for name, described in root["state_dict_metadata"].items()
    }


def _stored_key(described: _Record, places: Mapping[Shape | None, _Record]) -> StoredKey:
    if described.name == "BytesStorageMetadata":
        [place] = places.values()
        return StoredKey(None, (), (_piece(place, (), ()),))
    if described.name != "TensorStorageMetadata":
        raise ValueError(f"{described.name} is not a tensor")
    properties = described["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no dtype")
    whole, pieces = _shape(described["size"]), []
    for chunk in described["chunks"]:
        start, shape = _shape(chunk["offsets"]), _shape(chunk["sizes"])
        if not is_inside(start, shape, whole):
            raise ValueError(f"a shard {start} {shape} lies outside its tensor {whole}")
        pieces.append(_piece(places[start], start, shape))
    return StoredKey(dtype, whole, tuple(pieces))


def _piece(place: _Record, start: Shape, shape: Shape) -> Piece:
    name, at, length = _text(place["relative_path"]), place["offset"], place["length"]
    if not is_plain_name(name):
        raise ValueError(f"{name!r} is not the plain name of a file")
    at, length = _shape((at, length))
    transforms = tuple(_text(one) for one in place.state.get("transform_descriptors") or ())
    return Piece(name, at, length, length, "", None, start, shape, transforms)


def _shape(numbers: Any) -> Shape:
    if not isinstance(numbers, list | tuple) or not all(
        type(number) is int and 0 <= number < 1 << 63 for number in numbers
    ):
        raise ValueError("a shape or place is not made of sizes")
    return tuple(numbers)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("a name is not text")
    return value


def is_plain_name(name: str) -> bool:
    """Return whether a name is that of a file in the checkpoint's own directory."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0") and ":" not in name


def _needed_sizes(keys: Mapping[str, StoredKey]) -> dict[str, int]:
    """Return how many bytes each payload file must have at least, by file name."""
    sizes: dict[str, int] = {}
    for stored in keys.values():
        for piece in stored.pieces:
            sizes[piece.file] = max(piece.at + piece.length, sizes.get(piece.file, 0))
    return sizes


def keys_text(keys: Iterable[str]) -> str:
    """Name the first key of some content, and how many more there are."""
    first, *others = dict.fromkeys(keys)
    return f"it holds key {first!r}" + (f" and {len(others)} more" if others else "")
