"""llama.cpp for the tests, without compiling it: the library that an npm package ships, in the place of llama-cpp-python.

`use_llama_cpp()` downloads it once for each machine, and skips the test where npm or a registry is missing. `hf_freeze` calls C
functions of the module `llama_cpp` alone; here their names are looked up in the library.
"""

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest

VERSION = "3.22.1"  # of @node-llama-cpp/linux-x64, which has llama.cpp 0.5.0
# The fields of `llama_context_params` there, of four bytes each; those of pointers take two places.
_FIELDS = (
    *("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq"),
    *("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type", "pooling_type", "attention_type"),
    *("flash_attn_type", *(f"rope_{i}" for i in range(8)), *(f"callback_{i}" for i in range(4)), "type_k", "type_v"),
    *("abort_0", "abort_1", "abort_2", "abort_3"),
)
_REST = [("rest", ctypes.c_uint8 * 1024)]  # a structure may be longer than the one that C reads


class _ModelSettings(ctypes.Structure):
    _fields_: ClassVar[Any] = _REST


class _Settings(ctypes.Structure):
    _fields_: ClassVar[Any] = [*((name, ctypes.c_int32) for name in _FIELDS), ("embeddings", ctypes.c_bool), *_REST]


class _Batch(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_POINTER, _NUMBERS = ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)
_RESULTS: dict[str, Any] = {
    "llama_model_default_params": _ModelSettings,
    "llama_context_default_params": _Settings,
    "llama_batch_init": _Batch,
    "llama_model_load_from_file": _POINTER,
    "llama_init_from_model": _POINTER,
    "llama_model_get_vocab": _POINTER,
    "llama_get_memory": _POINTER,
    "llama_model_cls_label": ctypes.c_char_p,
    "llama_vocab_is_eog": ctypes.c_bool,
    **dict.fromkeys(("llama_get_logits", "llama_get_embeddings", "llama_get_embeddings_seq"), _NUMBERS),
}
_HANDLES = {  # functions whose first arguments are addresses
    "llama_init_from_model": [_POINTER, _Settings],
    "llama_decode": [_POINTER, _Batch],
    "llama_encode": [_POINTER, _Batch],
    "llama_memory_clear": [_POINTER, ctypes.c_bool],
    "llama_vocab_is_eog": [_POINTER, ctypes.c_int32],
    "llama_get_embeddings_seq": [_POINTER, ctypes.c_int32],
    "llama_model_cls_label": [_POINTER, ctypes.c_uint32],
    "llama_tokenize": [
        _POINTER,
        ctypes.c_char_p,
        ctypes.c_int32,
        _POINTER,
        ctypes.c_int32,
        ctypes.c_bool,
        ctypes.c_bool,
    ],
}
_HANDLE_ALONE = (
    *("llama_model_get_vocab", "llama_get_memory", "llama_free", "llama_model_free", "llama_get_logits"),
    *("llama_get_embeddings", "llama_vocab_n_tokens", "llama_model_n_ctx_train", "llama_model_n_embd"),
    *("llama_model_n_cls_out", "llama_model_decoder_start_token"),
)


def use_llama_cpp() -> None:
    """Make `import llama_cpp` find the library. If llama-cpp-python is installed, that stays."""
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        sys.modules["llama_cpp"] = library()


@functools.cache
def library() -> Any:
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
    for name, kind in _RESULTS.items():
        getattr(found, name).restype = kind
    for name, kinds in [*_HANDLES.items(), *((name, [_POINTER]) for name in _HANDLE_ALONE)]:
        getattr(found, name).argtypes = kinds
    settings = found.llama_context_default_params()
    assert (settings.n_ctx, settings.n_ubatch, settings.flash_attn_type, settings.type_k) == (512, 512, -1, 1), (
        "the settings of this llama.cpp lie elsewhere"
    )
    return found
