"""Reading the fields of any configuration object."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from mcore.modules.errors import ConfigFieldError
from mcore.parallel.settings import is_switched_on

__all__ = [
    "MISSING",
    "GraphConfigLike",
    "ModuleConfigLike",
    "is_switched_on",
    "read_field",
]


class _Missing:
    """The type of MISSING, with a readable repr for signatures."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


def read_field(config: object, name: str, default: Any = MISSING) -> Any:
    """Return a field of any configuration object, or a default.

    Works on a :class:`TransformerConfig`, a namespace, a frozen dataclass, a configuration of
    Megatron-LM or None. Nothing is cached: configurations may change after a model is built.

    Args:
        config: The configuration.
        name: The field, an attribute of ``config``.
        default: What to return when the field is not there.

    Returns:
        The value as stored.

    Raises:
        ConfigFieldError: The field is not there and no default is given. It is both an
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
            f"{type(config).__name__} has no field {name!r}, and there is no default for it; set it"
        )
    return default


@runtime_checkable
class ModuleConfigLike(Protocol):
    """What Float16Module reads from a configuration, for type checkers.

    Example:
        >>> from types import SimpleNamespace
        >>> isinstance(SimpleNamespace(fp16=False, bf16=True), ModuleConfigLike)
        True
    """

    fp16: bool
    bf16: bool


@runtime_checkable
class GraphConfigLike(Protocol):
    """What GraphableMegatronModule reads from a configuration, for type checkers.

    Example:
        >>> from types import SimpleNamespace
        >>> isinstance(SimpleNamespace(hidden_size=8, cuda_graph_impl="none"), GraphConfigLike)
        True
    """

    hidden_size: int
    cuda_graph_impl: str
