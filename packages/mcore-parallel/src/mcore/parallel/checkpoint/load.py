"""Loads of sharded state dicts, collectively over all ranks.

The first rank reads the index for all (all-reduce, broadcast). Each rank plans its reads and reads
objects (all-reduce). If everything fits on all ranks, each fills its tensors (all-reduce).
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    name_checkpoint,
    raise_as_damage,
)
from mcore.parallel.checkpoint.figures import Clock, show_progress
from mcore.parallel.checkpoint.files.directory import is_incomplete_name
from mcore.parallel.checkpoint.files.index import (
    file_problems,
    format_keys,
    parse_index,
    read_index_file,
    whole_file_problems,
)
from mcore.parallel.checkpoint.files.manifest import Index, key_with_boxes
from mcore.parallel.checkpoint.files.places import PathLike, Place, place_of
from mcore.parallel.checkpoint.selection import Choices, LoadReport, Rename, Selection
from mcore.parallel.checkpoint.team import Team, team_of
from mcore.parallel.shortened import titled_list

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan

    from mcore.parallel.checkpoint.files.reader import CheckedReader, Verify
    from mcore.parallel.groups import GroupLike


logger = logging.getLogger(__name__)

Unexpected = Literal["raise", "warn", "ignore"]
_MEGATRON_FILE = "metadata.json"  # next to torch's index in checkpoints of Megatron-LM


def load_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    strict: bool = True,
    unexpected: Unexpected = "warn",
    process_group: GroupLike | None = None,
    weights_only: bool = True,
    verify: Verify = "while_reading",
    progress_bar: bool = False,
    include: Choices = None,
    exclude: Choices = None,
    rename: Rename = None,
    report: LoadReport | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into the tensors of ``sd``. It may have been saved in another layout.

    Collective over ``process_group``: all its ranks call it. The first rank reads the manifest for
    all. Then each rank reads the data that it needs, replicas included. Keys, shapes, dtypes,
    targets and file sizes are checked first, on all ranks: if one does not fit, no tensor on any
    rank has changed. Floating-point tensors are cast to the target's dtype. Checkpoints of
    ``torch.distributed.checkpoint.save`` can be read too. Without torch.distributed this process
    reads alone. Only objects are unpickled, without running code.

    Args:
        sd: As in :func:`save_sharded_state_dict`. Its leaves name the values to load. Its tensors
            are filled in place, except that a ShardedTensor without data and a plain tensor on
            the meta device get a new tensor. Other values in it do not change.
        path: The checkpoint, or its URL. A leading ``~`` is expanded.
        strict: Raise if the checkpoint lacks a key. Otherwise the local value stays.
        unexpected: The reaction to keys in the checkpoint that are in no rank's ``sd``.
        process_group: The ranks that load. None is the world.
        weights_only: Refuse to run code from a checkpoint. Objects other than plain values and
            tensors need False.
        verify: ``"while_reading"`` compares the checksum of each piece while it is copied. If a
            piece is damaged, targets are partly filled, and the error message has a warning.
            ``"before"`` reads the data of this rank once more and fills no target if a piece is
            damaged. False compares no checksums. Index and manifest are always checked.
            Checkpoints of torch.distributed.checkpoint have only the CRC-32 in their archives.
        progress_bar: If the load takes over 5 s, show a bar of the bytes of the first rank on its
            terminal. Needs tqdm.
        include: The keys to load: a text, a function of a key that returns a bool, or a list of
            them. A text is a key, or with ``*`` at its end the start of keys. None is all keys.
        exclude: Keys that keep their present values, as for ``include``.
        rename: The keys in the checkpoint, by the keys in ``sd``: a function, or a dict of keys or
            of starts of keys with ``*`` on both sides.
        report: Gets the keys that were loaded, left, missing and unused.

    Returns:
        A dict of the structure of ``sd``, with tensors and values instead of their descriptions. A
        LocalNonpersistentObject becomes its local value.

    Raises:
        DamagedCheckpointError: On every rank: the path is not a complete checkpoint, or a file is
            missing, truncated, damaged or not a regular file. The text names file or key.
        CheckpointingException: On every rank: a key, dtype or shape does not fit, a tensor cannot
            be filled in place, or the optimizer state in ``sd`` is empty and the one in the
            checkpoint is not. The text names the key.
        ValueError: This rank is not a member of the group, or ``verify`` or ``unexpected`` has an
            unknown value.

    Example:
        >>> load_sharded_state_dict({}, "/no/such/checkpoint")
        Traceback (most recent call last):
            ...
        mcore.parallel.checkpoint.errors.DamagedCheckpointError: cannot load ...
    """
    _require_one_of("verify", verify, ("while_reading", "before", False))
    _require_one_of("unexpected", unexpected, ("raise", "warn", "ignore"))
    selection = Selection(include, exclude, rename, report)
    team = team_of(process_group)
    checkpoint = open_checkpoint(path, team)
    options = LoadOptions(strict, unexpected, weights_only, verify, progress_bar)
    loaded = load_opened(checkpoint, lambda: sd, team, options, selection=selection)
    checkpoint.log_figures(team)
    return loaded


