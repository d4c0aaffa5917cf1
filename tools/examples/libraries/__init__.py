"""Tests of the examples that need other libraries."""
