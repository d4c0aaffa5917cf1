"""Run logs and comparison of ranks for the trainers of other libraries, one module each."""