class LoadOptions(NamedTuple):
    """The options of a load, see :func:`load_sharded_state_dict`."""

    strict: bool
    unexpected: Unexpected
    weights_only: bool
    verify: Verify
    progress_bar: bool


class OpenCheckpoint:
    """A checkpoint whose index the first rank has read and checked."""

    def __init__(
        self, directory: Place, num_keys: int, content: bytes, index: Index | None, clock: Clock
    ) -> None:
        self.directory, self.num_keys = directory, num_keys
        self.clock, self.num_bytes, self.files = clock, 0, set[str]()
        self._content, self._index = content, index

    @property
    def index(self) -> Index:
        """The index, parsed at the first use. The first rank has parsed it already."""
        if self._index is None:
            self._index, self._content = parse_index(self.directory, self._content), b""
        return self._index

    def log_figures(self, team: Team) -> None:
        """Log size and times of the finished load on the first rank."""
        if team.is_first:
            figures = self.clock.stop(self.num_bytes, len(self.files))
            logger.info("loaded %s: %s", self.directory, figures)


def open_checkpoint(path: PathLike, team: Team) -> OpenCheckpoint:
    """Read the index of a checkpoint on the first rank, check its files, and send it to all."""
    clock = Clock()
    directory: Place = Path()
    index: Index | None = None

    def read() -> list[bytes]:
        nonlocal directory, index
        directory = place_of(path)
        with raise_as_damage():
            if not team.is_first:
                return [b"", b""]
            if is_incomplete_name(directory.name):
                raise CheckpointingException(
                    "it is the leftover of an unfinished save. Take a complete checkpoint"
                )
            content = read_index_file(directory)
            index = parse_index(directory, content)
            _check_files(directory, index)
            return [content, str(len(index.keys)).encode()]

    with name_checkpoint("load", path):
        content, num_keys = team.share(read, 2)
    clock.end_phase("index")
    rest = content if index is None else b""
    return OpenCheckpoint(directory, int(num_keys), rest, index, clock)


