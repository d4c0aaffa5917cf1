"""Batches of packed samples in one row, and batches for all ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.parallel.context_parallel import PACKED_KEYS
from mcore.parallel.groups import AnyGroup, as_process_group, comm_device, take_group

# The tensors of a batch in the order in which they travel, with their dtypes.
_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "attention_mask": torch.bool,
    "position_ids": torch.int64,
    "cu_seqlens": torch.int32,
    "cu_seqlens_padded": torch.int32,
    "max_seqlen": torch.int32,
    "local_cp_size": torch.int32,
}
_MAX_DIMS = 4


def flatten_batch_for_packed_sequences(batch: dict[str, Any]) -> dict[str, Any]:
    """Join the rows of a micro-batch of packed samples into one row of packed documents.

    No communication. The result is in the form that :func:`get_batch_on_this_cp_rank` accepts.

    Args:
        batch: ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, each ``[b, s]`` or absent
            or None, the borders of the documents of each row in ``cu_seqlens`` and
            ``cu_seqlens_padded``, ``[b, n]``, and ``max_seqlen``. Other values are kept.

    Returns:
        The batch itself without ``cu_seqlens``. Else a new dict: tensors ``[1, b * s]``, borders
        ``[1, m]``, in row i shifted by ``i * s``, with equal neighbours joined, and the
        maximum of ``max_seqlen``, ``[1]``.

    Raises:
        ValueError: The borders are not of one row for each sample.

    Example:
        >>> batch = {"tokens": torch.arange(8).view(2, 4)}
        >>> batch["cu_seqlens"] = torch.tensor([[0, 1, 4], [0, 2, 4]])
        >>> flatten_batch_for_packed_sequences(batch)["cu_seqlens"].tolist()
        [[0, 1, 4, 6, 8]]
    """
    if batch.get("cu_seqlens") is None:
        return batch
    flat = dict(batch)
    samples = {key: batch[key] for key in PACKED_KEYS if batch.get(key) is not None}
    shapes = {tuple(sample.shape[:2]) for sample in samples.values()}
    if len(shapes) > 1:
        raise ValueError(f"tensors of the batch have the shapes {sorted(shapes)}. Pass equal ones")
    for key in ("cu_seqlens", "cu_seqlens_padded"):
        if batch.get(key) is not None:
            flat[key] = _join_borders(key, batch[key], shapes)
    for key, sample in samples.items():
        flat[key] = sample.flatten(0, 1)[None]
    if batch.get("max_seqlen") is not None:
        flat["max_seqlen"] = _as_tensor(batch["max_seqlen"]).amax().reshape(1)
    return flat


def _as_tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor where it is, and other values on the CPU, whatever the default device is."""
    device = value.device if isinstance(value, Tensor) else "cpu"
    return torch.as_tensor(value, dtype=dtype, device=device)


def _join_borders(key: str, borders: Tensor, shapes: set[tuple[int, ...]]) -> Tensor:
    borders = borders[None] if borders.ndim == 1 else borders
    rows = borders.shape[0]
    [(samples, length)] = shapes or {(rows, 0)}
    if rows != samples or (rows > 1 and not shapes):
        raise ValueError(
            f"{key} has {rows} rows and the batch {samples if shapes else 'no'} samples. Pass the "
            "borders of the documents of each sample, and its tokens"
        )
    starts = torch.arange(rows, device=borders.device, dtype=borders.dtype) * length
    joined: Tensor = torch.unique_consecutive(borders + starts[:, None])
    return joined[None]


