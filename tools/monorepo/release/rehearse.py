"""A rehearsal: check every archive, serve it from a local index, and install it as users would."""

from __future__ import annotations

import re
import shutil
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from packaging.version import Version

from monorepo.isolation.checks import check_siblings
from monorepo.isolation.venv import (
    CleanVenv,
    IsolationError,
    build,
    clean_environment,
    make_venv,
)
from monorepo.ranges import next_breaking
from monorepo.release.archives import archive_problems, build_archives, run_tool
from monorepo.workspace import Distribution, Workspace, load_workspace

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
        _map_in_threads(lambda one: build_archives(one, served), packages)
        _map_in_threads(lambda one: _check_archives(served, one), packages)
        yield (
            f"{len(packages)} wheels and sdists pass twine, check-wheel-contents, pyroma and "
            "validate-pyproject"
        )
        with _serve_index(served) as address:
            # uv would use archives of the same version from its cache.
            fresh = (f"--refresh-package={each}" for each in workspace.names)
            made = make_venv(scratch / "user", python, [f"torch=={torch}"])
            venv = replace(made, options=(f"--index={address}", *fresh))
            yield from (_install_alone(workspace, one, venv) for one in packages)
            yield from _mix_versions(workspace, scratch, venv)


def _map_in_threads(step: Callable[[Distribution], None], packages: Iterable[Distribution]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(step, packages))


def _check_archives(served: Path, package: Distribution) -> None:
    sdist = served / f"{package.name.replace('-', '_')}-{package.version}.tar.gz"
    problems = [
        *archive_problems(package, served),
        *run_tool(*_PYROMA, sdist),
        *run_tool("validate_pyproject", package.folder / "pyproject.toml"),
    ]
    if problems:
        raise IsolationError("\n".join(problems))


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def _serve_index(folder: Path) -> Iterator[str]:
    """Serve a folder of archives on this machine, on a free port."""
    import pypiserver

    app = pypiserver.app(roots=[folder], disable_fallback=True, backend_arg="simple-dir")
    with make_server("127.0.0.1", 0, app, _Server, _Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple/"
        finally:
            server.shutdown()


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


def _mix_versions(workspace: Workspace, scratch: Path, venv: CleanVenv) -> Iterator[str]:
    """Pin, upgrade and downgrade the lowest package and a dependant, and provoke a conflict."""
    base = workspace[workspace.names[0]]
    upper = workspace[workspace.direct_dependants(base.name)[0]]
    old = {one.name: one.version for one in (base, upper)}
    new = {
        name: Version(f"{each.major}.{each.minor}.{each.micro + 1}") for name, each in old.items()
    }
    breaking = Version(f"{next_breaking(base.version)}.0")
    # A compatible and an incompatible release of one package, and a compatible one of the other.
    for package, version in ((base, new[base.name]), (base, breaking), (upper, new[upper.name])):
        _serve_again(workspace, scratch, package, version)
    venv.install(f"{base.name}=={old[base.name]}", f"{upper.name}=={new[upper.name]}")
    _expect(venv, {base.name: old[base.name], upper.name: new[upper.name]})
    yield f"{base.name} and {upper.name} can be pinned to different versions"
    venv.install("--upgrade-package", base.name, base.name, upper.name)
    _expect(venv, new)
    yield f"{base.name} upgrades alone, and stays below {breaking}"
    venv.install(f"{upper.name}=={old[upper.name]}")
    _expect(venv, {base.name: new[base.name], upper.name: old[upper.name]})
    yield f"{upper.name} downgrades alone"
    yield _provoke_conflict(venv, f"{base.name}=={breaking}", f"{upper.name}=={old[upper.name]}")


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
    copied = load_workspace(root)[package.name]
    shutil.copy(build(copied.folder, "wheel", root / "built"), scratch / "served")


def _expect(venv: CleanVenv, wanted: Mapping[str, Version]) -> None:
    installed = venv.installed()
    found = {name: Version(installed[name]) for name in wanted}
    if found != wanted:
        texts = (
            ", ".join(f"{name} {version}" for name, version in versions.items())
            for versions in (wanted, found)
        )
        raise IsolationError("requested {}, installed {}".format(*texts))


def _provoke_conflict(venv: CleanVenv, base: str, upper: str) -> str:
    """Request two incompatible versions. The error has to show the range that excludes one."""
    try:
        venv.install(base, upper)
    except IsolationError as error:
        names = (re.escape(each.partition("==")[0]) for each in (upper, base))
        why = re.search(r"{}\S* depends on {}\S+".format(*names), str(error))
        if why is None or "unsatisfiable" not in str(error):
            raise IsolationError(f"an unclear refusal of {base} with {upper}: {error}") from error
        return f"{base} with {upper} is refused: {why[0]}"
    raise IsolationError(f"{base} can be installed with {upper}, whose range leaves it out")
