"""Tests of the check that workflows name actions by commit."""

from pathlib import Path

import pytest

from monorepo.pinned_actions import loose_actions, main

COMMIT = "11bd71901bbe5b1630ceea73d27597364c9af683"


def test_workflows_of_this_repository_are_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "pinned"),
    [
        (f"      - uses: actions/checkout@{COMMIT} # v4.2.2", True),
        (f'        uses: "owner/name/folder@{COMMIT}"  # v1', True),
        ("      - uses: ./.github/actions/own", True),
        ("      - run: echo uses", True),
        ("      - uses: actions/checkout@v4", False),
        ("      - uses: actions/checkout@main # v4.2.2", False),
        (f"      - uses: actions/checkout@{COMMIT[:39]} # v4.2.2", False),
        (f"      - uses: actions/checkout@{COMMIT}", False),
        ("      - uses: docker://alpine:3.20", False),
    ],
)
def test_commit_and_release_are_both_needed(tmp_path: Path, line: str, pinned: bool) -> None:
    file = tmp_path / "ci.yml"
    file.write_text(f"jobs:\n{line}\n")
    problems = list(loose_actions(file))
    assert len(problems) == (0 if pinned else 1)
    assert all(problem.startswith("ci.yml:2: ") for problem in problems)


def test_loose_action_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    (folder / "a.yaml").write_text("- uses: owner/name@v1\n")
    assert main(["--root", str(tmp_path)]) == 1
    assert "a.yaml:1: owner/name@v1 has to be OWNER/NAME@COMMIT" in capsys.readouterr().out
