"""A run's whole state in one call: model, optimizer, step, random streams, and whatever else."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.objects import ShardedObject
from mcore.parallel.checkpoint.save_load import (
    Unexpected,
    load_opened,
    open_checkpoint,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.state_tree import OneLeaf
from mcore.parallel.checkpoint.team import Team, team_of
from mcore.parallel.checkpoint.training.model_state import ModelState, model_state
from mcore.parallel.checkpoint.training.optimizer_state import GROUPS, OptimizerState
from mcore.parallel.checkpoint.training.values import (
    RANDOM_STATE,
    StoredValues,
    check_names,
    is_stateful,
    rank_random_state,
    set_rank_random_state,
    state_of,
    states_to_save,
    stored_values,
)
from mcore.parallel.shortened import titled_list

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from mcore.parallel.checkpoint.background import SaveHandle
    from mcore.parallel.checkpoint.files.reader import Verify
    from mcore.parallel.checkpoint.files.regular_files import PathLike
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
    **more: Any,
) -> SaveHandle | None:
    """Write all that a run continues from, in whatever layout, as one checkpoint.

    Collective over ``process_group``: all its ranks call it with the same path, step and names. It
    appears complete or not at all, see :func:`save_sharded_state_dict`. Parameters and optimizer
    states are named as in ``model.state_dict()``, without the prefixes of
    DistributedDataParallel, torch.compile and activation checkpointing; a tied parameter is written
    under each of its names. Where hooks make other tensors of a parameter, these are written, and
    its optimizer state under its own name. Nothing of model and optimizer changes: an optimizer
    that has made no step has no state in the checkpoint either. Each rank's random streams (Python,
    NumPy if it is loaded, torch, the accelerator, the tracker of :mod:`mcore.parallel.rng`) are in
    it too. Without torch.distributed this process saves alone.

    Args:
        path: The directory to make; it must not exist.
        model: A module, plain or under DistributedDataParallel, ``fully_shard``, tensor parallelism
            of DTensors, or torch.compile; or the list of a pipeline rank's chunks, whose names must
            be those in the whole model.
        optimizer: A torch optimizer over the model's parameters, or several as a list.
        step: The number of steps made, given back by :func:`load_training_state`.
        process_group: The ranks that save; None is the world.
        async_: Write in the background what the state is now.
        check_replicas: Compare all that several ranks hold. Parameters and optimizer states of
            which ranks hold equal copies are compared in any case.
        weights_only: Refuse values that a load would refuse.
        **more: What else to save. Of what has a ``state_dict`` and ``load_state_dict``, such as a
            scheduler, a scaler or a data loader, the state; of another module the tensors; anything
            else as it is. What differs between ranks is saved for each rank.

    Returns:
        None, or the handle of a background save, whose ``result()`` waits for the rename.

    Raises:
        CheckpointingException: On every rank, and ``path`` is as before: as for
            :func:`save_sharded_state_dict`, or two chunks have one name, a tensor of the optimizer
            is no parameter of the model or one that hooks leave out of its state dict, copies
            differ, or the model is under FullyShardedDataParallel, whose parameters have no names.

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
    modules, optimizers = team.agree(lambda: _parts(model, optimizer))
    groups = optimizers.all_groups(team)
    values = states_to_save(more, team)

    def state() -> dict[str, Any]:
        streams = ShardedObject(RANDOM_STATE, rank_random_state(), (team.size,), (team.rank,))
        found = {"model": modules.tree("model"), "step": int(step), RANDOM_STATE: streams, **values}
        return found if optimizer is None else {**found, "optimizer": optimizers.tree(groups)}

    return save_sharded_state_dict(
        team.agree(state),
        path,
        process_group=process_group,
        async_=async_,
        check_replicas=check_replicas,
        weights_only=weights_only,
    )


def _parts(model: Model, optimizer: Optimizers) -> tuple[ModelState, OptimizerState]:
    modules = model_state(model)
    return modules, OptimizerState(optimizer, modules, "optimizer")


