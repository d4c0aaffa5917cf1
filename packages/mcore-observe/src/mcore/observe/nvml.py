"""The management library of NVIDIA GPUs, opened for the device that torch uses."""

from __future__ import annotations

from typing import Any

import torch

from mcore.observe.extras import require_extra

__all__ = ["open_device_handle"]


def open_device_handle(index: int | None = None) -> tuple[Any, Any]:
    """Open NVML for a device of torch.

    The device is found by its UUID: NVML's indices ignore CUDA_VISIBLE_DEVICES.

    Args:
        index: The index that torch uses; None takes the current accelerator.

    Returns:
        The module ``pynvml``, initialised, and the device's handle.

    Raises:
        ModuleNotFoundError: ``nvidia-ml-py`` is not installed; names the extra.
        RuntimeError: There is no NVIDIA GPU; NVML's own errors are passed on as they are.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise RuntimeError("NVML needs an NVIDIA GPU, and torch sees none")
    require_extra("nvml", "reading the GPU's sensors")
    import pynvml

    pynvml.nvmlInit()
    if index is None:
        index = torch.accelerator.current_device_index()
    uuid = torch.cuda.get_device_properties(index).uuid
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
