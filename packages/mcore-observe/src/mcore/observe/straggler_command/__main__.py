"""``python -m mcore.observe.straggler_command`` is ``mcore-straggler``."""

import sys

from mcore.observe.straggler_command.command import main

if __name__ == "__main__":
    sys.exit(main())
