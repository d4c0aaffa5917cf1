"""The meshes and groups of fully sharded data parallelism, checked and in one place."""

from mcore.parallel.fsdp_index.lookup import FSDPDistributedIndex

__all__ = ["FSDPDistributedIndex"]
