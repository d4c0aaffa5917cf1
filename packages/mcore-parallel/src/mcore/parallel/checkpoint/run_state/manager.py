"""The folder of a run's checkpoints: when to write one, which to keep, which to resume from."""

from __future__ import annotations

import json
import logging
import operator
import os
import re
import secrets
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    DamagedCheckpointError,
    name_checkpoint,
)
from mcore.parallel.checkpoint.files import directory, places
from mcore.parallel.checkpoint.files.manifest import is_plain_name
from mcore.parallel.checkpoint.run_state import training_state
from mcore.parallel.checkpoint.team import team_of
from mcore.parallel.shortened import titled_list

if TYPE_CHECKING:
    from mcore.parallel.checkpoint.figures import SaveHandle
    from mcore.parallel.checkpoint.run_state.training_state import Model, Optimizers
    from mcore.parallel.groups import GroupLike

logger = logging.getLogger(__name__)
_NAME = re.compile(r"step_(\d+)")
_MOVING = "moving.json"  # in a new branch, the names of the checkpoints that it gets


class CheckpointManager:
    """Writes a run's checkpoints ``root/step_N``, deletes old ones, and loads the newest good one.

    All ranks of the group make a manager and call its methods together. No other run may use the
    folder.

    Args:
        root: The folder, made by the first save. With ``mcore-parallel[remote]`` it may be a URL.
        keep: The number of newest checkpoints to keep, at least 1. None keeps all. Old checkpoints
            are deleted after a save is complete: with ``async_``, at the next save or wait.
            Checkpoints of later steps, damaged checkpoints that :meth:`load_latest` found, and
            abandoned branches are neither counted nor deleted.
        every: :meth:`save` writes the steps that are divisible by this number.
        async_: Write in a thread. A save first waits for the previous save, and raises its error.
        process_group: The ranks. None is the world.
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
        root: places.PathLike,
        *,
        keep: int | None = None,
        every: int = 1,
        async_: bool = False,
        process_group: GroupLike | None = None,
        protect: Iterable[str] = (),
    ) -> None:
        self.root = places.place_of(root)
        self.keep = None if keep is None else _check_whole_number("keep", keep, 1)
        self.every, self.async_ = _check_whole_number("every", every, 1), async_
        self._protect = directory.list_paths(protect)
        self._group = process_group
        self._pending: SaveHandle | None = None
        self._last: places.Place | None = None  # the checkpoint that has the model's present state
        self._step = 0  # of the last save
        self._has_saved = False
        self._damaged: set[places.Place] = set()

    def save(
        self,
        model: Model,
        optimizer: Optimizers = None,
        *,
        step: int,
        force: bool = False,
        **more: Any,
    ) -> bool:
        """Write the checkpoint of a step, or start to, if the step is divisible by ``every``.

        Call it after every step. Other steps return immediately, without communication. The first
        save deletes the leftovers of killed saves in the folder, see :func:`remove_incomplete`. If
        the run went back, the save also sets checkpoints of this and later steps aside, and those
        after the checkpoint that this manager loaded, as :meth:`rollback` does. If
        :meth:`load_latest` found a checkpoint of this step damaged, that is renamed to
        ``step_N.damaged``.

        Args:
            model: As for :func:`save_training_state`.
            optimizer: As for :func:`save_training_state`.
            step: The number of steps made.
            force: Write any step, such as the last step. A step that this manager has written is
                not written twice.
            **more: As for :func:`save_training_state`.

        Returns:
            Whether the checkpoint was written or, with ``async_``, started.

        Raises:
            CheckpointingException: On every rank: the save, or the previous asynchronous save,
                failed. The folder has only complete checkpoints.
            ValueError: The step is below 0.
            TypeError: The step is not a whole number.
        """
        step = _check_whole_number("step", step, 0)
        path = self.root / f"step_{step}"
        if path == self._last or (step % self.every and not force):
            return False
        self.wait()
        if not self._has_saved or path in self._damaged:
            self._change_folder(lambda: self._make_room(path))
        if not self._has_saved or step <= self._step:
            # The next save of a run that went back: nothing of the future that it left may stay.
            present = int(self._last.name.removeprefix("step_")) if self._last else step
            self._set_aside(min(step - 1, present), None, keep_damaged=True)
        self._pending = training_state.save_training_state(
            path, model, optimizer, step=step, process_group=self._group, async_=self.async_, **more
        )
        self._last, self._step, self._has_saved = path, step, True
        if self._pending is None:
            self._delete_old()
        return True

    def wait(self) -> None:
        """Wait for the asynchronous save, if there is one.

        Raises:
            CheckpointingException: On every rank: the save failed.
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
        """Load the newest checkpoint that is not damaged.

        Every rank logs a warning for each damaged checkpoint, which is incomplete or has changed
        since it was saved. It stays in the folder. A checkpoint that does not fit the model is an
        error, not damage.

        Args:
            model: As for :func:`load_training_state`.
            optimizer: As for :func:`load_training_state`.
            **options: The keywords of :func:`load_training_state`, also the objects that get their
                state back.

        Returns:
            The result of :func:`load_training_state`, or None if the folder has no checkpoint.

        Raises:
            CheckpointingException: On every rank: the checkpoint does not fit, or there are
                checkpoints and all are damaged (:class:`DamagedCheckpointError`).
        """
        self.wait()
        problems: list[str] = []
        for path in self._list_newest_first():
            try:
                found = training_state.load_training_state(
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

    def load(
        self, model: Model, optimizer: Optimizers = None, *, step: int, **options: Any
    ) -> dict[str, Any]:
        """Load the checkpoint of one step. The folder does not change before the next save.

        The next save sets checkpoints of later steps aside, as :meth:`rollback` does.

        Args:
            model: As for :func:`load_training_state`.
            optimizer: As for :func:`load_training_state`.
            step: The step of the checkpoint.
            **options: As for :meth:`load_latest`.

        Returns:
            The result of :func:`load_training_state`.

        Raises:
            DamagedCheckpointError: On every rank: the checkpoint is missing or damaged.
            CheckpointingException: On every rank: it does not fit.

        Example:
            >>> import tempfile, torch
            >>> checkpoints = CheckpointManager(tempfile.mkdtemp())
            >>> [checkpoints.save(torch.nn.Linear(2, 1), step=step) for step in (1, 2)]
            [True, True]
            >>> checkpoints.load(torch.nn.Linear(2, 1), step=1)
            {'step': 1}
        """
        self.wait()
        path = self.root / f"step_{_check_whole_number('step', step, 0)}"
        found = training_state.load_training_state(
            path, model, optimizer, process_group=self._group, **options
        )
        self._last, self._has_saved = path, False
        return found

    def rollback(self, step: int, name: str | None = None) -> places.Place | None:
        """Set the checkpoints after a step aside, as one branch that is a folder in ``root``.

        :meth:`load_latest` then returns the checkpoint of this step, and no later save or load
        looks at the branch. Nothing is deleted. At a URL the checkpoints are copied. After a
        crash, the next call of any method completes the branch.

        Args:
            step: The step to go back to, of which the folder has a checkpoint.
            name: The name of the branch. None is ``after_step_N``, with a number if it exists.

        Returns:
            The folder of the branch, or None if there is no later checkpoint.

        Raises:
            CheckpointingException: On every rank: there is no complete checkpoint of the step, the
                name exists or is that of a checkpoint, or the folder cannot be changed.

        Example:
            >>> import tempfile, torch
            >>> checkpoints = CheckpointManager(tempfile.mkdtemp())
            >>> [checkpoints.save(torch.nn.Linear(2, 1), step=step) for step in (1, 2)]
            [True, True]
            >>> checkpoints.rollback(1, "diverged").name
            'diverged'
            >>> checkpoints.load_latest(torch.nn.Linear(2, 1))
            {'step': 1}
        """
        self.wait()
        path = self.root / f"step_{_check_whole_number('step', step, 0)}"

        def check() -> None:
            if team.is_first and not directory.is_complete_checkpoint(path):
                raise CheckpointingException(
                    f"{path} is no complete checkpoint to go back to. The folder has "
                    f"{', '.join(sorted(_list_steps(self.root))) or 'none'}"
                )
            if name is not None and (_NAME.match(name) or not is_plain_name(name)):
                raise CheckpointingException(f"a branch cannot have the name {name!r}")

        team = team_of(self._group)
        team.agree(check)
        self._last = None
        return self._set_aside(step, name, keep_damaged=False)

    def _set_aside(self, step: int, name: str | None, *, keep_damaged: bool) -> places.Place | None:
        """Move the checkpoints after a step into a branch, on the first rank. One broadcast."""
        team = team_of(self._group)

        def move() -> list[bytes]:
            if not team.is_first:
                return [b""]
            _finish_branches(self.root)
            kept = {path.name for path in self._damaged} if keep_damaged else set()
            steps = _list_steps(self.root)
            later = [one for one, number in steps.items() if number > step and one not in kept]
            if not later:
                return [b""]
            before = max((one for one in steps.values() if one <= step), default=None)
            branch = _choose_branch(self.root, name, before)
            _write_list(branch, later)
            _finish_branches(self.root)
            return [os.fsencode(branch.name)]

        [found] = team.share(move)
        if not found:
            return None
        branch = self.root / os.fsdecode(found)
        self._damaged = {path for path in self._damaged if keep_damaged}
        logger.warning("the run went back: later checkpoints are set aside in %s", branch)
        return branch

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the asynchronous save. After an error in the block, only log its failure."""
        try:
            self.wait()
        except CheckpointingException as failure:
            if error is None:
                raise
            logger.error("the last asynchronous save failed: %s", failure)

    def _list_newest_first(self) -> list[places.Place]:
        """Return, on every rank, the checkpoints that the first rank finds, also damaged ones."""
        team = team_of(self._group)

        def list_names() -> list[bytes]:
            if team.is_first:
                _finish_branches(self.root)
            steps = _list_steps(self.root) if team.is_first else {}
            names = sorted(steps, key=lambda name: (steps[name], name), reverse=True)
            return [json.dumps(names).encode()]

        with name_checkpoint("load", self.root):
            [shared] = team.share(list_names)
        return [self.root / name for name in json.loads(shared)]

    def _make_room(self, path: places.Place) -> None:
        directory.remove_incomplete(self.root)
        if path in self._damaged:
            number, aside = 1, path.parent / f"{path.name}.damaged"
            while aside.exists():
                number += 1
                aside = path.parent / f"{path.name}.damaged-{number}"
            path.rename(aside)  # type: ignore[arg-type]  # both are of one type
            self._damaged.discard(path)

    def _delete_old(self) -> None:
        keep = self.keep
        if keep is not None:
            self._change_folder(lambda: self._keep_last(keep))

    def _keep_last(self, keep: int) -> None:
        """Delete old checkpoints, but none that is damaged or of a later step than the run."""
        damaged = {path.name for path in self._damaged}
        skipped = [
            name
            for name, step in _list_steps(self.root).items()
            if step > self._step or name in damaged
        ]
        directory.keep_last(self.root, keep, protect=[*self._protect, *skipped])

    def _change_folder(self, change: Callable[[], object]) -> None:
        """Change the folder on the first rank. A failure is only logged: the run can continue."""
        if not team_of(self._group).is_first:
            return
        try:
            change()
        except (CheckpointingException, OSError) as error:
            logger.warning(
                "old checkpoints in %s were not looked at, or cannot be deleted: %s",
                self.root,
                error,
            )


def _choose_branch(root: places.Place, name: str | None, before: int | None) -> places.Place:
    default = "after_start" if before is None else f"after_step_{before}"
    branch, number = root / (name or default), 1
    while branch.exists():
        if name is not None:
            raise CheckpointingException(f"{branch} already exists. Choose another name")
        number += 1
        branch = root / f"{default}-{number}"
    return branch


def _write_list(branch: places.Place, names: Iterable[str]) -> None:
    """Write the names of the checkpoints to move. A crash before this has moved nothing."""
    content = json.dumps(sorted(names)).encode()
    if isinstance(branch, places.RemotePath):
        with (branch / _MOVING).new_file() as stream:
            stream.write(content)
        return
    made = directory.incomplete_sibling(branch, secrets.randbits(63))
    made.mkdir()
    directory.write_file(made / _MOVING, content)
    directory.publish(made, branch)


def _finish_branches(root: places.Place) -> None:
    """Move the checkpoints of begun branches, also of processes that were killed."""
    for branch in places.list_folders(root):
        listed = branch / _MOVING
        if (
            _NAME.fullmatch(branch.name)
            or directory.is_incomplete_name(branch.name)
            or not listed.is_file()
        ):
            continue
        for name in json.loads(places.read_regular(listed, b"[")):
            if _NAME.fullmatch(name) and (root / name).exists():
                (root / name).rename(branch / name)
        if isinstance(listed, places.RemotePath):
            listed.remove()
        else:
            directory.sync_directory(listed.parent)
            directory.sync_directory(listed.parent.parent)
            listed.unlink()


def _check_whole_number(name: str, given: Any, least: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {given!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def _list_steps(root: places.Place) -> dict[str, int]:
    """Map the names of checkpoints in a folder, complete or not, to their steps."""
    names = [folder.name for folder in places.list_folders(root)]
    return {name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
