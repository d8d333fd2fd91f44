"""Files that a killed process, a power cut or a full disk leaves whole, and what folders weigh."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NEW, _HIDDEN = ".hf_freeze_new_", ".hf_freeze_part_"  # begin names of folders before and after they are locked


def write_whole(path: Path, content: str | bytes) -> None:
    """Write in one move: what stops it leaves the old file or the new one, never half of it. Processes may write the same file
    at a time, on several machines too: the last one wins."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
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
    process is killed, `folder` is as before; a kill leaves a hidden folder beside it, which a later call removes.

    The process holds a lock on the hidden folder: other containers and machines may share the disk, so a process number says
    nothing. Where the file system has no locks, nothing is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{_HIDDEN}*"):
        with _lock(left) as is_left:
            if is_left:
                shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder.parent))
    with _lock(new):
        temporary = new.rename(folder.parent / f"{_HIDDEN}{new.name.removeprefix(_NEW)}")  # which keeps the lock
        try:
            written = temporary / "written"
            written.mkdir()
            yield written
            if folder.exists():
                os.replace(folder, temporary / "replaced")
            os.replace(written, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Whether this process alone has the lock on the folder, which ends with the process."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # Windows; a folder that has just been removed
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def holds_files(folder: Path, source: str | os.PathLike[str]) -> bool:
    """Whether a result that is made of `source` would replace anything in `folder`.

    Raises ValueError for a file, and for a folder that `source` is in."""
    if not folder.exists() and not folder.is_symlink():
        return False
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another --out")
    if Path(source).exists() and Path(source).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{folder} holds the model that is read; choose another --out")
    return any(folder.iterdir())


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


def append_line(path: Path, line: str) -> None:
    """Append a line to a file that `whole_lines` reads, and have the disk hold it before this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())


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
