"""Compile a test file the way pytest does, so that a failing assert tells its values."""

import ast
import functools
import marshal
from pathlib import Path


@functools.cache
def rewritten_code(file: str) -> bytes | None:
    """Return the code of `file` with pytest's assert statements, read once in a process.

    Args:
        file: a test file.

    Returns:
        The code, for `marshal`; None where this pytest offers no rewriting, or the file is no valid
        Python: then an ordinary import does its work, or names the error.

    Example:
        >>> rewritten_code("/nonexistent.py") is None
        True
    """
    try:
        from _pytest.assertion import rewrite

        path = Path(file)
        kept = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        code = rewrite._read_pyc(path, kept)
        if code is None:
            source = path.read_bytes()
            tree = ast.parse(source, filename=file)
            rewrite.rewrite_asserts(tree, source, file)
            code = compile(tree, file, "exec", dont_inherit=True)
        return marshal.dumps(code)
    except (ImportError, AttributeError, TypeError, ValueError, OSError, SyntaxError):
        return None
