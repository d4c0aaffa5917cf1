"""``python -m mcore.watch``, the same as ``mcore-straggler``."""

import sys

from mcore.watch.command import main

if __name__ == "__main__":
    sys.exit(main())
