"""Doubles, "no value" and NaN as int64 numbers of the same order, for exact maxima over ranks.

A double is encoded as its bits ``b`` when ``b >= 0``, else as ``b ^ 0x7fffffffffffffff``: this
keeps the order of all doubles, infinities included, in full precision. "No value" is the lowest
int64 and NaN the highest, so that a NaN on any rank reaches every rank, which a floating-point MAX
does not promise.
"""

from __future__ import annotations

import math
import struct

import torch

__all__ = [
    "NO_VALUE",
    "decode_double",
    "encode_double",
    "encode_double_tensor",
    "require_one_real",
]

NO_VALUE = -(2**63)
_NAN = 2**63 - 1
_MAGNITUDE = 2**63 - 1


def encode_double(value: float | None) -> int:
    """Map a double, NaN or None to an int64 with the order None < -inf < ... < inf < NaN.

    Example:
        >>> encode_double(None) < encode_double(-1.5) < encode_double(0.1) < encode_double(1e300)
        True
    """
    if value is None:
        return NO_VALUE
    if math.isnan(value):
        return _NAN
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits if bits >= 0 else bits ^ _MAGNITUDE


def decode_double(code: int) -> float | None:
    """Give back what :func:`encode_double` encoded.

    Example:
        >>> decode_double(encode_double(-0.1))
        -0.1
    """
    if code == NO_VALUE:
        return None
    if code == _NAN:
        return math.nan
    bits = code if code >= 0 else code ^ _MAGNITUDE
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


def encode_double_tensor(value: torch.Tensor) -> torch.Tensor:
    """Encode a real tensor of one element like :func:`encode_double`, where it lies.

    Does not wait for the device.

    Returns:
        An int64 tensor of shape ``[]`` on the same device.

    Example:
        >>> encode_double_tensor(torch.tensor(-0.5)).item() == encode_double(-0.5)
        True
    """
    double = require_one_real(value).detach().reshape(()).to(torch.float64)
    bits = double.view(torch.int64)
    ordered = torch.where(bits >= 0, bits, bits ^ _MAGNITUDE)
    return torch.where(double.isnan(), _NAN, ordered)


def require_one_real(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it has one element that is no complex number, else raise TypeError."""
    if value.numel() != 1 or value.is_complex():
        raise TypeError(
            f"expected a real tensor of one element, got {value.dtype} {tuple(value.shape)}"
        )
    return value
