"""Files that a killed process, a power cut or a full disk leaves whole, and what folders weigh."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write in one move: what stops it leaves the old file or the new one, never half of it. Processes may write the same file
    at a time, on several machines too: the last one wins."""
    part = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder to write to, which then replaces `folder`. If writing fails, or the
    process is killed, `folder` is as before; a kill leaves a hidden folder beside it, which a later call removes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".hf_freeze_{socket.gethostname()}_"
    for left in folder.parent.glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).partition("_")[0]
        if pid.isdecimal() and not _runs(int(pid)):  # the name of another machine may begin with that of this one
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}_", dir=folder.parent) as temporary:
        written = Path(temporary) / "written"
        written.mkdir()
        yield written
        if folder.exists():
            os.replace(folder, Path(temporary) / "replaced")
        os.replace(written, folder)


def _runs(pid: int) -> bool:
    """Whether there is such a process on this machine."""
    if os.name == "nt":  # where signal 0 would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def bytes_of(folder: Path) -> int:
    """Of all files in the folder, and in those that it holds."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def link_or_copy(source: Path, target: Path) -> None:
    """Have `target` be the file `source` as well, in one move: by a hard link, or a copy where the file system has none."""
    part = source.with_name(f"{source.name}.part")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:
        try:
            shutil.copyfile(source, part)
            sync(part)
        except OSError:
            part.unlink(missing_ok=True)
            raise
    os.replace(part, target)
    part.unlink(missing_ok=True)  # a rename of one link over another of the same file leaves both


def sync(path: Path) -> None:
    """Have the disk hold the file, or the names in the folder, before this returns."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that is written line by line; one that a killed process has cut off is removed from it."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[-1]:
        write_whole(path, "".join(line + "\n" for line in lines[:-1]))
    return lines[:-1]
