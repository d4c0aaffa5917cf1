"""Reports on a run: memory, energy, elapsed and remaining time, throughput."""
