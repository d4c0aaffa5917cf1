"""A short text about Python, torch, the libraries around it and mcore, for bug reports."""

from __future__ import annotations

import json
import platform
from typing import NamedTuple

from mcore.versioning.package_state import NOT_INSTALLED, UNUSABLE, PackageState, package_state

_LIBRARIES = (
    ("torch", "torch"),
    ("transformer_engine", "transformer-engine"),
    ("flash_attn", "flash-attn"),
    ("mamba_ssm", "mamba-ssm"),
    ("causal_conv1d", "causal-conv1d"),
)
_OWN = ("versioning", "tensor", "parallel", "modules", "observe")


class EnvironmentReport(NamedTuple):
    """What a bug report needs to say about where it happened.

    Attributes:
        python: Implementation and version.
        platform: Operating system and architecture.
        packages: The libraries, then the mcore distributions.
    """

    python: str
    platform: str
    packages: tuple[PackageState, ...]

    def as_text(self) -> str:
        """One aligned line for each item."""
        lines = [("Python", self.python), ("platform", self.platform)]
        lines += [(package.name, str(package)) for package in self.packages]
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)

    def as_json(self) -> str:
        """A JSON object; every package has a name, a status, a version and a reason."""
        packages = [
            {
                "name": package.name,
                "status": _status(package),
                "version": package.version,
                "reason": package.reason,
            }
            for package in self.packages
        ]
        content = {"python": self.python, "platform": self.platform, "packages": packages}
        return json.dumps(content, indent=2)


def environment_report() -> EnvironmentReport:
    """Collect the report, without importing any of the packages.

    Of the requirements of a library, those on the packages of the report are checked; of the mcore
    distributions all are.

    Example:
        >>> report = environment_report()
        >>> [package.name for package in report.packages][:2]
        ['torch', 'transformer-engine']
    """
    watched = tuple(name for _, name in _LIBRARIES)
    states = [package_state(module, name, watched) for module, name in _LIBRARIES]
    states += [package_state(f"mcore.{part}", f"mcore-{part}") for part in _OWN]
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return EnvironmentReport(python, platform.platform(), tuple(states))


def _status(package: PackageState) -> str:
    if package.reason is not None:
        return UNUSABLE
    return NOT_INSTALLED if package.version is None else "installed"
