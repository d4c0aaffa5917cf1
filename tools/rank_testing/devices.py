"""Which ranks compute on an accelerator."""

_CPU_NAMES = frozenset({"cpu", "fake", "gloo", "mpi", "ucc"})


def uses_accelerator(init: str | None) -> bool:
    """Whether the ranks of a group that is initialised with `init` use an accelerator.

    Args:
        init: a backend, or pairs such as "cpu:gloo,cuda:nccl"; None for no group.

    Example:
        >>> uses_accelerator("gloo"), uses_accelerator(None), uses_accelerator("cuda:nccl")
        (False, False, True)
    """
    if init is None:
        return False
    return any(part.split(":")[0] not in _CPU_NAMES for part in init.split(","))
