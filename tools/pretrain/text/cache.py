"""The tokens of ``--data`` in a file that is written once and mapped into memory."""

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
    """The cache of one text and tokenizer: three files. ``KEY.json`` is written last."""

    folder: Path
    key: str

    @property
    def tokens(self) -> Path:
        """The tokens as integers."""
        return self.folder / f"{self.key}.bin"

    @property
    def borders(self) -> Path:
        """The start of each document, and the end of the last document."""
        return self.folder / f"{self.key}.borders"

    @property
    def facts(self) -> Path:
        """Type, number and checksum of the tokens."""
        return self.folder / f"{self.key}.json"


def find_cache(settings: Settings, run_dir: Path) -> TokenCache:
    """The cache of the settings' text, by default next to the run.

    Its key depends on the name, size and time of each file, and on the tokenizer.
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
    """Write the cache unless it exists. Each file becomes visible only when it is complete."""
    if cache.facts.exists():
        return
    tokenizer = open_tokenizer(settings.tokenizer)
    try:
        cache.folder.mkdir(parents=True, exist_ok=True)
        with _replace_when_complete(cache.tokens) as file:
            facts, borders = _write_tokens(file, settings, tokenizer)
        with _replace_when_complete(cache.borders) as file:
            file.write(np.array(borders, "<i8").tobytes())
        with _replace_when_complete(cache.facts) as file:
            file.write(json.dumps(facts).encode())
    except OSError as error:
        raise UsageError(
            f"cannot write the token cache {cache.tokens}: {error.strerror}. Pass another folder "
            "with --data-cache"
        ) from None


def open_cache(cache: TokenCache) -> tuple[NDArray[Any], int]:
    """The tokens, mapped read-only, and their checksum. Raises UsageError if they are damaged."""
    try:
        facts = json.loads(cache.facts.read_text())
        kind, count, checksum = np.dtype(facts["kind"]), int(facts["count"]), int(facts["crc32"])
        if cache.tokens.stat().st_size != count * kind.itemsize:
            raise ValueError(f"{count} tokens of {kind.itemsize} bytes were written")
        return np.memmap(cache.tokens, kind, "r", shape=(count,)), checksum
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the token cache {cache.tokens} cannot be read ({error}): remove it and "
            f"{cache.facts.name} to rebuild it"
        ) from None


def read_borders(cache: TokenCache) -> NDArray[Any]:
    """The starts of documents and the end of the last. Raises UsageError if it is damaged."""
    try:
        borders = np.fromfile(cache.borders, "<i8")
        if not len(borders) or borders[-1] != json.loads(cache.facts.read_text())["count"]:
            raise ValueError("their end is not the end of the tokens")
        return borders
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the documents of the token cache {cache.borders} cannot be read ({error}): remove "
            f"it and {cache.facts.name} to rebuild it"
        ) from None


def _write_tokens(
    file: IO[bytes], settings: Settings, tokenizer: Tokenizer
) -> tuple[dict[str, Any], list[int]]:
    kind = _choose_kind(tokenizer.vocabulary_size)
    sources = find_sources(settings.data)
    count = checksum = 0
    borders: list[int] = []
    last: Path | None = None
    total = sum(path.stat().st_size for path in sources)
    hidden = settings.quiet or not sys.stderr.isatty()
    with tqdm(
        total=total, desc="tokens", unit="B", unit_scale=True, dynamic_ncols=True, disable=hidden
    ) as bar:
        pieces = ((path, *piece) for path in sources for piece in read_pieces(path, settings.field))
        for batch in _group_pieces(pieces):
            for (path, _, _), numbers in zip(batch, _encode_batch(tokenizer, batch), strict=True):
                if path != last or is_jsonl(path):
                    borders.append(count)
                    last = path
                written = numbers.astype(kind, copy=False).tobytes()
                file.write(written)
                count, checksum = count + len(numbers), zlib.crc32(written, checksum)
            bar.update(sum(taken for _, _, taken in batch))
    if not count:
        raise UsageError(f"--data {settings.data}: it contains no text")
    return {"kind": kind, "count": count, "crc32": checksum}, [*borders, count]


def _encode_batch(tokenizer: Tokenizer, batch: list[_Piece]) -> list[NDArray[Any]]:
    try:
        return tokenizer.encode([piece for _, piece, _ in batch])
    except UnicodeDecodeError:
        for path, piece, _ in batch:
            try:
                piece.decode()
            except UnicodeDecodeError as error:
                problem = f"{path} is not UTF-8, which --tokenizer needs: {error.reason}, "
                place = f"byte {error.start} of {piece[error.start - 20 : error.end]!r}"
                raise UsageError(f"--data: {problem}{place}") from None
        raise


def _choose_kind(vocabulary_size: int) -> str:
    """The smallest little-endian type for every token of a vocabulary."""
    if vocabulary_size <= 1 << 8:
        return "<u1"
    return "<u2" if vocabulary_size <= 1 << 16 else "<u4"


def _group_pieces(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
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
def _replace_when_complete(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name at the end of the block, and is deleted after an error."""
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
