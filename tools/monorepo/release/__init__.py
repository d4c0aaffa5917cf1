"""Releases: show unreleased changes, prepare and verify a release, push its tag."""
