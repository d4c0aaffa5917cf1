"""The configuration of a transformer, initial weights, and fields of any configuration object."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch

__all__ = [
    "TransformerConfig",
    "is_switched_on",
    "read_field",
]

InitMethod = Callable[[torch.Tensor], Any]
GraphImpl = Literal["none", "local", "transformer_engine", "full_iteration"]
SymmetricAllReduce = Literal["two_shot", "one_shot", "multimem_all_reduce"]


class ConfigFieldError(AttributeError, ValueError):
    """A configuration object lacks a field that is needed and has no default.

    Example:
        >>> from types import SimpleNamespace
        >>> try:
        ...     read_field(SimpleNamespace(), "hidden_size")
        ... except ConfigFieldError as error:
        ...     print(error)
        SimpleNamespace has no field 'hidden_size', and there is no default for it. Set it
    """


class _Missing:
    """The type of MISSING, with a readable repr for signatures."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


@dataclass
class TransformerConfig:
    """Sizes, precision, parallelism and graph settings of a transformer.

    The constructor validates the fields and sets those that depend on others. Later changes of a
    field are not validated and do not update other fields. ``dataclasses.replace`` sets dependent
    fields anew unless the constructor or ``replace`` got another value. Modules read a field when
    they use it. Two configurations are equal if all fields except the two init methods are.

    Args:
        num_layers: Number of transformer layers.
        hidden_size: Width of the residual stream, a multiple of ``num_attention_heads``.
        num_attention_heads: Number of attention heads.
        ffn_hidden_size: Inner width of the feed-forward. None means ``4 * hidden_size``.
        tensor_model_parallel_size: Ranks that share each layer.
        pipeline_model_parallel_size: Ranks that hold different layers.
        virtual_pipeline_model_parallel_size: Model chunks per pipeline rank, None for one.
        context_parallel_size: Ranks that share each sequence.
        sequence_parallel: Split activations outside of tensor-parallel regions along the sequence.
        fp16: Run in float16.
        bf16: Run in bfloat16.
        params_dtype: Dtype of the parameters. None means float16 with ``fp16``, bfloat16 with
            ``bf16``, else float32.
        fp8: Recipe of 8-bit floating-point matrix products, None for none.
        fp4: Recipe of 4-bit floating-point matrix products, None for none.
        use_kitchen: Let the kitchen library control quantisation.
        quant_recipe: A quantisation recipe object, None for none.
        symmetric_ar_type: Accepted for layers of Megatron-LM. No module of this package reads it:
            see :meth:`MegatronModule.set_symmetric_ar`.
        cuda_graph_impl: ``"none"``, ``"local"`` (each layer captures its graphs),
            ``"transformer_engine"`` (:func:`~mcore.modules.graphs.capture_graphs` captures all
            layers) or ``"full_iteration"`` (the trainer captures the whole iteration).
        cuda_graph_warmup_steps: Eager runs before a capture.
        cuda_graph_retain_backward_graph: Keep the autograd graph during backward capture.
        fine_grained_activation_offloading: Accepted for layers of Megatron-LM. No module of this
            package offloads activations.
        init_method_std: Standard deviation of initial weights.
        init_method: Fills weights in place. None means ``init_method_normal(init_method_std)``.
        output_layer_init_method: Fills weights that write to the residual stream. None means
            ``scaled_init_method_normal(init_method_std, num_layers)``.
        perform_initialization: Accepted for layers of Megatron-LM. Layers of this package fill
            weights by the argument of the same name of their constructors.
        use_cpu_initialization: Accepted for layers of Megatron-LM. Layers of this package fill
            weights on the device of the weights.
        enable_cuda_graph: Deprecated. Means ``cuda_graph_impl="local"``.
        external_cuda_graph: Deprecated. Means ``cuda_graph_impl="transformer_engine"``.

    Warns:
        UserWarning: Once per process, field and value, if one of the fields that no module of this
            package reads has a value other than its default.

    Raises:
        ValueError: A field is invalid, see :meth:`validate`.

    Example:
        >>> TransformerConfig(num_layers=2, hidden_size=12, num_attention_heads=4).ffn_hidden_size
        48
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype | None = None
    fp8: Literal["e4m3", "hybrid"] | None = None
    fp4: Literal["e2m1"] | None = None
    use_kitchen: bool = False
    quant_recipe: object | None = None
    symmetric_ar_type: SymmetricAllReduce | None = None
    cuda_graph_impl: GraphImpl = "none"
    cuda_graph_warmup_steps: int = 3
    cuda_graph_retain_backward_graph: bool = False
    fine_grained_activation_offloading: bool = False
    init_method_std: float = 0.02
    # Not compared: functions from the same factory are never equal.
    init_method: InitMethod | None = field(default=None, compare=False)
    output_layer_init_method: InitMethod | None = field(default=None, compare=False)
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    enable_cuda_graph: bool = False
    external_cuda_graph: bool = False
    # The values that were not given but set here. dataclasses.replace() passes all fields on.
    _derived: dict[str, Any] | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in (self._derived or {}).items():
            if getattr(self, name) == value:
                setattr(self, name, "none" if name == "cuda_graph_impl" else None)
        given = {name: getattr(self, name) for name in _DERIVED}
        names = [name for name in _OLD_GRAPH_FIELDS if getattr(self, name)]
        if len(names) == 2 or (names and self.cuda_graph_impl != "none"):
            raise ValueError(
                f"{' and '.join(names)} given with cuda_graph_impl={self.cuda_graph_impl!r}. "
                "Pass cuda_graph_impl alone"
            )
        if names:
            self.cuda_graph_impl = "local" if self.enable_cuda_graph else "transformer_engine"
            warnings.warn(
                f"{names[0]} is deprecated. Use cuda_graph_impl={self.cuda_graph_impl!r}",
                DeprecationWarning,
                stacklevel=3,  # this method, the generated __init__, the caller
            )
        # Before the defaults below are computed from these values.
        self.validate()
        for name, default in _UNREAD.items():
            if getattr(self, name) != default:
                _warn_unread(f"{name}={getattr(self, name)!r}")
        if self.params_dtype is None:
            half = torch.bfloat16 if is_switched_on(self.bf16) else torch.float32
            self.params_dtype = torch.float16 if is_switched_on(self.fp16) else half
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.init_method is None:
            self.init_method = init_method_normal(self.init_method_std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = scaled_init_method_normal(
                self.init_method_std, self.num_layers
            )
        self._derived = {
            name: getattr(self, name)
            for name, value in given.items()
            if getattr(self, name) is not value
        }

    def validate(self) -> None:
        """Check the current values of all fields.

        Raises:
            ValueError: Names the field and its value: a size below 1 or not an int, fp16 with
                bf16, fp8 with fp4, sequence parallelism without tensor parallelism, virtual stages
                without a pipeline, heads that do not divide the hidden size, an unknown choice, a
                ``params_dtype`` that is not a floating dtype, a negative number of warm-up steps.

        Example:
            >>> config = TransformerConfig(num_layers=2, hidden_size=12, num_attention_heads=4)
            >>> config.num_attention_heads = 5
            >>> config.validate()
            Traceback (most recent call last):
            ...
            ValueError: hidden_size=12 is not divisible by num_attention_heads=5
        """
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL_SIZES:
                _require_int(name, value, least=1)
        _require_int("cuda_graph_warmup_steps", self.cuda_graph_warmup_steps, least=0)
        for name, choices in FIELD_CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r} is unknown. Choose from {list(choices)}")
        dtype = self.params_dtype
        is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not is_float:
            raise ValueError(f"params_dtype={dtype!r} is not a floating torch.dtype")
        for first, second in (("fp16", "bf16"), ("fp8", "fp4")):
            if is_switched_on(getattr(self, first)) and is_switched_on(getattr(self, second)):
                raise ValueError(
                    f"{first}={getattr(self, first)!r} excludes "
                    f"{second}={getattr(self, second)!r}. Choose one"
                )
        for name, size in (
            ("sequence_parallel", "tensor_model_parallel_size"),
            ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size"),
        ):
            value = getattr(self, name)
            if value and getattr(self, size) == 1:
                raise ValueError(f"{name}={value!r} needs {size} > 1, got 1")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by "
                f"num_attention_heads={self.num_attention_heads}"
            )


def read_field(config: object, name: str, default: Any = MISSING) -> Any:
    """Return a field of any configuration object, or a default.

    Works on a :class:`TransformerConfig`, a namespace, a frozen dataclass, a configuration of
    Megatron-LM or None. Nothing is cached: configurations may change after a model is built.

    Args:
        config: The configuration.
        name: The field, an attribute of ``config``.
        default: The result if the field is missing.

    Returns:
        The value as stored.

    Raises:
        ConfigFieldError: The field is missing and no default is given. It is both an
            AttributeError and a ValueError.

    Example:
        >>> from types import SimpleNamespace
        >>> read_field(SimpleNamespace(bf16=True), "bf16")
        True
        >>> read_field(None, "bf16", False)
        False
    """
    value = getattr(config, name, MISSING)
    if value is not MISSING:
        return value
    if default is MISSING:
        raise ConfigFieldError(
            f"{type(config).__name__} has no field {name!r}, and there is no default for it. Set it"
        )
    return default


def is_using_quantization_scales(config: object) -> bool:
    """Return whether a configuration enables fp8 or fp4, whose weights have scales.

    Args:
        config: Any configuration object. A missing field is off.

    Example:
        >>> from types import SimpleNamespace
        >>> is_using_quantization_scales(SimpleNamespace(fp8="hybrid"))
        True
    """
    return any(is_switched_on(read_field(config, name, None)) for name in ("fp8", "fp4"))


# Fields that only layers of Megatron-LM read, with their defaults.
_UNREAD = {
    "symmetric_ar_type": None,
    "fine_grained_activation_offloading": False,
    "perform_initialization": True,
    "use_cpu_initialization": False,
}


@functools.cache  # once per process, whatever the warning filters are
def _warn_unread(setting: str) -> None:
    warnings.warn(
        f"{setting} has no effect on layers of mcore.modules: the field is accepted for layers of "
        "Megatron-LM",
        UserWarning,
        stacklevel=4,  # this function, __post_init__, the generated __init__, the caller
    )


_OLD_GRAPH_FIELDS = ("enable_cuda_graph", "external_cuda_graph")
# Fields that the constructor sets if they are not given.
_DERIVED = (
    "ffn_hidden_size",
    "params_dtype",
    "cuda_graph_impl",
    "init_method",
    "output_layer_init_method",
)
_OPTIONAL_SIZES = ("ffn_hidden_size", "virtual_pipeline_model_parallel_size")
_SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    *_OPTIONAL_SIZES,
)
FIELD_CHOICES: dict[str, tuple[str | None, ...]] = {
    "fp8": ("e4m3", "hybrid", None),
    "fp4": ("e2m1", None),
    "symmetric_ar_type": (*get_args(SymmetricAllReduce), None),
    "cuda_graph_impl": get_args(GraphImpl),
}


def _require_int(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} is not a whole number >= {least}")


def is_switched_on(value: object) -> bool:
    """Return whether the value of a field such as ``fp8`` means "on".

    Args:
        value: Any value. Pass None for a missing field.

    Returns:
        False for None, False, the empty string and zero (numpy's too), else True.

    Example:
        >>> is_switched_on("hybrid"), is_switched_on(False), is_switched_on(object())
        (True, False, True)
    """
    try:
        return value not in (None, False, "", 0)
    except (RuntimeError, TypeError, ValueError):
        return True  # a comparison without a truth value, as for a tensor


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that fills a tensor from N(0, sigma).

    Args:
        sigma: The standard deviation, >= 0.

    Returns:
        A picklable ``f(tensor)`` that writes in place and returns the tensor. Any shape (also
        empty), floating dtype and device (also meta). It draws from the default generator of the
        tensor's device. ``f.keywords["std"]`` is the standard deviation.

    Raises:
        ValueError: ``sigma`` is negative, not finite or not a number.

    Example:
        >>> import torch
        >>> weight = torch.empty(2, 3)
        >>> init_method_normal(0.02)(weight) is weight
        True
    """
    return _fill_from_normal(_check_std(sigma))


def scaled_init_method_normal(
    sigma: float, num_layers: int, multiplier: float = 2.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that fills a tensor from N(0, sigma / sqrt(multiplier * num_layers)).

    For the layers that write to the residual stream. The default multiplier is for two of them in
    a transformer layer and keeps the stream's variance independent of the depth (Radford et al.,
    "Language Models are Unsupervised Multitask Learners", section 2.3).

    Args:
        sigma: The standard deviation before scaling, >= 0.
        num_layers: The number of transformer layers, >= 1.
        multiplier: Residual branches per layer, > 0.

    Returns:
        As for :func:`init_method_normal`.

    Raises:
        ValueError: An argument is out of range or not a number.

    Example:
        >>> scaled_init_method_normal(0.02, 8).keywords["std"]
        0.005
    """
    return _fill_from_normal(_scale_std(sigma, num_layers, multiplier))


def mup_scaled_init_method_normal(
    sigma: float, num_layers: int, width_mult: float, multiplier: float = 2.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function like :func:`scaled_init_method_normal` for maximal update parametrisation.

    The standard deviation is ``sigma / sqrt(multiplier * num_layers * width_mult)`` (Yang et al.,
    "Tensor Programs V", table 8: hidden weights shrink with the root of the width).

    Args:
        sigma: The standard deviation of the base model, >= 0.
        num_layers: The number of transformer layers, >= 1.
        width_mult: Width of this model divided by that of the base model, > 0.
        multiplier: Residual branches per layer, > 0.

    Returns:
        As for :func:`init_method_normal`.

    Raises:
        ValueError: An argument is out of range or not a number.

    Example:
        >>> mup_scaled_init_method_normal(0.02, 2, width_mult=4.0).keywords["std"]
        0.005
    """
    std = _scale_std(sigma, num_layers, multiplier)
    return _fill_from_normal(std / math.sqrt(_check_positive("width_mult", width_mult)))


def _fill_from_normal(std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=std)


def _scale_std(sigma: float, num_layers: int, multiplier: float) -> float:
    if not isinstance(num_layers, Integral) or isinstance(num_layers, bool) or num_layers < 1:
        raise ValueError(f"num_layers is {num_layers!r}. Pass a whole number >= 1")
    return _check_std(sigma) / math.sqrt(_check_positive("multiplier", multiplier) * num_layers)


def _check_std(sigma: float) -> float:
    if not _is_finite_number(sigma) or sigma < 0:
        raise ValueError(f"sigma is {sigma!r}. Pass a finite standard deviation >= 0")
    return float(sigma)


def _check_positive(name: str, value: float) -> float:
    if not _is_finite_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}. Pass a finite number > 0")
    return float(value)


def _is_finite_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
