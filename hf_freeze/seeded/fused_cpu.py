"""Calls fused_cpu.cpp, which makes seeded values with the vector instructions of a CPU, and compiles it on first use.

The compiler is `$CXX` or g++ or clang++; the library is kept in `$XDG_CACHE_HOME/hf_freeze` (default ~/.cache/hf_freeze), one for
each version of the source and kind of CPU. It is plain C for ctypes, so it needs no header of Python or torch, and takes a few
seconds.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_freeze.seeded.philox import stream
from hf_freeze.seeded.tiles import KINDS, Numpy, Plain, Stream

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
_FEW_PER_THREAD = 1 << 20  # weights; a share that is smaller is not worth a thread


class UnavailableError(RuntimeError):
    """Why the library cannot be had, in one line."""


@functools.cache
def library() -> Any:
    """The compiled library. Raises UnavailableError without a compiler, and if the compiler or the loader fails."""
    try:
        return _declared(ctypes.CDLL(str(_compiled())))
    except OSError as error:
        raise UnavailableError(f"its library cannot be written or loaded: {error}") from error


def _compiled() -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler or shutil.which(compiler) is None:
        raise UnavailableError(f"no C++ compiler {compiler or 'g++ or clang++'} on the PATH; set CXX")
    text = "\n".join((_SOURCE.read_text(encoding="utf-8"), *_FLAGS, compiler, _cpu()))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hf_freeze")
    path = cache / f"fused_cpu-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # moved when it is whole: another process may be looking
            written = Path(folder, path.name)
            command = [compiler, *_FLAGS, "-o", str(written), str(_SOURCE)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                first = next((line for line in result.stderr.splitlines() if "error" in line), "no message")
                raise UnavailableError(f"{compiler} failed: {first.strip()}")
            os.replace(written, path)
    return path


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() + platform.machine()


def _declared(found: Any) -> Any:
    integer, pointer, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
    matrix = (ctypes.c_int, pointer, integer, real)  # kind, stream, width of a row, scale
    found.hf_freeze_fill.argtypes = (*matrix, pointer, integer, integer, integer, pointer, integer)
    found.hf_freeze_multiply_rows.argtypes = (*matrix, *(integer,) * 2, pointer, integer, pointer, pointer, integer)
    found.hf_freeze_multiply_columns.argtypes = (*matrix, *(integer,) * 3, pointer, integer, pointer, pointer, integer)
    for name in ("fill", "multiply_rows", "multiply_columns"):
        getattr(found, f"hf_freeze_{name}").restype = None
    return found


class Compiled(Numpy):
    """Makes the values of `Numpy`, which it replaces, by the library."""

    def uniform(
        self, words: Stream, width: int, rows: np.ndarray, start: int, stop: int, device: torch.device
    ) -> torch.Tensor:
        if device.type != "cpu":
            return super().uniform(words, width, rows, start, stop, device)
        return _filled(Plain(0, words, 0, width, 1.0), rows, start, stop)

    def few_bits(self, kind: str, seed: int, name: str, rows: np.ndarray, start: int, stop: int) -> torch.Tensor:
        return _filled(Plain(KINDS.index(kind), stream(seed, name), 0, stop, 1.0), rows, start, stop)


def _filled(matrix: Plain, rows: np.ndarray, start: int, stop: int) -> torch.Tensor:
    out = torch.empty(len(rows), stop - start)
    fill(matrix, rows, start, stop, out)
    return out


def fill(matrix: Plain, rows: np.ndarray, start: int, stop: int, out: torch.Tensor) -> None:
    """Write the columns [start, stop) of `rows` to `out`, fp32 (rows, stop - start) on the CPU, each row in one piece."""
    places = np.ascontiguousarray(rows, dtype=np.int64)
    library().hf_freeze_fill(
        *_arguments(matrix), places.ctypes.data, len(places), start, stop, out.data_ptr(), out.stride(0)
    )


def _arguments(matrix: Plain) -> tuple[Any, ...]:
    return matrix.kind, (ctypes.c_uint32 * 4)(*matrix.stream), matrix.width, matrix.scale


def multiply(matrix: Plain, x: torch.Tensor, axis: int, bias: torch.Tensor | None) -> torch.Tensor:
    """x (T, K) by the matrix (height, width): fp32 (T, height) for `axis` 0, (T, width) for 1, plus `bias`. Some kilobytes of the
    matrix are in memory at a time; `torch.get_num_threads()` threads share the outputs."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    outputs = matrix.width if axis else matrix.height
    y = torch.empty(len(x), outputs)
    call = library().hf_freeze_multiply_columns if axis else library().hf_freeze_multiply_rows
    extra = (matrix.height,) if axis else ()

    def share(begin: int, end: int) -> None:
        offset = None if bias is None else bias.data_ptr() + 4 * begin
        places = x.data_ptr(), len(x), offset, y.data_ptr() + 4 * begin, outputs
        call(*_arguments(matrix), *extra, begin, end, *places)

    threads = min(torch.get_num_threads(), matrix.height * matrix.width // _FEW_PER_THREAD)
    if threads < 2:
        share(0, outputs)
        return y
    step = -(-outputs // threads)
    step += -step % 128  # so that no call of the generator is made twice
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda begin: share(begin, min(begin + step, outputs)), range(0, outputs, step)))
    return y
