"""The argument `inference_params`, which has become `inference_context`."""

from __future__ import annotations

import warnings
from typing import TypeVar

Context = TypeVar("Context")
Params = TypeVar("Params")


def deprecate_inference_params(
    inference_context: Context | None, inference_params: Params | None
) -> Context | Params | None:
    """Choose between an argument and its deprecated former name, and warn about the latter.

    Only `None` means "not given": an empty list and `0` count as given.

    Args:
        inference_context: The value of the argument under its present name.
        inference_params: The value of the argument under its deprecated name.

    Returns:
        `inference_context`, or `inference_params` where the former is None.

    Warns:
        FutureWarning: `inference_params` was given; blamed on the line that calls this function.

    Example:
        >>> deprecate_inference_params("context", None)
        'context'
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     deprecate_inference_params(None, "params")
        'params'
        >>> print(caught[0].message)
        `inference_params` is deprecated; pass `inference_context` instead.
    """
    if inference_params is None:
        return inference_context
    if inference_context is None:
        warnings.warn(
            "`inference_params` is deprecated; pass `inference_context` instead.",
            FutureWarning,
            stacklevel=2,
        )
        return inference_params
    warnings.warn(
        "`inference_params` is deprecated and ignored, since `inference_context` is given too; "
        "pass `inference_context` alone.",
        FutureWarning,
        stacklevel=2,
    )
    return inference_context
