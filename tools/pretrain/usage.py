"""Exit codes, and the one error that ends the job with a single line and exit code 2."""

EXIT_USAGE = 2
EXIT_DIVERGED = 4
EXIT_FOLDER = 5


class UsageError(Exception):
    """The request cannot be fulfilled. The message names the option to change."""