def get_batch_on_this_tp_rank(
    batch: dict[str, Any] | None,
    has_cu_seqlens: bool,
    is_hybrid_cp: bool,
    create_attention_mask_in_dataloader: bool,
    broadcast_src_rank: int,
    broadcast_group: AnyGroup | None,
    cp_size: int,
    tp_rank: int,
    micro_batch_size: int,
    seq_length: int,
    mtp_on_this_rank: bool,
    pipeline_model_parallel_size: int = 1,
    is_pipeline_first_stage: bool = False,
    is_pipeline_last_stage: bool = False,
) -> dict[str, Any]:
    """Return the batch of tensor-parallel rank 0 on all ranks of the group.

    Collective over ``broadcast_group``: a broadcast of the shapes and one for each tensor. The
    tensors are ``tokens`` and ``position_ids`` on the first stage, ``labels`` and ``loss_mask`` on
    the last, and all four with one stage or multi-token prediction. Borders travel on every stage.

    Args:
        batch: The batch on tensor-parallel rank 0, ignored on the others.
        has_cu_seqlens: Send ``cu_seqlens``, ``cu_seqlens_padded`` and ``max_seqlen``.
        is_hybrid_cp: Send ``local_cp_size``. The length of the sequence is then free.
        create_attention_mask_in_dataloader: Send ``attention_mask``, ``[b, 1, s, s]``.
        broadcast_src_rank: Global rank of tensor-parallel rank 0.
        broadcast_group: Tensor-parallel group or 1-D DeviceMesh. None for one rank.
        cp_size: Accepted for callers of Megatron-LM. The shapes travel with the batch.
        tp_rank: This rank in the group.
        micro_batch_size: Rows of ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``.
        seq_length: Their length.
        mtp_on_this_rank: This rank has a multi-token prediction layer.
        pipeline_model_parallel_size: Number of pipeline stages.
        is_pipeline_first_stage: This is the first stage.
        is_pipeline_last_stage: This is the last stage.

    Returns:
        All nine keys on every rank, None for keys that do not travel.

    Raises:
        ValueError: On all ranks of the group: a tensor is missing on rank 0 or has another shape.

    Example:
        >>> batch = {"tokens": torch.zeros(1, 4), "position_ids": torch.arange(4)[None]}
        >>> batch |= {"labels": torch.zeros(1, 4), "loss_mask": torch.ones(1, 4)}
        >>> found = get_batch_on_this_tp_rank(
        ...     batch, False, False, False, 0, None, 1, 0, 1, 4, False
        ... )
        >>> found["tokens"].dtype, found["cu_seqlens"]
        (torch.int64, None)
    """
    has_all = pipeline_model_parallel_size == 1 or mtp_on_this_rank
    wanted = {
        "tokens": has_all or is_pipeline_first_stage,
        "labels": has_all or is_pipeline_last_stage,
        "loss_mask": has_all or is_pipeline_last_stage,
        "attention_mask": create_attention_mask_in_dataloader,
        "position_ids": has_all or is_pipeline_first_stage,
        "cu_seqlens": has_cu_seqlens,
        "cu_seqlens_padded": has_cu_seqlens,
        "max_seqlen": has_cu_seqlens,
        "local_cp_size": is_hybrid_cp,
    }
    group = as_process_group(take_group(broadcast_group, "tp"))
    device = torch.device("cpu") if group is None else comm_device(group)
    is_shared = group is not None and group.size() > 1
    sent: dict[str, Tensor] = {}
    header = torch.zeros(len(_DTYPES), 1 + _MAX_DIMS, dtype=torch.int64, device="cpu")
    failure: Exception | None = None
    if tp_rank == 0:
        try:
            for row, key in zip(header, _DTYPES, strict=True):
                value = (batch or {}).get(key)
                if value is not None and wanted[key]:
                    tensor = _as_tensor(value, _DTYPES[key])
                    sent[key] = (tensor.to(device) if is_shared else tensor).contiguous()
                    row[0] = 1 + tensor.ndim
                    row[1 : 1 + tensor.ndim] = _as_tensor(tensor.shape, torch.int64)
        except (RuntimeError, TypeError, ValueError) as error:
            failure = error
            header[0, 0] = -1  # the other ranks wait for the header
    if is_shared:
        header = header.to(device)
        dist.broadcast(header, broadcast_src_rank, group)
    if header[0, 0] == -1:
        raise ValueError(
            f"the batch of tensor-parallel rank 0 cannot be sent: {failure or 'see that rank'}. "
            f"Pass tensors of at most {_MAX_DIMS} dims"
        ) from failure
    shapes = {
        key: tuple(row[1:ndim])
        for key, row in zip(_DTYPES, header.tolist(), strict=True)
        if (ndim := row[0])
    }
    _check_shapes(shapes, wanted, micro_batch_size, None if is_hybrid_cp else seq_length)
    found: dict[str, Any] = dict.fromkeys(_DTYPES)
    for key, shape in shapes.items():
        tensor = (
            sent[key] if tp_rank == 0 else torch.empty(shape, dtype=_DTYPES[key], device=device)
        )
        if is_shared:
            dist.broadcast(tensor, broadcast_src_rank, group)
        found[key] = tensor
    return found


def _check_shapes(
    shapes: dict[str, tuple[int, ...]], wanted: dict[str, bool], rows: int, length: int | None
) -> None:
    """Compare the shapes on rank 0, which all ranks have, with the expected shapes."""
    optional = ("cu_seqlens_padded", "max_seqlen")
    missing = [key for key in _DTYPES if wanted[key] and key not in shapes and key not in optional]
    if missing:
        raise ValueError(f"the batch of tensor-parallel rank 0 lacks {missing}. Add them there")
    for key in PACKED_KEYS:
        shape = shapes.get(key)
        if shape is not None and length is not None and shape != (rows, length):
            raise ValueError(
                f"{key} of tensor-parallel rank 0 has the shape {shape}, not the micro-batch size "
                f"and sequence length {(rows, length)}. Pass the sizes of the batch"
            )
