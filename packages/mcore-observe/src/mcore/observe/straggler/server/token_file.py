"""The token file of a controller on loopback. Only processes of its user can read it."""

from __future__ import annotations

import glob
import os
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


class TokenFile:
    """Keeps the token of an address, in a file of mode 0600, while this process listens.

    The file is locked while the socket is open, in this process or in a fork of it. A file without
    a lock was left by a dead process, and another process may listen on its port now.

    Raises:
        OSError: The file or its lock is not possible.
    """

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._pid = os.getpid()
        self.path = _find_path(address)
        self.path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        _check_owner(self.path.parent)
        _remove_stale(self.path.parent)
        self._file, partial = tempfile.mkstemp(dir=self.path.parent)  # of mode 0600
        try:
            # Locked before it gets its name, else a client could find it without a lock.
            _lock(self._file, is_shared=False)
            os.write(self._file, token.encode() + b"\n")
            os.replace(partial, self.path)
        except OSError:
            os.close(self._file)
            os.unlink(partial)
            raise

    def remove(self) -> None:
        """Remove the file. A fork of the process only closes its copy."""
        if os.getpid() == self._pid:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def find_token(address: tuple[str, int]) -> str | None:
    """Return the token of the process of this user that listens on an address, if it has a file.

    The address must be the peer of a connection, not a name: a name may have several addresses.
    """
    try:
        path = _find_path(address)
        _check_owner(path.parent)
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)  # NFS grants locks only for writable files
    except OSError:
        return None
    with os.fdopen(file, "rb") as opened:
        try:
            _lock(file, is_shared=True)
        except BlockingIOError:
            return opened.read(256).decode("ascii", "replace").strip() or None
        except OSError:
            return None
    with suppress(FileNotFoundError):
        path.unlink()
    return None


def _remove_stale(folder: Path) -> None:
    """Remove the files that dead processes of this machine have left."""
    for path in folder.glob(f"{glob.escape(socket.gethostname())}-*"):
        with suppress(OSError):  # a lock of a living process, or another start was faster
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                _lock(file, is_shared=False)
                if os.path.samestat(os.fstat(file), path.lstat()):
                    path.unlink()
            finally:
                os.close(file)


def _find_path(address: tuple[str, int]) -> Path:
    host, port = address
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # Home folders may be shared by many machines, but loopback addresses belong to one.
    name = f"{socket.gethostname()}-{host.replace(':', '_')}-{port}"
    return Path(caches, "mcore-straggler", name)


def _check_owner(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of mode 0700 of this user")


def _lock(file: int, *, is_shared: bool) -> None:
    try:
        import fcntl
    except ImportError as error:
        raise OSError("this system has no file locks") from error
    fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
