"""The extras of this distribution and their optional libraries."""

from __future__ import annotations

from importlib import metadata

# Any one of these distributions provides the library of the extra.
_DISTRIBUTIONS = {
    "tensorboard": ("tensorboard", "tb-nightly"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "wandb": ("wandb",),
    "comet": ("comet-ml",),
    "nvml": ("nvidia-ml-py",),
    "nvtx": ("nvtx",),
    "charts": ("matplotlib",),
    "watch": ("rich",),
    "transformers": ("transformers",),
    "lightning": ("lightning",),
    "torchtitan": ("torchtitan",),
}


def is_extra_installed(extra: str) -> bool:
    """Return whether the library of an extra is installed, without importing it."""
    if extra not in _DISTRIBUTIONS:
        raise ValueError(f"unknown extra {extra!r}: mcore-observe has {sorted(_DISTRIBUTIONS)}")
    return any(_has_metadata(name) for name in _DISTRIBUTIONS[extra])


def require_extra(extra: str, needed_for: str) -> None:
    """Raise ModuleNotFoundError, naming the extra to install, if its library is missing."""
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
