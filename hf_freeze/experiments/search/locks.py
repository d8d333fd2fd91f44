"""Which process works on what, where several share a search."""

from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: one process a search
    fcntl = None


class Locks:
    """Names that this process alone holds, until it lets go of them or ends, however it ends: the system keeps the locks, on one
    machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, name: str) -> bool:
        """Whether nobody else holds `name`: then it is held now."""
        if name in self._files:
            return False
        file = (self._folder / name).open("w")
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
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
