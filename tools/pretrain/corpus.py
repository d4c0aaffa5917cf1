"""The text (the standard library of Python or the user's) and the batches drawn from it."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mcore.parallel.agreement import gathered_reports
from pretrain.packing import PackedText
from pretrain.settings import Settings
from pretrain.text.cache import (
    TokenCache,
    check_text,
    find_cache,
    make_cache,
    open_cache,
    read_borders,
)
from pretrain.usage import UsageError
from pretrain.windows import Batch, Text, batch_at, starts_in_order

Result = TypeVar("Result")
_DEFAULT_SHARE = 0.05
_LEAST_IN_MILLIONS = 100_000
_LONGEST_WAIT = datetime.timedelta(days=7)
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Two parts of a text as unsigned integers, and a checksum of the whole text.

    Training batches have random windows, or with ``each_once`` every window once per epoch.
    ``surplus`` is the number of samples that earlier steps took beyond those of steps of this size.
    """

    train: Text
    validation: Text
    checksum: int
    unit: str = "bytes"
    each_once: bool = False
    surplus: int = 0

    @property
    def description(self) -> str:
        """The lengths of the two parts."""
        train, validation = map(self._describe_length, (self.train, self.validation))
        return f"{train} to train on, {validation} to validate"

    def training_batch(self, settings: Settings, rows: slice, step: int) -> Batch:
        """The rows of a step (from 1), equal in every layout and after a resume.

        With ``each_once`` they start after the samples of the earlier steps.
        """
        if not self.each_once:
            return draw_batch(self.train, settings, rows, settings.seed, step)
        starts = starts_in_order(
            len(self.train), seq_length=settings.seq_length, seed=settings.seed,
            first=self.surplus + (step - 1) * settings.global_batch_size,
            count=settings.global_batch_size,
        )  # fmt: skip
        return batch_at(self.train, starts, rows, settings.seq_length)

    def validation_batch(self, settings: Settings, rows: slice, number: int) -> Batch:
        """Rows of a validation batch (from 0) of random windows."""
        return draw_batch(self.validation, settings, rows, settings.seed + 1, number)

    def packed(self, borders: NDArray[Any], multiple: int) -> Corpus:
        """The text with packed documents. Raises UsageError if no document has a target."""
        split = len(self.train)
        parts = []
        for text, first in ((self.train, 0), (self.validation, split)):
            part = PackedText(np.asarray(text), (borders - first).clip(0, len(text)), multiple)
            if not part.num_labels:
                raise UsageError("--packed: no document has two tokens, the fewest to learn from")
            parts.append(part)
        checksum = zlib.crc32(borders.astype("<i8").tobytes(), self.checksum)
        train, validation = parts
        return dataclasses.replace(self, train=train, validation=validation, checksum=checksum)

    def _describe_length(self, part: Text) -> str:
        if isinstance(part, PackedText):
            return f"{self._format_amount(len(part.tokens))} in {part.num_documents} documents"
        return self._format_amount(len(part))

    def _format_amount(self, count: int) -> str:
        if count < _LEAST_IN_MILLIONS:
            return f"{count:,} {self.unit}"
        return f"{count / 1e6:.1f} {'MB' if self.unit == 'bytes' else f'M {self.unit}'}"


def load_text(settings: Settings, run_dir: Path, resumed: Path | None = None) -> Corpus:
    """The text of a run. With ``--data`` collective on the world.

    The first rank of each node writes a missing cache of tokens while the others wait. A failure
    on one rank raises UsageError on all ranks.
    """
    multiple = settings.document_multiple if settings.packed else 0
    if not settings.data:
        return load_corpus(settings.validation_share, multiple)
    # Tokenizing may take longer than the timeout of a run's collectives.
    patient_group = dist.new_group(timeout=_LONGEST_WAIT, backend="gloo")

    def make() -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            make_cache(settings, find_cache(settings, run_dir), resumed)

    run_on_all(make, patient_group)
    corpus = run_on_all(
        lambda: load_cached_corpus(settings, find_cache(settings, run_dir)), patient_group
    )
    dist.destroy_process_group(patient_group)
    return corpus


