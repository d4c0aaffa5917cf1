"""What a run shows: logs, trackers, slow ranks, the closing lines."""
