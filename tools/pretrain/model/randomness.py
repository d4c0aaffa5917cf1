"""Random numbers: initial weights, equal in every layout, and the streams of a rank."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from mcore.modules import TransformerConfig, init_method_normal, scaled_init_method_normal
from mcore.parallel import (
    ProcessGroups,
    get_cuda_rng_tracker,
    get_pg_rank,
    get_pg_size,
    model_parallel_cuda_manual_seed,
    set_tensor_model_parallel_attributes,
)
from mcore.parallel.rng import (
    _get_cuda_rng_state,
    _set_cuda_rng_state,
    convert_cuda_rng_state,
    is_graph_safe_cuda_rng_tracker,
)
from mcore.tensor import round_up_to_nearest_multiple

Init = Callable[[torch.Tensor], object]
_DATA_PARALLEL_STRIDE = 100_003
_PIPELINE_STRIDE = 100


def inner_init(config: TransformerConfig) -> Init:
    """The initializer of matrices inside a layer."""
    return config.init_method or init_method_normal(config.init_method_std)


def output_init(config: TransformerConfig) -> Init:
    """The initializer of matrices that add to the residual stream."""
    return config.output_layer_init_method or scaled_init_method_normal(
        config.init_method_std, config.num_layers
    )


@dataclass(frozen=True)
class ParameterInit:
    """Draws parameters by name, so every rank of every layout starts from the same model."""

    seed: int
    device: torch.device
    tp_group: torch.distributed.ProcessGroup | None

    def whole(self, name: str, shape: tuple[int, ...], init: Init) -> torch.Tensor:
        """The unsharded fp32 tensor on the CPU. Does not change a default RNG stream."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
            tensor = torch.empty(shape)
            init(tensor)
        return tensor

    def shard(
        self, name: str, shape: tuple[int, ...], init: Init, *, axis: int | None
    ) -> torch.nn.Parameter:
        """This tensor-parallel rank's slice along ``axis``. Rows of zeros pad the last rank.

        Without an axis the whole tensor, equal on all ranks.
        """
        size = get_pg_size(self.tp_group)
        tensor = self.whole(name, shape, init)
        if axis is None:
            return torch.nn.Parameter(tensor.to(self.device))
        missing = round_up_to_nearest_multiple(shape[axis], size) - shape[axis]
        if missing:
            filler = torch.zeros(*shape[:axis], missing, *shape[axis + 1 :])
            tensor = torch.cat((tensor, filler), dim=axis)
        mine = tensor.chunk(size, dim=axis)[get_pg_rank(self.tp_group)].clone()
        parameter = torch.nn.Parameter(mine.to(self.device))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis)
        return parameter


def seed_streams(
    seed: int, groups: ProcessGroups, device: torch.device, *, for_graphs: bool = False
) -> None:
    """Seed the default stream, equal within a tp group, and the model-parallel stream, different.

    Replicas over dp and cp read different data and stages have different layers, so all their
    streams differ. Graphs need streams with advanceable states, which draw the same numbers.
    """
    own = seed + _DATA_PARALLEL_STRIDE * groups.rank("dp_cp") + _PIPELINE_STRIDE * groups.rank("pp")
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(
        own, use_cudagraphable_rng=for_graphs, force_reset_rng=True, tp_rank=groups.rank("tp"),
        ep_rank=groups.rank("ep"), etp_rank=groups.rank("expt_tp"), device=device,
    )  # fmt: skip


def stream_for(*, differs_over_tp: bool) -> AbstractContextManager[None]:
    """The stream for random numbers that differ between tp ranks, or are equal on all of them."""
    return get_cuda_rng_tracker().fork() if differs_over_tp else contextlib.nullcontext()


def save_streams(device: torch.device) -> dict[str, Any]:
    """Plain states of the CPU stream, the device's stream and the tracker's streams."""
    streams = get_cuda_rng_tracker().get_states()
    return {
        "cpu": torch.get_rng_state(),
        "device": _get_cuda_rng_state(device),
        "tracker": {name: convert_cuda_rng_state(state) for name, state in streams.items()},
    }


def restore_streams(states: dict[str, Any], device: torch.device) -> None:
    """Restore the result of ``save_streams``."""
    torch.set_rng_state(states["cpu"])
    _set_cuda_rng_state(states["device"], device)
    tracker = get_cuda_rng_tracker()
    for_graphs = is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name: convert_cuda_rng_state(state, to_graphable=for_graphs, device=device)
            for name, state in states["tracker"].items()
        }
    )
