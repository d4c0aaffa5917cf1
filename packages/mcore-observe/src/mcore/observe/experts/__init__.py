"""Metrics of experts and of multi-token prediction, and a writer to all trackers."""
