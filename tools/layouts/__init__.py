"""Every layout of the main job against one float64 process: ``hatch run parity``."""
