"""Packed documents in the main job: against each document alone in float64, in every layout."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from layouts.reference import Part, PlainGPT, loss_in_parts, parts_of, train_plain
from pretrain.corpus import Corpus, load_cached_corpus, load_corpus
from pretrain.settings import Settings
from pretrain.text.cache import find_cache, make_cache
from pretrain.usage import UsageError
from pretrain_runs import OFF, SMALL, TINY, curve_of, losses_of, pretrain, seen_here, train_here
from rank_testing import run_ranks

MULTIPLE = 8


def write_documents(path: Path, *, count: int) -> list[bytes]:
    """Write records of many lengths, from one byte to more than two windows."""
    draw = random.Random(7)
    lengths = [draw.choice((0, 4, 9, 20, 31, 70)) for _ in range(count)]
    texts = ["".join(draw.choices("abcdefgh \n", k=length)) for length in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [(text + "\n").encode() for text in texts]


def plain_curves(settings: Settings, documents: list[bytes]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of float64 steps that see each part of a document alone."""
    model = PlainGPT(settings).double()
    return train_plain(model, settings, loss_in_parts(model, settings, documents))


def train_layouts(cases: list[tuple[Settings, str]]) -> None:
    """Train layouts of one number of ranks, one after the other in one world."""
    for settings, run_dir in cases:
        train_here(settings, run_dir)


