"""Releases: what is unreleased, what a release changes, what must not be published."""
