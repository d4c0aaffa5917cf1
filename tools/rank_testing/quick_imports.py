"""The first import of the fork server: few of the many objects that imports make are garbage."""

import gc

gc.disable()  # each rank enables it
