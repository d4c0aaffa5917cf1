"""What an environment must contain beside a distribution, and what it must not contain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from monorepo.isolation.venv import CleanVenv
from monorepo.workspace import Distribution, Workspace

TORCH = "torch"

_IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
name, distribution, *absent = sys.argv[1:]
package = importlib.import_module(name)
for module in pkgutil.walk_packages(package.__path__, name + "."):
    if not module.name.endswith(".__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if f'pip install "{distribution}[' not in str(error):  # the extra that it needs
                raise
for other in absent:
    if importlib.util.find_spec(other) is not None:
        raise SystemExit(f"{other} can be imported, which {name} does not declare")
if not package.__file__.startswith(sys.prefix):
    raise SystemExit(f"{name} comes from {package.__file__}, which is outside {sys.prefix}")
"""


class IsolationError(RuntimeError):
    """A distribution does not stand alone."""


def check_contents(workspace: Workspace, target: Distribution, venv: CleanVenv) -> None:
    """Check an installation without extras against exactly what the distribution declares."""
    check_siblings(workspace, target, venv.installed())
    expected = {target.name, *workspace.closure(target.name)}
    others = [workspace[name] for name in workspace.names if name not in expected]
    absent = [other.module for other in others]
    check_imports(target, venv, absent)


def check_imports(target: Distribution, venv: CleanVenv, absent: Iterable[str] = ()) -> None:
    """Import every module of a distribution from its installation; ``absent`` must not be found.

    A module may refuse, if it names the extra that it needs.
    """
    try:
        venv.run_code(_IMPORT_ALL, target.module, target.name, *absent)
    except RuntimeError as error:
        raise IsolationError(f"{target.name} cannot be imported:\n{error}") from error


def check_siblings(
    workspace: Workspace, target: Distribution, installed: Mapping[str, str]
) -> None:
    """Compare what is installed with what the files of the distributions say, both ways."""
    found = set(installed)
    expected = {target.name, *workspace.closure(target.name)}
    siblings = found.intersection(workspace.names)
    if siblings != expected:
        raise IsolationError(
            f"{target.name} came with {sorted(siblings - {target.name})}; its dependencies lead "
            f"to {sorted(expected - {target.name})}"
        )
    needs_torch = any(workspace[name].requires(TORCH) for name in expected)
    if (TORCH in found) != needs_torch:
        raise IsolationError(
            f"{target.name} {'needs' if needs_torch else 'does not need'} torch, which is "
            f"{'installed' if TORCH in found else 'missing'} beside it"
        )
