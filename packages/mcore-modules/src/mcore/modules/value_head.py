"""Value heads: a replicated projection, and hooks that put it into a model's last stage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore.modules.traversal import copy_sharing_groups
from mcore.modules.wrappers import (
    ModelList,
    ensure_model_list,
    find_in_wrapped_models,
    is_data_parallel_wrapper,
    iter_wrapped_models,
    unwrap_model,
)
from mcore.parallel.groups import comm_device, get_pg_rank, get_pg_size, get_pg_src_rank
from mcore.parallel.process_groups import (
    get_default_process_groups,
    get_tensor_model_parallel_group_if_none,
)
from mcore.parallel.regions import (
    gather_from_sequence_parallel_region as _gather_from_sequence_parallel_region,
)
from mcore.parallel.torch_compat import is_distributed
from mcore.versioning import internal_api


class LinearForLastLayer(torch.nn.Linear):
    """A linear projection in place of a language model's output layer.

    Every tensor-parallel rank has the whole weight. With sequence parallelism each rank projects
    its slice of the sequence, then the few output columns are gathered. All ranks compute the same
    loss from them, so each already holds the whole output gradient and backward takes its own
    slice, without communication. A rank's weight gradient covers its slice only: the trainer must
    sum it over the tensor-parallel group, which ``sequence_parallel`` on weight and bias signals.
    That mark stays when the module is moved, copied, pickled or loaded.

    Args:
        input_size: Width of the input.
        output_size: Number of outputs.
        sequence_parallel: The input is split along the sequence over ``tp_group``.
        bias: Add a bias.
        dropout: Probability of dropping an input in training.
        output_in_fp32: Give float32 outputs.
        tp_group: The tensor-parallel group. Default: that of the default ProcessGroups.
        init_method: Fills the weight in place, and the bias is zero. Default: as in
            ``torch.nn.Linear``.
        perform_initialization: Fill weight and bias at all.
        check_shapes: Compare input lengths over the group at each forward, which costs a small
            all-reduce and a host sync: unequal lengths hang or corrupt a gather silently.
        device: Where the weight is made.
        dtype: Dtype of the weight; inputs are cast to it.

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
        # Before the constructor of Linear, which calls reset_parameters.
        self.sequence_parallel = bool(sequence_parallel)
        self.init_method = init_method
        self.perform_initialization = perform_initialization
        super().__init__(input_size, output_size, bias=bias, device=device, dtype=dtype)
        self.dropout = dropout
        self.output_in_fp32 = output_in_fp32
        self.tp_group = tp_group
        self.check_shapes = check_shapes
        # Tells tools that the weight is replicated.
        self.tensor_model_parallel = False
        self.register_load_state_dict_post_hook(_stamp_after_load)  # type: ignore[no-untyped-call]

    def reset_parameters(self) -> None:
        """Fill weight and bias, as the constructor does; for a module built on the meta device."""
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

        With sequence parallelism one all-gather over ``tp_group``, called by all its ranks with
        inputs of one shape; every rank gets the result. Backward has no communication.

        Args:
            input_: ``[s / tp, b, h]`` with sequence parallelism over tp ranks, else ``[..., h]``.
            weight: Ignored: a tied embedding must not replace the head.
            runtime_gather_output: Ignored.

        Returns:
            The outputs ``[s, b, output_size]`` or ``[..., output_size]``, and None for the bias,
            which is added already.

        Raises:
            ValueError: Sequence parallelism without a group in a world of several ranks, or unequal
                lengths with ``check_shapes``.
        """
        hidden = F.dropout(input_.to(self.weight.dtype), self.dropout, self.training)
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
            _check_equal_lengths(logits, group)
        return _gather_from_sequence_parallel_region(logits, False, group)

    def _stamp(self) -> None:
        if self.sequence_parallel:
            for parameter in (self.weight, self.bias):
                if parameter is not None:
                    parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> LinearForLastLayer:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._stamp()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearForLastLayer:
        return copy_sharing_groups(self, memo)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._stamp()

    def extra_repr(self) -> str:
        """Return what ``repr`` shows beside the name."""
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}"


def _stamp_after_load(head: LinearForLastLayer, _: Any) -> None:
    head._stamp()


def _check_equal_lengths(logits: torch.Tensor, group: Any) -> None:
    length = logits.shape[0]
    extremes = torch.tensor([length, -length], device=comm_device(group))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    longest, shortest = extremes[0].item(), -extremes[1].item()
    if longest != shortest:
        raise ValueError(
            f"this rank has a sequence slice of length {length}, the ranks of the group have from "
            f"{shortest} to {longest}; pad them to one length"
        )


def create_value_head_hook(
    hidden_size: int,
    sequence_parallel: bool,
    output_size: int = 1,
    *,
    pp_group: Any = None,
    vp_size: int | None = None,
    tp_group: Any = None,
    pg_collection: Any = None,
    output_layer_path: str = "output_layer",
    broadcast_init: bool = True,
) -> Callable[[Any], ModelList]:
    """Return a hook that replaces the output layer of the last pipeline stage by a value head.

    The hook must run before the model is wrapped for data parallelism. The head lies on the device
    and has the dtype of the layer it replaces, else of the model's first parameter. All
    tensor-parallel ranks of the last stage must call the hook: with ``broadcast_init`` it
    broadcasts the head from the group's first rank, since random numbers may differ between them.

    Args:
        hidden_size: Width of the last hidden states.
        sequence_parallel: They are split along the sequence over the tensor-parallel group.
        output_size: Number of outputs.
        pp_group: The pipeline group. Default: that of ``pg_collection``, else of the chunk's.
            Without one, a chunk's boolean ``post_process`` decides, else it is the last.
        vp_size: Chunks per pipeline rank; None for one.
        tp_group: The head's tensor-parallel group. Default: that of ``pg_collection``, of the
            chunk's, else of the default ProcessGroups.
        pg_collection: The process groups of this rank.
        output_layer_path: Dotted path of the output layer below a chunk.
        broadcast_init: Make the head equal on all tensor-parallel ranks. False for a build on the
            meta device.

    Returns:
        ``hook(model)``, which takes a model or a list of chunks, changes it in place and returns
        the list. It raises TypeError for a chunk that is wrapped for data parallelism, and
        ValueError where the number of chunks does not fit or the path leads nowhere.

    Raises:
        ValueError: A size is not a whole number >= 1.

    Example:
        >>> from types import SimpleNamespace
        >>> model = SimpleNamespace(output_layer=None)
        >>> hook = create_value_head_hook(4, sequence_parallel=False)
        >>> hook(model) == [model], model.output_layer.out_features
        (True, 1)
    """
    for name, size in (("hidden_size", hidden_size), ("output_size", output_size)):
        if not isinstance(size, Integral) or size < 1:
            raise ValueError(f"{name} is {size!r}; pass a whole number >= 1")
    _register_linear_for_last_layer_mapping()

    def hook(model: Any) -> ModelList:
        chunks = ensure_model_list(model)
        _refuse_data_parallel(chunks)
        for chunk in _last_chunks(chunks, pp_group, pg_collection, vp_size):
            group = _group_of("tp", chunk, tp_group, pg_collection, get_default_process_groups())
            make = partial(
                LinearForLastLayer, hidden_size, output_size, sequence_parallel, tp_group=group
            )
            _replace_layer(unwrap_model(chunk), output_layer_path, make, broadcast_init)
        return chunks

    return hook


def make_value_model(hidden_size: int, sequence_parallel: bool) -> Callable[[Any], ModelList]:
    """Return :func:`create_value_head_hook` for one output.

    Args:
        hidden_size: Width of the last hidden states.
        sequence_parallel: They are split along the sequence over the tensor-parallel group.

    Returns:
        The hook.

    Example:
        >>> from types import SimpleNamespace
        >>> make_value_model(4, False)(SimpleNamespace())[0].output_layer.out_features
        1
    """
    return create_value_head_hook(hidden_size, sequence_parallel)


def _refuse_data_parallel(chunks: ModelList) -> None:
    for chunk in chunks:
        for model in iter_wrapped_models(chunk):
            if is_data_parallel_wrapper(model):
                raise TypeError(
                    f"a chunk is wrapped in {type(model).__name__}, which would not know the "
                    "head's parameters; run the hook before wrapping"
                )


def _group_of(name: str, chunk: Any, given: Any, pg_collection: Any, default: Any = None) -> Any:
    """Return the group that is given, else that of the first collection that has it."""
    own = find_in_wrapped_models(chunk, "pg_collection")
    found = (getattr(source, name, None) for source in (pg_collection, own, default))
    return next((group for group in (given, *found) if group is not None), None)


def _last_chunks(
    chunks: ModelList, pp_group: Any, pg_collection: Any, vp_size: int | None
) -> ModelList:
    group = _group_of("pp", chunks[0], pp_group, pg_collection) if chunks else pp_group
    pp_size = get_pg_size(group)
    expected = vp_size if pp_size > 1 and vp_size is not None else 1
    if len(chunks) != expected:
        raise ValueError(
            f"Model list length is {len(chunks)}, but {expected} expected with {pp_size} pipeline "
            f"ranks and vp_size {vp_size}"
        )
    if group is None:
        is_last = find_in_wrapped_models(chunks[0], "post_process")
        return chunks if is_last is not False else []
    return chunks[-1:] if get_pg_rank(group) == pp_size - 1 else []


def _replace_layer(
    chunk: Any, path: str, make: Callable[..., LinearForLastLayer], broadcast: bool
) -> None:
    owner, name = _owner_of(chunk, path)
    replaced = getattr(owner, name, None)
    like = _tensor_like(replaced, chunk)
    head = make() if like is None else make(device=like.device, dtype=like.dtype)
    head.train(getattr(replaced, "training", getattr(chunk, "training", True)))
    if broadcast:
        _broadcast(head)
    setattr(owner, name, head)


def _owner_of(chunk: Any, path: str) -> tuple[Any, str]:
    *parents, name = path.split(".")
    owner = chunk
    for parent in parents:
        owner = getattr(owner, parent, None)
        if owner is None:
            raise ValueError(
                f"output_layer_path {path!r} leads nowhere at {parent!r} of {type(chunk).__name__}"
            )
    return owner, name


def _tensor_like(replaced: Any, chunk: Any) -> torch.Tensor | None:
    """Return a tensor with the device and dtype for the head."""
    weight = getattr(replaced, "weight", None)
    if isinstance(weight, torch.Tensor):
        return weight
    return next(chunk.parameters(), None) if isinstance(chunk, torch.nn.Module) else None


def _broadcast(head: LinearForLastLayer) -> None:
    if get_pg_size(head.tp_group) == 1:
        return
    if head.weight.is_meta:
        raise ValueError(
            "a head on the meta device has no values to broadcast; pass broadcast_init=False"
        )
    source = get_pg_src_rank(head.tp_group)
    for parameter in head.parameters():
        dist.broadcast(parameter.detach(), src=source, group=head.tp_group)
        torch.autograd.graph.increment_version(parameter)  # a collective does not


ModuleParallelism: TypeAlias = Literal["column", "row", "replicated"]

_kinds: dict[str, ModuleParallelism] = {}


def register_module_parallelism(class_name: str, kind: ModuleParallelism) -> None:
    """Register how modules of a class, or of its subclasses, are distributed.

    Args:
        class_name: The class's name, without its module.
        kind: ``"column"``, ``"row"`` or ``"replicated"``.

    Raises:
        ValueError: Another kind, or the class is registered with another one.

    Example:
        >>> register_module_parallelism("RowLinear", "row")
        >>> get_module_parallelism("RowLinear")
        'row'
    """
    if kind not in get_args(ModuleParallelism):
        raise ValueError(f"kind={kind!r} is unknown; choose {list(get_args(ModuleParallelism))}")
    registered = _kinds.setdefault(class_name, kind)
    if registered != kind:
        raise ValueError(
            f"{class_name} is registered as {registered!r}, not {kind!r}; register it once"
        )


def get_module_parallelism(module_or_name: object) -> ModuleParallelism | None:
    """Return how a module is distributed, by its class or the nearest of its base classes.

    Args:
        module_or_name: A module or the name of a class.

    Returns:
        The kind that was registered, or None.

    Example:
        >>> import torch
        >>> get_module_parallelism(torch.nn.Identity()) is None
        True
    """
    if isinstance(module_or_name, str):
        return _kinds.get(module_or_name)
    names = (cls.__name__ for cls in type(module_or_name).__mro__)
    return next((_kinds[name] for name in names if name in _kinds), None)


@internal_api
def _register_linear_for_last_layer_mapping() -> None:
    """Register LinearForLastLayer as replicated, with Megatron Bridge too where it is imported."""
    register_module_parallelism("LinearForLastLayer", "replicated")
    bridge = sys.modules.get("megatron.bridge.models.conversion.param_mapping")
    register = getattr(getattr(bridge, "AutoMapping", None), "register_module_type", None)
    if callable(register):
        register("LinearForLastLayer", "replicated")
