"""Hostile inputs for everything that reads a file or request of somebody else."""
