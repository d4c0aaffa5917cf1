"""Measured results of ``bench``, ``scale``, ``layouts`` and ``faults``: their journal and page.

``journal`` keeps results as lines of JSON, ``machine`` names the machine they depend on, and
``page`` formats them as Markdown. The recorded files are in ``RECORDS``.
"""

from pathlib import Path

RECORDS = Path(__file__).parents[1] / "docs"
