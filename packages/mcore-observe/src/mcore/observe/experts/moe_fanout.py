"""A writer with TensorBoard's interface that also sends MoE metrics to MLflow and Comet."""

from __future__ import annotations

import logging
from typing import Any

import torch

from mcore.observe.sinks import sanitize_metric_name
from mcore.observe.sinks.scalars import as_number
from mcore.tensor.dtensor import is_dtensor
from mcore.versioning import internal_api

logger = logging.getLogger(__name__)


@internal_api
class _MoeMetricFanoutWriter:
    """Sends each scalar to a TensorBoard writer, MLflow and Comet.

    Other attributes are those of the TensorBoard writer.

    Args:
        tb_writer: A ``SummaryWriter``, or None.
        comet_logger: A Comet experiment, or None.
        mlflow_logger: An object with MLflow's ``log_metrics``, or None.
    """

    def __init__(self, tb_writer: Any, comet_logger: Any, mlflow_logger: Any) -> None:
        self._tb_writer = tb_writer
        self._comet_logger = comet_logger
        self._mlflow_logger = mlflow_logger
        self._warned: set[str] = set()

    @staticmethod
    def _sanitize(value: Any) -> Any:
        """Convert tensors with one element and NumPy scalars to Python numbers.

        A DTensor is gathered first, which is a collective over its mesh. Other values, larger
        tensors included, are returned unchanged.
        """
        if is_dtensor(value):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            return value.item() if value.numel() == 1 else value
        number = as_number(value)
        return value if number is None else number

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        """Send one scalar: to TensorBoard unchanged, to the others as a Python number.

        A tensor with more than one element is sent to TensorBoard only, with one warning per name.
        """
        if self._tb_writer is not None:
            self._tb_writer.add_scalar(name, value, iteration)
        scalar = self._sanitize(value)
        if isinstance(scalar, torch.Tensor):
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "%s has shape %s and is not sent to MLflow and Comet, which need one number",
                    name,
                    tuple(scalar.shape),
                )
            return
        if self._mlflow_logger is not None:
            self._mlflow_logger.log_metrics({sanitize_metric_name(name): scalar}, step=iteration)
        if self._comet_logger is not None:
            self._comet_logger.log_metrics({name: scalar}, step=iteration)

    def add_scalars(self, *args: Any, **kwargs: Any) -> None:
        """Send a group of scalars to TensorBoard, the only tracker that can show one."""
        if self._tb_writer is not None:
            self._tb_writer.add_scalars(*args, **kwargs)

    def flush(self) -> None:
        """Flush the TensorBoard writer."""
        if self._tb_writer is not None:
            self._tb_writer.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_tb_writer"), name)


@internal_api
def _build_moe_metric_writer(tb_writer: Any, comet_logger: Any, mlflow_logger: Any) -> Any:
    """Return a writer to all given trackers.

    Args:
        tb_writer: A ``SummaryWriter``, or None.
        comet_logger: A Comet experiment, or None.
        mlflow_logger: An object with MLflow's ``log_metrics``, or None.

    Returns:
        ``tb_writer`` itself without MLflow and Comet, else a writer that sends to all of them.

    Example:
        >>> _build_moe_metric_writer(None, None, None) is None
        True
    """
    if comet_logger is None and mlflow_logger is None:
        return tb_writer
    return _MoeMetricFanoutWriter(tb_writer, comet_logger, mlflow_logger)
