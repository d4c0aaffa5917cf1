"""A fast walk over a module and everything below it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["has_attribute", "iter_modules"]


def iter_modules(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield ``root`` and all modules below it, each once, in the order of ``root.modules()``.

    Builds no names, which makes it several times faster than ``modules()`` on large models. Modules
    added or replaced since an earlier walk are seen: nothing is cached.

    Args:
        root: Any module.

    Yields:
        Distinct modules, parents before their children.

    Example:
        >>> shared = torch.nn.Identity()
        >>> len(list(iter_modules(torch.nn.Sequential(shared, shared))))
        2
    """
    seen: set[int] = set()
    pending: list[torch.nn.Module] = [root]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        children = module._modules
        if children:
            pending.extend(child for child in reversed(children.values()) if child is not None)


def has_attribute(module: torch.nn.Module, name: str) -> bool:
    """Return whether a module has a plain attribute or its class has one, such as a property.

    Much faster than ``hasattr`` for an attribute that is missing, which most modules of a model
    lack. Parameters, buffers, children and what a ``__getattr__`` makes up do not count.

    Args:
        module: The module.
        name: The attribute.

    Returns:
        True or False.

    Example:
        >>> linear = torch.nn.Linear(2, 1)
        >>> has_attribute(linear, "in_features"), has_attribute(linear, "weight")
        (True, False)
    """
    return name in module.__dict__ or hasattr(type(module), name)
