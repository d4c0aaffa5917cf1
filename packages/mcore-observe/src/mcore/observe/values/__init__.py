"""Numbers on devices: the scalars of a step, and sums of losses between two lines."""
