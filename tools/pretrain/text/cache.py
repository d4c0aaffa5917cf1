"""The tokens of one's own text in a file that is made once and mapped into memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from pretrain.settings import Settings
from pretrain.text.sources import find_sources, is_jsonl, read_pieces
from pretrain.text.tokenizer import Tokenizer, open_tokenizer
from pretrain.usage import UsageError

_FORMAT = 2
_BATCH_BYTES = 8 << 20
_Piece = tuple[Path, bytes, int]


@dataclass(frozen=True)
class TokenCache:
    """The cache of one text and tokenizer: three files, of which ``KEY.json`` is written last."""

    folder: Path
    key: str

    @property
    def tokens(self) -> Path:
        """The numbers, one after the other."""
        return self.folder / f"{self.key}.bin"

    @property
    def borders(self) -> Path:
        """Where each document starts, and where the last one ends."""
        return self.folder / f"{self.key}.borders"

    @property
    def facts(self) -> Path:
        """Their type, how many there are, and their checksum."""
        return self.folder / f"{self.key}.json"


def find_cache(settings: Settings, run_dir: Path) -> TokenCache:
    """Where the tokens of the settings' text are, or are to be: by default beside the run.

    The key follows from the name, size and time of each file, and from the tokenizer.
    """
    sources = [
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in find_sources(settings.data)
    ]
    named = json.dumps([_FORMAT, settings.tokenizer_digest, settings.field, sources])
    folder = Path(settings.data_cache) if settings.data_cache else run_dir.absolute().parent
    return TokenCache(
        folder if settings.data_cache else folder / "token-cache",
        hashlib.sha256(named.encode()).hexdigest()[:24],
    )


def make_cache(settings: Settings, cache: TokenCache) -> None:
    """Write the cache unless it is there; nothing appears under its name before it is whole."""
    if cache.facts.exists():
        return
    tokenizer = open_tokenizer(settings.tokenizer)
    try:
        cache.folder.mkdir(parents=True, exist_ok=True)
        with _replacing(cache.tokens) as file:
            facts, borders = _write(file, settings, tokenizer)
        with _replacing(cache.borders) as file:
            file.write(np.array(borders, "<i8").tobytes())
        with _replacing(cache.facts) as file:
            file.write(json.dumps(facts).encode())
    except OSError as error:
        raise UsageError(
            f"cannot write the token cache {cache.tokens}: {error.strerror}; name another folder "
            "with --data-cache"
        ) from None


def open_cache(cache: TokenCache) -> tuple[NDArray[Any], int]:
    """The tokens, mapped and read-only, and their checksum; UsageError where they are damaged."""
    try:
        facts = json.loads(cache.facts.read_text())
        kind, count, checksum = np.dtype(facts["kind"]), int(facts["count"]), int(facts["crc32"])
        if cache.tokens.stat().st_size != count * kind.itemsize:
            raise ValueError(f"{count} tokens of {kind.itemsize} bytes were written")
        return np.memmap(cache.tokens, kind, "r", shape=(count,)), checksum
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the token cache {cache.tokens} cannot be read ({error}): remove it and "
            f"{cache.facts.name} to have it made again"
        ) from None


def read_borders(cache: TokenCache) -> NDArray[Any]:
    """Where each document starts, and where the last one ends; UsageError where it is damaged."""
    try:
        borders = np.fromfile(cache.borders, "<i8")
        if not len(borders) or borders[-1] != json.loads(cache.facts.read_text())["count"]:
            raise ValueError("they do not end where the tokens do")
        return borders
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the documents of the token cache {cache.borders} cannot be read ({error}): remove "
            f"it and {cache.facts.name} to have it made again"
        ) from None


def _write(
    file: IO[bytes], settings: Settings, tokenizer: Tokenizer
) -> tuple[dict[str, Any], list[int]]:
    kind = _smallest_kind(tokenizer.vocabulary_size)
    sources = find_sources(settings.data)
    count = checksum = 0
    borders: list[int] = []
    last: Path | None = None
    total = sum(path.stat().st_size for path in sources)
    with _bar(total, quiet=settings.quiet) as bar:
        pieces = ((path, *piece) for path in sources for piece in read_pieces(path, settings.field))
        for batch in _batches(pieces):
            for (path, _, _), numbers in zip(batch, _encoded(tokenizer, batch), strict=True):
                if path != last or is_jsonl(path):
                    borders.append(count)
                    last = path
                written = numbers.astype(kind, copy=False).tobytes()
                file.write(written)
                count, checksum = count + len(numbers), zlib.crc32(written, checksum)
            bar.update(sum(taken for _, _, taken in batch))
    if not count:
        raise UsageError(f"--data {settings.data}: there is no text in it")
    return {"kind": kind, "count": count, "crc32": checksum}, [*borders, count]


def _encoded(tokenizer: Tokenizer, batch: list[_Piece]) -> list[NDArray[Any]]:
    try:
        return tokenizer.encode([piece for _, piece, _ in batch])
    except UnicodeDecodeError:
        for path, piece, _ in batch:
            try:
                piece.decode()
            except UnicodeDecodeError as error:
                told = f"{path} is not UTF-8, which --tokenizer needs: {error.reason}, "
                place = f"byte {error.start} of {piece[error.start - 20 : error.end]!r}"
                raise UsageError(f"--data: {told}{place}") from None
        raise


def _smallest_kind(vocabulary_size: int) -> str:
    """The little-endian type that holds every number of a vocabulary."""
    if vocabulary_size <= 1 << 8:
        return "<u1"
    return "<u2" if vocabulary_size <= 1 << 16 else "<u4"


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in lists of about 8 MiB, which a tokenizer's threads share."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the name when the block ends, and goes when it fails."""
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _bar(total_bytes: int, *, quiet: bool) -> tqdm[Any]:
    return tqdm(
        total=total_bytes,
        desc="tokens",
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        disable=quiet or not sys.stderr.isatty(),
    )
