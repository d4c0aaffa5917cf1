"""Tests that need megatron-core: results of the packages equal its own. See parity_*.py."""
