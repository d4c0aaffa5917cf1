"""Saves and loads of a run's whole state: model, optimizer, step, random streams, extra values."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.load import Unexpected, load_opened, open_checkpoint
from mcore.parallel.checkpoint.objects import ShardedObject
from mcore.parallel.checkpoint.run_state.extra_values import (
    OPTIMIZER_ENTRIES,
    RANDOM_STATE,
    StoredValues,
    check_names,
    find_stored_tensors,
    find_stored_values,
    is_stateful,
    join_tensors,
    rank_random_state,
    set_rank_random_state,
    state_of,
    states_to_save,
)
from mcore.parallel.checkpoint.run_state.model_state import ModelState, model_state
from mcore.parallel.checkpoint.run_state.optimizer_state import GROUPS, OptimizerState
from mcore.parallel.checkpoint.save import save_tree
from mcore.parallel.checkpoint.selection import Choices, LoadReport, Rename, Selection
from mcore.parallel.checkpoint.state_tree import OneLeaf
from mcore.parallel.checkpoint.team import Team, team_of
from mcore.parallel.shortened import titled_list

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from mcore.parallel.checkpoint.async_save import SaveHandle
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
            values in the state of the optimizer differ, or the model is under
            FullyShardedDataParallel, whose parameters have no names.

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
        modules, optimizers = _collect_states(model, optimizer)
        values = {**states_to_save(more), OPTIMIZER_ENTRIES: optimizers.entries()}
        streams = ShardedObject(RANDOM_STATE, rank_random_state(), (team.size,), (team.rank,))
        found = {"model": modules.tree("model"), "step": int(step), RANDOM_STATE: streams, **values}
        if optimizer is not None:
            found["optimizer"] = optimizers.tree()
        leaves = sorted(
            name for name in [*more, OPTIMIZER_ENTRIES] if isinstance(values[name], OneLeaf)
        )
        return found, {"names of values": f"{sorted(more)}", "names of plain values": f"{leaves}"}

    return save_tree(
        build,
        path,
        team,
        async_=async_,
        check_replicas=check_replicas,
        weights_only=weights_only,
        progress_bar=progress_bar,
    )


def _collect_states(model: Model, optimizer: Optimizers) -> tuple[ModelState, OptimizerState]:
    modules = model_state(model)
    return modules, OptimizerState(optimizer, modules, "optimizer")


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
            not fit, a group of the optimizer has parameters that had different options, or a value
            in ``more`` was saved for each of another number of ranks. After the fill: the model
            does not take the tensors that its hooks compute from a parameter.

    Example:
        >>> import torch
        >>> load_training_state("/no/such/checkpoint", torch.nn.Linear(2, 1))
        Traceback (most recent call last):
            ...
        mcore.parallel.checkpoint.errors.DamagedCheckpointError: cannot load ...
    """
    selection = Selection(include, exclude, rename, report)
    team = team_of(process_group)
    modules, optimizers = team.agree(lambda: _collect_states(model, optimizer))

    def collect_modules() -> dict[str, ModelState]:
        check_names(more)
        return {name: model_state(one) for name, one in more.items() if isinstance(one, nn.Module)}

    others = team.agree(collect_modules)
    checkpoint = open_checkpoint(path, team)
    index = team.agree(lambda: checkpoint.index)
    stored = find_stored_values(index.keys, team)
    first = {"step": OneLeaf(), **stored.targets}
    first = {name: one for name, one in first.items() if selection.takes(name)}
    if optimizer is not None:
        first["optimizer"] = {GROUPS: OneLeaf()}
    options: dict[str, Any] = {
        "strict": strict,
        "weights_only": weights_only,
        "verify": verify,
        "progress_bar": progress_bar,
    }
    values = load_opened(checkpoint, lambda: first, team, unexpected="ignore", **options)

    def build() -> dict[str, Any]:
        asked = {*more, OPTIMIZER_ENTRIES} if optimizer is not None else {*more}
        if strict:
            _check_rank_counts(asked & stored.of_other_ranks.keys(), stored, team)
        tree = _build_extra_tree(more, others, stored)
        if optimizer is not None:
            is_whole = strict and not selection.is_partial
            if is_whole:
                optimizers.check_entries(values.get(OPTIMIZER_ENTRIES))
            keys, groups = optimizers.select(index.keys, values["optimizer"][GROUPS], selection)
            values["optimizer"][GROUPS] = groups
            tree["optimizer"] = optimizers.targets(keys, groups, strict=is_whole)
        plain = {name: one for name, one in values.items() if name != "optimizer"}
        tensors, others_tensors = find_stored_tensors(plain, more, index.keys, team)
        accounted.extend(others_tensors)
        return {**tree, **tensors, "model": modules.tree("model")}

    streams_of_others = stored.of_other_ranks.get(RANDOM_STATE, [])
    accounted = [*stored.keys, f"optimizer.{GROUPS}", *streams_of_others]
    loaded = load_opened(
        checkpoint,
        build,
        team,
        unexpected=unexpected,
        accounted=accounted,
        selection=selection,
        **options,
    )
    if streams_of_others and random_state and team.is_first:
        logger.warning(
            "%s has the random streams of %d ranks, not of %d: they are not restored",
            checkpoint.directory,
            len(streams_of_others),
            team.size,
        )

    def take_back() -> dict[str, Any]:
        modules.take_back(loaded["model"])
        if optimizer is not None:
            states = {**loaded["optimizer"], GROUPS: values["optimizer"][GROUPS]}
            optimizers.take_back(states, values.get(OPTIMIZER_ENTRIES) or ())
        return _restore_extra(more, others, join_tensors(values, loaded), loaded)

    found = team.agree(take_back)
    streams = values.get(RANDOM_STATE)
    if random_state and streams is not None:
        team.agree(lambda: set_rank_random_state(streams))
    checkpoint.log_figures(team)
    return found


def _check_rank_counts(names: Collection[str], stored: StoredValues, team: Team) -> None:
    problems = [
        f"{name!r} was saved for each of {len(stored.of_other_ranks[name])} ranks, and {team.size} "
        "load. Leave it out, or pass strict=False to keep its present state"
        for name in sorted(names)
    ]
    if problems:
        raise CheckpointingException(titled_list("some values cannot be restored", problems))


def _build_extra_tree(
    more: Mapping[str, Any], others: Mapping[str, ModelState], stored: StoredValues
) -> dict[str, Any]:
    """Return the extra values to fill: values with tensors by name, and values not in the index."""
    tree: dict[str, Any] = {}
    for name in more.keys() - stored.of_other_ranks.keys():
        state = others[name].tree(name) if name in others else state_of(name, more[name])
        if name not in stored.targets or not isinstance(state, OneLeaf):
            tree[name] = state
    return tree


def _restore_extra(
    more: Mapping[str, Any],
    others: Mapping[str, ModelState],
    values: Mapping[str, Any],
    loaded: Mapping[str, Any],
) -> dict[str, Any]:
    """Give objects their state, and return all extra values."""
    known = {"model", "optimizer", RANDOM_STATE, OPTIMIZER_ENTRIES}
    found = {name: value for name, value in {**values, **loaded}.items() if name not in known}
    for name in found.keys() & more.keys():
        if name in others:
            others[name].take_back(found[name])
        elif is_stateful(more[name]):
            more[name].load_state_dict(found[name])
        if name in others or is_stateful(more[name]):
            found[name] = more[name]
    return dict(sorted(found.items()))
