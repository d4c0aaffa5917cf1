"""Hashes of the parameters of a model, computed by several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from mcore.parallel.tensor_memory import BytePieces, Part, plain_parts, stored_bytes
from mcore.tensor.param_flags import ensure_params_ready

_STAGING_BYTES = 256 << 20  # of each of the two staging buffers, divided among the threads
_MIN_STAGING_BYTES = 4096
_MAX_THREADS = 8
_WORTH_A_THREAD = 1 << 20  # bytes, hashed in about the time that a thread needs to start


class NamedParam(NamedTuple):
    """A parameter with its chunk, its name and the plain tensors of its values on this rank."""

    chunk: int
    name: str
    param: nn.Parameter
    parts: list[Part]


class Hasher(Protocol):
    """The hash objects of hashlib and xxhash."""

    def update(self, data: memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


NewHasher: TypeAlias = Callable[[], Hasher]


def named_params(model: nn.Module | Sequence[nn.Module]) -> list[NamedParam]:
    """List the parameters of a module or its chunks. ValueError for one without bytes to read."""
    chunks = [model] if isinstance(model, nn.Module) else model
    if not isinstance(chunks, list | tuple):
        raise TypeError(f"model must be a module or a list of modules, got {type(model).__name__}")
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, nn.Module):
            raise TypeError(f"model chunk {index} must be a module, got {type(chunk).__name__}")
    ensure_params_ready(param for chunk in chunks for param in chunk.parameters())
    found = []
    for index, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            try:
                found.append(NamedParam(index, name, param, plain_parts(param)))
            except ValueError as error:
                raise ValueError(
                    f"parameter {name!r} of model chunk {index} cannot be hashed: {error}"
                ) from error
    return found


def hash_params(
    params: Sequence[NamedParam], new_hasher: NewHasher, *, num_threads: int | None, bit_exact: bool
) -> list[bytes]:
    """Return the digest of each parameter. A parameter with several names is read only once."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    threads = min(_MAX_THREADS, usable) if num_threads is None else num_threads
    if threads < 1:
        raise ValueError(f"num_threads is {num_threads}: at least 1 is needed")
    unique = list({id(named.param): named for named in params}.values())
    for device in {tensor.device for named in params for _, tensor in named.parts}:
        if device.type != "cpu":  # other threads read on other streams
            torch.accelerator.synchronize(device)
    sizes = [
        sum(stored_bytes(part, as_float32=not bit_exact) for _, part in named.parts)
        for named in unique
    ]
    # The largest first, so no thread starts a long one at the end.
    order = sorted(range(len(unique)), key=sizes.__getitem__, reverse=True)
    queue = deque(unique[index] for index in order)
    threads = max(1, min(threads, len(unique), sum(sizes) // _WORTH_A_THREAD))
    staging_bytes = min(_STAGING_BYTES // threads, max(_MIN_STAGING_BYTES, *sizes, 0))
    work = partial(_hash_queue, queue, new_hasher, staging_bytes, bit_exact)
    digests: dict[int, bytes] = {}
    if threads == 1:
        digests = work()
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="param-hash") as pool:
            for future in [pool.submit(work) for _ in range(threads)]:
                digests |= future.result()
    return [digests[id(named.param)] for named in params]


def _hash_queue(
    queue: deque[NamedParam], new_hasher: NewHasher, staging_bytes: int, bit_exact: bool
) -> dict[int, bytes]:
    """Hash parameters of the common queue until it is empty."""
    pieces = BytePieces(staging_bytes, as_float32=not bit_exact)
    digests: dict[int, bytes] = {}
    while True:
        try:
            named = queue.popleft()
        except IndexError:
            return digests
        hasher = new_hasher()
        for _, tensor in named.parts:
            # An accelerator is made current in this thread, which else initialises the first one.
            index = None if tensor.device.type == "cpu" else tensor.device.index
            with torch.accelerator.device_index(index):
                for piece in pieces.of(tensor):
                    hasher.update(piece)
        digests[id(named.param)] = hasher.digest()
