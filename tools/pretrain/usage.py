"""Exit codes, and the one error that ends the job with a single line and exit code 2."""

EXIT_USAGE = 2
EXIT_DIVERGED = 4
EXIT_FOLDER = 5


class UsageError(Exception):
    """What the user asked for cannot be done; the text says what to change."""
