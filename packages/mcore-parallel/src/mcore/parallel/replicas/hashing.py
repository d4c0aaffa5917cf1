"""Hashes of the parameters of a model, computed by several threads."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
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


class _Task(NamedTuple):
    """A parameter and the number of bytes to hash."""

    named: NamedParam
    num_bytes: int


class Hasher(Protocol):
    """The hash objects of hashlib and xxhash."""

    def update(self, data: memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


NewHasher: TypeAlias = Callable[[], Hasher]


def param_hashes(
    model: nn.Module | Sequence[nn.Module],
    *,
    num_threads: int | None = None,
    bit_exact: bool = True,
) -> dict[str, str]:
    """Return the SHA-1 of every parameter's bytes, to compare two runs offline.

    No communication: every rank gets the hashes of its parameters. Of a DTensor the local shard is
    hashed, of a quantised wrapper the tensors inside it, one after the other. Shape and dtype are
    not part of the hash.

    Args:
        model: A module, or the model chunks of this rank.
        num_threads: Number of hashing threads, at least 1. None means one for each CPU, at most 8.
        bit_exact: Hash the raw bytes. False hashes the values as float32 (of complex numbers the
            real part), as Megatron-LM does. Then bfloat16 and float32 tensors of the same values
            have equal hashes, but so do different values that are equal as float32.

    Returns:
        Lower-case hexadecimal SHA-1 by parameter name. With several chunks the names start with
        ``chunk0.``, ``chunk1.`` and so on. A parameter that a chunk has under two names is listed
        once.

    Raises:
        TypeError: ``model`` is neither a module nor a sequence of modules.
        ValueError: A parameter has no bytes to read (meta device, uninitialised, sparse, an
            unknown tensor subclass), or ``num_threads`` is below 1.

    Example:
        >>> layer = nn.Linear(4, 1, bias=False)
        >>> _ = nn.init.ones_(layer.weight)
        >>> param_hashes(layer)
        {'weight': 'df87141c4e5d8879ae12632dd0e1eee69aa1d093'}
    """
    found = named_params(model)
    is_alone = isinstance(model, nn.Module) or len(model) == 1
    new_hasher = partial(hashlib.sha1, usedforsecurity=False)
    digests = hash_params(found, new_hasher, num_threads=num_threads, bit_exact=bit_exact)
    return {
        named.name if is_alone else f"chunk{named.chunk}.{named.name}": digest.hex()
        for named, digest in zip(found, digests, strict=True)
    }


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
    threads = _count_threads() if num_threads is None else num_threads
    if threads < 1:
        raise ValueError(f"num_threads is {num_threads}: at least 1 is needed")
    tasks = [
        _Task(named, sum(stored_bytes(t, as_float32=not bit_exact) for _, t in named.parts))
        for named in {id(named.param): named for named in params}.values()
    ]
    for device in {tensor.device for named in params for _, tensor in named.parts}:
        if device.type != "cpu":  # other threads read on other streams
            torch.accelerator.synchronize(device)
    digests = _run(tasks, new_hasher, threads, bit_exact)
    return [digests[id(named.param)] for named in params]


def _count_threads() -> int:
    """Return the number of CPUs that this process may use, at most eight."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    return min(_MAX_THREADS, usable)


def _run(
    tasks: list[_Task], new_hasher: NewHasher, num_threads: int, bit_exact: bool
) -> dict[int, bytes]:
    """Hash the tasks, the largest first, so no thread starts a long task at the end."""
    sizes = [task.num_bytes for task in tasks]
    largest_first = deque(sorted(tasks, key=lambda task: task.num_bytes, reverse=True))
    threads = max(1, min(num_threads, len(tasks), sum(sizes) // _WORTH_A_THREAD))
    staging_bytes = min(_STAGING_BYTES // threads, max(_MIN_STAGING_BYTES, *sizes, 0))
    work = partial(_run_thread, largest_first, new_hasher, staging_bytes, bit_exact)
    if threads == 1:
        return work()
    with ThreadPoolExecutor(threads, thread_name_prefix="param-hash") as pool:
        futures = [pool.submit(work) for _ in range(threads)]
    return {key: digest for future in futures for key, digest in future.result().items()}


def _run_thread(
    tasks: deque[_Task], new_hasher: NewHasher, staging_bytes: int, bit_exact: bool
) -> dict[int, bytes]:
    """Hash tasks of the common queue until it is empty."""
    pieces = BytePieces(staging_bytes, as_float32=not bit_exact)
    digests: dict[int, bytes] = {}
    while True:
        try:
            task = tasks.popleft()
        except IndexError:
            return digests
        hasher = new_hasher()
        for _, tensor in task.named.parts:
            with _use_device(tensor.device):
                for piece in pieces.of(tensor):
                    hasher.update(piece)
        digests[id(task.named.param)] = hasher.digest()


def _use_device(device: torch.device) -> AbstractContextManager[object]:
    """Make an accelerator current in this thread, which else initialises the first one."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
