"""Results of the packages against megatron-core's: ``hatch run peers:parity``."""

from __future__ import annotations

from importlib.util import find_spec

# Only the environment ``peers`` has megatron-core and megatron-fsdp.
collect_ignore_glob = [] if find_spec("megatron_fsdp") else ["test_*.py"]
