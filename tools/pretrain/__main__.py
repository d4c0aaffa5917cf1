"""``python -m pretrain``: start the ranks, or run as one of a launcher's ranks."""

import gc
import sys

from pretrain.cli.command import main

if __name__ == "__main__":
    gc.disable()  # until torch is imported: few of the many objects of an import are garbage
    sys.exit(main(sys.argv[1:]))
