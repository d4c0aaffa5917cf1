"""Join the ranks of one run into a process group."""

import datetime

import torch
import torch.distributed as dist

from rank_testing.messages import rendezvous_path
from rank_testing.server import uses_accelerator

# The test process reports a hang with each rank's stack: the group must not time out before that.
_GROUP_TIMEOUT_MARGIN_S = 10.0


def limit_threads() -> None:
    """Give torch one thread in this rank: the ranks of a test share the machine's cores."""
    torch.set_num_threads(1)


def join_group(init: str, rank: int, world_size: int, folder: str, timeout_s: float) -> None:
    """Initialise ``torch.distributed`` in this rank; all ranks of the run have to call it.

    The ranks meet through a file in ``folder``, so no port can clash. The group waits a little
    longer than the test process.
    """
    on_accelerator = uses_accelerator(init)
    if on_accelerator:
        _select_device(init, rank, world_size)
    timeout = datetime.timedelta(seconds=timeout_s + _GROUP_TIMEOUT_MARGIN_S)
    store = dist.FileStore(rendezvous_path(folder), world_size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    dist.init_process_group(init, store=store, rank=rank, world_size=world_size, timeout=timeout)
    if not on_accelerator:
        # A rank that fails before its peers are connected to it would leave them waiting.
        dist.barrier()


def _select_device(init: str, rank: int, world_size: int) -> None:
    count = torch.accelerator.device_count()
    needed = world_size if "nccl" in init else 1
    if count < needed:
        raise RuntimeError(
            f"init={init!r} with {world_size} ranks needs {needed} accelerators, "
            f"this machine has {count}; skip the test here or start fewer ranks"
        )
    torch.accelerator.set_device_index(rank % count)
