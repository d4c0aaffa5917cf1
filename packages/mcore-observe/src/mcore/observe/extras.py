"""Which optional library belongs to which extra of this distribution."""

from __future__ import annotations

from importlib import metadata

__all__ = ["is_extra_installed", "require_extra"]

# Any one of these distributions provides the library that the extra asks for.
_DISTRIBUTIONS = {
    "tensorboard": ("tensorboard", "tb-nightly"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "wandb": ("wandb",),
    "comet": ("comet-ml",),
    "nvml": ("nvidia-ml-py",),
    "nvtx": ("nvtx",),
}


def is_extra_installed(extra: str) -> bool:
    """Say whether the library of an extra is installed, without importing it.

    Args:
        extra: ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, ``"comet"``, ``"nvml"`` or ``"nvtx"``.

    Returns:
        True if the metadata of a distribution that provides the library is found.

    Raises:
        ValueError: No such extra.

    Example:
        >>> is_extra_installed("tensorboard") in (True, False)
        True
    """
    if extra not in _DISTRIBUTIONS:
        raise ValueError(f"unknown extra {extra!r}; mcore-observe has {sorted(_DISTRIBUTIONS)}")
    return any(_has_metadata(name) for name in _DISTRIBUTIONS[extra])


def require_extra(extra: str, needed_for: str) -> None:
    """Raise an error that names the extra to install when its library is missing.

    Args:
        extra: The extra, as for :func:`is_extra_installed`.
        needed_for: What the caller wanted, for the message: ``"tensorboard_dir"``.

    Raises:
        ModuleNotFoundError: The library is not installed.
        ValueError: No such extra.

    Example:
        >>> import torch.utils
        >>> try:
        ...     require_extra("tensorboard", "tensorboard_dir")
        ... except ModuleNotFoundError as error:
        ...     print("pip install" in str(error))
        ... else:
        ...     print(True)
        True
    """
    if not is_extra_installed(extra):
        library = _DISTRIBUTIONS[extra][0]
        raise ModuleNotFoundError(
            f"{needed_for} needs {library}, which is not installed: "
            f'pip install "mcore-observe[{extra}]"',
            name=library,
        )


def _has_metadata(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
