"""Brings metrics to trackers in the background, and keeps them on the disk until they arrive."""
