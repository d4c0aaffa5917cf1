"""Every input of the corpus: no error, at most 2 seconds of the CPU and 200 MB."""

import mmap
import os
import resource
import tempfile
import traceback
from pathlib import Path

import pytest

from fuzz.__main__ import MOST_MB, MOST_SECONDS
from fuzz.corpus import read_corpus
from fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_of_the_corpus_does_harm(name: str, tmp_path: Path) -> None:
    TARGETS[name](b"", tmp_path)  # imports and servers come first
    for number, content in enumerate(read_corpus(name, tmp_path)):
        assert _harm(name, content) == "", f"input {number}: {content[:80]!r}"


def test_harm_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def waste(content: bytes, folder: Path) -> None:
        while content == b"loop":
            pass
        # Memory that the process had not, not even free.
        size = mmap.mmap(-1, 2 * MOST_MB << 20).write(bytes(2 * MOST_MB << 20))
        if content == b"error":
            raise KeyError(size)

    monkeypatch.setitem(TARGETS, "config", waste)
    assert "KeyError" in _harm("config", b"error")
    assert "MB" in _harm("config", b"memory")
    monkeypatch.setattr(f"{__name__}.MOST_SECONDS", 0)
    assert "signal" in _harm("config", b"loop")


def _harm(name: str, content: bytes) -> str:
    """The error or the exceeded limit of an input, in a separate process, or an empty text."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS + 1, MOST_SECONDS + 1))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = ""
        try:
            with tempfile.TemporaryDirectory() as folder:
                TARGETS[name](content, Path(folder))
        except BaseException:
            said = traceback.format_exc()[-2000:]
        used_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        os.write(writing, (said or (f"{used_mb} MB" if used_mb > MOST_MB else "")).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    return said or (f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "")
