"""States of a device's default random number generator, on the CPU and any accelerator.

A state is plain, a uint8 tensor on the CPU, or a ``torch.Generator`` handle. Only handles may be
exchanged inside a CUDA graph, because a replay advances the state that the handle refers to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from mcore.tensor.device import capture_query, current_device
from mcore.versioning import internal_api

RngState: TypeAlias = "Tensor | torch.Generator"

# The only device type named in this module: the documented default argument, and the only type
# with generators that torch can register with a graph.
CUDA = "cuda"
CURRENT_INDEX = -1


@internal_api
def _get_cuda_rng_state(
    device: int | str | torch.device = CUDA, clone: bool = False, graph_safe: bool = False
) -> RngState:
    """Return the state of a device's default random number generator.

    Args:
        device: Accelerator index, name or device. "cuda" without an index and -1 mean the current
            accelerator, or the CPU if there is none.
        clone: With ``graph_safe``, return an independent copy instead of the live handle. Plain
            states are always new tensors.
        graph_safe: Return a ``torch.Generator`` that shares its state with the default generator.
            If the device cannot share it (the CPU), an independent copy of the generator.

    Returns:
        A uint8 tensor on the CPU, or a generator. No communication. No state is advanced.

    Raises:
        RuntimeError: The device was named explicitly and does not exist.

    Example:
        >>> state = _get_cuda_rng_state("cpu")
        >>> first = torch.rand(2)
        >>> _set_cuda_rng_state(state, "cpu")
        >>> torch.equal(torch.rand(2), first)
        True
    """
    state = read_rng_state(default_generator(resolve_rng_device(device)), graph_safe)
    return clone_rng_state(state) if clone and graph_safe else state


@internal_api
def _set_cuda_rng_state(
    new_state: RngState, device: int | str | torch.device = CURRENT_INDEX, graph_safe: bool = False
) -> None:
    """Set the state of a device's default random number generator. In effect on return.

    Args:
        new_state: A state from ``_get_cuda_rng_state`` with the same ``graph_safe``. Not cloned.
        device: As for ``_get_cuda_rng_state``.
        graph_safe: ``new_state`` is a generator, and the default generator shares its state from
            now on. If the device cannot share it (the CPU), the state is copied.

    Raises:
        RuntimeError: The device was named explicitly and does not exist, or the state is of
            another kind of device.
        TypeError: ``new_state`` is not of the kind that ``graph_safe`` requires.

    Example:
        >>> _set_cuda_rng_state(torch.Generator().manual_seed(1), "cpu", graph_safe=True)
        >>> torch.initial_seed()
        1
    """
    write_rng_state(default_generator(resolve_rng_device(device)), new_state, graph_safe)


def convert_cuda_rng_state(
    state: RngState, to_graphable: bool = False, *, device: int | str | torch.device | None = None
) -> RngState:
    """Convert a state between its plain and its graph-safe form, without a change of the numbers.

    Args:
        state: A plain state (uint8 tensor) or a ``torch.Generator``.
        to_graphable: Return a generator, else a plain state.
        device: Device of a new generator. Default the current accelerator, else the CPU.

    Returns:
        ``state`` itself if it already has the requested form, else an independent copy.

    Raises:
        RuntimeError: The plain state is not of ``device``.
        TypeError: ``state`` is neither a tensor nor a generator.

    Example:
        >>> plain = torch.Generator().manual_seed(1).get_state()
        >>> generator = convert_cuda_rng_state(plain, to_graphable=True, device="cpu")
        >>> torch.equal(convert_cuda_rng_state(generator), plain)
        True
    """
    if not isinstance(state, (Tensor, torch.Generator)):
        raise TypeError(f"expected a tensor or torch.Generator as rng state, got {type(state)}")
    if isinstance(state, torch.Generator):
        return state if to_graphable else state.get_state()
    if not to_graphable:
        return state
    generator = torch.Generator(resolve_rng_device(CURRENT_INDEX if device is None else device))
    return generator.set_state(state)


def resolve_rng_device(device: int | str | torch.device) -> torch.device:
    """Return the device for an argument of this module, with the index of an accelerator."""
    current = current_device()
    if device == CURRENT_INDEX:
        return current
    if isinstance(device, int):
        device = torch.device(CUDA if current.type == "cpu" else current.type, device)
    named = torch.device(device)
    if named.type == "cpu":
        return torch.device("cpu")
    if named.index is None:
        if named.type in (CUDA, current.type):
            return current
    elif named.type == current.type and named.index < torch.accelerator.device_count():
        return named
    raise RuntimeError(
        f"device {str(named)!r} does not exist, the current device is {str(current)!r}: pass -1 "
        "for the current accelerator (or the CPU if there is none), or 'cpu'"
    )


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device itself, not a copy."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if hasattr(module, "init"):
        module.init()  # creates the generators
    generators: tuple[torch.Generator, ...] | None = getattr(module, "default_generators", None)
    if generators is None:
        raise RuntimeError(
            f"{module.__name__} has no default_generators, so the rng state of {device} cannot be "
            "exchanged: pass device='cpu'"
        )
    return generators[device.index]


def read_rng_state(generator: torch.Generator, graph_safe: bool) -> RngState:
    """Return a generator's plain state, or a handle that shares its state if the device can."""
    if not graph_safe:
        return generator.get_state()
    if _can_share_state(generator.device):
        return generator.graphsafe_get_state()
    return generator.clone_state()


