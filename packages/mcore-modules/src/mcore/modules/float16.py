"""Float16Module, which runs a float32 model in float16 or bfloat16."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch

from mcore.modules.config import ConfigFieldError, is_switched_on, read_field
from mcore.modules.module import MegatronModule
from mcore.modules.precision import (
    convert_module_to_dtype_except_fp32_marked,
    float16_to_fp32,
    fp32_to_float16,
    keeping_dtype_of_marked,
    record_fp32_marks,
    restore_precision,
    stamp_fp32_marks,
)
from mcore.modules.sharding import sharded_state_dict_of
from mcore.modules.wrappers import find_group, find_in_wrapped_models
from mcore.parallel.groups import get_pg_rank, get_pg_size
from mcore.parallel.process_groups import ProcessGroups
from mcore.tensor.dtensor import is_dtensor
from mcore.tensor.param_flags import ensure_params_ready
from mcore.versioning.signatures import positional_names

_NAME = "module"
_CHILD = f"{_NAME}."  # the prefix of keys of the module inside a wrapper
_FSDP1 = "_fsdp_wrapped_module."


# Functions: torch.compile of torch 2.11 cannot trace a method of Tensor in an attribute.
def _cast_to_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half()


def _cast_to_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16()


class Float16Module(MegatronModule):
    """A model in 16-bit floats with float32 inputs and float32 outputs.

    The constructor casts the wrapped module in place: parameters keep their identity and ties.
    Tensors marked with :func:`keep_in_fp32` or :func:`mark_keep_in_fp32` stay in float32, also when
    the wrapper is moved, cast, copied, pickled or loaded later. Float8 storage is not cast. A later
    cast does change the other tensors: ``.float()`` makes them float32.

    Inputs are cast only on the first pipeline stage, outputs only on the last: tensors between
    stages have the model's dtype. Keys of state dicts are those of the wrapped module. Names of
    parameters, buffers and modules begin with ``module.``, as for any module. With an optimizer,
    pass the wrapped module to ``get_state_dict`` of torch.distributed.checkpoint: both its names
    and its keys are without ``module.``. While PEFT has adapters in the wrapper, keys of
    ``state_dict`` begin with ``module.`` too: PEFT saves tensors whose keys are names.

    Args:
        config: A configuration with ``fp16`` or ``bf16`` true. The other field may be missing.
        module: The model.
        pp_group: The pipeline group. Default: that of ``pg_collection``, of the module's
            ``pg_collection``, of the default ProcessGroups, else no pipeline.
        vp_stage: Number of this chunk of the model. Default: the module's ``vp_stage``.
        vp_size: Chunks per pipeline rank. Default: that of the configuration.
        pg_collection: The process groups of this rank.
        no_cast_kwargs: Keyword arguments that are not cast, see also
            :meth:`keep_arguments_in_fp32`. The loss mask is one by default: its sum beyond 256
            would be wrong in bfloat16.

    Raises:
        ValueError: Not exactly one of fp16 and bf16 is on, the stage is out of range, there is no
            pipeline group for a configuration with a pipeline, or this rank is not in it.
        ConfigFieldError: The configuration has neither ``fp16`` nor ``bf16``.
        TypeError: ``module`` is not a module, or ``no_cast_kwargs`` is a string.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> model = Float16Module(SimpleNamespace(bf16=True), torch.nn.Linear(2, 1))
        >>> model.module.weight.dtype, model(torch.ones(1, 2)).dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(
        self,
        config: Any,
        module: torch.nn.Module,
        *,
        pp_group: Any = None,
        vp_stage: int | None = None,
        vp_size: int | None = None,
        pg_collection: ProcessGroups | None = None,
        no_cast_kwargs: Collection[str] = ("loss_mask",),
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module is a {type(module).__name__}. Pass a torch.nn.Module")
        if isinstance(no_cast_kwargs, str):
            raise TypeError(
                f"no_cast_kwargs is the string {no_cast_kwargs!r}. Pass a tuple of names"
            )
        super().__init__(config)
        self.fp16, self.bf16 = _choose_precision(config)
        self.no_cast_kwargs = frozenset(no_cast_kwargs)
        self._kept_positions: tuple[int, ...] = ()
        of_module = find_in_wrapped_models(module, "pg_collection")
        self.pg_collection = of_module if pg_collection is None else pg_collection
        if pp_group is None:
            pp_group = find_group("pp", module, pg_collection)
        stages = read_field(config, "pipeline_model_parallel_size", None) or 1
        if pp_group is None and stages > 1:
            raise ValueError(
                f"pipeline_model_parallel_size is {stages} and no pipeline group is given, so the "
                "first and the last stage are unknown. Pass pp_group or a pg_collection with pp"
            )
        self._pp_rank, self._pp_size = get_pg_rank(pp_group), get_pg_size(pp_group)
        if vp_stage is None:
            vp_stage = find_in_wrapped_models(module, "vp_stage")
        if vp_size is None:
            vp_size = read_field(config, "virtual_pipeline_model_parallel_size", None)
        self._set_stage(vp_stage, vp_size)
        # After all checks: the cast is in place, and an error must leave the module as it was.
        self.float16_convertor = _cast_to_half if self.fp16 else _cast_to_bfloat16
        self.module = convert_module_to_dtype_except_fp32_marked(module, self._dtype)
        self._assigned = False
        self.keep_arguments_in_fp32()
        self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            _accept_both_spellings
        )
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _restore_assigned
        )

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.fp16 else torch.bfloat16

    @property
    def vp_stage(self) -> int | None:
        """Number of this chunk of the model. Setting it decides whether inputs are cast."""
        return self._vp_stage

    @vp_stage.setter
    def vp_stage(self, value: int | None) -> None:
        self._set_stage(value, self._vp_size)

    @property
    def vp_size(self) -> int | None:
        """Chunks per pipeline rank. Setting it decides whether outputs are cast."""
        return self._vp_size

    @vp_size.setter
    def vp_size(self, value: int | None) -> None:
        self._set_stage(self._vp_stage, value)

    def _set_stage(self, vp_stage: int | None, vp_size: int | None) -> None:
        is_first, is_last = stage_flags(self._pp_rank, self._pp_size, vp_stage, vp_size)
        self._vp_stage, self._vp_size = vp_stage, vp_size
        self._casts_inputs, self._casts_outputs = is_first, is_last

    def set_input_tensor(self, input_tensor: Any) -> Any:
        """Pass the previous pipeline stage's output to the wrapped module.

        Args:
            input_tensor: The argument of the wrapped module's ``set_input_tensor``.

        Returns:
            The result of that method.
        """
        return self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def keep_arguments_in_fp32(self, *names: str) -> None:
        """Exempt further arguments of the wrapped module from the cast.

        For example advantages, returns and log-probabilities in reinforcement learning: their sums
        and differences need float32. They may be passed by name or by position.

        Args:
            *names: Names of arguments of the wrapped module's ``forward``, added to
                ``no_cast_kwargs``.

        Raises:
            TypeError: A name is not a string.

        Example:
            >>> import torch
            >>> from types import SimpleNamespace
            >>> model = Float16Module(SimpleNamespace(bf16=True), torch.nn.Identity())
            >>> model.keep_arguments_in_fp32("advantages")
            >>> sorted(model.no_cast_kwargs)
            ['advantages', 'loss_mask']
        """
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"a name is a {type(name).__name__}. Pass names of arguments")
        self.no_cast_kwargs |= set(names)
        try:
            arguments = positional_names(self.module.forward)
        except (TypeError, ValueError):  # no signature
            arguments = []
        self._kept_positions = tuple(
            place for place, name in enumerate(arguments) if name in self.no_cast_kwargs
        )

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """Run the wrapped module in its precision.

        Args:
            *inputs: Its positional inputs. On the first stage float32 tensors in them, also in
                nested containers, are cast. Containers with a cast tensor are copied, others are
                passed unchanged.
            fp32_output: Cast 16-bit outputs to float32 on the last stage. Not passed to the module.
            **kwargs: Its keyword inputs, cast too except ``no_cast_kwargs``.

        Returns:
            Its outputs, in float32 on the last stage unless ``fp32_output`` is false.
        """
        if self._casts_inputs:
            untouched = self.no_cast_kwargs
            cast = {name: value for name, value in kwargs.items() if name not in untouched}
            given = inputs
            # In one call: a tensor that is passed twice is cast once.
            inputs, cast = fp32_to_float16((inputs, cast), self.float16_convertor)
            kwargs.update(cast)
            if self._kept_positions:
                kept = self._kept_positions
                inputs = tuple(given[i] if i in kept else item for i, item in enumerate(inputs))
        outputs = self.module(*inputs, **kwargs)
        if self._casts_outputs and fp32_output:
            outputs = float16_to_fp32(outputs)
        return outputs

    def state_dict(  # type: ignore[override]
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the wrapped module's state dict, without ``module.`` in the keys.

        PEFT's adapters in the wrapper and ``FullyShardedDataParallel`` around it need ``module.``.

        Args:
            destination: A dict to fill and return.
            prefix: Put before each key.
            keep_vars: Return the parameters themselves instead of detached tensors.

        Returns:
            The state dict.
        """
        # FullyShardedDataParallel looks for the names of parameters, which contain the child.
        owner: Any = super() if _FSDP1 in prefix or self._has_adapters() else self.module
        state: dict[str, Any] = owner.state_dict(
            destination=destination,
            prefix=prefix,
            keep_vars=keep_vars,
        )
        _repeat_versions_below_wrapper(state, prefix)
        return state

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the result of the wrapped module's method, or of its ``state_dict``.

        Args:
            prefix: Put before each key.
            keep_vars: Return the parameters themselves instead of detached tensors.

        Returns:
            The state dict.
        """
        ensure_params_ready(self.parameters())
        method = getattr(self.module, "state_dict_for_save_checkpoint", self.module.state_dict)
        state: dict[str, Any] = method(prefix=prefix, keep_vars=keep_vars)
        return state

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the wrapped module's sharded state dict, without ``module.`` in the keys.

        Args:
            prefix: Put before each key.
            *args: ``sharded_offsets`` and ``metadata``, as for
                :meth:`MegatronModule.sharded_state_dict`.
            **kwargs: The same by name.

        Returns:
            The result of the wrapped module's method. A module without the method is replicated.
        """
        method = getattr(self.module, "sharded_state_dict", None)
        if callable(method):
            entries: dict[str, Any] = method(prefix, *args, **kwargs)
            return entries
        return sharded_state_dict_of(self.module, prefix, *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the wrapped module, from keys with or without ``module.`` before them.

        Args:
            state_dict: The state dict.
            strict: Raise if keys are missing or unexpected.
            assign: Replace the module's tensors by the given tensors, then cast them.

        Returns:
            A named tuple with ``missing_keys`` and ``unexpected_keys``.

        Raises:
            RuntimeError: Keys or shapes do not fit.
        """
        state_dict = _drop_wrapper_from_keys(state_dict, lambda: set(self.module.state_dict()))
        if not assign:
            return self.module.load_state_dict(state_dict, strict=strict)
        result = self.module.load_state_dict(state_dict, strict=strict, assign=True)
        # Assigned tensors have the dtype of the state dict, and none of the marks.
        restore_precision(self.module, self._dtype)
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        # functional_call with keys of the state dict would set a tensor on this wrapper, and the
        # wrapped module would silently compute with its old one.
        inside = self.__dict__.get("_modules", {}).get("module")
        if inside is not None and (name in inside._parameters or name in inside._buffers):
            raise AttributeError(
                f"{name!r} is a parameter or buffer of the wrapped module. Set it on .module "
                f"(as 'module.{name}' in torch.func.functional_call)"
            )
        super().__setattr__(name, value)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Declare to torch.distributed.checkpoint.state_dict that keys omit ``module``."""
        # Below FullyShardedDataParallel the keys do contain it, and no parameter is a DTensor.
        if self._has_adapters() or (
            getattr(self, "_is_fsdp_managed_module", False)
            and not any(map(is_dtensor, self.parameters()))
        ):
            return {}
        inside = self.module
        names = (*inside._modules, *inside._parameters, *inside._buffers)
        return _NamesInside.fromkeys(names, _NAME)

    def _has_adapters(self) -> bool:
        """Return whether PEFT has adapters in this wrapper, not in a model inside it."""
        # PEFT sets the attribute, and deletes it when it merges or removes the adapters. It would
        # silently save no adapter if the keys were not the names.
        return bool(vars(self).get("peft_config"))

    def _apply(self, fn: Any, recurse: bool = True) -> Float16Module:
        # Names first, since the function may replace tensors, and the marks are lost with them.
        record_fp32_marks(self.module)
        keeping = keeping_dtype_of_marked(self.module, fn)
        super()._apply(keeping, recurse)  # type: ignore[no-untyped-call]
        stamp_fp32_marks(self.module)
        return self


def _choose_precision(config: object) -> tuple[bool, bool]:
    fp16, bf16 = read_field(config, "fp16", None), read_field(config, "bf16", None)
    if fp16 is None and bf16 is None:
        raise ConfigFieldError(
            f"{type(config).__name__} has neither fp16 nor bf16. Set one of them to True"
        )
    chosen = is_switched_on(fp16), is_switched_on(bf16)
    if chosen[0] == chosen[1]:
        raise ValueError(f"fp16={fp16!r} and bf16={bf16!r}: exactly one of them must be true")
    return chosen


def _accept_both_spellings(
    module: Float16Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *_: Any,
) -> None:
    """Accept keys with and without ``module.`` when a parent loads the wrapper."""
    # Modules below are loaded later: the post hook restores the precision of all of them.
    module._assigned = bool(local_metadata.get("assign_to_params_buffers", False))
    _add_wrapper_to_keys(state_dict, prefix, lambda: set(module.module.state_dict()))


def _restore_assigned(module: Float16Module, _: Any) -> None:
    """Restore precision after a parent has loaded the wrapper and everything below it."""
    if module._assigned:
        restore_precision(module.module, module._dtype)


def _add_wrapper_to_keys(
    state_dict: MutableMapping[str, Any], prefix: str, own_keys: Callable[[], Collection[str]]
) -> None:
    """Put ``module.`` after the prefix of keys, in place. ``own_keys`` is called only in doubt."""
    keys = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
    if _has_wrapper(keys, own_keys):
        return
    moved = {prefix + _CHILD + key: state_dict.pop(prefix + key) for key in keys}
    state_dict.update(moved)


def _drop_wrapper_from_keys(
    state_dict: Mapping[str, Any], own_keys: Callable[[], Collection[str]]
) -> Mapping[str, Any]:
    """Return a state dict for the wrapped module, without ``module.`` before keys and versions."""
    if not _has_wrapper(list(state_dict), own_keys):
        return state_dict
    renamed: OrderedDict[str, Any] = OrderedDict(
        (key.removeprefix(_CHILD), value) for key, value in state_dict.items()
    )
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        renamed._metadata = {  # type: ignore[attr-defined]
            f"{key}.".removeprefix(_CHILD).removesuffix("."): value
            for key, value in metadata.items()
        }
    return renamed


def _has_wrapper(keys: Collection[str], own_keys: Callable[[], Collection[str]]) -> bool:
    """Count matching keys, since the wrapped module may have a child called ``module`` too."""
    if not any(key.startswith(_CHILD) for key in keys):
        return False
    inside = own_keys()
    without = sum(key in inside for key in keys)
    with_wrapper = sum(key.startswith(_CHILD) and key[len(_CHILD) :] in inside for key in keys)
    if without or with_wrapper:
        return with_wrapper > without
    return all(key.startswith(_CHILD) for key in keys)


def _repeat_versions_below_wrapper(state: Mapping[str, Any], prefix: str) -> None:
    """Repeat versions under ``module``, the name by which a parent loads the wrapper."""
    metadata = getattr(state, "_metadata", None)
    if metadata is None or not prefix:
        return
    below = {key: version for key, version in metadata.items() if f"{key}.".startswith(prefix)}
    for key, version in below.items():
        metadata.setdefault(f"{prefix}module.{key[len(prefix) :]}".removesuffix("."), version)


class _NamesInside(dict[str, str]):
    """The names inside a wrapper, which torch finds only through the child ``module``.

    Refuses the name of the child, under which torch would store the state of an optimizer. It
    would not find that when loading: the model's keys do not contain the child.
    """

    def get(self, name: str, default: Any = None) -> Any:
        if name == _NAME and name not in self:
            raise RuntimeError(
                "torch would store the state of the optimizer under names with 'module' of the "
                "Float16Module, and would not find them when loading. Pass the module inside it, "
                "which has the same keys: get_state_dict(unwrap_model(model), optimizer)"
            )
        return super().get(name, default)


def stage_flags(
    pp_rank: int, pp_size: int, vp_stage: int | None, vp_size: int | None
) -> tuple[bool, bool]:
    """Return whether a model chunk is the first and the last. ValueError if out of range.

    In an interleaved schedule the first pipeline rank has the model's first chunk, and the last
    rank its last chunk.
    """
    chunks = 1 if vp_size is None else vp_size
    if chunks > 1 and vp_stage is None:
        raise ValueError(
            f"vp_stage is None with {vp_size} virtual stages. Pass 0 to {chunks - 1}, the number "
            "of this model chunk"
        )
    chunk = vp_stage or 0
    if not 0 <= chunk < max(chunks, 1):
        raise ValueError(
            f"vp_stage is {vp_stage} with vp_size {vp_size}. "
            + (f"Pass 0 to {chunks - 1}" if chunks > 1 else "Pass None or 0, or a vp_size")
        )
    is_last = pp_rank == pp_size - 1 and chunk == max(chunks, 1) - 1
    return pp_rank == 0 and chunk == 0, is_last
