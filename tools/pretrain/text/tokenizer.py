"""Tokenizers: bytes, or a Hugging Face tokenizer file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pretrain.usage import UsageError


class Tokenizer(Protocol):
    """Converts text to numbers below ``vocabulary_size`` and back.

    ``digest`` identifies the tokenizer. It is empty for bytes.
    """

    vocabulary_size: int
    digest: str

    def encode(self, pieces: Sequence[bytes]) -> list[NDArray[Any]]:
        """The numbers of each piece. Raises ValueError for invalid UTF-8, except with bytes."""
        ...

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of numbers. Invalid UTF-8 is replaced."""
        ...


def open_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a file, or of bytes for an empty path. Raises UsageError."""
    return _FromFile(Path(path)) if path else _Bytes()


class _Bytes:
    vocabulary_size = 256
    digest = ""

    def encode(self, pieces: Sequence[bytes]) -> list[NDArray[Any]]:
        return [np.frombuffer(piece, np.uint8) for piece in pieces]

    def decode(self, numbers: Sequence[int]) -> str:
        return bytes(numbers).decode(errors="replace")


class _FromFile:
    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError:
            raise UsageError("--tokenizer needs the library tokenizers: install it") from None
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise UsageError(f"--tokenizer: {path} is not a regular file")
        try:
            content = path.read_bytes()
            self._tokenizer = HuggingFaceTokenizer.from_buffer(content)
        except OSError as error:
            raise UsageError(f"--tokenizer: cannot read {path}: {error.strerror}") from None
        except Exception as error:  # the library raises no narrower type
            raise UsageError(f"--tokenizer {path} is not a tokenizer file ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        numbers = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary_size = 1 + max(numbers, default=0)  # the numbers may have gaps
        self.digest = hashlib.sha256(content).hexdigest()

    def encode(self, pieces: Sequence[bytes]) -> list[NDArray[Any]]:
        texts = [piece.decode() for piece in pieces]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(one.ids, np.uint32) for one in encoded]

    def decode(self, numbers: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(numbers), skip_special_tokens=False)
        return text
