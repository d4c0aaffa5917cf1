"""Prometheus' text format 0.0.4: families of samples with their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable

_PREFIX = "mcore_straggler_"


def family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> str:
    """Return the lines of one metric: its help, its type, and its samples with their labels."""
    lines = [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"]
    for of_sample, value in samples:
        braced = f"{{{of_sample}}}" if of_sample else ""
        lines.append(f"{_PREFIX}{name}{braced} {_number(value)}")
    return "\n".join(lines) + "\n"


def labels(**values: object) -> str:
    """Return the labels of a sample, with their values escaped."""
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.12g}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