def _other_modules(more: Mapping[str, Any]) -> dict[str, ModelState]:
    check_names(more)
    return {name: model_state(one) for name, one in more.items() if isinstance(one, nn.Module)}


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
    random_state: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Continue from a checkpoint of :func:`save_training_state`, whatever layout wrote it.

    Collective over ``process_group``. Parameters, buffers and states that an optimizer has are
    filled in place; states that it lacks are made in the layout of its parameters and with the
    dtypes of the checkpoint, and those that the checkpoint lacks are dropped. Options of groups
    follow the names of their parameters, but for ``foreach``, ``fused``, ``capturable`` and
    ``differentiable``, which stay. Everything else is given back only when all ranks have read all
    that they need. Random streams are put back where as many ranks load as saved. Without
    torch.distributed this process loads alone.

    Args:
        path: The checkpoint.
        model: As in :func:`save_training_state`, in any layout; on real devices.
        optimizer: One or several, made after the model was sharded; no step is needed. None leaves
            the states of the checkpoint unread.
        strict: Raise when the checkpoint lacks something; otherwise the present one stays.
        unexpected: What to do when the checkpoint has keys that no rank asks for.
        process_group: The ranks that load; None is the world.
        weights_only: Refuse to run code that a checkpoint may hold.
        verify: As in :func:`load_sharded_state_dict`.
        random_state: Put the random streams back.
        **more: Objects whose state was saved under these names, which get it back, modules too, and
            dicts with DTensors, which are filled in place.

    Returns:
        ``step``, and every further value of the checkpoint by name; for what was passed as an
        object, that object. Equal on all ranks but for what was saved for each rank.

    Raises:
        DamagedCheckpointError: On every rank: it is not complete, or has changed. Tensors may be
            filled in part, as the text says then.
        CheckpointingException: On every rank, before anything is filled: a key, shape or dtype does
            not fit, a group of the optimizer has parameters that had different options, or a value
            passed here was saved for each of another number of ranks. After: the model does not
            take back what its hooks made of a parameter.

    Example:
        >>> import torch
        >>> load_training_state("/no/such/checkpoint", torch.nn.Linear(2, 1))
        Traceback (most recent call last):
            ...
        mcore.parallel.checkpoint.errors.DamagedCheckpointError: cannot load ...
    """
    team = team_of(process_group)
    modules, optimizers = team.agree(lambda: _parts(model, optimizer))
    others = team.agree(lambda: _other_modules(more))
    directory, index = open_checkpoint(path, team)
    stored = stored_values(index.keys, team)
    first = {"step": OneLeaf(), **stored.targets}
    if optimizer is not None:
        first["optimizer"] = {GROUPS: OneLeaf()}
    options: dict[str, Any] = {"strict": strict, "weights_only": weights_only, "verify": verify}
    values = load_opened(directory, index, lambda: first, team, unexpected="ignore", **options)

    def wanted() -> dict[str, Any]:
        _check_more(more, stored, team, strict=strict)
        tree = _tree_of_more(more, others, stored)
        if optimizer is not None:
            groups = values["optimizer"][GROUPS] or []
            tree["optimizer"] = optimizers.targets(index.keys, groups, strict=strict)
        return {**tree, "model": modules.tree("model")}

    streams_of_others = stored.of_other_ranks.get(RANDOM_STATE, [])
    accounted = [*stored.keys, f"optimizer.{GROUPS}", *streams_of_others]
    loaded = load_opened(
        directory, index, wanted, team, unexpected=unexpected, accounted=accounted, **options
    )
    if streams_of_others and random_state and team.is_first:
        logger.warning(
            "%s has the random streams of %d ranks, not of %d: they are left as they are",
            directory,
            len(streams_of_others),
            team.size,
        )

    def take_back() -> dict[str, Any]:
        modules.take_back(loaded["model"])
        if optimizer is not None:
            optimizers.take_back({**loaded["optimizer"], GROUPS: values["optimizer"][GROUPS]})
        return _given_back(more, others, values, loaded)

    found = team.agree(take_back)
    streams = values.get(RANDOM_STATE)
    if random_state and streams is not None:
        team.agree(lambda: set_rank_random_state(streams))
    return found


def _check_more(more: Mapping[str, Any], stored: StoredValues, team: Team, *, strict: bool) -> None:
    problems = [
        f"{name!r} was saved for each of {len(stored.of_other_ranks[name])} ranks, and {team.size} "
        "load; leave it out, or pass strict=False to keep its present state"
        for name in sorted(more.keys() & stored.of_other_ranks.keys())
    ]
    if problems and strict:
        raise CheckpointingException(titled_list("some values cannot be given back", problems))


def _tree_of_more(
    more: Mapping[str, Any], others: Mapping[str, ModelState], stored: StoredValues
) -> dict[str, Any]:
    """Return what to fill of further values: those with tensors by name, and what is missing."""
    tree: dict[str, Any] = {}
    for name in more.keys() - stored.of_other_ranks.keys():
        state = others[name].tree(name) if name in others else state_of(name, more[name])
        if name not in stored.targets or not isinstance(state, OneLeaf):
            tree[name] = state
    return tree


def _given_back(
    more: Mapping[str, Any],
    others: Mapping[str, ModelState],
    values: Mapping[str, Any],
    loaded: Mapping[str, Any],
) -> dict[str, Any]:
    """Give objects their state, and return all further values."""
    own = {"model", "optimizer", RANDOM_STATE}
    found = {name: value for name, value in {**values, **loaded}.items() if name not in own}
    for name in found.keys() & more.keys():
        if name in others:
            others[name].take_back(found[name])
        elif is_stateful(more[name]):
            more[name].load_state_dict(found[name])
        if name in others or is_stateful(more[name]):
            found[name] = more[name]
    return dict(sorted(found.items()))
