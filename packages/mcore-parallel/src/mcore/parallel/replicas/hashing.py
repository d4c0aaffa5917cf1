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

_STAGING_BYTES = 256 << 20  # of each of the two staging buffers, shared out among the threads
_MIN_STAGING_BYTES = 4096
_MAX_THREADS = 8
_WORTH_A_THREAD = 1 << 20  # bytes; less is hashed before a thread has started


class NamedParam(NamedTuple):
    """A parameter, where it was found, and the plain tensors that hold its values here."""

    chunk: int
    name: str
    param: nn.Parameter
    parts: list[Part]


class _Task(NamedTuple):
    """A parameter, and how much there is to hash."""

    named: NamedParam
    num_bytes: int


class Hasher(Protocol):
    """What hashlib and xxhash make."""

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

    No communication: every rank gets the hashes of what it holds. A DTensor counts with its local
    shard, a quantised wrapper with the tensors inside it, one after the other. Shape and dtype do
    not enter the hash.

    Args:
        model: A module, or the model chunks of this rank.
        num_threads: Threads to hash with, at least 1; None means one for each CPU, at most 8.
        bit_exact: Hash the raw bytes. False hashes the values as float32 (of complex numbers the
            real part), as Megatron-LM does, so that bfloat16 and float32 copies of the same values
            are equal, but so are values that float32 cannot tell apart.

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
    digests = hash_params(found, _sha1, num_threads=num_threads, bit_exact=bit_exact)
    return {
        named.name if is_alone else f"chunk{named.chunk}.{named.name}": digest.hex()
        for named, digest in zip(found, digests, strict=True)
    }


def named_params(model: nn.Module | Sequence[nn.Module]) -> list[NamedParam]:
    """List the parameters of a module or its chunks; ValueError for one without bytes to read."""
    chunks = [model] if isinstance(model, nn.Module) else model
    if not isinstance(chunks, list | tuple):
        raise TypeError(f"model must be a module or a list of modules, got {type(model).__name__}")
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, nn.Module):
            raise TypeError(f"model chunk {index} must be a module, got {type(chunk).__name__}")
    return [
        _named(index, name, param)
        for index, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    ]


def _named(chunk: int, name: str, param: nn.Parameter) -> NamedParam:
    try:
        return NamedParam(chunk, name, param, plain_parts(param))
    except ValueError as error:
        raise ValueError(
            f"parameter {name!r} of model chunk {chunk} cannot be hashed: {error}"
        ) from error


def hash_params(
    params: Sequence[NamedParam], new_hasher: NewHasher, *, num_threads: int | None, bit_exact: bool
) -> list[bytes]:
    """Return the digest of each parameter, each of which is read only once."""
    threads = _default_threads() if num_threads is None else num_threads
    if threads < 1:
        raise ValueError(f"num_threads is {num_threads}; at least 1 is needed")
    tasks = [
        _task(named, bit_exact) for named in {id(named.param): named for named in params}.values()
    ]
    _wait_for_accelerators(params)
    digests = _run(tasks, new_hasher, threads, bit_exact)
    return [digests[id(named.param)] for named in params]


def _task(named: NamedParam, bit_exact: bool) -> _Task:
    return _Task(named, sum(stored_bytes(t, as_float32=not bit_exact) for _, t in named.parts))


def _default_threads() -> int:
    """Return one for each CPU that this process may use, at most eight."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    return min(_MAX_THREADS, usable)


def _wait_for_accelerators(params: Sequence[NamedParam]) -> None:
    """Wait for all streams, since other threads read on streams of their own."""
    for device in {tensor.device for named in params for _, tensor in named.parts}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _sha1() -> Hasher:
    return hashlib.sha1(usedforsecurity=False)


def _run(
    tasks: list[_Task], new_hasher: NewHasher, num_threads: int, bit_exact: bool
) -> dict[int, bytes]:
    """Hash the tasks, the largest first, so that no thread starts a long one at the end."""
    sizes = [task.num_bytes for task in tasks]
    largest_first = deque(sorted(tasks, key=lambda task: task.num_bytes, reverse=True))
    threads = max(1, min(num_threads, len(tasks), sum(sizes) // _WORTH_A_THREAD))
    staging_bytes = min(_STAGING_BYTES // threads, max(_MIN_STAGING_BYTES, *sizes, 0))
    work = partial(_work, largest_first, new_hasher, staging_bytes, bit_exact)
    if threads == 1:
        return work()
    with ThreadPoolExecutor(threads, thread_name_prefix="param-hash") as pool:
        futures = [pool.submit(work) for _ in range(threads)]
    return {key: digest for future in futures for key, digest in future.result().items()}


def _work(
    tasks: deque[_Task], new_hasher: NewHasher, staging_bytes: int, bit_exact: bool
) -> dict[int, bytes]:
    """Take tasks until there are none left; run by each thread."""
    pieces = BytePieces(staging_bytes, as_float32=not bit_exact)
    digests: dict[int, bytes] = {}
    while True:
        try:
            task = tasks.popleft()
        except IndexError:
            return digests
        digests[id(task.named.param)] = _digest(task.named.parts, new_hasher(), pieces)


def _digest(parts: list[Part], hasher: Hasher, pieces: BytePieces) -> bytes:
    for _, tensor in parts:
        with _on_device(tensor.device):
            for piece in pieces.of(tensor):
                hasher.update(piece)
    return hasher.digest()


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make an accelerator current in this thread, so that no other one is initialised."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
