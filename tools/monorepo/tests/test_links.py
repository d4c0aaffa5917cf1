"""Links in documents, on a repository with planted faults."""

from pathlib import Path

import pytest

from monorepo.settings import broken_links, link_problems
from monorepo.tests.sample_repository import SampleRepository


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](other.md)", None),
        ("[a](other.md#two-words)", None),
        ("[a](#mcore-whats-in-it)\n\n# `mcore`: what's in it?\n", None),
        ("[a](#here)\n\n# Here\n", None),
        ("[a](/docs/other.md)", None),
        ("[a](../docs)", None),
        ("[a](https://example.com/nothing.md) [b](mailto:a@example.com)", None),
        ("`[a](gone.md)`\n\n```\n[a](gone.md)\n```\n", None),
        ("[a](gone.md)", "docs/page.md: gone.md leads to no file"),
        ("![a](gone.png)", "docs/page.md: gone.png leads to no file"),
        ('[a](gone.md "title")', "docs/page.md: gone.md leads to no file"),
        ("[a](other.md#three)", "docs/page.md: other.md#three leads to no heading"),
        ("[a](#gone)", "docs/page.md: #gone leads to no heading"),
    ],
)
def test_links_of_a_page(tmp_path: Path, text: str, problem: str | None) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "other.md").write_text("# Two words\n")
    (folder / "page.md").write_text(text)
    assert list(broken_links(tmp_path, folder / "page.md")) == ([problem] if problem else [])


def test_readmes_of_packages_are_read_on_an_index(tmp_path: Path) -> None:
    page = tmp_path / "packages/mcore-a/README.md"
    page.parent.mkdir(parents=True)
    page.write_text("[a](CHANGELOG.md) [b](#here)\n\n# Here\n")
    page.with_name("CHANGELOG.md").touch()
    [problem] = broken_links(tmp_path, page)
    assert problem.endswith("README.md: CHANGELOG.md leads nowhere from the page that a package "
                            "index shows")  # fmt: skip


def test_documents_that_git_ignores_are_left_out(tmp_path: Path) -> None:
    repository = SampleRepository(tmp_path)
    repository.write({"README.md": "[a](docs.md)\n", "docs.md": "x\n", ".gitignore": "ignored/\n"})
    repository.write({"ignored/page.md": "[a](gone.md)\n"})
    assert list(link_problems(tmp_path)) == []
    repository.write({"new.md": "[a](gone.md)\n"})
    assert list(link_problems(tmp_path)) == ["new.md: gone.md leads to no file"]
