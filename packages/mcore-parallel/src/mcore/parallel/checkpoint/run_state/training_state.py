"""Saves and loads of a run's whole state: model, optimizer, step, random streams, extra values."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.load import LoadOptions, Unexpected, load_opened, open_checkpoint
from mcore.parallel.checkpoint.objects import ShardedObject
from mcore.parallel.checkpoint.run_state import extra_values
from mcore.parallel.checkpoint.run_state.model_state import model_state
from mcore.parallel.checkpoint.run_state.optimizer_state import GROUPS, OptimizerState
from mcore.parallel.checkpoint.save import SaveOptions, save_tree
from mcore.parallel.checkpoint.selection import Choices, LoadReport, Rename, Selection
from mcore.parallel.checkpoint.state_tree import OneLeaf
from mcore.parallel.checkpoint.team import Team, team_of
from mcore.parallel.shortened import titled_list

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from mcore.parallel.checkpoint.figures import SaveHandle
    from mcore.parallel.checkpoint.files.manifest import StoredKey
    from mcore.parallel.checkpoint.files.places import PathLike
    from mcore.parallel.checkpoint.files.reader import Verify
    from mcore.parallel.groups import GroupLike

    Model = nn.Module | Iterable[nn.Module]
    Optimizers = Optimizer | Iterable[Optimizer] | None

logger = logging.getLogger(__name__)


def save_training_state(
    path: PathLike,
    model: Model,
    optimizer: Optimizers = None,
    *,
    step: int,
    process_group: GroupLike | None = None,
    async_: bool = False,
    check_replicas: bool = False,
    weights_only: bool = True,
    progress_bar: bool = False,
    **more: Any,
) -> SaveHandle | None:
    """Write the whole state of a run as one checkpoint, which any layout can load.

    Collective over ``process_group``: all its ranks call it with the same path, step and names. The
    checkpoint becomes visible in one step, see :func:`save_sharded_state_dict`. Without
    torch.distributed this process saves alone.

    Parameters and optimizer states are named as in ``model.state_dict()``, without the prefixes of
    DistributedDataParallel, torch.compile and activation checkpointing. A tied parameter is written
    under each of its names. If hooks compute other tensors from a parameter, those are written, and
    its optimizer state under the name of the parameter. Model and optimizer do not change: an
    optimizer that has made no step has no state in the checkpoint either. Each rank's random
    streams are saved too: Python, NumPy if it is loaded, torch, the accelerator, and the tracker of
    :mod:`mcore.parallel.rng`.

    Args:
        path: The directory to make. It must not exist.
        model: A module, plain or under DistributedDataParallel, ``fully_shard``, tensor parallelism
            of DTensors, or torch.compile. Or the list of a pipeline rank's chunks, with the names
            of the whole model.
        optimizer: A torch optimizer over the model's parameters, or several as a list. Also
            ZeroRedundancyOptimizer, torchtitan's OptimizersContainer, and optimizers with hooks or
            an overridden ``state_dict``. An optimizer with state that could not be loaded is
            refused.
        step: The number of steps made. :func:`load_training_state` returns it.
        process_group: The ranks that save. None is the world.
        async_: Copy the present state, return, and write in a thread.
        check_replicas: Compare all replicas on several ranks. Replicas of bare parameters and
            optimizer states are always compared.
        weights_only: Refuse values that a load would refuse.
        progress_bar: As in :func:`save_sharded_state_dict`.
        **more: Extra values. For an object with ``state_dict`` and ``load_state_dict``, such as a
            scheduler, a scaler or a data loader, its state is saved. For another module, its
            tensors are saved. Any other value is saved itself. A value that differs between ranks
            is saved for each rank.

    Returns:
        None, or the handle of an asynchronous save. Its ``result()`` waits for the rename.

    Raises:
        CheckpointingException: On every rank, and ``path`` is not changed: as for
            :func:`save_sharded_state_dict`, or two chunks have one name, a tensor of the optimizer
            is no parameter of the model or hooks leave it out of the state dict, replicas or plain
            values in the state of the optimizer differ, adapters of peft are merged into the
            weights, or the model is under FullyShardedDataParallel, whose parameters have no names.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> path = tempfile.mkdtemp() + "/step_3"
        >>> save_training_state(path, model, optimizer, step=3, epoch=1)
        >>> load_training_state(path, model, optimizer)
        {'epoch': 1, 'step': 3}
    """
    team = team_of(process_group)

    def build() -> tuple[dict[str, Any], dict[str, str]]:
        modules = model_state(model)
        optimizers = OptimizerState(optimizer, modules, "optimizer")
        values = {
            **extra_values.states_to_save(more),
            extra_values.OPTIMIZER_ENTRIES: optimizers.entries(),
        }
        streams = ShardedObject(
            extra_values.RANDOM_STATE, extra_values.rank_random_state(), (team.size,), (team.rank,)
        )
        found = {
            "model": modules.tree("model"),
            "step": int(step),
            extra_values.RANDOM_STATE: streams,
            **values,
        }
        if optimizer is not None:
            found["optimizer"] = optimizers.tree()
        leaves = sorted(
            name
            for name in [*more, extra_values.OPTIMIZER_ENTRIES]
            if isinstance(values[name], OneLeaf)
        )
        return found, {"names of values": f"{sorted(more)}", "names of plain values": f"{leaves}"}

    options = SaveOptions(async_, check_replicas, weights_only, progress_bar)
    return save_tree(build, path, team, options)


def load_training_state(
    path: PathLike,
    model: Model,
    optimizer: Optimizers = None,
    *,
    strict: bool = True,
    unexpected: Unexpected = "warn",
    process_group: GroupLike | None = None,
    weights_only: bool = True,
    verify: Verify = "while_reading",
    progress_bar: bool = False,
    random_state: bool = True,
    include: Choices = None,
    exclude: Choices = None,
    rename: Rename = None,
    report: LoadReport | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save_training_state`, which may have another layout.

    Collective over ``process_group``. Without torch.distributed this process loads alone.

    Parameters, buffers and existing optimizer states are filled in place. States that the optimizer
    lacks are made in the layout of its parameters and with the dtypes of the checkpoint. States
    that the checkpoint lacks are dropped. Options of groups are restored by the names of the
    parameters, except ``foreach``, ``fused``, ``capturable`` and ``differentiable``, which stay.
    Other objects get their state after all ranks have read all data. Random streams are restored if
    the number of ranks is the same as at the save.

    Args:
        path: The checkpoint.
        model: As in :func:`save_training_state`, in any layout, on real devices.
        optimizer: One or several, made after the model was sharded. No step is needed. None skips
            the optimizer states of the checkpoint.
        strict: Raise if the checkpoint lacks a key. Otherwise the present value stays.
        unexpected: The reaction to keys in the checkpoint that no rank loads.
        process_group: The ranks that load. None is the world.
        weights_only: Refuse to run code from a checkpoint.
        verify: As in :func:`load_sharded_state_dict`.
        progress_bar: As in :func:`load_sharded_state_dict`.
        random_state: Restore the random streams.
        include: As in :func:`load_sharded_state_dict`, with keys such as ``model.head.weight`` and
            the names of extra values. ``"model.*"`` loads the parameters alone. The optimizer needs
            ``"optimizer.*"``.
        exclude: As in :func:`load_sharded_state_dict`. The optimizer's states and options of an
            excluded parameter are left too.
        rename: As in :func:`load_sharded_state_dict`. States are renamed as their parameters.
        report: As in :func:`load_sharded_state_dict`.
        **more: Objects, also modules, that get the state saved under these names, and dicts of
            tensors, also DTensors, which are filled in place.

    Returns:
        ``step`` and the extra values of the checkpoint by name. A value with tensors of 1 MiB or
        more is only read if its name is in ``more``. An object in ``more`` is returned itself.
        Equal on all ranks, except for values that were saved for each rank.

    Raises:
        DamagedCheckpointError: On every rank: the checkpoint is not complete or has changed. If
            tensors may be filled in part, the text has a warning.
        CheckpointingException: On every rank. Before anything is filled: a key, shape or dtype does
            not fit, names of a tied parameter have different content, adapters of peft are merged
            into the weights, a group of the optimizer has parameters that had different options, or
            a value in ``more`` was saved for each of another number of ranks. After the fill: the
            model does not take the tensors that its hooks compute from a parameter.

    Example:
        >>> import torch
        >>> load_training_state("/no/such/checkpoint", torch.nn.Linear(2, 1))
        Traceback (most recent call last):
            ...
        mcore.parallel.checkpoint.errors.DamagedCheckpointError: cannot load ...
    """
    selection = Selection(include, exclude, rename, report)
    team = team_of(process_group)
    run = team.agree(lambda: _Run(model, optimizer, more))
    checkpoint = open_checkpoint(path, team)
    index = team.agree(lambda: checkpoint.index)
    stored = extra_values.find_stored_values(index.keys, team)
    streams_of_others = stored.of_other_ranks.get(extra_values.RANDOM_STATE, [])
    options = LoadOptions(strict, unexpected, weights_only, verify, progress_bar)
    quiet = options._replace(unexpected="ignore")
    values = load_opened(checkpoint, lambda: run.list_values(stored, selection), team, quiet)
    accounted = [*stored.keys, f"optimizer.{GROUPS}", *streams_of_others]

    def build() -> dict[str, Any]:
        if strict:
            run.check_rank_counts(stored, team)
        tree = run.list_targets(stored, index.keys, values, selection, strict=strict)
        plain = {name: one for name, one in values.items() if name != "optimizer"}
        tensors, others = extra_values.find_stored_tensors(plain, more, index.keys, team)
        accounted.extend(others)
        return {**tree, **tensors}

    loaded = load_opened(checkpoint, build, team, options, accounted=accounted, selection=selection)
    if streams_of_others and random_state and team.is_first:
        logger.warning(
            "%s has the random streams of %d ranks, not of %d: they are not restored",
            checkpoint.directory,
            len(streams_of_others),
            team.size,
        )
    found = team.agree(lambda: run.take_back(values, loaded))
    streams = values.get(extra_values.RANDOM_STATE)
    if random_state and streams is not None:
        team.agree(lambda: extra_values.set_rank_random_state(streams))
    checkpoint.log_figures(team)
    return found


