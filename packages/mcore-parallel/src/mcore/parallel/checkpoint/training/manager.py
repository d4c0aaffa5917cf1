"""A folder of checkpoints of one run: when one is written, which stay, which a run goes on from."""

from __future__ import annotations

import json
import logging
import operator
import re
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mcore.parallel.checkpoint.errors import CheckpointingException, DamagedCheckpointError
from mcore.parallel.checkpoint.files.directory import (
    keep_last,
    remove_incomplete,
)
from mcore.parallel.checkpoint.files.regular_files import PathLike, Place, place_of
from mcore.parallel.checkpoint.files.remote import RemotePath
from mcore.parallel.checkpoint.team import team_of
from mcore.parallel.checkpoint.training.run_state import load_training_state, save_training_state
from mcore.parallel.shortened import titled_list

if TYPE_CHECKING:
    from mcore.parallel.checkpoint.background import SaveHandle
    from mcore.parallel.checkpoint.training.run_state import Model, Optimizers
    from mcore.parallel.groups import GroupLike

logger = logging.getLogger(__name__)
_NAME = re.compile(r"step_(\d+)")


class CheckpointManager:
    """Writes a run's checkpoints ``root/step_N``, deletes old ones, and finds where to go on.

    All ranks of the group make one and call its methods together. The folder is the run's alone.

    Args:
        root: The folder, made by the first save; with ``mcore-parallel[remote]`` a URL too.
        keep: How many of the newest checkpoints stay, at least 1; None keeps all. Old ones are
            deleted after a save is complete: with ``async_``, at the next save or wait. Those
            that :meth:`load_latest` found damaged, or of later steps, are not counted and stay.
        every: Of the steps that :meth:`save` is called with, those are written that this divides.
        async_: Write in the background. A save waits for the one before it first, and raises its
            error.
        process_group: The ranks; None is the world.
        protect: Names of checkpoints that ``keep`` neither counts nor deletes.

    Raises:
        ValueError: ``keep`` or ``every`` is below 1.
        TypeError: One of them is not a whole number.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with CheckpointManager(tempfile.mkdtemp(), keep=2, every=10) as checkpoints:
        ...     state = checkpoints.load_latest(model, optimizer) or {"step": 0}
        ...     for step in range(state["step"] + 1, 31):
        ...         if checkpoints.save(model, optimizer, step=step):
        ...             print(step)
        10
        20
        30
    """

    def __init__(
        self,
        root: PathLike,
        *,
        keep: int | None = None,
        every: int = 1,
        async_: bool = False,
        process_group: GroupLike | None = None,
        protect: Iterable[str] = (),
    ) -> None:
        self.root = place_of(root)
        self.keep = None if keep is None else _whole_number("keep", keep, 1)
        self.every, self.async_ = _whole_number("every", every, 1), async_
        self._protect = tuple(protect)
        self._group = process_group
        self._pending: SaveHandle | None = None
        self._last: Place | None = None  # what the model's state is saved as
        self._step = 0  # of the last save
        self._has_saved = False
        self._damaged: set[Place] = set()

    def save(
        self,
        model: Model,
        optimizer: Optimizers = None,
        *,
        step: int,
        force: bool = False,
        **more: Any,
    ) -> bool:
        """Write the checkpoint of a step if it is one to write, or start to.

        Call it after every step; other steps return at once, without communication. The first
        save deletes what killed saves left in the folder; a checkpoint of this step that
        :meth:`load_latest` found damaged is renamed to ``step_N.damaged``.

        Args:
            model: As for :func:`save_training_state`.
            optimizer: Likewise.
            step: The number of steps made.
            force: Write also where ``every`` does not divide the step, as after the last one; a
                step that this manager has written is not written again.
            **more: As for :func:`save_training_state`.

        Returns:
            Whether the checkpoint was written, or with ``async_`` begun.

        Raises:
            CheckpointingException: On every rank: the save, or the background save before it,
                failed. The folder holds only complete checkpoints.
            ValueError: The step is below 0.
            TypeError: The step is not a whole number.
        """
        step = _whole_number("step", step, 0)
        path = self.root / f"step_{step}"
        if path == self._last or (step % self.every and not force):
            return False
        self.wait()
        if not self._has_saved or path in self._damaged:
            self._on_first_rank(lambda: self._make_room(path))
        self._pending = save_training_state(
            path,
            model,
            optimizer,
            step=step,
            process_group=self._group,
            async_=self.async_,
            **more,
        )
        self._last, self._step, self._has_saved = path, step, True
        if self._pending is None:
            self._delete_old()
        return True

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointingException: On every rank: it failed.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except CheckpointingException:
            self._last = None
            raise
        self._delete_old()

    def load_latest(
        self, model: Model, optimizer: Optimizers = None, **options: Any
    ) -> dict[str, Any] | None:
        """Continue from the newest checkpoint that is not damaged.

        Each damaged one, incomplete or changed since it was saved, is named in a warning on every
        rank, and left where it is. One that does not fit the model is an error, not damage.

        Args:
            model: As for :func:`load_training_state`.
            optimizer: Likewise.
            **options: The keywords of :func:`load_training_state`, objects whose state was saved
                among them.

        Returns:
            What :func:`load_training_state` returns; None where the folder has no checkpoint.

        Raises:
            CheckpointingException: On every rank: the checkpoint does not fit, or there are
                checkpoints and all are damaged (:class:`DamagedCheckpointError`).
        """
        self.wait()
        problems: list[str] = []
        for path in self._newest_first():
            try:
                found = load_training_state(
                    path, model, optimizer, process_group=self._group, **options
                )
                self._last = path
                return found
            except DamagedCheckpointError as error:
                self._damaged.add(path)
                problems.append(str(error))
                logger.warning("going back to the checkpoint before %s: %s", path, error)
        if problems:
            title = f"every checkpoint in {self.root} is damaged"
            raise DamagedCheckpointError(titled_list(title, problems, "checkpoint"))
        return None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the save in the background; after an error its failure is only logged."""
        try:
            self.wait()
        except CheckpointingException as failure:
            if error is None:
                raise
            logger.error("the last save in the background failed: %s", failure)

    def _newest_first(self) -> list[Place]:
        """Return on every rank what the first rank finds, damaged checkpoints included."""
        team = team_of(self._group)
        names = _step_names if team.is_first else lambda _: []
        [shared] = team.share(lambda: [json.dumps(names(self.root)).encode()])
        return [self.root / name for name in json.loads(shared)]

    def _make_room(self, path: Place) -> None:
        remove_incomplete(self.root)
        if path in self._damaged:
            number, aside = 1, path.parent / f"{path.name}.damaged"
            while aside.exists():
                number += 1
                aside = path.parent / f"{path.name}.damaged-{number}"
            path.rename(aside)  # type: ignore[arg-type]  # of its own kind
            self._damaged.discard(path)

    def _delete_old(self) -> None:
        keep = self.keep
        if keep is not None:
            self._on_first_rank(
                lambda: keep_last(self.root, keep, protect=[*self._protect, *self._passed_over()])
            )

    def _passed_over(self) -> list[str]:
        """Name damaged checkpoints, and those of later steps than the run is at."""
        steps = _steps_below(self.root)
        damaged = {path.name for path in self._damaged}
        return [name for name, step in steps.items() if step > self._step or name in damaged]

    def _on_first_rank(self, change: Callable[[], object]) -> None:
        """Change the folder on the first rank; a failure is no reason to end a run."""
        if not team_of(self._group).is_first:
            return
        try:
            change()
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be deleted: %s", self.root, error)


def _whole_number(name: str, given: Any, least: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {given!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def _step_names(root: Place) -> list[str]:
    """Return the names of checkpoints in a folder, complete or not, newest first."""
    steps = _steps_below(root)
    return sorted(steps, key=lambda name: (steps[name], name), reverse=True)


def _steps_below(root: Place) -> dict[str, int]:
    """Map the names of checkpoints in a folder, complete or not, to their steps."""
    if isinstance(root, RemotePath):
        names = [folder.name for folder in root.folders()]
    else:
        is_dir = root.is_dir()
        names = [one.name for one in root.iterdir() if not one.is_symlink()] if is_dir else []
    return {name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
