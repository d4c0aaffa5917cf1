"""The versions of the libraries that large-model code depends on.

Every function answers "which version", not "does it import": a library whose metadata is installed
has a version even where its shared libraries are missing. A library with metadata is never imported
to find its version.
"""

from __future__ import annotations

from typing import overload

from packaging.version import Version

from mcore.versioning.lookup import InstalledPackage, known_package
from mcore.versioning.minimum_checks import remembering, taking_vers

_ABSENT = Version("0.0.0")
_TORCH = known_package("torch", "torch")
_TRANSFORMER_ENGINE = known_package("transformer_engine", "transformer-engine")
_FLASH_ATTN = known_package("flash_attn", "flash-attn")
_MAMBA_SSM = known_package("mamba_ssm", "mamba-ssm")
_CAUSAL_CONV1D = known_package("causal_conv1d", "causal-conv1d")


def get_torch_version() -> Version:
    """The version of PyTorch, without importing it.

    Returns:
        `torch.__version__` where torch is loaded, else what its metadata says, local label such as
        `+cpu` included; `Version("0.0.0")` where torch is absent.

    Raises:
        packaging.version.InvalidVersion: torch is there, but gives no readable version.

    Example:
        >>> get_torch_version() >= Version("0.0.0")
        True
    """
    return _TORCH.version() or _ABSENT


def get_te_version() -> Version:
    """The version of Transformer Engine, without importing it.

    Returns:
        As `get_torch_version`; `Version("0.0.0")` where Transformer Engine is absent.

    Raises:
        packaging.version.InvalidVersion: It is there, but gives no readable version.

    Example:
        >>> get_te_version() >= Version("0.0.0")
        True
    """
    return _TRANSFORMER_ENGINE.version() or _ABSENT


def get_fa_version() -> Version:
    """The version of FlashAttention, without importing it.

    Returns:
        `flash_attn.__version__` where it is loaded, else what its metadata says.

    Raises:
        importlib.metadata.PackageNotFoundError: It is absent; a subclass of ImportError.
        packaging.version.InvalidVersion: It is there, but gives no readable version.

    Example:
        >>> try:
        ...     found = str(get_fa_version())
        ... except ImportError:
        ...     found = "absent"
    """
    return _present(_FLASH_ATTN)


def get_mamba_version() -> Version:
    """The version of mamba-ssm, without importing it.

    Returns:
        `mamba_ssm.__version__` where it is loaded, else what its metadata says.

    Raises:
        importlib.metadata.PackageNotFoundError: It is absent; a subclass of ImportError.
        packaging.version.InvalidVersion: It is there, but gives no readable version.

    Example:
        >>> try:
        ...     found = str(get_mamba_version())
        ... except ImportError:
        ...     found = "absent"
    """
    return _present(_MAMBA_SSM)


def get_causal_conv1d_version() -> Version:
    """The version of causal-conv1d, without importing it.

    Returns:
        `causal_conv1d.__version__` where it is loaded, else what its metadata says.

    Raises:
        importlib.metadata.PackageNotFoundError: It is absent; a subclass of ImportError.
        packaging.version.InvalidVersion: It is there, but gives no readable version.

    Example:
        >>> try:
        ...     found = str(get_causal_conv1d_version())
        ... except ImportError:
        ...     found = "absent"
    """
    return _present(_CAUSAL_CONV1D)


@remembering(_TORCH)
def is_torch_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Whether PyTorch is there in a version or newer.

    A build of a coming release, as in vendor containers, counts as older than that release:
    `2.9.0a0+50eac811a6.nv25.09` is not at least `2.9.0`. Whoever wants "the 2.9 series, its alphas
    included" asks for `"2.9.0a0"`, or sets `release_only`.

    Args:
        version: The version to compare with.
        check_equality: False asks for strictly newer; a local label such as `+cpu` then makes
            nothing newer, unless `version` carries one as well.
        release_only: Compare only the release number of what is installed, so that a pre-release
            counts as its release.

    Returns:
        The answer by the order of `packaging.version.Version`; False where torch is absent,
        whatever is asked for.

    Raises:
        packaging.version.InvalidVersion: `version` is none.

    Example:
        >>> is_torch_min_version("1000.0")
        False
    """
    return _TORCH.is_at_least(version, check_equality, release_only=release_only)


@overload
def is_te_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool: ...
@overload
def is_te_min_version(
    *, vers: str | Version, check_equality: bool = True, release_only: bool = False
) -> bool: ...
@taking_vers
@remembering(_TRANSFORMER_ENGINE)
def is_te_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Whether Transformer Engine is there in a version or newer.

    Args:
        version: The version to compare with; the keyword may also be written `vers`.
        check_equality: False asks for strictly newer.
        release_only: Compare only the release number of what is installed.

    Returns:
        The answer by the order of `packaging.version.Version`; False where it is absent, whatever
        is asked for.

    Raises:
        packaging.version.InvalidVersion: `version` is none.
        TypeError: Both `version` and `vers` are given.

    Example:
        >>> is_te_min_version("1000.0"), is_te_min_version(vers="1000.0")
        (False, False)
    """
    return _TRANSFORMER_ENGINE.is_at_least(version, check_equality, release_only=release_only)


