"""The index file of torch.distributed.checkpoint, read without running code from it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.checksums import checksum_of_bytes
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE, FileRecords
from mcore.parallel.torch_compat import METADATA_FILE, METADATA_GLOBALS

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows only the parts of such an index and refuses anything else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        allowed = (
            (module_name, global_name) in METADATA_GLOBALS
            or (module_name == "torch" and _is_dtype(global_name))
            or (module_name.partition(".")[0] == "pathlib" and global_name.endswith("Path"))
        )
        if not allowed:
            raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def read_metadata(
    directory: Path, files: FileRecords | None = None, *, weights_only: bool = True
) -> Metadata:
    """Read the index of a checkpoint and check it against the manifest."""
    from torch.distributed.checkpoint.metadata import Metadata

    path = directory / METADATA_FILE
    try:
        content = path.read_bytes()
        _check_content(path, content, files)
        load = _MetadataUnpickler if weights_only else pickle.Unpickler
        metadata = load(io.BytesIO(content)).load()
    except CheckpointingException:
        raise
    except FileNotFoundError as error:
        raise CheckpointingException(_no_checkpoint(directory)) from error
    except Exception as error:
        hint = ", or pass weights_only=False if you trust it" if weights_only else ""
        raise CheckpointingException(
            f"{path} cannot be read ({describe_error(error)}); take another checkpoint{hint}"
        ) from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise CheckpointingException(f"{path} is not the index of a checkpoint")
    return metadata


def _check_content(path: Path, content: bytes, files: FileRecords | None) -> None:
    if files is None:
        return
    record = files.get(METADATA_FILE)
    if record is None or [piece.checksum for piece in record.pieces] != [
        checksum_of_bytes(content)
    ]:
        raise CheckpointingException(
            f"{path} has changed since it was saved, or {path.with_name(MANIFEST_FILE)} is that of "
            "another checkpoint; take another checkpoint"
        )


def _no_checkpoint(directory: Path) -> str:
    if not directory.exists():
        return f"{directory} does not exist; see list_checkpoints({str(directory.parent)!r})"
    return f"{directory} is not a checkpoint: it has no file {METADATA_FILE}"


def needed_sizes(metadata: Metadata) -> dict[str, int]:
    """Return how many bytes each payload file must have at least, by file name."""
    sizes: dict[str, int] = {}
    try:
        for place in metadata.storage_data.values():
            end = place.offset + place.length
            sizes[place.relative_path] = max(end, sizes.get(place.relative_path, 0))
    except (AttributeError, TypeError) as error:
        raise CheckpointingException(
            f"the index of the checkpoint does not say where its content is stored ({error})"
        ) from error
    return sizes


def keys_text(keys: Iterable[str]) -> str:
    """Name the first key of some content, and how many more there are."""
    first, *others = dict.fromkeys(keys)
    return f"it holds key {first!r}" + (f" and {len(others)} more" if others else "")
