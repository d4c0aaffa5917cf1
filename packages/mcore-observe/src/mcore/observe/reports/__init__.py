"""Reports on a run: memory, energy, time used and left, throughput."""