def write_rng_state(generator: torch.Generator, state: RngState, graph_safe: bool) -> None:
    """Set a generator to a plain state, or share the state of a handle if the device can."""
    expected = torch.Generator if graph_safe else Tensor
    if not isinstance(state, expected):
        raise TypeError(
            f"expected a {expected.__name__} as rng state (graph_safe={graph_safe}), got a "
            f"{type(state).__name__}: use convert_cuda_rng_state(state, to_graphable={graph_safe})"
        )
    if isinstance(state, Tensor):
        generator.set_state(state)
    elif _can_share_state(generator.device):
        generator.graphsafe_set_state(state)
    else:
        generator.set_state(state.get_state())


@functools.cache
def _can_share_state(device: torch.device) -> bool:
    """Return whether generators of a device can share one state. Checked once.

    Asks the default generator: a new one must not be made while a graph is captured.
    """
    try:
        default_generator(device).graphsafe_get_state()
    except NotImplementedError:
        return False
    return True


def clone_rng_state(state: RngState) -> RngState:
    """Return an independent copy of a state of either kind."""
    return state.clone_state() if isinstance(state, torch.Generator) else state.clone()


def read_generators(states: Iterable[RngState]) -> list[tuple[torch.Generator, Tensor]]:
    """Return the generators among some states, each with its plain state.

    RuntimeError while a graph is captured. Its replays would draw from the same handles, but
    generators have no plain state that a graph could return to.
    """
    generators = [state for state in states if isinstance(state, torch.Generator)]
    if any(capture_query(device)() for device in {one.device for one in generators}):
        raise RuntimeError(
            "random streams cannot be repeated inside a graph: its backward would draw other "
            "numbers than its forward. Do not recompute activations inside the captured layer, or "
            "run it without a graph"
        )
    return [(generator, generator.get_state()) for generator in generators]


def require_graph_safe_generators(device: torch.device) -> None:
    """Raise RuntimeError if graphs on this device cannot register generators."""
    if device.type == CUDA and not hasattr(torch.cuda.CUDAGraph, "register_generator_state"):
        raise RuntimeError(
            "use_cudagraphable_rng needs torch.cuda.CUDAGraph.register_generator_state, which "
            f"torch {torch.__version__} lacks: use a CUDA build that has it, or turn the flag off"
        )
