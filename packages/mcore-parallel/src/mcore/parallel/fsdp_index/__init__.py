"""The meshes and groups of fully sharded data parallelism, checked and in one place."""

from mcore.parallel.fsdp_index.distributed_index import FSDPDistributedIndex

__all__ = ["FSDPDistributedIndex"]
