"""Settings of a run: what is logged and where, without secrets, and the extras they need."""
