"""Which ranks of a device mesh hold an empty shard, in integer arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["every_rank_has_elements"]


def _chunk_size(size: int, num_chunks: int, index: int) -> int:
    """The length of one chunk as `torch.chunk` cuts, zero for the chunks it leaves out."""
    full = -(-size // num_chunks)
    return min(max(size - index * full, 0), full)


def _shard_sizes(size: int, num_shards: int, split_factor: int) -> set[int]:
    """The distinct lengths of `num_shards` shards of one dimension.

    A strided shard cuts into `split_factor` pieces, each piece into `num_shards`, and joins the
    chunks of the same index; a plain shard is the case of one piece.
    """
    pieces = [_chunk_size(size, split_factor, piece) for piece in range(split_factor)]
    return {
        sum(_chunk_size(piece, num_shards, index) for piece in pieces)
        for index in range(num_shards)
    }


def every_rank_has_elements(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Iterable[object]
) -> bool:
    """Return whether no rank of a mesh holds an empty shard of a tensor with elements.

    It needs no communication and comes out the same on every rank.

    Args:
        shape: The global shape of the tensor.
        mesh_shape: The number of ranks along each mesh dimension.
        placements: The DTensor placement for each mesh dimension. One with a `dim` shards; one
            with a `split_factor` as well is a strided shard.

    Returns:
        Whether each rank holds at least one element. `False` if the tensor has none.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> every_rank_has_elements((8,), (4,), [Shard(0)])
        True
        >>> every_rank_has_elements((5,), (4,), [Shard(0)])  # cut into 2, 2, 1 and 0
        False
    """
    sizes = [{size} for size in shape]
    for num_shards, placement in zip(mesh_shape, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if not isinstance(dim, int):
            continue
        split_factor = getattr(placement, "split_factor", 1)
        sizes[dim] = set().union(
            *(_shard_sizes(size, num_shards, split_factor) for size in sizes[dim])
        )
    return not any(0 in lengths for lengths in sizes)
