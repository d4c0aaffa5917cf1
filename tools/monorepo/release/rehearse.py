"""A rehearsal: check every archive, serve it from a local index, and install it as users would."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version

from monorepo.isolation.run import check_siblings
from monorepo.isolation.venv import CleanVenv, IsolationError, build, clean_environment, make_venv
from monorepo.ranges import next_breaking
from monorepo.release.verify import archive_problems, run_tool
from monorepo.workspace import Distribution, Workspace

# Only the owners of an index account know their public e-mail address.
_PYROMA = ("pyroma", "--min", "10", "--skip-tests", "AuthorEmail")
_FIRST_EXAMPLE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


def rehearse(workspace: Workspace, *, python: str, torch: str) -> Iterator[str]:
    """Rehearse a release of all packages. Yields a line per successful step."""
    with TemporaryDirectory(prefix="rehearsal-") as folder:
        scratch = Path(folder).resolve()
        served = scratch / "served"
        packages = list(workspace.distributions.values())
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda one: _publish(one, served), packages))
        yield f"{len(packages)} wheels and sdists pass twine, check-wheel-contents and pyroma"
        # uv would use archives of the same version from its cache.
        fresh = (f"--refresh-package={each}" for each in workspace.names)
        made = make_venv(scratch / "user", python, [f"torch=={torch}"])
        index = f"--index={(served / 'simple').as_uri()}"
        venv = replace(made, options=(*made.options, index, *fresh))
        yield from (_install_alone(workspace, one, venv) for one in packages)
        yield from _upgrade_alone(workspace, scratch, venv)


def _publish(package: Distribution, served: Path) -> None:
    """Build and check the archives of a package, and add them to a local index."""
    build(package.folder, served)
    sdist = served / f"{package.name.replace('-', '_')}-{package.version}.tar.gz"
    problems = [*archive_problems(package, served), *run_tool(*_PYROMA, sdist)]
    if problems:
        raise IsolationError("\n".join(problems))
    _list_archives(served, package)


def _list_archives(served: Path, package: Distribution) -> None:
    """Write the page of a package in a local index, with a link to each of its archives."""
    page = served / "simple" / package.name / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    archives = sorted(served.glob(f"{package.name.replace('-', '_')}-*"))
    links = (f'<a href="{file.as_uri()}">{file.name}</a>\n' for file in archives)
    page.write_text("".join(links), encoding="utf-8")


def _install_alone(workspace: Workspace, package: Distribution, venv: CleanVenv) -> str:
    """Install one package alone, then as its README shows, and run its first example."""
    venv.install("--exact", package.name)
    check_siblings(workspace, package, venv.installed())
    with_extras = set(find_installations(package)) - {package.name}
    if with_extras:
        venv.install(*with_extras)
    run_first_example(package, venv)
    brought = ", ".join(workspace.closure(package.name)) or "no sibling"
    return f"{package.name} alone brings {brought}, and its first example runs"


def find_installations(package: Distribution) -> list[str]:
    """The requirements after ``pip install`` in a README: the package, alone or with extras."""
    page = (package.folder / "README.md").read_text(encoding="utf-8").partition("```python")[0]
    found = re.findall(r"^pip install \"?([^\s\"]+)", page, re.MULTILINE)
    return [each for each in found if each.partition("[")[0] == package.name]


def run_first_example(package: Distribution, venv: CleanVenv) -> None:
    """Run the first example of a README, and compare its output with the page."""
    found = _FIRST_EXAMPLE.search((package.folder / "README.md").read_text(encoding="utf-8"))
    if found is None:
        raise IsolationError(f"the README of {package.name} has no example in Python")
    work = venv.folder / "work" / package.name
    work.mkdir(parents=True)
    done = subprocess.run(
        [venv.python, "-I", "-c", found["code"]],
        cwd=work, env=clean_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise IsolationError(f"the first example of {package.name} fails:\n{done.stderr}")
    if found["output"] not in (None, done.stdout):
        raise IsolationError(
            f"the first example of {package.name} prints\n{done.stdout}and not\n{found['output']}"
        )


def _upgrade_alone(workspace: Workspace, scratch: Path, venv: CleanVenv) -> Iterator[str]:
    """Upgrade the lowest package: to its compatible release, not to the one that breaks users."""
    base = workspace[workspace.names[0]]
    upper = workspace[workspace.direct_dependants(base.name)[0]]
    old = base.version
    compatible = Version(f"{old.major}.{old.minor}.{old.micro + 1}")
    breaking = Version(f"{next_breaking(old)}.0")
    for version in (compatible, breaking):
        _serve_again(workspace, scratch, base, version)
    venv.install(f"{base.name}=={old}", upper.name)
    venv.install("--upgrade-package", base.name, base.name, upper.name)
    installed = venv.installed()[base.name]
    if Version(installed) != compatible:
        raise IsolationError(
            f"with {upper.name}, {base.name} {old} upgrades to {installed} and not to {compatible}"
        )
    yield f"{base.name} upgrades alone, and stays below {breaking}"


def _serve_again(
    workspace: Workspace, scratch: Path, package: Distribution, version: Version
) -> None:
    """Add a package to the index under another version."""
    root = scratch / f"{package.name}-{version}"
    copy = root / package.folder.relative_to(workspace.root)
    shutil.copytree(package.folder, copy, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    file = copy / package.version_file.relative_to(package.folder)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(str(package.version), str(version)), encoding="utf-8")
    build(copy, scratch / "served", "--wheel")
    _list_archives(scratch / "served", package)