def load_opened(
    checkpoint: OpenCheckpoint,
    build: Callable[[], Mapping[str, Any]],
    team: Team,
    options: LoadOptions,
    *,
    accounted: Collection[str] = (),
    selection: Selection | None = None,
) -> dict[str, Any]:
    """Load into the state dict that ``build`` makes. ``accounted`` keys are not unexpected."""
    from mcore.parallel.checkpoint.files.reader import CheckedReader
    from mcore.parallel.checkpoint.planning.load_planner import ShardedLoadPlanner

    planner = ShardedLoadPlanner(strict=options.strict, weights_only=options.weights_only)
    directory = checkpoint.directory

    def plan_reads() -> tuple[tuple[CheckedReader, LoadPlan], list[bool]]:
        index, sd = checkpoint.index, build()
        is_megatron = not index.has_checksums and (directory / _MEGATRON_FILE).is_file()
        planner.has_listed_objects = is_megatron
        wanted = planner.take(sd, selection, index.keys)
        keys = {
            name: key_with_boxes(index.keys, name, planner.boxes.get(name))
            for name in wanted
            if name in index.keys
        }
        reader = CheckedReader(directory, index, keys, options.verify)
        planner.set_up_planner(cast("dict[str, Any]", sd), reader.metadata, team.is_first)
        plan = planner.create_local_plan()
        _reject_empty_optimizer((), sd, index.keys)
        with raise_as_damage():
            reader.check_plan(plan)
            reader.read_objects(plan, planner)
        expected = planner.wanted.union(accounted)
        return (reader, plan), [key in expected for key in index.keys]

    def fill(report: Callable[[int], object]) -> None:
        with raise_as_damage():
            reader.read_tensors(planner.finish_plan(plan), planner, report)

    with name_checkpoint("load", directory):
        (reader, plan), expected = team.agree_max(plan_reads, checkpoint.num_keys, are_flags=True)
        extra: list[str] = []
        if not all(expected):
            keys = checkpoint.index.keys
            extra = [key for key, flag in zip(keys, expected, strict=True) if not flag]
        if selection is not None:
            selection.report.unused += extra
            extra = [] if selection.is_partial else extra
        if extra:  # ``extra`` is equal on all ranks, ``unexpected`` may not be
            team.agree(lambda: _handle_unexpected(extra, options.unexpected, team))
        checkpoint.clock.end_phase("plan")
        stream = sys.stderr if options.progress_bar and team.is_first else None
        with show_progress(f"loading {directory.name}", reader.num_bytes, stream) as report:
            try:
                team.agree(lambda: fill(report))
            except CheckpointingException as error:
                raise type(error)(
                    f"{error}\nTensors on any rank may have been filled in part: load another "
                    "checkpoint into them before using them"
                ) from error
        checkpoint.clock.end_phase("read")
        checkpoint.num_bytes += reader.num_bytes
        checkpoint.files |= reader.files
    return planner.loaded_state_dict()


def _require_one_of(name: str, given: object, choices: tuple[object, ...]) -> None:
    if not any(given is choice or (given == choice and choice) for choice in choices):
        raise ValueError(f"{name} must be one of {choices}, got {given!r}")


def _check_files(directory: Place, index: Index) -> None:
    """Check the size of every file, and the content of those without pieces."""
    for name, problem in file_problems(directory, index):
        inside = [
            key
            for key, stored in index.keys.items()
            if any(piece.file == name for piece in stored.pieces)
        ]
        held = f"; {format_keys(inside)}" if inside else ""
        raise CheckpointingException(f"{problem}{held}. Take another checkpoint")
    for name, problem in whole_file_problems(directory, index):
        raise CheckpointingException(
            f"{directory / name} has changed since it was saved ({problem}). Take another "
            "checkpoint"
        )


def _reject_empty_optimizer(
    path: tuple[Any, ...], node: Mapping[Any, Any], keys: Mapping[str, Any]
) -> None:
    """Raise if the empty state of a new optimizer would ignore the state in the checkpoint."""
    if not isinstance(node, Mapping):
        return
    for key, value in node.items():
        _reject_empty_optimizer((*path, key), value, keys)
    groups = node.get("param_groups")
    if node.get("state") != {} or not isinstance(groups, list | tuple):
        return
    if not any(group.get("params") for group in groups if isinstance(group, Mapping)):
        return
    prefix = ".".join(map(str, (*path, "state", "")))
    inside = [name for name in keys if name.startswith(prefix)]
    if inside:
        raise CheckpointingException(
            "the optimizer in the state dict has no state yet, so nothing of the "
            f"{len(inside)} keys of its state in the checkpoint would be loaded, such as "
            f"{inside[0]!r}. Make the state with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or leave "
            f"{prefix.rstrip('.')!r} out if you do not need it"
        )


def _handle_unexpected(extra: Sequence[str], unexpected: Unexpected, team: Team) -> None:
    if unexpected == "ignore":
        return
    title = "some keys of the checkpoint are in no rank's state dict and are not loaded"
    if unexpected == "raise":
        raise CheckpointingException(titled_list(title, extra, "key"))
    if team.is_first:
        warnings.warn(f"{titled_list(title, extra, 'key')}", stacklevel=8)
