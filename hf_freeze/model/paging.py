"""Models that are larger than the memory: their tensors lie in files, of which the system keeps in memory what is in use.

Tensors that are loaded lie in the files of their checkpoint already. Those that are made go to files of a folder, one after
another (`Paged`), and a thread has the system write out and forget the pages of all these files when they take too much memory.
"""

import contextlib
import ctypes
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.io import append_line, sync, whole_lines, write_whole

_SMALL = 2**16  # bytes; smaller tensors stay in memory
_MADV_PAGEOUT = 21  # Linux 5.4: no change is lost, whether the pages are written yet or not
_MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) +(/.*\S)")


class Paged:
    """The files of one folder, which the caller removes.

    `limit`: bytes of resident memory, above those at the start, from which on pages are given back while the context is open;
    only Linux keeps to it. Modules that `keep` is called for stay in the folder, where `restore` finds them after the process was
    killed. `say`: is called with a line after each layer of a calibration.
    """

    def __init__(self, folder: Path, limit: int, say: Callable[[str], Any] = lambda text: None) -> None:
        self.folder, self.say, self._limit = folder, say, limit
        self._journal = folder / "finished"
        self._kept = set(whole_lines(self._journal)) if self._journal.exists() else set()
        self._files, self.step = 0, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @torch.no_grad()
    def move(self, module: nn.Module) -> None:
        """Move the tensors of a module, and of those in it, that lie in memory of this process to files."""
        in_files = _file_ranges()
        moved: dict[tuple[int, torch.Size], torch.Tensor] = {}
        for name, tensor in _tensors(module):
            address = tensor.untyped_storage().data_ptr()
            if tensor.nbytes < _SMALL or any(start <= address < end for start, end in in_files):
                continue
            key = (tensor.data_ptr(), tensor.shape)
            if key not in moved:
                moved[key] = self.copied(tensor)
            _set(module, name, moved[key])

    @torch.no_grad()
    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in a file, which is gone once no tensor uses it."""
        path = self.folder / f"{self._files}.tensor"
        self._files += 1
        copy = in_file(path, tensor.shape, tensor.dtype, new=True).copy_(tensor)
        path.unlink()
        return copy

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, as plain data: a process that resumes reads it."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            write_whole(path, json.dumps(make()))
        return json.loads(path.read_text(encoding="utf-8"))

    def next_step(self) -> None:
        """Modules of the same name are others from now on."""
        self.step += 1

    def keep_layer(self, name: str, layer: nn.Module) -> None:
        """`keep` the modules of a layer whose tensors lie in memory of this process."""
        in_files = _file_ranges()
        for part_name, part in layer.named_modules():
            addresses = [
                tensor.untyped_storage().data_ptr()
                for tensor in (*part._parameters.values(), *part._buffers.values())
                if tensor is not None and tensor.device.type == "cpu" and tensor.nbytes
            ]
            if any(not any(start <= address < end for start, end in in_files) for address in addresses):
                self.keep(f"{name}.{part_name}" if part_name else name, part)

    def restore_layer(self, name: str, layer: nn.Module) -> None:
        """`restore` the modules of a layer that were kept."""
        for part_name, part in layer.named_modules():
            self.restore(f"{name}.{part_name}" if part_name else name, part)

    @torch.no_grad()
    def keep(self, name: str, module: nn.Module) -> None:
        """Move all tensors of a finished module to files that stay, so that `restore` finds them."""
        key = f"{self.step} {name}"
        if key in self._kept:  # restored, or converted again by a method that does not ask
            self.move(module)
            return
        for tensor_name, tensor in list(_tensors(module)):
            path = self._path(name, tensor_name)
            path.unlink(missing_ok=True)  # of a process that was killed while it wrote
            _set(module, tensor_name, in_file(path, tensor.shape, tensor.dtype, new=True).copy_(tensor))
            sync(path)
        sync(self.folder)
        self._kept.add(key)
        append_line(self._journal, key)

    def restore(self, name: str, module: nn.Module) -> bool:
        """Fill a module with what `keep` has kept of it; False if it has not."""
        if f"{self.step} {name}" not in self._kept:
            return False
        for tensor_name, tensor in list(_tensors(module)):
            _set(module, tensor_name, in_file(self._path(name, tensor_name), tensor.shape, tensor.dtype, new=False))
        return True

    def _path(self, module_name: str, tensor_name: str) -> Path:
        return self.folder / f"{self.step} {module_name} {tensor_name}.tensor"

    def _watch(self) -> None:
        before = resident()
        while not self._end.wait(0.02):
            if resident() > before + self._limit:
                page_out()
                surgery.return_freed_memory()

    def __deepcopy__(self, memo: Any) -> "Paged":
        return self

    def __enter__(self) -> "Paged":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def resident() -> int:
    """Bytes of resident memory of this process; 0 where that is not known."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def available() -> int | None:
    """Bytes of memory that new work may take on this machine; None where that is not known."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all parameters and buffers on the CPU, those of more than one name under each."""
    for owner_name, owner in module.named_modules(remove_duplicate=False):
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None and tensor.device.type == "cpu":
                yield f"{owner_name}.{name}" if owner_name else name, tensor


def _set(module: nn.Module, name: str, value: torch.Tensor) -> None:
    owner_name, _, name = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    parameter = owner._parameters.get(name)
    if parameter is None:
        owner._buffers[name] = value
    else:
        parameter.data = value


def in_file(path: Path, shape: Sequence[int], dtype: torch.dtype, *, new: bool) -> torch.Tensor:
    """A tensor in the memory of a file, which has room for it if it is new. Raises OSError where the disk is full."""
    size = math.prod(shape) * dtype.itemsize
    if new:
        # A file with holes in it would end the process where a page finds the disk full.
        with path.open("wb") as file:
            try:
                if hasattr(os, "posix_fallocate"):  # macOS has none
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
                else:
                    file.truncate(size)
            except OSError as error:
                path.unlink(missing_ok=True)
                raise OSError(
                    error.errno, f"{error.strerror}: {size / 1e6:.1f} MB more are needed in {path.parent}"
                ) from None
    if size == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    storage: Any = torch.UntypedStorage.from_file(str(path), True, size)
    return torch.empty(0, dtype=dtype).set_(storage).view(tuple(shape))


def page_out() -> None:
    """Have the system write out and forget the pages of all files that lie in the memory of this process, except its code."""
    if sys.platform == "linux":
        madvise = ctypes.CDLL(None).madvise
        for start, end in _file_ranges():
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT)


def _file_ranges() -> list[tuple[int, int]]:
    """(first address, address after the last) of each file with tensors in memory."""
    ranges = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            match = _MAPPED.match(line)
            if match and match[4].removesuffix(" (deleted)").endswith((".safetensors", ".tensor")):
                ranges.append((int(match[1], 16), int(match[2], 16)))
    return ranges