@remembering(_FLASH_ATTN)
def is_fa_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Whether FlashAttention is there in a version or newer.

    Args:
        version: The version to compare with.
        check_equality: False asks for strictly newer.
        release_only: Compare only the release number of what is installed.

    Returns:
        The answer by the order of `packaging.version.Version`; False where it is absent, whatever
        is asked for.

    Raises:
        packaging.version.InvalidVersion: `version` is none.

    Example:
        >>> is_fa_min_version("1000.0")
        False
    """
    return _FLASH_ATTN.is_at_least(version, check_equality, release_only=release_only)


@remembering(_MAMBA_SSM)
def is_mamba_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Whether mamba-ssm is there in a version or newer.

    Args:
        version: The version to compare with.
        check_equality: False asks for strictly newer.
        release_only: Compare only the release number of what is installed.

    Returns:
        The answer by the order of `packaging.version.Version`; False where it is absent, whatever
        is asked for.

    Raises:
        packaging.version.InvalidVersion: `version` is none.

    Example:
        >>> is_mamba_min_version("1000.0")
        False
    """
    return _MAMBA_SSM.is_at_least(version, check_equality, release_only=release_only)


@remembering(_CAUSAL_CONV1D)
def is_causal_conv1d_min_version(
    version: str | Version, check_equality: bool = True, *, release_only: bool = False
) -> bool:
    """Whether causal-conv1d is there in a version or newer.

    Args:
        version: The version to compare with.
        check_equality: False asks for strictly newer.
        release_only: Compare only the release number of what is installed.

    Returns:
        The answer by the order of `packaging.version.Version`; False where it is absent, whatever
        is asked for.

    Raises:
        packaging.version.InvalidVersion: `version` is none.

    Example:
        >>> is_causal_conv1d_min_version("1000.0")
        False
    """
    return _CAUSAL_CONV1D.is_at_least(version, check_equality, release_only=release_only)


def get_package_version(module: str, distribution: str | None = None) -> Version | None:
    """The version of any package, found as for the packages that have a function of their own.

    Args:
        module: The name to import; dots name a submodule, whose parents are then imported where
            there is no metadata.
        distribution: The name of the distribution where it is another than `module`.

    Returns:
        The version, or None where the package is absent.

    Raises:
        packaging.version.InvalidVersion: The package is there, but gives no readable version.

    Example:
        >>> get_package_version("packaging") >= Version("23.2")
        True
        >>> get_package_version("no_such_module") is None
        True
    """
    return known_package(module, distribution).version()


def is_package_min_version(
    module: str,
    version: str | Version,
    check_equality: bool = True,
    *,
    distribution: str | None = None,
    release_only: bool = False,
) -> bool:
    """Whether any package is there in a version or newer.

    Args:
        module: The name to import.
        version: The version to compare with.
        check_equality: False asks for strictly newer.
        distribution: The name of the distribution where it is another than `module`.
        release_only: Compare only the release number of what is installed.

    Returns:
        The answer by the order of `packaging.version.Version`; False where the package is absent.

    Raises:
        packaging.version.InvalidVersion: `version` is none, or the package is there, but gives no
            readable version.

    Example:
        >>> is_package_min_version("packaging", "23.2")
        True
    """
    package = known_package(module, distribution)
    return package.is_at_least(version, check_equality, release_only=release_only)


def _present(package: InstalledPackage) -> Version:
    version = package.version()
    if version is None:
        from importlib.metadata import PackageNotFoundError

        raise PackageNotFoundError(package.distribution)
    return version
