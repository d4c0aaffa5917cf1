"""One's own text in the main job: its files, tokens, cache and order, and what continues it."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from pretrain import sample
from pretrain.corpus import Corpus, load_corpus, load_text
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.text.cache import find_cache, make_cache, open_cache
from pretrain.text.sources import find_sources
from pretrain.text.tokenizer import open_tokenizer
from pretrain.usage import UsageError
from pretrain.windows import permute, starts_in_order
from pretrain_runs import OFF, SMALL, TINY, curve_of, losses_of, pretrain, seen_here
from rank_testing import run_ranks
from rank_testing.scripts import run_script

LINE = "the cat sat on the mat. "
QUICK = [*TINY, "--no-mlflow", "--no-tensorboard", "--no-straggler", "--train-iters", "2"]


def write_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer of whole words whose numbers have gaps, the highest being 300."""
    words = {"[UNK]": 0, "the": 3, "cat": 7, "sat": 9, "on": 260, "mat": 300, ".": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return tokenizer


@examples(deadline=None, max_examples=30)
@given(st.integers(1, 3000), st.text(max_size=5))
@example(1, "")
@example(4096, "")
@example(4097, "")
def test_a_permutation_has_every_place_once(size: int, key: str) -> None:
    order = permute(np.arange(size), size, key)
    assert sorted(order.tolist()) == list(range(size))
    if size > 100:
        assert order.tolist() != permute(np.arange(size), size, f"{key}x").tolist()
        assert order.tolist() != list(range(size))
        some = np.array([size - 1, 0, size // 2])
        assert permute(some, size, key).tolist() == order[some].tolist()


@examples(deadline=None, max_examples=40)
@given(
    st.integers(1, 9), st.integers(21, 200), st.integers(0, 5), st.permutations([1, 2, 4]),
    st.booleans(),
)  # fmt: skip
def test_every_window_comes_once_an_epoch_in_any_layout_and_after_a_resume(
    seq_length: int, num_tokens: int, seed: int, sizes: list[int], halves: bool
) -> None:
    text = np.arange(num_tokens, dtype="<u2")
    corpus = Corpus(text, text, 0, each_once=True)
    windows = [tuple(text[at : at + seq_length + 1].tolist())
               for at in range(0, num_tokens - seq_length, seq_length)]  # fmt: skip
    settings = Settings(global_batch_size=8, seq_length=seq_length, seed=seed)
    steps = -(-3 * len(windows) // 8)
    drawn = []
    for step in range(1, steps + 1):
        dp = sizes[step % 3]  # as if each step were of another start
        rows = 8 // dp
        cut = max(1, rows // 2) if halves else rows
        for first in range(0, 8, cut):
            batch = corpus.training_batch(settings, slice(first, first + cut), step)
            drawn += [
                (*tokens, labels[-1])
                for tokens, labels in zip(
                    batch["tokens"].tolist(), batch["labels"].tolist(), strict=True
                )
            ]
    for epoch in range(3):
        own = drawn[epoch * len(windows) : (epoch + 1) * len(windows)]
        assert collections.Counter(own) == collections.Counter(windows)


def test_the_order_follows_from_seed_and_epoch() -> None:
    orders = [
        tuple(starts_in_order(201, seq_length=2, seed=seed, first=first, count=100).tolist())
        for seed, first in ((1, 0), (1, 100), (2, 0), (1, 0))
    ]
    assert len(set(orders)) == 3
    assert orders[0] == orders[3] != tuple(range(0, 200, 2))


def test_ranks_see_every_window_once_whatever_the_layouts_of_the_starts(tmp_path: Path) -> None:
    numbers = b"".join(number.to_bytes(2, "big") for number in range(1, 1215))
    (tmp_path / "text.bin").write_bytes(numbers)
    split = int(len(numbers) * 0.95)
    expected = [list(numbers[at : at + 32]) for at in range(0, split - 32, 32)]
    shape = {**SMALL, "num_layers": 1, "data": str(tmp_path / "text.bin")}
    settings = Settings(**shape | {"train_iters": len(expected) // 8, "micro_batch_size": 2})
    seen = []
    for dp, stop in ((2, 4), (1, 0)):
        start = dataclasses.replace(settings, dp=dp, exit_after=stop)
        of_ranks = run_ranks(seen_here, dp, start, str(tmp_path / "run"), resume=bool(seen))
        seen += [row for rows in of_ranks for row in rows]
    assert len(seen) == 9 * 8
    assert sorted(seen) == sorted(expected)
    assert len(list((tmp_path / "token-cache").iterdir())) == 3  # made once, beside the run


def test_a_run_learns_ones_own_tokens_and_goes_on_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = write_tokenizer(tmp_path / "words.json")
    (tmp_path / "books").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "books" / name).write_text(150 * LINE)
    options = ["--data", "books/*.txt", "--tokenizer", "words.json", "--tp", "2"]
    shape = [*QUICK, "--train-iters", "40", "--lr", "1e-2", "--seq-length", "16", "--untied"]
    done = pretrain(tmp_path, *shape, *options, "--run-dir", "run", "--data-cache", "cache")
    assert done.returncode == 0, done.stderr
    assert "nats per token)" in done.stdout
    losses = losses_of(tmp_path / "run")
    assert losses[0] == pytest.approx(math.log(301), rel=0.1)
    settings = Settings(**json.loads((tmp_path / "run" / "config.json").read_text())["settings"])
    assert settings.vocabulary_size == 301

    [written] = (tmp_path / "cache").glob("*.bin")
    tokens = 2 * tokenizer.encode(150 * LINE).ids
    assert np.fromfile(written, "<u2").tolist() == tokens
    assert f" {int(0.95 * len(tokens)):,} tokens to train on, " in done.stdout

    model = sample.load_model(dataclasses.replace(settings, tp=1), RunFolder(tmp_path / "run"))
    cached, _ = open_cache(find_cache(settings, tmp_path / "run"))
    corpus = Corpus(cached, cached[int(len(cached) * 0.95) :], 0)
    batch = corpus.validation_batch(settings, slice(0, 8), 0)
    with torch.no_grad():
        logits = model(batch["tokens"], batch["position_ids"])[..., :301].permute(1, 2, 0)
    [validation] = curve_of(tmp_path / "run", "lm loss validation").values()
    told = torch.nn.functional.cross_entropy(logits, batch["labels"])
    assert float(told) == pytest.approx(validation, rel=1e-4)

    run = ["--run", str(tmp_path / "run"), "--tokens", "7"]
    for more in ([], ["--temperature", "9", "--top-k", "1"]):
        assert sample.main([*run, "the cat", *more]) == 0
        assert capsys.readouterr().out == "the cat sat on the mat . the cat\n"
    drawn = []
    for seed in "1123":
        assert sample.main([*run, "the cat", "--temperature", "9", "--seed", seed]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3

    resumed = ["--resume", "run", "--train-iters", "41"]
    (tmp_path / "words.json").write_text((tmp_path / "words.json").read_text() + "\n")
    refused = pretrain(tmp_path, *resumed)
    assert refused.returncode == 2
    assert "differs from the tokenizer of the run to resume" in refused.stderr
    assert sample.main([*run, "the cat"]) == 2
    assert "differs from the tokenizer of the run" in capsys.readouterr().err
    write_tokenizer(tmp_path / "words.json")
    with (tmp_path / "books" / "b.txt").open("a") as book:
        book.write(LINE)
    refused = pretrain(tmp_path, *resumed)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "differs from the text of the run to resume" in refused.stderr


def refusals_here(settings: Settings, run_dir: str) -> list[str]:
    """What this rank is told of a text that only the first rank reads, and of one without cache."""
    told = []
    for local in (None, "1"):  # None: as the launcher has set it
        with (
            mock.patch.dict("os.environ", {} if local is None else {"LOCAL_RANK": local}),
            pytest.raises(UsageError) as refused,
        ):
            load_text(settings, Path(run_dir))
        told.append(str(refused.value))
    return told


def test_what_one_rank_cannot_read_all_ranks_refuse(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"texts": "a"}\n')
    settings = Settings(data=str(tmp_path / "a.jsonl"), **OFF)
    one, other = run_ranks(refusals_here, 2, settings, str(tmp_path / "run"))
    assert one == other
    assert "a.jsonl, line 1 has no text in a field 'text'" in one[0]
    assert "cannot be read" in one[1]


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({}, "--data no*.txt", "no*.txt: no file matches"),
        ({"a.txt": b"x" * 200}, "--data a.txt", "of its 200 bytes, 190 are for training and 10"),
        ({"a.txt": b""}, "--data a.txt", "a.txt: it contains no text"),
        (
            {"a.txt": b"the\ncat \xe9t\n" * 99}, "--data a.txt --tokenizer words.json",
            "a.txt is not UTF-8, which --tokenizer needs: invalid continuation byte, byte 8",
        ),
        ({"a.jsonl": b'{"text": "a"}\n\n{"test": 1}\n'}, "--data a.jsonl", "line 3 has no"),
        ({"a.jsonl": b'{"body": "a"}\n{\n'}, "--data a.jsonl --field body", "line 2 is not JSON"),
        ({"a.jsonl": b"[" * 200_000}, "--data a.jsonl", "line 1 is not JSON (maximum recursion"),
        ({"a.jsonl": b'{"text": "\\ud800"}'}, "--data a.jsonl", "1: its text is not"),
        ({"a.txt": b"a"}, "--data a.txt --tokenizer a.txt", "a.txt is not a tokenizer file"),
        ({"a.txt": b"a"}, "--data a.txt --tokenizer b.json", "cannot read"),
        ({"a.txt": b"a"}, "--data a.txt --data-cache a.txt", "cannot write the token cache"),
        ({"a.txt": b"a"}, "--data a.txt --validation-share 1", "must be between 0 and 1, got 1.0"),
        ({}, "--tokenizer words.json", "pass the text with --data"),
    ],
)  # fmt: skip
def test_a_text_that_cannot_be_used(
    files: dict[str, bytes], options: str, message: str, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "words.json")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    done = pretrain(tmp_path, *QUICK, *options.split(), "--run-dir", "run")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run").exists()
    assert not [*tmp_path.rglob("*.partial")]


def test_what_is_no_regular_file_is_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is not a regular file"):
        find_sources(str(tmp_path / "pipe"))
    code = f"import pretrain.text.tokenizer as t; t.open_tokenizer({str(tmp_path / 'pipe')!r})"
    done = run_script(code)
    assert "pipe is not a regular file" in done.stderr


@pytest.mark.parametrize("data", ["/", "/proc/**/*"])
def test_a_text_of_too_many_files_is_refused_without_looking_at_all_of_them(data: str) -> None:
    code = f"""
from unittest.mock import patch
from pretrain.text import sources
with patch.object(sources, "_MOST_NAMES", 500), patch("pathlib.Path.is_file", exit):
    sources.find_sources({data!r})
"""
    assert "500 files or more. Join texts in .jsonl" in run_script(code).stderr


def test_a_cache_is_used_again_until_a_file_or_the_tokenizer_changes(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    (folder / "in").mkdir(parents=True)
    (folder / ".hidden").write_text("no")
    (folder / "b.txt").write_bytes(b"two\r\n")
    (folder / "a.jsonl").write_text('{"text": "on\\u00e9"}\n \n{"text": "", "x": 1}\n')
    (folder / "in" / "c").write_bytes(b"\xff")
    settings = Settings(data=str(folder), **OFF)
    cache = find_cache(settings, tmp_path / "run")
    make_cache(settings, cache)
    tokens, checksum = open_cache(cache)
    assert bytes(tokens) == "on\u00e9\n\ntwo\r\n".encode() + b"\xff"

    made = cache.tokens.stat()
    make_cache(settings, find_cache(settings, tmp_path / "other"))
    assert (cache.tokens.stat().st_ino, cache.tokens.stat().st_mtime_ns) == (
        made.st_ino, made.st_mtime_ns,
    )  # fmt: skip
    (folder / "in" / "c").write_bytes(b"\xfe")
    os.utime(folder / "in" / "c", ns=(0, 0))  # the clock of files may not have moved meanwhile
    changed = find_cache(settings, tmp_path / "run")
    make_cache(settings, changed)
    assert changed.key != cache.key
    assert open_cache(changed)[1] != checksum
    write_tokenizer(tmp_path / "words.json")
    digest = open_tokenizer(str(tmp_path / "words.json")).digest
    other = find_cache(dataclasses.replace(settings, tokenizer_digest=digest), tmp_path / "run")
    assert other.key != changed.key

    cache.tokens.write_bytes(b"short")
    with pytest.raises(UsageError, match=r"cannot be read .*: remove it and"):
        open_cache(cache)


def test_the_built_in_text_is_cut_as_before() -> None:
    corpus = load_corpus()
    total = len(corpus.train) + len(corpus.validation)
    assert len(corpus.train) == int(total * 0.95)
    assert len(load_corpus(0.25).validation) == total - int(total * 0.75)
