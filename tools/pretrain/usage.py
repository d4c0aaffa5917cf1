"""Exit codes, and the one error that ends the job with a single line and exit code 2."""

EXIT_USAGE = 2
EXIT_DIVERGED = 4
EXIT_FOLDER = 5


class UsageError(Exception):
    """The request cannot be fulfilled. The message names the option to change."""

    def __init__(self, message: object) -> None:
        super().__init__(clean(str(message)))


def clean(text: str) -> str:
    """The text of a foreign file without characters that control a terminal."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)
