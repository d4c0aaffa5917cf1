"""Read the Python stacks that a rank wrote, without the harness's own frames."""

import os

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PARENT_WATCHER = f'File "{os.path.join(_FOLDER, "orphans.py")}"'
_LIFE_OF_A_RANK = f'File "{os.path.join(_FOLDER, "child.py")}"'


def readable_stacks(text: str) -> str:
    """Return the stacks in `text`, each from its innermost frame to the test's function.

    Args:
        text: what `faulthandler` wrote: blocks parted by blank lines, one for each thread.

    Example:
        >>> print(readable_stacks('Thread 0x1:\\n  File "a.py", line 3 in f\\n\\n\\n'))
        Thread 0x1:
          File "a.py", line 3 in f
    """
    blocks = (_without_callers(block) for block in text.split("\n\n") if _says_something(block))
    return "\n\n".join(blocks)


def in_torch_distributed(stacks: str) -> bool:
    """Whether a thread was inside `torch.distributed`, where a rank waits for others.

    Example:
        >>> in_torch_distributed('  File "/lib/torch/distributed/c10d.py", line 3 in all_reduce')
        True
    """
    return f"torch{os.sep}distributed{os.sep}" in stacks


def _says_something(block: str) -> bool:
    return (
        bool(block.strip()) and _PARENT_WATCHER not in block and "Extension modules:" not in block
    )


def _without_callers(block: str) -> str:
    lines = block.strip("\n").split("\n")
    for number, line in enumerate(lines):
        if _LIFE_OF_A_RANK in line:
            return "\n".join(lines[:number])
    return "\n".join(lines)
