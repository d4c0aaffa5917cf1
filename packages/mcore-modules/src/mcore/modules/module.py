"""MegatronModule, the base class of models and layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcore.modules.config import FIELD_CHOICES, is_switched_on, read_field
from mcore.modules.precision import stamp_fp32_marks
from mcore.modules.sharding import describes_by_walk, sharded_state_dict_of
from mcore.modules.traversal import has_plain_attribute, iter_modules, reduce_sharing_groups
from mcore.tensor.param_flags import ensure_params_ready

_QUANTISATION_FIELDS = ("fp8", "fp4", "use_kitchen", "quant_recipe")


class MegatronModule(torch.nn.Module):
    """A torch module with a configuration, sharded state dicts and model-wide switches.

    The methods read these attributes if a module has them: ``config``, ``vp_stage`` (its virtual
    pipeline stage), ``pg_collection`` (its ProcessGroups), ``tp_group`` (its tensor-parallel
    group).

    ``copy.deepcopy`` copies parameters, buffers and configuration. Process groups, also of the
    modules below, cannot be copied and are shared.

    Args:
        config: Any configuration object, usually a :class:`TransformerConfig`, stored unchanged.

    Example:
        >>> import torch
        >>> from mcore.modules import TransformerConfig
        >>> class Block(MegatronModule):
        ...     def __init__(self, config):
        ...         super().__init__(config)
        ...         self.linear = torch.nn.Linear(config.hidden_size, 1)
        >>> block = Block(TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=2))
        >>> sorted(block.sharded_state_dict(prefix="block."))
        ['block.linear.bias', 'block.linear.weight']
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the state dict for a checkpoint. Override it to save something else.

        Args:
            prefix: Put before each key.
            keep_vars: Return the parameters themselves instead of detached tensors.

        Returns:
            ``self.state_dict(prefix=prefix, keep_vars=keep_vars)``.

        Example:
            >>> list(MegatronModule(None).state_dict_for_save_checkpoint(prefix="model."))
            []
        """
        ensure_params_ready(self.parameters())
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    @describes_by_walk
    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe the position of each tensor of this module in the whole model's checkpoint.

        Parameters, persistent buffers and extra state of this module are replicated over the
        tensor-parallel and data-parallel groups. Children with a ``sharded_state_dict`` describe
        themselves. A module with tensors split over ranks overrides this method. No communication
        and no host sync: meta tensors work too. A state-dict hook of this module gets the entries
        of this module only, without the prefix.

        Groups are resolved by the outermost module and passed down in a copy of ``metadata``. The
        first of these is used. Tensor-parallel: ``self.tp_group``, ``self.pg_collection.tp``,
        ``metadata["tp_group"]``, the default ProcessGroups, none. Data-parallel with
        context-parallel: ``metadata["dp_cp_group"]``, ``self.pg_collection.dp_cp``, the default
        ProcessGroups, a single rank if the other groups fill the world, the world if nothing splits
        the model. Pipeline: ``self.pg_collection``, the default, the configuration's size.

        Args:
            prefix: Put before each key, with its trailing dot.
            sharded_offsets: ``(axis, index, count)`` for each leading axis that this module's
                tensors get in the checkpoint, such as the layer's number. The axes are 0, 1, ...
            metadata: Passed to all modules below, not changed.

        Returns:
            A ShardedTensor (or ShardedObject for extra state) for each key. Its ``data`` is the
            live parameter or buffer.

        Raises:
            TypeError: ``metadata`` is not a dict.
            ValueError: Bad offsets, or two entries with one key. Also, as a RuntimeError too, if a
                group is unknown: a tensor might be written twice or not at all.

        Example:
            >>> import torch
            >>> module = MegatronModule(None)
            >>> module.linear = torch.nn.Linear(2, 1)
            >>> module.sharded_state_dict(prefix="m.")["m.linear.weight"].global_shape
            (1, 2)
        """
        return sharded_state_dict_of(self, prefix, sharded_offsets, metadata)

    def set_is_first_microbatch(self) -> None:
        """Make quantised layers refresh their cached copies of weights that have changed.

        Sets ``is_first_microbatch`` to True on this module and all below it that have the
        attribute, if the configuration enables any of fp8, fp4, use_kitchen, quant_recipe. Does
        nothing otherwise.

        Example:
            >>> from types import SimpleNamespace
            >>> module = MegatronModule(SimpleNamespace(fp8="hybrid"))
            >>> module.is_first_microbatch = False
            >>> module.set_is_first_microbatch()
            >>> module.is_first_microbatch
            True
        """
        if not any(is_switched_on(read_field(self.config, n, None)) for n in _QUANTISATION_FIELDS):
            return
        # Not iter_modules(): it takes twice as long on a model of many layers.
        pending: list[Any] = [self]
        seen: set[int] = set()
        set_by_class: set[int] = set()
        classes: dict[type, bool] = {}
        while pending:
            module = pending.pop()
            held = module.__dict__
            if "is_first_microbatch" in held:
                held["is_first_microbatch"] = True  # past nn.Module.__setattr__, which is slow
            else:
                kind = module.__class__
                if kind not in classes:
                    classes[kind] = hasattr(kind, "is_first_microbatch")
                if classes[kind] and id(module) not in set_by_class:
                    set_by_class.add(id(module))
                    module.is_first_microbatch = True
            children = module._modules
            if children and id(module) not in seen:
                seen.add(id(module))
                pending.extend([child for child in children.values() if child is not None])

    def set_symmetric_ar(self, set_to: str | None = None) -> None:
        """Choose the all-reduce algorithm of all layers that can use symmetric memory.

        Sets ``symmetric_ar_type`` on this module and all below it that have the attribute.

        Args:
            set_to: ``"two_shot"``, ``"one_shot"``, ``"multimem_all_reduce"``, or None for the
                usual all-reduce.

        Raises:
            ValueError: Another value. Nothing is changed.

        Example:
            >>> module = MegatronModule(None)
            >>> module.symmetric_ar_type = None
            >>> module.set_symmetric_ar("one_shot")
            >>> module.symmetric_ar_type
            'one_shot'
        """
        choices = FIELD_CHOICES["symmetric_ar_type"]
        if set_to not in choices:
            raise ValueError(f"set_to={set_to!r} is unknown. Choose {list(choices)}")
        for module in iter_modules(self):
            if has_plain_attribute(module, "symmetric_ar_type"):
                module.symmetric_ar_type = set_to  # type: ignore[assignment]

    def refresh_cache(self) -> None:
        """Do nothing. Override it to drop values computed from weights that were just replaced.

        Example:
            >>> MegatronModule(None).refresh_cache()
        """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce_sharing_groups(super().__reduce_ex__(protocol))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        stamp_fp32_marks(self)  # copies of parameters have no attributes
