"""The tokens of ``--data`` in a file that is written once and mapped into memory."""

from __future__ import annotations

import errno
import hashlib
import json
import shlex
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from mcore.observe.files import replacing
from pretrain.run_folder import is_own, is_plain
from pretrain.settings import Settings, format_flag, read_fact
from pretrain.text.sources import find_sources, is_jsonl, read_pieces
from pretrain.text.tokenizer import Tokenizer, open_tokenizer
from pretrain.usage import UsageError

_FORMAT = 2
_DAMAGED = (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError)
_KINDS = ("<u1", "<u2", "<u4")  # little-endian integers
_BATCH_BYTES = 8 << 20
_Piece = tuple[Path, bytes, int]


class TokenCache:
    """The cache of one text and tokenizer: three files in a folder.

    Attributes:
        folder: the folder.
        key: identifies text and tokenizer.
        tokens: the tokens as integers.
        borders: the start of each document, and the end of the last document.
        facts: type, number and checksum of the tokens. Written last.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.tokens = folder / f"{key}.bin"
        self.borders = folder / f"{key}.borders"
        self.facts = folder / f"{key}.json"


def find_cache(settings: Settings, run_dir: Path) -> TokenCache:
    """The cache of the settings' text, by default next to the run.

    Its key depends on the name, size and time of each file, and on the tokenizer.
    """
    sources = [
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in find_sources(settings.data)
    ]
    named = json.dumps([_FORMAT, settings.tokenizer_digest, settings.field, sources])
    folder = Path(settings.data_cache or run_dir.absolute().parent / "token-cache")
    return TokenCache(folder, hashlib.sha256(named.encode()).hexdigest()[:24])


def make_cache(settings: Settings, cache: TokenCache, resumed: Path | None = None) -> None:
    """Write the cache, or check the tokens of an existing one. Raises UsageError.

    Each file is readable by this user alone and becomes visible only when it is complete, and only
    if the text is that of the ``resumed`` run.
    """
    try:
        cache.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_own(cache.folder.stat(), cache.facts):
            raise OSError(errno.EPERM, "its folder belongs to another user")
        if cache.facts.exists():
            _check_cache(cache)
            return
        tokenizer = open_tokenizer(settings.tokenizer)
        with replacing(cache.tokens, 0o600) as file:
            facts, borders = _write_tokens(file, settings, tokenizer)
            content, checksum = np.array(borders, "<i8").tobytes(), facts["crc32"]
            if resumed is not None:
                check_text(zlib.crc32(content, checksum) if settings.packed else checksum, resumed)
        with replacing(cache.borders, 0o600) as file:
            file.write(content)
        with replacing(cache.facts, 0o600) as file:
            file.write(json.dumps(facts).encode())
    except OSError as error:
        raise UsageError(
            f"cannot write the token cache {cache.tokens}: {error.strerror}. Pass another folder "
            "with --data-cache"
        ) from None


def check_text(checksum: int, resumed: Path) -> None:
    """Raise UsageError if the text differs from the text of the run to resume."""
    before = read_fact(resumed, "corpus_crc32")
    if before != checksum:
        raise UsageError(
            f"--data: its text (checksum {checksum}) differs from the text of the run to resume "
            f"({before}), so its position has no meaning: pass --reset-data or start a new run"
        )


def refuse_foreign_text(settings: Settings, run_dir: Path, names: Iterable[str]) -> None:
    """Raise UsageError for a text or a cache folder, of ``names``, that only a run's folder names.

    Those next to the run are allowed, unless they are hidden, and those of an earlier cache.
    """
    root = run_dir.resolve().parent
    paths = {"data": find_sources(settings.data), "data_cache": [Path(settings.data_cache)]}
    for name, path in ((one, path) for one in names for path in paths[one]):
        inside = path.resolve().is_relative_to(root) and path.resolve().relative_to(root).parts
        if inside and not any(part.startswith(".") for part in inside):
            continue
        if not find_cache(settings, run_dir).facts.exists():
            given = f"{format_flag(name)} {shlex.quote(getattr(settings, name))}"
            raise UsageError(
                f"--resume {run_dir}: its config.json names {path}, outside {root}. To use it, "
                f"pass {given} or --trust-run"
            )


def _check_cache(cache: TokenCache) -> None:
    for path in (cache.tokens, cache.borders, cache.facts):
        if not is_plain(path.lstat()):  # reading a pipe would block
            raise OSError(errno.EPERM, f"{path.name} is no plain file")
        if not is_own(path.lstat(), path):
            raise OSError(errno.EPERM, f"{path.name} belongs to another user")
    tokens, checksum = open_cache(cache)
    found = 0
    for start in range(0, len(tokens), _BATCH_BYTES):
        found = zlib.crc32(tokens[start : start + _BATCH_BYTES].data, found)
    if found != checksum:
        raise _make_damage_error(cache, f"its checksum is {found} and not {checksum}")


def _make_damage_error(cache: TokenCache, problem: object, part: str = "") -> UsageError:
    part = part or f"token cache {cache.tokens}"
    remedy = f"remove it and {cache.facts.name} to rebuild it"
    return UsageError(f"the {part} cannot be read ({problem}): {remedy}")


def open_cache(cache: TokenCache) -> tuple[NDArray[Any], int]:
    """The tokens, mapped read-only, and their checksum. Raises UsageError if they are damaged."""
    try:
        facts = json.loads(cache.facts.read_text())
        kind, count, checksum = facts["kind"], int(facts["count"]), int(facts["crc32"])
        if kind not in _KINDS:  # NumPy would read others as pointers
            raise ValueError(f"{kind!r} is none of {', '.join(_KINDS)}")
        if cache.tokens.stat().st_size != count * np.dtype(kind).itemsize:
            raise ValueError(f"{count} tokens of type {kind} were written")
        return np.memmap(cache.tokens, kind, "r", shape=(count,)), checksum
    except _DAMAGED as error:
        raise _make_damage_error(cache, error) from None


def read_borders(cache: TokenCache) -> NDArray[Any]:
    """The starts of documents and the end of the last. Raises UsageError if it is damaged."""
    try:
        borders = np.fromfile(cache.borders, "<i8")
        count = json.loads(cache.facts.read_text())["count"]
        if not len(borders) or borders[0] or borders[-1] != count or (np.diff(borders) < 0).any():
            raise ValueError("its documents do not end with the tokens")
        return borders
    except _DAMAGED as error:
        part = f"documents of the token cache {cache.borders}"
        raise _make_damage_error(cache, error, part) from None


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
    """The smallest type for every token of a vocabulary."""
    return next(kind for kind in _KINDS if vocabulary_size <= 1 << 8 * np.dtype(kind).itemsize)


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
