"""The meshes and groups of fully sharded data parallelism, checked and in one place."""

from mcore.parallel.fsdp_index.distributed_index import (
    FSDPDistributedIndex,
    using_tensor_parallel,
)

__all__ = ["FSDPDistributedIndex", "using_tensor_parallel"]
