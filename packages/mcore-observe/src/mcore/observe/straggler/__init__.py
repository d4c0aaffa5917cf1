"""Comparison of the ranks of a job, to find the slow ones and why they are slow."""
