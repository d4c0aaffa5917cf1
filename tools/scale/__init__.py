"""Costs that grow with the number of ranks: one process plays the ranks, with fake groups."""
