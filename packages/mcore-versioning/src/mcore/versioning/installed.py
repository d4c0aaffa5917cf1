"""The versions of the libraries that large-model code depends on.

A library with metadata is never imported, so it has a version even if importing it would fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, overload

from packaging.version import Version

from mcore.versioning.lookup import (
    InstalledPackage,
    constant_when_compiled,
    find_version_text,
    known_package,
    versions_by_text,
)

Check = TypeVar("Check", bound="Callable[..., bool]")
_ABSENT = Version("0.0.0")
_TORCH = known_package("torch", "torch")
_TRANSFORMER_ENGINE = known_package("transformer_engine", "transformer-engine")
_FLASH_ATTN = known_package("flash_attn", "flash-attn")
_MAMBA_SSM = known_package("mamba_ssm", "mamba-ssm")
_CAUSAL_CONV1D = known_package("causal_conv1d", "causal-conv1d")
_FLASHINFER = known_package("flashinfer", "flashinfer-python")
_EMERGING_OPTIMIZERS = known_package("emerging_optimizers", "emerging-optimizers")
_PACKING_IN_INFERENCE = ((_CAUSAL_CONV1D, "1.5.3.post1"), (_MAMBA_SSM, "2.2.6.post3"))
_PACKING_IN_TRAINING = ((_CAUSAL_CONV1D, "1.4.0"), (_MAMBA_SSM, "2.0.0"))


def _cache_answers(package: InstalledPackage) -> Callable[[Check], Check]:
    """Answer a repeated question from a cache while ``__version__`` is the same object."""
    module, modules = package.module, sys.modules

    def remember(ask: Check) -> Check:
        # The last parameter is keyword-only in the signature that users see. If it were here as
        # well, each call would take a tenth longer.
        @wraps(ask)
        def check(
            version: str | Version, check_equality: bool = True, release_only: bool = False
        ) -> bool:
            if check_equality and not release_only:
                try:
                    # The object itself is compared: an equal text may be of a replaced module.
                    known, answers = package.loaded
                    if modules[module].__version__ is known:
                        return answers[version]
                except (AttributeError, KeyError, TypeError):
                    pass
            return ask(version, check_equality, release_only=release_only)

        return constant_when_compiled(check)  # type: ignore[return-value]

    return remember


def _accept_vers(check: Callable[..., bool]) -> Callable[..., bool]:
    """Accept ``vers`` as another name of the keyword ``version``."""

    @wraps(check)
    def renaming(*args: Any, **kwargs: Any) -> bool:
        if "vers" in kwargs:
            if args or "version" in kwargs:
                raise TypeError("pass the version once: as `version` or as `vers`, not both")
            kwargs["version"] = kwargs.pop("vers")
        return check(*args, **kwargs)

    return constant_when_compiled(renaming)


def get_torch_version() -> Version:
    """Return the version of PyTorch, without importing it.

    Returns:
        ``torch.__version__`` if torch is loaded, including a local label such as ``+cpu``. Else
        the version in its metadata, which has no label for CUDA wheels from PyPI.
        ``Version("0.0.0")`` if torch is absent.

    Raises:
        packaging.version.InvalidVersion: torch is installed, but its version can't be parsed.

    Example:
        >>> get_torch_version() >= Version("0.0.0")
        True
    """
    return _TORCH.version() or _ABSENT


def get_te_version() -> Version:
    """Return the version of Transformer Engine, without importing it.

    Returns:
        As :func:`get_torch_version`. ``Version("0.0.0")`` if Transformer Engine is absent.

    Raises:
        packaging.version.InvalidVersion: It is installed, but its version can't be parsed.

    Example:
        >>> get_te_version() >= Version("0.0.0")
        True
    """
    return _TRANSFORMER_ENGINE.version() or _ABSENT


def get_fa_version() -> Version:
    """Return the version of FlashAttention, without importing it.

    Returns:
        ``flash_attn.__version__`` if it is loaded, else the version in its metadata.

    Raises:
        importlib.metadata.PackageNotFoundError: It is absent, or has no metadata and fails to
            import. A subclass of ImportError.
        packaging.version.InvalidVersion: It is installed, but its version can't be parsed.

    Example:
        >>> try:
        ...     found = str(get_fa_version())
        ... except ImportError:
        ...     found = "absent"
    """
    return _require_version(_FLASH_ATTN)


def get_mamba_version() -> Version:
    """Return the version of mamba-ssm, with the sources and errors of :func:`get_fa_version`.

    Example:
        >>> try:
        ...     found = str(get_mamba_version())
        ... except ImportError:
        ...     found = "absent"
    """
    return _require_version(_MAMBA_SSM)


def get_causal_conv1d_version() -> Version:
    """Return the version of causal-conv1d, with the sources and errors of :func:`get_fa_version`.

    Example:
        >>> try:
        ...     found = str(get_causal_conv1d_version())
        ... except ImportError:
        ...     found = "absent"
    """
    return _require_version(_CAUSAL_CONV1D)


def get_flashinfer_version() -> Version | None:
    """Return the version of FlashInfer, without importing it, or None if it is absent.

    Raises:
        packaging.version.InvalidVersion: It is installed, but its version can't be parsed.

    Example:
        >>> found = get_flashinfer_version()
        >>> found is None or found >= Version("0.0")
        True
    """
    return _FLASHINFER.version()


def get_emerging_optimizers_version() -> Version | None:
    """Return the version of emerging-optimizers, as :func:`get_flashinfer_version`.

    Example:
        >>> found = get_emerging_optimizers_version()
        >>> found is None or found >= Version("0.0")
        True
    """
    return _EMERGING_OPTIMIZERS.version()


@_cache_answers(_TORCH)
def is_torch_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Return whether PyTorch is installed in at least a given version.

    A pre-release build, as in vendor containers, counts as older than its release:
    ``2.9.0a0+50eac811a6.nv25.09`` is not at least ``2.9.0``. To accept the alphas of the 2.9
    series, pass ``"2.9.0a0"`` or set ``release_only``. A nightly such as ``2.9.0.dev20250915`` is
    older than ``2.9.0a0``: to accept it too, pass ``"2.9.0.dev0"`` or set ``release_only``.

    Args:
        version: The version to compare with.
        check_equality: False requires a strictly newer version. A local label such as ``+cpu``
            does not make a version newer, unless ``version`` has a label as well.
        release_only: A pre-release counts as its release. A post-release stays newer than it.

    Returns:
        The answer in the order of ``packaging.version.Version``. False if torch is absent.

    Raises:
        packaging.version.InvalidVersion: ``version`` is not a valid version.

    Example:
        >>> is_torch_min_version("1000.0")
        False
    """
    return _TORCH.is_at_least(version, check_equality, release_only)


