"""llama.cpp (https://github.com/ggml-org/llama.cpp) for exported GGUF files, by the package llama-cpp-python. Imports no torch.

Shapes: T tokens, V vocabulary, D hidden size.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.publish.export.folders import require

FILE = "model.gguf"
LENGTH = 1024  # tokens that a model has memory for, if it has as many positions
_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


class LlamaCpp:
    """The model in an exported folder, on the CPU, one text at a time. `task`: what it was exported for. `exact`: keys and values
    are kept in fp32 instead of 16 bits.

    Raises ValueError if llama-cpp-python is missing, for a file that llama.cpp cannot open, and for more tokens than the model
    has positions.
    """

    def __init__(self, folder: Path, task: str, *, threads: int = 1, exact: bool = False) -> None:
        self._api = api = require("llama_cpp", "llama-cpp")
        api.llama_log_set(_QUIET, None)
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(folder / FILE).encode(), api.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot open {folder / FILE}; export it again, or update llama-cpp-python")
        self._vocabulary = api.llama_model_get_vocab(self._model)
        self.task, self.size = task, api.llama_vocab_n_tokens(self._vocabulary)
        self.length = min(api.llama_model_n_ctx_train(self._model), LENGTH)
        settings = api.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = settings.n_outputs_max = self.length
        settings.n_threads = settings.n_threads_batch = threads
        settings.embeddings = task in ("feature-extraction", "sequence-classification")
        if task == "feature-extraction":
            settings.pooling_type = 0  # none: a vector for each token
        if exact:
            settings.type_k = settings.type_v = 0  # fp32
            settings.flash_attn_type = 0
        self._context = api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ValueError(f"llama.cpp cannot run {folder / FILE}; update llama-cpp-python")

    def close(self) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def tokens(self, text: str) -> list[int]:
        """Ids of a text, with those that every text gets."""
        data = text.encode()
        found = (ctypes.c_int32 * (len(data) + 8))()
        count = self._api.llama_tokenize(self._vocabulary, data, len(data), found, len(found), True, True)
        return list(found[:count])

    def logits(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        """(T, V): after each of these tokens, which follow `start` others."""
        if not start:
            self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._run(self._api.llama_decode, ids, start)
        return self._read(self._api.llama_get_logits(self._context), (len(ids), self.size))

    def outputs(self, ids: Sequence[int]) -> np.ndarray:
        """Of an encoder: (T, D) states, or (classes,) scores."""
        self.encode(ids)
        if self.task == "feature-extraction":
            shape = (len(ids), self._api.llama_model_n_embd(self._model))
            return self._read(self._api.llama_get_embeddings(self._context), shape)
        shape = (self._api.llama_model_n_cls_out(self._model),)
        return self._read(self._api.llama_get_embeddings_seq(self._context, 0), shape)

    def encode(self, ids: Sequence[int]) -> None:
        """The encoder reads these tokens; of an encoder-decoder, for the decoder."""
        self._run(self._api.llama_encode, ids, 0)

    def continued(self, ids: Sequence[int], most: int, ends: Sequence[int] | None = None) -> list[int]:
        """At most `most` tokens by greedy search, the last of them one of `ends`; None: those of the model."""
        found: list[int] = []
        logits = self.logits(ids)
        while len(found) < most:
            found.append(int(logits[-1].argmax()))
            is_end = self._api.llama_vocab_is_eog(self._vocabulary, found[-1]) if ends is None else found[-1] in ends
            if is_end or len(found) == most:
                break
            logits = self.logits(found[-1:], len(ids) + len(found) - 1)
        return found

    def labels(self) -> list[str]:
        """Of the classes."""
        count = self._api.llama_model_n_cls_out(self._model)
        return [self._api.llama_model_cls_label(self._model, i).decode() for i in range(count)]

    def start(self) -> int:
        """What the decoder of an encoder-decoder reads first."""
        return self._api.llama_model_decoder_start_token(self._model)

    def _run(self, function: Any, ids: Sequence[int], start: int) -> None:
        if start + len(ids) > self.length:
            raise ValueError(
                f"{start + len(ids)} tokens are more than the {self.length} that llama.cpp has memory for here"
            )
        batch = self._api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, number in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = number, start + place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        code = function(self._context, batch)
        self._api.llama_batch_free(batch)
        if code:
            raise ValueError(f"llama.cpp failed with code {code} on {len(ids)} tokens")

    @staticmethod
    def _read(pointer: Any, shape: tuple[int, ...]) -> np.ndarray:
        return np.ctypeslib.as_array(pointer, shape).copy()
