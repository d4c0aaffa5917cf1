"""Whether the ranks that should hold equal parameters do."""

from __future__ import annotations

import torch.distributed as dist

from mcore.modules import MegatronModule
from mcore.parallel import (
    ProcessGroups,
    check_param_hashes_across_dp_replicas,
    logical_and_across_model_parallel_group,
)


class ReplicasDifferError(Exception):
    """Copies of a parameter are not equal; lines before name the parameter and the rank."""


def check_replicas(model: MegatronModule, groups: ProcessGroups, step: int) -> None:
    """Compare the parameters of all ranks of ``dp_cp``, bit by bit; all ranks call it together.

    Each parameter that differs from the copy on the first rank of its group is logged as an error
    on the rank that holds it.

    Raises:
        ReplicasDifferError: on all ranks, some copies differ.
    """
    equal = check_param_hashes_across_dp_replicas(model, cross_check=True, dp_group=groups.dp_cp)
    if logical_and_across_model_parallel_group(equal, dist.group.WORLD):
        return
    raise ReplicasDifferError(
        f"copies of the parameters differ between ranks after step {step}, as the lines "
        "'Hash not matching' say: a bit has flipped or the ranks have diverged; the checkpoint of "
        "this step is not written"
    )