@overload
def is_te_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool: ...
@overload
def is_te_min_version(
    *, vers: str | Version, check_equality: bool = True, release_only: bool = False
) -> bool: ...
@_accept_vers
@_cache_answers(_TRANSFORMER_ENGINE)
def is_te_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Return whether Transformer Engine is installed in at least a given version.

    Arguments, result and errors are as in :func:`is_torch_min_version`. The keyword ``version``
    may also be written ``vers``. Both together are a TypeError.

    Example:
        >>> is_te_min_version("1000.0"), is_te_min_version(vers="1000.0")
        (False, False)
    """
    return _TRANSFORMER_ENGINE.is_at_least(version, check_equality, release_only)


@_cache_answers(_FLASH_ATTN)
def is_fa_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Return whether FlashAttention is installed in at least a given version.

    Arguments, result and errors are as in :func:`is_torch_min_version`.

    Example:
        >>> is_fa_min_version("1000.0")
        False
    """
    return _FLASH_ATTN.is_at_least(version, check_equality, release_only)


@_cache_answers(_MAMBA_SSM)
def is_mamba_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Return whether mamba-ssm is installed in at least a given version.

    Arguments, result and errors are as in :func:`is_torch_min_version`.

    Example:
        >>> is_mamba_min_version("1000.0")
        False
    """
    return _MAMBA_SSM.is_at_least(version, check_equality, release_only)


@_cache_answers(_CAUSAL_CONV1D)
def is_causal_conv1d_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Return whether causal-conv1d is installed in at least a given version.

    Arguments, result and errors are as in :func:`is_torch_min_version`.

    Example:
        >>> is_causal_conv1d_min_version("1000.0")
        False
    """
    return _CAUSAL_CONV1D.is_at_least(version, check_equality, release_only)


