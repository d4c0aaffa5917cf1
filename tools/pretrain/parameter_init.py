"""Initial weights that do not depend on the layout: draw the whole tensor, keep a slice."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mcore.modules import (
    TransformerConfig,
    init_method_normal,
    scaled_init_method_normal,
)
from mcore.parallel.groups import get_pg_rank, get_pg_size
from mcore.parallel.tensor_parallel import set_tensor_model_parallel_attributes
from mcore.tensor import round_up_to_nearest_multiple

Init = Callable[[torch.Tensor], object]


def inner_init(config: TransformerConfig) -> Init:
    """How matrices start whose result goes on inside a layer."""
    return config.init_method or init_method_normal(config.init_method_std)


def output_init(config: TransformerConfig) -> Init:
    """How matrices start whose result is added to the residual stream."""
    return config.output_layer_init_method or scaled_init_method_normal(
        config.init_method_std, config.num_layers
    )


@dataclass(frozen=True)
class ParameterInit:
    """Draws parameters by name, so that every rank of every layout starts from the same model."""

    seed: int
    device: torch.device
    tp_group: torch.distributed.ProcessGroup | None

    def whole(self, name: str, shape: tuple[int, ...], init: Init) -> torch.Tensor:
        """The unsharded fp32 tensor on the CPU; leaves the default RNG stream as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
            tensor = torch.empty(shape)
            init(tensor)
        return tensor

    def shard(
        self, name: str, shape: tuple[int, ...], init: Init, *, axis: int
    ) -> torch.nn.Parameter:
        """This tensor-parallel rank's slice along ``axis``; rows of zeros fill up the last."""
        size = get_pg_size(self.tp_group)
        tensor = self.whole(name, shape, init)
        missing = round_up_to_nearest_multiple(shape[axis], size) - shape[axis]
        if missing:
            filler = torch.zeros(*shape[:axis], missing, *shape[axis + 1 :])
            tensor = torch.cat((tensor, filler), dim=axis)
        mine = tensor.chunk(size, dim=axis)[get_pg_rank(self.tp_group)].clone()
        parameter = torch.nn.Parameter(mine.to(self.device))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis)
        return parameter

    def replica(self, name: str, shape: tuple[int, ...], init: Init) -> torch.nn.Parameter:
        """The whole tensor, equal on all ranks."""
        return torch.nn.Parameter(self.whole(name, shape, init).to(self.device))
