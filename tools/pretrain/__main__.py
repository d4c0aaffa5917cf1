"""``python -m pretrain``: start the ranks, or be one of them where a launcher started us."""

import sys

from pretrain.cli.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
