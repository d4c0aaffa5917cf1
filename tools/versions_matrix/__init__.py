"""The tests of mcore-versioning on every Python that it supports and this machine has."""
