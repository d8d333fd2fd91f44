"""Which process works on what, where several share a search, on one machine or, on a shared folder, on many."""

import os
import socket
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: one process a search
    fcntl = None


class Locks:
    """Names that this process alone holds, until it gives them back or ends, however it ends: the system keeps the locks. A
    network file system passes them on to other machines, and frees those of a dead machine after a while.

    Raises ValueError where the file system of `folder` has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if fcntl is not None:
            self._check()

    def take(self, name: str) -> bool:
        """Whether nobody else holds `name`: then it is held now."""
        if name in self._files:
            return False
        file = (self._folder / name).open("w")
        if not _lock(file):
            file.close()
            return False
        self._files[name] = file
        return True

    def is_free(self, name: str) -> bool:
        """Whether nobody holds `name`, this process neither."""
        if not self.take(name):
            return False
        self.give(name)
        return True

    def give(self, name: str) -> None:
        self._files.pop(name).close()

    def _check(self) -> None:
        """Whether a file that is open twice can be locked once. If other machines see that lock, cannot be known here."""
        path = self._folder / f"check-{socket.gethostname()}-{os.getpid()}"
        try:
            with path.open("w") as one, path.open("w") as other:
                works, why = _lock(one) and not _lock(other), "a file can be locked twice"
        except OSError as error:
            works, why = False, str(error)
        path.unlink(missing_ok=True)
        if not works:
            raise ValueError(
                f"{self._folder} is on a file system without locks ({why}), which a search needs: mount it with them (Lustre: -o "
                "flock; NFS: without nolock), or choose --out on another one"
            )


def _lock(file: Any) -> bool:
    """Lock an open file; False where it is locked already. Raises OSError where the file system has no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
