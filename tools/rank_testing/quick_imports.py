"""The first import of each server: few of the many objects that imports make are garbage."""

import gc

gc.disable()  # each process that a server forks enables it
