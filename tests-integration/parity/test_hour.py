"""The hour of the guide ``migrate.md``: all of its commands, on the tree that it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "tools/docs/pages/guides/migrate.md"
TITLE = "\n## Move an existing tree in an hour\n"
BLOCK = re.compile(r"^```(console|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_commands_of_the_guide_move_a_tree(tmp_path: Path) -> None:
    tree = shutil.copytree(HERE / "tree", tmp_path / "tree")
    command = tmp_path / "mcore-migrate"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mcore_migrate "$@"\n')
    command.chmod(0o755)
    places = {
        "PATH": [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]],
        "PYTHONPATH": [str(HERE), *sys.path],
    }
    environment = {**os.environ, **{name: os.pathsep.join(one) for name, one in places.items()}}
    section = PAGE.read_text().partition(TITLE)[2].partition("\n## ")[0]
    blocks, printed, start_s = BLOCK.findall(section), "", time.monotonic()
    assert len(blocks) == 7
    for kind, text in blocks:
        if kind == "text":
            assert printed == text
            continue
        printed = ""
        for line in text.splitlines():
            done = subprocess.run(
                ["bash", "-c", line], cwd=tree, env=environment, timeout=900, text=True,
                capture_output=True,
            )  # fmt: skip
            printed += done.stdout
            assert done.returncode == int("--check" in line), f"{line}: {printed}{done.stderr}"
    for name, package in {"before": "megatron", "served": "mcore", "moved": "mcore"}.items():
        lines = (tree / f"{name}.txt").read_text().splitlines()
        assert len({line for line in lines if re.search(r"\| lm loss: \d\.\d+ \|", line)}) == 20
        # The ranks share the file, so another one's line may come first.
        homes = [line for line in lines if line.startswith("divide is from ")]
        assert [home.split()[-1].partition(".")[0] for home in homes] == [package]
        assert {"rank0.pt", "rank1.pt", "checkpoint"} == set(os.listdir(tree / name))
    source = (tree / "pretrain_gpt.py").read_text()
    assert "mcore_megatron" not in source
    assert "from megatron.core.utils import (\n    unwrap_model,\n)\n" in source
    sys.stdout.write(f"the hour: {time.monotonic() - start_s:.0f} s\n")
