"""A stand-in accelerator of two devices, on which code for CUDA runs in tests without a GPU.

Values, gradients and addresses are real, computed by the kernels of the CPU. What CUDA refuses or
leaves undefined is refused, or is poison (NaN).
"""

from standin.backend import register, switch_on, switched_on
from standin.memory import NAME, is_device
from standin.recording import HostWaitError, TooManyLaunchesError, launches, no_host_waits, recorded

__all__ = [
    "NAME",
    "HostWaitError",
    "TooManyLaunchesError",
    "is_device",
    "launches",
    "no_host_waits",
    "recorded",
    "register",
    "switch_on",
    "switched_on",
]
