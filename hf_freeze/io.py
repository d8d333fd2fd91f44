"""Files that a killed process, a power cut or a full disk leaves whole."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write in one move: what stops it leaves the old file or the new one, never half of it. Processes may write the same file
    at a time: the last one wins."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that is written line by line; one that a killed process has cut off is removed from it."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[-1]:
        write_whole(path, "".join(line + "\n" for line in lines[:-1]))
    return lines[:-1]