def run_on_all(work: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """Run ``work`` on all ranks of a group. An error on one rank is raised on all ranks."""
    results: list[Result] = []
    report = None
    try:
        results.append(work())
    except UsageError as error:
        report = str(error)
    for failure in gathered_reports(report, group).values():
        raise UsageError(failure)
    return results[0]


def load_cached_corpus(settings: Settings, cache: TokenCache) -> Corpus:
    """The text of ``--data`` from an existing cache. Raises UsageError if it is too short."""
    tokens, checksum = open_cache(cache)
    kind = "tokens" if settings.tokenizer_digest else "bytes"
    split = _split_text(f"--data {settings.data}", len(tokens), kind, settings)
    corpus = Corpus(tokens[:split], tokens[split:], checksum, kind, each_once=True)
    if settings.packed:
        return corpus.packed(read_borders(cache), settings.document_multiple)
    return corpus


def check_same_text(corpus: Corpus, device: torch.device, resumed: Path | None) -> None:
    """Raise UsageError on all ranks if their texts differ, or differ from the resumed run's text.

    One all-reduce over the world.
    """
    # The maxima of x and -x are equal in magnitude only if x is equal on all ranks.
    facts = torch.tensor([corpus.checksum, -corpus.checksum], device=device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    if facts[0] != -facts[1]:
        raise UsageError(
            "the ranks read different texts: start them all with the same Python version, or the "
            "same files of --data"
        )
    if resumed is not None:
        check_text(corpus.checksum, resumed)


def standard_library_files() -> list[os.DirEntry[str]]:
    """Sources of the standard library in sorted order, without tests and installed packages."""
    folders, found = [sysconfig.get_path("stdlib")], []
    for folder in folders:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                folders += [entry.path] * (entry.name not in _LEFT_OUT)  # those may be large
            elif entry.name.endswith(".py"):
                found.append(entry)
    return sorted(found, key=lambda entry: entry.path)


def require_text(settings: Settings) -> None:
    """Raise UsageError if the built-in text is too short. Reads only the sizes of the files."""
    total = sum(entry.stat().st_size for entry in standard_library_files())
    _split_text("the standard library", total, "bytes", settings)


def _split_text(source: str, count: int, kind: str, settings: Settings) -> int:
    """The place where the validation text begins. Raises UsageError if a part is too short."""
    split = int(count * (1 - settings.validation_share))
    if min(split, count - split) <= settings.seq_length:
        raise UsageError(
            f"{source}: of its {count} {kind}, {split} are for training and {count - split} for "
            f"validation, but both must be above --seq-length {settings.seq_length}"
        )
    return split


def load_corpus(validation_share: float = _DEFAULT_SHARE, document_multiple: int = 0) -> Corpus:
    """Read and concatenate the files of the standard library. The end is for validation.

    With a ``document_multiple`` each file is a packed document.
    """
    data, borders = bytearray(), [0]
    for entry in standard_library_files():
        with open(entry, "rb", buffering=0) as file:
            data += file.readall()
        borders.append(len(data))
    text = torch.frombuffer(data, dtype=torch.uint8)
    split = int(len(data) * (1 - validation_share))
    corpus = Corpus(text[:split], text[split:], zlib.crc32(data))
    return corpus.packed(np.array(borders), document_multiple) if document_multiple else corpus


def draw_batch(text: Text, settings: Settings, rows: slice, seed: int, step: int) -> Batch:
    """Draw rows of the batch of one step, equal in every layout and after a resume."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    possible = len(text) - settings.seq_length
    starts = torch.randint(possible, (settings.global_batch_size,), generator=generator)
    return batch_at(text, starts, rows, settings.seq_length)
