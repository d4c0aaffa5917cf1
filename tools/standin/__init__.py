"""A stand-in accelerator of two devices, on which code for CUDA runs in tests without a GPU.

Values, gradients and addresses are real, computed by the kernels of the CPU. What CUDA refuses or
leaves undefined is refused, or is poison (NaN).
"""

from standin.backend import switch_on, switched_on
from standin.recording import launches, no_host_waits, recorded

__all__ = ["launches", "no_host_waits", "recorded", "switch_on", "switched_on"]
