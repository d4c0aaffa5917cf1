"""Imports of Megatron's helpers rewritten to those of the mcore packages."""
