"""When an embedding or output layer leaves its weight gradients for the end of the step."""

from __future__ import annotations

__all__ = ["defers_embedding_wgrad", "validate_wgrad_deferral"]


def validate_wgrad_deferral(config: object) -> None:
    """Raise ValueError where a configuration defers the embedding's weight gradients wrongly.

    Args:
        config: Any object; fields that it does not have count as not set:
            ``defer_embedding_wgrad_compute``, ``wgrad_deferral_limit`` and
            ``pipeline_model_parallel_size`` (1).

    Raises:
        ValueError: Weight gradients are deferred without pipeline parallelism, or the limit is
            negative.

    Example:
        >>> from types import SimpleNamespace
        >>> validate_wgrad_deferral(SimpleNamespace(pipeline_model_parallel_size=2))
    """
    limit = _limit(config)
    if limit < 0:
        raise ValueError(
            f"wgrad_deferral_limit is {limit}; give 0 to defer all micro-batches, or the number "
            "of micro-batches to defer"
        )
    stages = getattr(config, "pipeline_model_parallel_size", 1)
    if _is_deferring(config) and stages <= 1:
        raise ValueError(
            f"defer_embedding_wgrad_compute is set with pipeline_model_parallel_size {stages}; "
            "it needs 2 or more, for without a pipeline there is no idle time to fill"
        )


def defers_embedding_wgrad(config: object, num_deferred: int) -> bool:
    """Say whether a layer has to leave the weight gradient of its next micro-batch for later.

    A layer that gets True appends its activation and its output gradient to its buffers; one that
    gets False computes the weight gradient at once.

    Args:
        config: Any object, as for :func:`validate_wgrad_deferral`.
        num_deferred: The micro-batches that the layer's buffers hold already.

    Returns:
        False unless ``defer_embedding_wgrad_compute`` is set. Then True as long as the buffers
        hold fewer than ``wgrad_deferral_limit``, always for a limit of 0.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=2)
        >>> [defers_embedding_wgrad(config, held) for held in range(3)]
        [True, True, False]
    """
    limit = _limit(config)
    return _is_deferring(config) and (limit == 0 or num_deferred < limit)


def _is_deferring(config: object) -> bool:
    return bool(getattr(config, "defer_embedding_wgrad_compute", False))


def _limit(config: object) -> int:
    limit: int = getattr(config, "wgrad_deferral_limit", 0)
    return limit
