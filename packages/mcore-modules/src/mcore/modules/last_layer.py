"""LinearForLastLayer, a replicated projection instead of an output layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore.modules.traversal import reduce_sharing_groups
from mcore.parallel.groups import comm_device, get_pg_size
from mcore.parallel.process_groups import get_tensor_model_parallel_group_if_none
from mcore.parallel.regions import gather_from_sequence_parallel_region
from mcore.parallel.torch_compat import is_distributed
from mcore.versioning import internal_api


class LinearForLastLayer(torch.nn.Linear):
    """A linear projection instead of a language model's output layer.

    Every tensor-parallel rank has the whole weight. With sequence parallelism each rank projects
    its slice of the sequence, then the few output columns are gathered. All ranks compute the same
    loss from them, so each has the whole output gradient, and backward uses the rank's slice of it
    without communication. A rank's weight gradient covers only its slice: the trainer must sum it
    over the tensor-parallel group. The attribute ``sequence_parallel`` of weight and bias marks
    this. The mark is kept when the module is moved, copied, pickled, loaded or sharded by
    ``fully_shard``.

    Args:
        input_size: Width of the input.
        output_size: Number of outputs.
        sequence_parallel: The input is split along the sequence over ``tp_group``.
        bias: Add a bias.
        dropout: Probability of dropping an input in training, stored as ``dropout.p``.
        output_in_fp32: Return float32 outputs.
        tp_group: The tensor-parallel group. Default: that of the default ProcessGroups.
        init_method: Fills the weight in place, and the bias is zero. Default: as in
            ``torch.nn.Linear``.
        perform_initialization: If False, weight and bias stay uninitialised.
        check_shapes: Compare input lengths over the group at each forward, with a small all-reduce
            and a host sync. Without it, unequal lengths make a gather hang or return wrong data.
        device: The device of the weight.
        dtype: Dtype of the weight. Inputs are cast to it.

    Raises:
        ValueError: ``dropout`` is not a number from 0 to 1.

    Example:
        >>> import torch
        >>> head = LinearForLastLayer(3, 2, False)
        >>> logits, bias = head(torch.ones(4, 3))
        >>> logits.shape, bias
        (torch.Size([4, 2]), None)
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        sequence_parallel: bool,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        output_in_fp32: bool = True,
        tp_group: Any = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        perform_initialization: bool = True,
        check_shapes: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not (isinstance(dropout, Real) and 0 <= dropout <= 1):
            raise ValueError(f"dropout is {dropout!r}. Pass a probability, 0 to 1")
        # Before the constructor of Linear, which calls reset_parameters.
        self.sequence_parallel: bool = bool(sequence_parallel)
        self.init_method: Callable[[torch.Tensor], Any] | None = init_method
        self.perform_initialization: bool = perform_initialization
        super().__init__(input_size, output_size, bias=bias, device=device, dtype=dtype)
        self.dropout: torch.nn.Dropout = torch.nn.Dropout(float(dropout))
        self.output_in_fp32: bool = output_in_fp32
        self.tp_group: Any = tp_group
        self.check_shapes: bool = check_shapes
        # Marks the weight as replicated for other tools.
        self.tensor_model_parallel = False

    def reset_parameters(self) -> None:
        """Fill weight and bias like the constructor, for a module built on the meta device."""
        self._stamp()
        if not self.perform_initialization:
            return
        if self.init_method is None:
            super().reset_parameters()
            return
        with torch.no_grad():
            self.init_method(self.weight)
            if self.bias is not None:
                self.bias.zero_()

    def forward(  # type: ignore[override]
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Project the input.

        With sequence parallelism this is an all-gather over ``tp_group``: all its ranks call it
        with inputs of the same shape and get the result. Backward has no communication.

        Args:
            input_: ``[s / tp, b, h]`` with sequence parallelism over tp ranks, else ``[..., h]``.
            weight: Ignored: a tied embedding must not replace the head.
            runtime_gather_output: Ignored.

        Returns:
            The outputs ``[s, b, output_size]`` or ``[..., output_size]``, with the bias added, and
            None for a separate bias.

        Raises:
            ValueError: Sequence parallelism without a group in a world of several ranks, or unequal
                lengths with ``check_shapes``.
        """
        self._stamp()
        hidden = self.dropout(input_.to(self.weight.dtype))
        logits = F.linear(hidden, self.weight, self.bias)
        if self.output_in_fp32:
            logits = logits.float()
        if self.sequence_parallel:
            logits = self._gather(logits)
        return logits, None

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        group = get_tensor_model_parallel_group_if_none(self.tp_group, check_initialized=False)
        if group is None and is_distributed() and dist.get_world_size() > 1:
            raise ValueError(
                "sequence_parallel needs tp_group or default ProcessGroups with tp in a world of "
                f"{dist.get_world_size()} ranks"
            )
        if get_pg_size(group) == 1:
            return logits
        if self.check_shapes:
            # The maximum of -length is minus the smallest length: one reduction finds both.
            length = logits.shape[0]
            extremes = torch.tensor([length, -length], device=comm_device(group))
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
            longest, shortest = extremes[0].item(), -extremes[1].item()
            if longest != shortest:
                raise ValueError(
                    f"this rank has a sequence slice of length {length}, but the lengths in the "
                    f"group are {shortest} to {longest}. Pad all slices to the same length"
                )
        return gather_from_sequence_parallel_region(logits, False, group)

    def _stamp(self) -> None:
        if self.sequence_parallel:
            # A parametrization such as weight_norm has parameters from which it makes the weight.
            is_made = "parametrizations" in self._modules
            for parameter in self.parameters() if is_made else (self.weight, self.bias):
                if parameter is not None:
                    parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # fully_shard replaces these parameters before and after each forward.
        if name in ("weight", "bias") and value is not None and self.sequence_parallel:
            value.sequence_parallel = True

    def _apply(self, fn: Any, recurse: bool = True) -> LinearForLastLayer:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._stamp()
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce_sharing_groups(super().__reduce_ex__(protocol))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._stamp()

    def extra_repr(self) -> str:
        """Return the text that ``repr`` shows after the class name."""
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}"


@internal_api
def _register_linear_for_last_layer_mapping() -> None:
    """Register LinearForLastLayer as replicated with Megatron Bridge, if it is imported."""
    bridge = sys.modules.get("megatron.bridge.models.conversion.param_mapping")
    register = getattr(getattr(bridge, "AutoMapping", None), "register_module_type", None)
    if callable(register):
        register("LinearForLastLayer", "replicated")
