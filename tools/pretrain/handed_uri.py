"""The MLflow URI that was typed, on its way to the ranks, whose command lines all may see."""

from __future__ import annotations

import os

MLFLOW_URI = "--mlflow-uri"
_VARIABLE = "PRETRAIN_MLFLOW_URI"


def hand_over(argv: list[str], uri: str | None) -> list[str]:
    """Put the URI where processes started from now on find it, and nobody else on the machine.

    Args:
        argv: the command line, which may hold the URI.
        uri: what it holds; None where it does not.

    Returns:
        The command line without it.
    """
    os.environ.pop(_VARIABLE, None)
    if uri is not None:
        os.environ[_VARIABLE] = uri
    kept = []
    words = iter(argv)
    for word in words:
        if word == MLFLOW_URI:
            next(words, None)
        elif not word.startswith(f"{MLFLOW_URI}="):
            kept.append(word)
    return kept


def take_over() -> str | None:
    """The URI that the launching process handed over; processes that this one starts lack it."""
    return os.environ.pop(_VARIABLE, None)
