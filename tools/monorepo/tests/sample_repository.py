"""A small repository in a temporary folder, for the tests of the programs that read one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_PYPROJECT = Path(__file__).with_name("sample_pyproject.txt").read_text(encoding="utf-8")


class SampleRepository:
    """A git repository with packages of a few lines each.

    Args:
        root: An empty folder, or one to make.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch=main")

    def add_package(
        self, name: str, *, version: str = "0.1.0", needs: tuple[str, ...] = (), code: str = ""
    ) -> None:
        """Write a package.

        Args:
            name: Such as ``mcore-tensor``.
            version: Its version.
            needs: Its requirements, as in its ``pyproject.toml``.
            code: The text of its ``__init__.py``.
        """
        module = name.replace("-", "/")
        dependencies = ", ".join(f'"{one}"' for one in needs)
        self.write(
            {
                f"packages/{name}/pyproject.toml": _PYPROJECT.format(
                    name=name, folder=module, dependencies=dependencies
                ),
                f"packages/{name}/README.md": f"# {name}\n",
                f"packages/{name}/LICENSE": "Apache-2.0\n",
                f"packages/{name}/CHANGELOG.md": (
                    f"# Changelog of {name}\n\n## {version} (2026-01-01)\n\n### Added\n\n- All.\n"
                ),
                f"packages/{name}/src/{module}/__init__.py": code,
                f"packages/{name}/src/{module}/py.typed": "",
            }
        )
        self.set_version(name, version)

    def set_version(self, name: str, version: str) -> None:
        """Rewrite the version file of a package."""
        module = name.replace("-", "/")
        file = f"packages/{name}/src/{module}/_version.py"
        self.write({file: f'__version__ = "{version}"\n'})

    def set_code(self, name: str, code: str) -> None:
        """Rewrite the ``__init__.py`` of a package."""
        self.write({f"packages/{name}/src/{name.replace('-', '/')}/__init__.py": code})

    def write(self, files: Mapping[str, str]) -> None:
        """Write files, by their paths relative to the root."""
        for path, text in files.items():
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def replace(self, path: str, old: str, new: str) -> None:
        """Replace the first occurrence of a text in a file, which has to contain it."""
        text = self.read(path)
        assert old in text, f"{old!r} is not in {path}"
        self.write({path: text.replace(old, new, 1)})

    def read(self, path: str) -> str:
        """The text of a file."""
        return (self.root / path).read_text(encoding="utf-8")

    def files(self) -> dict[str, str]:
        """The text of every file of the working tree."""
        found = (path for path in self.root.rglob("*") if path.is_file())
        return {
            path.relative_to(self.root).as_posix(): path.read_text(encoding="utf-8")
            for path in found
            if ".git" not in path.relative_to(self.root).parts
        }

    def commit(self, *tags: str) -> str:
        """Commit everything and tag it; returns the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "a step")
        for tag in tags:
            self.git("tag", tag)
        return self.git("rev-parse", "HEAD").strip()

    def git(self, *arguments: str) -> str:
        """Run git here, and return what it prints."""
        # No settings of the machine or of its user, such as signed commits or hooks.
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        # Maintenance would run in the background, while tests copy the repository.
        quiet = ["-c", "maintenance.auto=false", "-c", "gc.auto=0"]
        identity = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
        return subprocess.run(
            ["git", *quiet, *identity, *arguments], cwd=self.root, env={**os.environ, **settings},
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