@_cache_answers(_FLASHINFER)
def is_flashinfer_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Return whether FlashInfer is installed in at least a given version.

    Arguments, result and errors are as in :func:`is_torch_min_version`.

    Example:
        >>> is_flashinfer_min_version("1000.0")
        False
    """
    return _FLASHINFER.is_at_least(version, check_equality, release_only)


@_cache_answers(_EMERGING_OPTIMIZERS)
def is_emerging_optimizers_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Return whether emerging-optimizers is installed in at least a given version.

    Arguments, result and errors are as in :func:`is_torch_min_version`. If it is absent, Megatron's
    function raises instead.

    Example:
        >>> is_emerging_optimizers_min_version("1000.0")
        False
    """
    return _EMERGING_OPTIMIZERS.is_at_least(version, check_equality, release_only)


@constant_when_compiled
def check_mamba_sequence_packing_support(
    for_inference_not_training: bool = True,
) -> tuple[bool, str | None]:
    """Return whether causal_conv1d and mamba_ssm are new enough for packed sequences.

    Args:
        for_inference_not_training: False checks for training, which needs less recent versions.

    Returns:
        ``(True, None)``, or ``(False, reason)`` with the first package that is missing or too old.
        causal_conv1d is checked first.

    Example:
        >>> supported, reason = check_mamba_sequence_packing_support()
        >>> supported == (reason is None)
        True
    """
    needed = _PACKING_IN_INFERENCE if for_inference_not_training else _PACKING_IN_TRAINING
    for package, minimum in needed:
        if not package.is_at_least(minimum):
            found = package.version()
            state = "not installed" if found is None else f"found {found}"
            return False, f"{package.module} >= {minimum} is required ({state})"
    return True, None


def get_package_version(module: str, distribution: str | None = None) -> Version | None:
    """Return the version of any package, found in the same way as that of PyTorch.

    Args:
        module: The name to import. With dots it names a submodule, and its parents are imported
            if there is no metadata.
        distribution: The name of the distribution if it differs from ``module``.

    Returns:
        The version, or None if the package is absent.

    Raises:
        packaging.version.InvalidVersion: The package is installed, but its version can't be parsed.

    Example:
        >>> get_package_version("packaging") >= Version("23.2")
        True
        >>> get_package_version("no_such_module") is None
        True
    """
    text = find_version_text(module, distribution)
    return None if text is None else versions_by_text[text]


@constant_when_compiled
def is_package_min_version(
    module: str,
    version: str | Version,
    check_equality: bool = True,
    *,
    distribution: str | None = None,
    release_only: bool = False,
) -> bool:
    """Return whether any package is installed in at least a given version.

    Args:
        module: The name to import.
        version: The version to compare with.
        check_equality: False requires a strictly newer version.
        distribution: The name of the distribution if it differs from ``module``.
        release_only: A pre-release counts as its release.

    Returns:
        The answer in the order of ``packaging.version.Version``. False if the package is absent.

    Raises:
        packaging.version.InvalidVersion: ``version`` is not valid, or the package is installed,
            but its version can't be parsed.

    Example:
        >>> is_package_min_version("packaging", "23.2")
        True
    """
    package = known_package(module, distribution)
    return package.is_at_least(version, check_equality, release_only)


def _require_version(package: InstalledPackage) -> Version:
    version = package.version()
    if version is None:
        from importlib.metadata import PackageNotFoundError

        raise PackageNotFoundError(package.distribution)
    return version
