"""A layer that can run from captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch

from mcore.modules.config import is_switched_on, read_field
from mcore.modules.graphs.local import LocalGraphManager
from mcore.modules.graphs.runner import (
    GraphedCallable,
    GraphRunner,
    GraphStateError,
    is_graph_capturing,
)
from mcore.modules.module import MegatronModule
from mcore.modules.traversal import iter_modules, reduce_sharing_groups
from mcore.tensor.device import device_of

Hook = Callable[..., Any]


class GraphableMegatronModule(MegatronModule):
    """A layer that runs eagerly, from graphs of this layer, or from graphs captured for all layers.

    The configuration's ``cuda_graph_impl`` decides at each call. ``"none"`` and
    ``"full_iteration"``: like any module. ``"local"``: through ``cudagraph_manager``, which
    captures the layer separately. ``"transformer_engine"``: in training, after
    :func:`~mcore.modules.graphs.capture_graphs` has filled ``cuda_graphs``, from the graph of the
    microbatch. The manual hooks run before it, and the module's hooks do not run.

    Outputs of a graph are in its memory, which later calls overwrite. Clone an output that is kept
    over several calls: under ``torch.no_grad()`` in training mode, where no backward follows, and
    after the backward. Or call ``eval()`` for rollouts, which run eagerly. On a CPU the next call
    fills such an output with NaN.

    A graph repeats the captured work. Hooks of the layer itself that are registered after the
    capture raise GraphStateError, or run eagerly with ``"local"``. Other hooks, modes and children
    of modules below are refused on a CPU, but not noticed on other devices.

    Copies and pickles have no graphs, manual hooks or manager state. They get a new default
    manager.

    ``torch.compile`` and ``torch.export`` trace the layer itself, without a manager or graphs.

    Args:
        config: Any configuration object.
        vp_stage: Virtual pipeline stage of the layer.
        graph_runner: Captures graphs. None chooses by configuration and device.
        cudagraph_manager: Called as ``manager(module, args, kwargs)`` with ``"local"``. With None,
            ``create_mcore_cudagraph_manager(config)`` sets the attribute if the class has that
            method. Else it is a :class:`~mcore.modules.graphs.LocalGraphManager`.

    Example:
        >>> import torch
        >>> from mcore.modules import TransformerConfig
        >>> class Layer(GraphableMegatronModule):
        ...     def __init__(self, config):
        ...         super().__init__(config)
        ...         self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size)
        ...     def forward(self, hidden_states):
        ...         return self.linear(hidden_states)
        >>> layer = Layer(TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=2))
        >>> layer(**layer.get_layer_static_inputs(seq_length=2, micro_batch_size=1)).shape
        torch.Size([2, 1, 4])
    """

    graph_runner: GraphRunner | None
    cudagraph_manager: Any
    backward_dw_wrapper: BackwardDWWrapper | None = None

    def __init__(
        self,
        config: Any,
        vp_stage: int | None = None,
        *,
        graph_runner: GraphRunner | None = None,
        cudagraph_manager: Any = None,
    ) -> None:
        super().__init__(config)
        self.vp_stage = vp_stage
        # Not nn.Module.__setattr__: a runner or manager that is a module is not part of the model.
        object.__setattr__(self, "graph_runner", graph_runner)
        self.cuda_graphs: list[GraphedCallable] = []
        self.cuda_graph_manual_hooks: list[tuple[Hook, tuple[Any, ...]]] = []
        self.current_microbatch = 0
        if read_field(config, "cuda_graph_impl", "none") == "local":
            self._set_manager(cudagraph_manager)

    def _set_manager(self, manager: Any) -> None:
        create = getattr(self, "create_mcore_cudagraph_manager", None)
        if manager is None and callable(create):
            create(self.config)
            manager = self._modules.pop("cudagraph_manager", None)
            manager = vars(self).get("cudagraph_manager") if manager is None else manager
        if manager is None:
            manager = LocalGraphManager(self.config, self.graph_runner)
        object.__setattr__(self, "cudagraph_manager", manager)

    def get_layer_static_inputs(
        self, seq_length: int, micro_batch_size: int
    ) -> dict[str, torch.Tensor]:
        """Return sample inputs for a capture. Override it for a layer with other inputs.

        Args:
            seq_length: Length of the whole sequences, in tokens.
            micro_batch_size: Sequences per microbatch.

        Returns:
            ``hidden_states``: ones of shape ``[seq_length / cp / tp, micro_batch_size, hidden]``
            (divided by tp only with sequence parallelism) that require grad, in the model's dtype,
            on the device of the first parameter, else the current accelerator, else the CPU.

        Raises:
            ValueError: A size below 1, or the parallel sizes do not divide ``seq_length``.
            ConfigFieldError: The configuration has no ``hidden_size``.

        Example:
            >>> from types import SimpleNamespace
            >>> layer = GraphableMegatronModule(SimpleNamespace(hidden_size=8, bf16=True))
            >>> layer.get_layer_static_inputs(16, 2)["hidden_states"].shape
            torch.Size([16, 2, 8])
        """
        ranks = self._get_parallel_size("context_parallel_size")
        if read_field(self.config, "sequence_parallel", False):
            ranks *= self._get_parallel_size("tensor_model_parallel_size")
        if seq_length < 1 or seq_length % ranks:
            raise ValueError(
                f"seq_length is {seq_length}. Pass a positive multiple of {ranks}, the number of "
                "ranks that share a sequence"
            )
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}. Pass at least 1")
        dtype = read_field(self.config, "params_dtype", None) or torch.float32
        # bf16 and fp16 override params_dtype: Float16Module casts the parameters.
        for name, half in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            dtype = half if read_field(self.config, name, False) else dtype
        hidden_states = torch.ones(
            (seq_length // ranks, micro_batch_size, read_field(self.config, "hidden_size")),
            dtype=dtype,
            device=device_of(self.parameters()),
            requires_grad=True,
        )
        return {"hidden_states": hidden_states}

    def _get_parallel_size(self, name: str) -> int:
        size = read_field(self.config, name, 1)
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} of the configuration is {size!r}. Set a whole number >= 1")
        return size

    def setup_manual_hooks(self, make_hook_func: Callable[[], Hook]) -> None:
        """Set the hooks that run before each replay, instead of forward pre-hooks.

        There is a hook for each distinct module that is covered by the graphs and has parameters
        itself.

        Args:
            make_hook_func: Called once for each of these modules. Returns a hook, which is called
                with the module.

        Example:
            >>> import torch
            >>> class Layer(GraphableMegatronModule):
            ...     def __init__(self):
            ...         super().__init__(None)
            ...         self.linear = torch.nn.Linear(2, 2)
            >>> layer = Layer()
            >>> layer.setup_manual_hooks(lambda: print)
            >>> [module for _, (module,) in layer.cuda_graph_manual_hooks]
            [Linear(in_features=2, out_features=2, bias=True)]
        """
        covered: dict[int, torch.nn.Module] = {}
        for submodule in self._get_submodules_under_cudagraphs():
            covered.update((id(module), module) for module in iter_modules(submodule))
        self.cuda_graph_manual_hooks = [
            (make_hook_func(), (module,))
            for module in covered.values()
            if any(parameter is not None for parameter in module._parameters.values())
        ]

    def init_backward_dw_wrapper(self) -> None:
        """Set ``backward_dw_wrapper``, whose ``backward_dw()`` computes delayed weight gradients.

        Does nothing unless the configuration enables both ``overlap_moe_expert_parallel_comm`` and
        ``delay_wgrad_compute``. The wrapper calls ``backward_dw`` of the layer's ``mlp`` for its
        shared experts, if it has any, then that of its ``self_attention``. Copies and pickles of
        the layer have no wrapper.

        Raises:
            ValueError: The layer has no configuration.
            TypeError: The layer has no ``self_attention`` with ``backward_dw``.

        Example:
            >>> from types import SimpleNamespace
            >>> layer = GraphableMegatronModule(SimpleNamespace(delay_wgrad_compute=False))
            >>> layer.init_backward_dw_wrapper()
            >>> layer.backward_dw_wrapper is None
            True
        """
        if self.config is None:
            raise ValueError(f"{type(self).__name__} has no configuration. Pass one to the layer")
        fields = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
        if all(is_switched_on(read_field(self.config, name, None)) for name in fields):
            object.__setattr__(self, "backward_dw_wrapper", BackwardDWWrapper(self))

    def set_te_cuda_graph_backward_dw_wrapper(self) -> None:
        """Let the next ``backward_dw_wrapper.backward_dw()`` replay the current microbatch's graph.

        Call it after the layer's forward of that microbatch. If its graph was captured without
        delayed weight gradients, the wrapper calls the layer's functions as before.

        Raises:
            GraphStateError: There is no wrapper, see :meth:`init_backward_dw_wrapper`, or no graph.

        Example:
            >>> layer = GraphableMegatronModule(None)
            >>> try:
            ...     layer.set_te_cuda_graph_backward_dw_wrapper()
            ... except GraphStateError as error:
            ...     print(error)
            GraphableMegatronModule has no wrapper. Call init_backward_dw_wrapper() first
        """
        if self.backward_dw_wrapper is None:
            name = type(self).__name__
            raise GraphStateError(f"{name} has no wrapper. Call init_backward_dw_wrapper() first")
        graph = self._get_current_graph()
        self.backward_dw_wrapper.graphed = getattr(graph, "backward_dw", None)

    def _get_submodules_under_cudagraphs(self) -> list[torch.nn.Module]:
        """Return the modules that graphs cover: this layer. Override it for partial capture."""
        return [self]

    def _te_cuda_graph_capture(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured function: the forward, without this module's hooks."""
        return self.forward(*args, **kwargs)

    def _get_current_graph(self) -> GraphedCallable:
        if not self.cuda_graphs:
            raise GraphStateError(
                f"{type(self).__name__} has no graphs to replay. Call capture_graphs() first"
            )
        return self.cuda_graphs[self.current_microbatch % len(self.cuda_graphs)]

    def _te_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> Any:
        """Run the manual hooks, then the graph of the current microbatch.

        TypeError for bad arguments, GraphStateError without graphs or with hooks that cannot run.
        """
        _check_tensors(args, kwargs)
        graph = self._get_current_graph()
        refuse_hooks(self, type(self).__name__)
        graph_args, graph_kwargs = self._get_te_cuda_graph_replay_args(*args, **kwargs)
        for hook, hook_args in self.cuda_graph_manual_hooks:
            hook(*hook_args)
        return graph(*graph_args, **graph_kwargs)

    def _get_te_cuda_graph_replay_args(
        self, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the graph: ``hidden_states`` by position, the others by name."""
        hidden_states = kwargs.pop("hidden_states", None)
        if args and hidden_states is not None:
            raise TypeError("hidden_states is given twice. Pass it by position or by name")
        if not args and hidden_states is None:
            raise TypeError("hidden_states is missing. Pass it")
        kwargs["is_first_microbatch"] = self.current_microbatch == 0
        return args or (hidden_states,), kwargs

    def _should_call_local_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the layer's manager runs this call."""
        return "cudagraph_manager" in vars(self) or "cudagraph_manager" in self._modules

    def _should_call_te_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether this call is captured or replayed."""
        return (
            self.training
            and read_field(self.config, "cuda_graph_impl", "none") == "transformer_engine"
            and (bool(self.cuda_graphs) or is_graph_capturing())
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer through its manager, its graphs or, as any module, its hooks."""
        if torch.compiler.is_compiling():  # its operations become a part of the compiled graph
            return super().__call__(*args, **kwargs)
        if self._should_call_local_cudagraph(*args, **kwargs):
            return self.cudagraph_manager(self, args, kwargs)
        if self._should_call_te_cudagraph(*args, **kwargs):
            if not self.cuda_graphs:
                return self._te_cuda_graph_capture(*args, **kwargs)
            return self._te_cuda_graph_replay(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Graphs hold memory addresses of this process: a copy starts without them.
        state = dict(vars(self))
        had_manager = state.pop("cudagraph_manager", None) is not None
        state.pop("backward_dw_wrapper", None)
        state.update(cuda_graphs=[], cuda_graph_manual_hooks=[], _had_manager=had_manager)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        has_manager = state.pop("_had_manager", False)
        super().__setstate__(state)
        if has_manager:
            self._set_manager(None)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The runner may hold a device's graphs, which cannot be copied: share it.
        return reduce_sharing_groups(super().__reduce_ex__(protocol), self.graph_runner)


def refuse_hooks(layer: GraphableMegatronModule, name: str) -> None:
    """Raise GraphStateError if a layer has hooks that its graphs leave out."""
    if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        raise GraphStateError(f"{name} has hooks, which a graph would leave out. Remove them")
    if layer._forward_pre_hooks and not layer.cuda_graph_manual_hooks:
        raise GraphStateError(
            f"{name} has forward pre-hooks, which a graph would leave out. Remove them or call "
            "setup_manual_hooks()"
        )


class BackwardDWWrapper:
    """Computes the weight gradients of a layer that are not computed in its backward.

    Args:
        layer: Its ``self_attention`` has ``backward_dw()``. If its ``mlp`` has shared experts, that
            has ``backward_dw(routed_experts, shared_experts)``.

    Raises:
        TypeError: The layer has no ``self_attention`` with ``backward_dw``.
    """

    def __init__(self, layer: GraphableMegatronModule) -> None:
        attention = getattr(getattr(layer, "self_attention", None), "backward_dw", None)
        if not callable(attention):
            raise TypeError(
                f"{type(layer).__name__} has no self_attention with backward_dw(), which computes "
                "its weight gradients"
            )
        self._eager: list[Callable[[], Any]] = [attention]
        mlp: Any = getattr(layer, "mlp", None)
        if getattr(mlp, "shared_experts", None) is not None:
            experts = partial(mlp.backward_dw, routed_experts=False, shared_experts=True)
            self._eager.insert(0, experts)
        self.graphed: Callable[[], Any] | None = None  # runs instead in the next call

    def backward_dw(self) -> None:
        """Compute the weight gradients of one microbatch."""
        graphed, self.graphed = self.graphed, None
        for compute in self._eager if graphed is None else [graphed]:
            compute()


def _check_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for place, value in chain(enumerate(args), kwargs.items()):
        is_named = isinstance(place, str)
        if not (isinstance(value, torch.Tensor) or (is_named and value is None)):
            where = f"keyword argument {place!r}" if is_named else f"positional argument {place}"
            accepted = "tensors and None" if is_named else "tensors"
            raise TypeError(f"{where} is a {type(value).__name__}. A graph accepts {accepted} only")
