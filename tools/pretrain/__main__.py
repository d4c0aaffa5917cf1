"""``python -m pretrain``: start the ranks, or run as one of a launcher's ranks."""

import sys

from pretrain.cli.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