@pytest.mark.slow
def test_losses_and_norms_are_those_of_each_document_alone(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", count=150)
    shape = {**SMALL, "packed": True, "train_iters": 3}
    shape["data"] = str(tmp_path / "documents.jsonl")
    exact: list[dict[str, Any]] = [
        {"cp": 4},
        {"cp": 2, "tp": 2, "sequence_parallel": True, "recompute": True},
        {"cp": 2, "dp": 2, "fsdp": True, "micro_batch_size": 2},
        {"tp": 2, "dp": 2, "micro_batch_size": 1, "recompute": True},
        {"cp": 2, "dp": 2, "value_head": True},
    ]
    alone: list[dict[str, Any]] = [{}, {"cuda_graph": "local"}]
    cases = {
        number: (Settings(**{**shape, "dp": 1, **layout}), str(tmp_path / str(number)))
        for number, layout in enumerate([*exact, {"cp": 2, "tp": 2, "bf16": True}, *alone])
    }
    for world_size in (1, 4):
        run_ranks(
            train_layouts, world_size,
            [case for case in cases.values() if case[0].world_size == world_size], timeout_s=600,
        )  # fmt: skip
    wanted = {
        head: plain_curves(Settings(**{**shape, "value_head": head}), documents)
        for head in (False, True)
    }
    assert wanted[False][0][-1] < wanted[False][0][0] - 0.02
    for settings, run_dir in cases.values():
        losses, norms = wanted[settings.value_head]
        name = "value loss" if settings.value_head else "lm loss"
        # A bf16 number keeps 8 bits: 2**-9 of each at most is lost, and steps add up.
        near = 2e-2 if settings.bf16 else 1e-5
        assert losses_of(Path(run_dir), name) == pytest.approx(losses, rel=near), settings.layout
        told = list(curve_of(Path(run_dir), "grad-norm").values())
        assert told == pytest.approx(norms, rel=near), settings.layout


@examples(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 3),
    st.sampled_from([1, 2, 4]), st.integers(0, 5), st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_every_part_comes_once_an_epoch_in_any_layout(
    lengths: list[int], windows_long: int, multiple: int, seed: int, dp: int
) -> None:
    seq_length = 4 * windows_long
    values = iter(range(1, 2000))
    documents = [[next(values) for _ in range(length)] for length in lengths]
    expected = parts_of(documents, seq_length, multiple)
    text = np.array([token for document in documents for token in document], "<u2")
    borders = np.cumsum([0, *lengths])
    if max(lengths) < 2 or not expected:
        return
    whole = np.concatenate((text, np.array([1, 2], "<u2")))  # what is behind is to validate
    corpus = Corpus(text, whole[len(text) :], 0, each_once=True).packed(
        np.append(borders, len(whole)), multiple
    )
    settings = Settings(global_batch_size=4, seq_length=seq_length, seed=seed)
    drawn: list[list[Part]] = []
    for step in range(1, -(-2 * len(expected) // 4) + 1):
        weights = []
        for first in range(0, 4, 4 // dp):
            batch = corpus.training_batch(settings, slice(first, first + 4 // dp), step)
            weights.append(batch["loss_mask"])
            drawn += read_windows(batch)
        weight = torch.cat(weights)
        assert weight.unique().numel() <= 2
        assert not weight.any() or float(weight.mean()) == pytest.approx(1.0)
    for epoch in range(2):
        own = drawn[epoch * len(expected) : (epoch + 1) * len(expected)]
        assert Counter(map(repr, own)) == Counter(map(repr, expected))


def read_windows(batch: dict[str, torch.Tensor]) -> list[list[Part]]:
    """The parts of documents that a batch has by its borders, without what fills them up."""
    rows, seq_length = batch["tokens"].shape
    windows: list[list[Part]] = [[] for _ in range(rows)]
    borders = batch["cu_seqlens"].tolist()
    flat = {name: batch[name].flatten().tolist() for name in batch if name != "cu_seqlens"}
    for start, end in itertools.pairwise(borders):
        assert start // seq_length == (end - 1) // seq_length
        assert flat["position_ids"][start:end] == list(range(end - start))
        labels = [
            label if weight else -1
            for label, weight in zip(
                flat["labels"][start:end], flat["loss_mask"][start:end], strict=True
            )
        ]
        tokens = [token for token in flat["tokens"][start:end] if token]  # zeros fill up
        windows[start // seq_length].append((tokens, labels[: len(tokens)]))
        assert labels[len(tokens) :] == [-1] * (end - start - len(tokens))
    return windows


def test_a_resumed_run_sees_each_window_once_in_another_layout(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    texts = [f"{number:06d}" * (1 + number % 9) for number in range(99)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shape = {**SMALL, "num_layers": 1, "packed": True, "data": str(path)}
    settings = Settings(**shape | {"micro_batch_size": 2})
    cache = find_cache(settings, tmp_path / "run")
    make_cache(settings, cache)
    corpus = load_cached_corpus(settings, cache)
    windows = (len(corpus.train) - 1) // 32
    settings = dataclasses.replace(settings, train_iters=windows // 8)
    seen: list[tuple[int, ...]] = []
    for dp, cp, stop in ((2, 1, settings.train_iters // 2), (1, 2, 0)):
        start = dataclasses.replace(settings, dp=dp, cp=cp, exit_after=stop)
        of_ranks = run_ranks(seen_here, 2, start, str(tmp_path / "run"), resume=bool(seen))
        seen += [tuple(row) for rows in (of_ranks if dp == 2 else of_ranks[:1]) for row in rows]
    assert len(seen) == len(set(seen)) == windows // 8 * 8

    records = path.read_text().splitlines(keepends=True)
    path.write_text("".join(records).replace('{"text": "000001', '{"text": "\\n00001', 1))
    more = ["--resume", str(tmp_path / "run"), "--train-iters", "99"]
    refused = pretrain(tmp_path, *more)
    assert "differs from the text of the run to resume" in refused.stderr
    path.write_text("".join(records))
    refused = pretrain(tmp_path, *more, "--no-packed")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--packed False differs from the run to resume" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cp", "8"], "--document-multiple 8 is not divisible by 2 * --cp 16"),
        (["--document-multiple", "12"], "--seq-length 32 is not divisible by --document-multiple"),
        (["--data", "short.jsonl"], "no document has two tokens"),
    ],
)
def test_what_cannot_be_packed_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text(999 * '{"text": ""}\n')
    done = pretrain(tmp_path, *TINY, "--packed", *options, "--run-dir", "run")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_damaged_borders_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 99)
    settings = Settings(data=str(tmp_path / "a.txt"), packed=True, seq_length=32, **OFF)
    cache = find_cache(settings, tmp_path / "run")
    make_cache(settings, cache)
    for content in (b"", np.array([0, 7], "<i8").tobytes(), b"123"):
        cache.borders.write_bytes(content)
        with pytest.raises(UsageError, match=r"documents of the token cache .* remove it and"):
            load_cached_corpus(settings, cache)


def test_the_standard_library_has_a_document_for_each_file() -> None:
    corpus = load_corpus(0.05, MULTIPLE)
    plain = load_corpus()
    assert corpus.checksum != plain.checksum
    assert " MB in " in corpus.description
    batch = corpus.validation_batch(Settings(packed=True), slice(0, 16), 0)
    assert float(batch["loss_mask"].mean()) == pytest.approx(1.0)
