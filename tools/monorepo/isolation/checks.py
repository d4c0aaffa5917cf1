"""The modules and distributions that an environment must have, and must not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from monorepo.isolation.venv import CleanVenv, IsolationError
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
            if f'pip install "{distribution}[' not in str(error):  # the message names its extra
                raise
for other in absent:
    if importlib.util.find_spec(other) is not None:
        raise SystemExit(f"{other} can be imported, which {name} does not declare")
if not package.__file__.startswith(sys.prefix):
    raise SystemExit(f"{name} is imported from {package.__file__}, outside {sys.prefix}")
"""


def check_contents(workspace: Workspace, target: Distribution, venv: CleanVenv) -> None:
    """Check that an installation without extras has exactly the declared contents."""
    check_siblings(workspace, target, venv.installed())
    expected = {target.name, *workspace.closure(target.name)}
    others = [workspace[name] for name in workspace.names if name not in expected]
    check_imports(target, venv, [other.module for other in others])


def check_imports(target: Distribution, venv: CleanVenv, absent: Iterable[str] = ()) -> None:
    """Import every module of a distribution from its installation. ``absent`` must not be found.

    A module may refuse if its message names the extra to install.
    """
    try:
        venv.run_code(_IMPORT_ALL, target.module, target.name, *absent)
    except IsolationError as error:
        raise IsolationError(f"{target.name} cannot be imported:\n{error}") from error


def check_siblings(
    workspace: Workspace, target: Distribution, installed: Mapping[str, str]
) -> None:
    """Compare the installed packages with the declared ones, both ways."""
    expected = {target.name, *workspace.closure(target.name)}
    siblings = {*installed}.intersection(workspace.names)
    if siblings != expected:
        raise IsolationError(
            f"the installation of {target.name} brought {sorted(siblings - {target.name})}, but "
            f"its dependencies lead to {sorted(expected - {target.name})}"
        )
    # Requirements are transitive, so each sibling may be the package that needs torch.
    needs_torch = any(workspace[name].requires(TORCH) for name in expected)
    if (TORCH in installed) != needs_torch:
        raise IsolationError(
            f"{target.name} {'needs' if needs_torch else 'does not need'} torch, which is "
            f"{'missing' if needs_torch else 'installed'}"
        )
