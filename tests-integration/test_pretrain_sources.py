"""The files that are text of the main job: not its own outputs, and compressed ones as text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pretrain import sample
from pretrain.settings import Settings
from pretrain.text.cache import find_cache, make_cache, open_cache
from pretrain.text.sources import find_sources
from pretrain.usage import UsageError
from pretrain_runs import TINY, losses_of, pretrain

QUIET = (*TINY, "--no-mlflow", "--no-tensorboard", "--no-straggler", "--train-iters", "2")
LINE = "the cat sat on the mat. "


def test_a_text_folder_may_hold_the_runs_and_their_caches(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    (books / "a.txt").write_text(100 * LINE)
    for number in (1, 2):
        done = pretrain(books, *QUIET, "--data", ".", "--run-dir", f"runs/{number}")
        assert done.returncode == 0, done.stderr
        caches = sorted(path.suffix for path in (books / "runs" / "token-cache").iterdir())
        assert caches == [".bin", ".borders", ".json"]
    assert losses_of(books / "runs" / "1") == losses_of(books / "runs" / "2")
    assert find_sources(str(books)) == find_sources(str(books / "**" / "*")) == [books / "a.txt"]
    metrics = books / "runs" / "1" / "metrics.jsonl"
    assert find_sources(str(metrics)) == [metrics]  # a file that a user names is text
    resumed = pretrain(books, "--resume", "runs/1", "--train-iters", "3")
    assert resumed.returncode == 0, resumed.stderr


def test_compressed_files_are_read_or_refused(tmp_path: Path) -> None:
    record = json.dumps({"text": "on the mat"}).encode() + b"\n"
    texts = {
        "a.txt.gz": (gzip.compress(LINE.encode()), LINE.encode()),
        "b.jsonl.gz": (gzip.compress(2 * record), b"on the mat\non the mat\n"),
        "c.JSONL": (record, b"on the mat\n"),
        "d.JSONL.GZ": (gzip.compress(record), b"on the mat\n"),
        "e.ndjson": (record, b"on the mat\n"),
    }
    for name, (content, text) in texts.items():
        (tmp_path / name).write_bytes(content)
        settings = Settings(data=str(tmp_path / name))
        cache = find_cache(settings, tmp_path / "run")
        make_cache(settings, cache)
        assert bytes(open_cache(cache)[0]) == text, name
    damaged = gzip.compress(1000 * LINE.encode())
    for name, content, problem in (
        ("e.txt.gz", damaged[:-9], "cannot read .*e.txt.gz: Compressed file ended before"),
        ("f.txt.gz", b"no gzip", "cannot read .*f.txt.gz: Not a gzipped file"),
        ("g.txt.gz", damaged[:20] + b"\xff\xff\xff" + damaged[23:], "cannot read .*g.txt.gz: "),
        ("h.jsonl.zst", b"x", "h.jsonl.zst is compressed or no text: pass text or .jsonl files"),
        ("i.TXT.XZ", b"x", "i.TXT.XZ is compressed"),
        ("j.tar.gz", damaged, "j.tar.gz is compressed or no text"),
        ("k.parquet", b"PAR1", "k.parquet is compressed or no text"),
    ):
        (tmp_path / name).write_bytes(content)
        settings = Settings(data=str(tmp_path / name))
        with pytest.raises(UsageError, match=problem):
            make_cache(settings, find_cache(settings, tmp_path / "run"))


def test_an_empty_data_option_does_not_replace_the_text_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(100 * LINE)
    done = pretrain(tmp_path, *QUIET, "--data", "a.txt", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    refused = pretrain(tmp_path, "--resume", "run", "--data", "", "--train-iters", "3")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"--data '' differs from the run to resume, which has {tmp_path}/a.txt" in refused.stderr


@pytest.mark.parametrize("option", [["--top-k", "3"], ["--seed", "1"]])
def test_a_sample_without_draws_refuses_options_of_draws(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample.main(["--run", "nowhere", "x", *option]) == 2
    assert capsys.readouterr().err == (
        "sample: error: --top-k and --seed are for draws: pass --temperature too\n"
    )