class _Run:
    """The objects of a run on this rank. No communication."""

    def __init__(self, model: Model, optimizer: Optimizers, more: Mapping[str, Any]) -> None:
        extra_values.check_names(more)
        self.modules = model_state(model)
        self.has_optimizer = optimizer is not None
        self.optimizers = OptimizerState(optimizer, self.modules, "optimizer")
        self._more = more
        self._inner = {
            name: model_state(one) for name, one in more.items() if isinstance(one, nn.Module)
        }

    def list_values(
        self, stored: extra_values.StoredValues, selection: Selection
    ) -> dict[str, Any]:
        """Return the values of a checkpoint that are read before the tensors."""
        listed: dict[str, Any] = {"step": OneLeaf(), **stored.targets}
        listed = {name: one for name, one in listed.items() if selection.takes(name)}
        return {**listed, "optimizer": {GROUPS: OneLeaf()}} if self.has_optimizer else listed

    def check_rank_counts(self, stored: extra_values.StoredValues, team: Team) -> None:
        """Raise if a value that is asked for was saved for each of another number of ranks."""
        asked = {*self._more, *([extra_values.OPTIMIZER_ENTRIES] if self.has_optimizer else [])}
        problems = [
            f"{name!r} was saved for each of {len(stored.of_other_ranks[name])} ranks, and "
            f"{team.size} load. Leave it out, or pass strict=False to keep its present state"
            for name in sorted(asked & stored.of_other_ranks.keys())
        ]
        if problems:
            raise CheckpointingException(titled_list("some values cannot be restored", problems))

    def list_targets(
        self,
        stored: extra_values.StoredValues,
        keys: Mapping[str, StoredKey],
        values: dict[str, Any],
        selection: Selection,
        *,
        strict: bool,
    ) -> dict[str, Any]:
        """Return what is filled after the values: tensors, and values not in the index."""
        for name, modules in {"model": self.modules, **self._inner}.items():
            modules.check_tied(name, keys, selection)
        tree: dict[str, Any] = {"model": self.modules.tree("model")}
        for name in self._more.keys() - stored.of_other_ranks.keys():
            inner = self._inner.get(name)
            state = inner.tree(name) if inner else extra_values.state_of(name, self._more[name])
            if name not in stored.targets or not isinstance(state, OneLeaf):
                tree[name] = state
        if self.has_optimizer:
            is_whole = strict and not selection.is_partial
            if is_whole:
                self.optimizers.check_entries(values.get(extra_values.OPTIMIZER_ENTRIES))
            given = values["optimizer"][GROUPS]
            states, values["optimizer"][GROUPS] = self.optimizers.select(keys, given, selection)
            tree["optimizer"] = self.optimizers.targets(
                states, values["optimizer"][GROUPS], strict=is_whole
            )
        return tree

    def take_back(self, values: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
        """Give the objects their state, and return the extra values."""
        self.modules.take_back(loaded["model"])
        if self.has_optimizer:
            states = {**loaded["optimizer"], GROUPS: values["optimizer"][GROUPS]}
            self.optimizers.take_back(states, values.get(extra_values.OPTIMIZER_ENTRIES) or ())
        known = {"model", "optimizer", extra_values.RANDOM_STATE, extra_values.OPTIMIZER_ENTRIES}
        every = {**extra_values.join_tensors(values, loaded, self._more), **loaded}
        found = {name: value for name, value in sorted(every.items()) if name not in known}
        for name in found.keys() & self._more.keys():
            if name in self._inner:
                self._inner[name].take_back(found[name])
            elif extra_values.is_stateful(self._more[name]):
                self._more[name].load_state_dict(found[name])
            if name in self._inner or extra_values.is_stateful(self._more[name]):
                found[name] = self._more[name]
        return found
