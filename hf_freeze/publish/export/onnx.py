"""Exports to ONNX, for ONNX Runtime and other engines. Batch size and lengths are dynamic.

    model.onnx     BERT: input_ids, attention_mask, token_type_ids (B, T) -> the outputs of the model, such as logits
    encoder.onnx   Marian: input_ids, attention_mask (B, T) -> present.{layer}.encoder.{key,value} (B, N, T, H)
    decoder.onnx   Marian: input_ids (B, 1), encoder_attention_mask (B, T), past_key_values.{layer}.{decoder,encoder}.{key,value}
                   -> logits (B, 1, V), present.{layer}.decoder.{key,value} (B, N, P + 1, H)

Shapes: B texts, T source tokens, P previous target tokens (0 or more), N heads, H head dim, V vocabulary. encoder.onnx also
computes the keys and values of the decoder's cross-attention, once for each text, so that one decoder file suffices.
"""

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_freeze.publish.export.folders import Export, require
from hf_freeze.publish.export.translator import Translator, set_or, token_ids

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
QUANTIZATIONS = ("int8",)
SUPPORTED_TASKS = {
    "bert": (
        "masked-lm",
        "sequence-classification",
        "token-classification",
        "question-answering",
        "feature-extraction",
    ),
    "marian": ("seq2seq-lm",),
}
NEEDS_TOKENIZER = False
HOLDS_VARIANTS = ("bert",)  # architectures that can be exported unmerged: an ONNX graph represents any forward
_TOLERANCE = 1e-3  # absolute and relative, of outputs


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError if the forward cannot be traced, or if ONNX Runtime computes other outputs
    than PyTorch."""
    model = export.model.float()
    write_parts = _write_translator if model.config.is_encoder_decoder else _write_encoder
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        unquantized = folder if export.quantization is None else Path(temporary)
        try:
            write_parts(export, model, unquantized)
        except torch.onnx.OnnxExporterError as error:  # its message is pages long
            reason = export.refusal or "torch.export cannot trace it"
            raise ValueError(f"onnx cannot hold this model: {reason}") from error
        if export.quantization is not None:
            export.say("quantizing")
            _quantize(unquantized, folder)
    model.config.save_pretrained(folder)


def _quantize(unquantized: Path, folder: Path) -> None:
    """Quantise the weights of matrix products and tables to int8 with one scale each; activations are quantised at run time."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for path in sorted(unquantized.glob("*.onnx")):
        with _quiet():
            quantize_dynamic(path, folder / path.name, weight_type=QuantType.QInt8)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the output of the exporters; failures still raise exceptions."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _export(
    module: nn.Module, inputs: dict[str, Tensor], outputs: list[str], axes: dict[str, dict[int, str]], path: Path
) -> None:
    """Export `module` to `path`. `axes`: the names of the dynamic dimensions of each input."""
    with _quiet():
        program: Any = torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=(tuple(axes[name] for name in inputs),),  # the forwards take *inputs
            dynamo=True,
            verbose=False,
        )
        program.save(str(path))


def _session(path: Path, **options: Any) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    for name, value in options.items():
        setattr(settings, name, value)
    return onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def _compare(actual: list[Any], expected: list[Tensor], part: str) -> None:
    for onnx, torch_ in zip(actual, expected, strict=True):
        if onnx.shape != tuple(torch_.shape) or not np.allclose(onnx, torch_.numpy(), _TOLERANCE, _TOLERANCE):
            raise ValueError(
                f"onnxruntime does not compute the same as PyTorch for the {part}: shapes or values differ"
            )


# -- encoders ----------------------------------------------------------------------------------------------------------------


class _Model(nn.Module):
    """Wraps a model for the exporter: positional inputs, and a tuple of tensors as output."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.model(**dict(zip(self.names, inputs, strict=True))).values())


def _write_encoder(export: Export, model: Any, folder: Path) -> None:
    names = ["input_ids", "attention_mask", "token_type_ids"]
    vocabulary = model.config.vocab_size
    inputs = _batch(names, vocabulary, 3, 7)
    outputs = list(model(**inputs))
    export.say("tracing")
    wrapped = _Model(model, names)
    axes = {name: {0: "batch", 1: "length"} for name in names}
    _export(wrapped, inputs, outputs, axes, folder / "model.onnx")
    export.say("comparing with PyTorch")
    session = _session(folder / "model.onnx")
    for rows, length in ((1, 1), (4, 11)):
        inputs = _batch(names, vocabulary, rows, length)
        feed = {name: value.numpy() for name, value in inputs.items()}
        _compare(session.run(None, feed), list(model(**inputs).values()), "model")


def _batch(names: list[str], vocabulary: int, rows: int, length: int) -> dict[str, Tensor]:
    """Random tokens (rows, length). With several rows, half of the last row is padding."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, length, dtype=torch.long)
    if rows > 1:
        mask[-1, (length + 1) // 2 :] = 0
    tensors = {
        "input_ids": torch.randint(vocabulary, (rows, length), generator=generator),
        "attention_mask": mask,
        "token_type_ids": torch.zeros(rows, length, dtype=torch.long),
    }
    return {name: tensors[name] for name in names}


# -- translators -------------------------------------------------------------------------------------------------------------


class _Encoder(nn.Module):
    """input_ids, attention_mask (B, T) -> key and value (B, N, T, H) of the cross-attention of each decoder layer"""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.model.encoder
        self.attentions: Any = nn.ModuleList(layer.encoder_attn for layer in model.model.decoder.layers)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        hidden = self.encoder(input_ids=inputs[0], attention_mask=inputs[1]).last_hidden_state
        keys_values = []
        for attention in self.attentions:
            for projection in (attention.k_proj, attention.v_proj):
                projected = projection(hidden)
                keys_values.append(projected.view(*projected.shape[:2], -1, attention.head_dim).transpose(1, 2))
        return tuple(keys_values)


class _Decoder(nn.Module):
    """input_ids (B, 1), encoder_attention_mask (B, T), keys and values of the previous target tokens, then of the source ->
    logits, and keys and values of the target including this token"""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.output = model.model.decoder, model.lm_head
        self.register_buffer("bias", model.final_logits_bias)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        ids, mask, *cached = inputs
        pairs = list(zip(cached[::2], cached[1::2], strict=True))
        target, source = (DynamicCache(half) for half in (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]))
        # The cache already has the keys and values of the encoder states, so the states themselves are not read.
        states = cached[0].new_zeros(ids.shape[0], mask.shape[1], self.decoder.config.d_model)
        outputs = self.decoder(
            input_ids=ids,
            encoder_hidden_states=states,
            encoder_attention_mask=mask,
            past_key_values=EncoderDecoderCache(target, source),
            use_cache=True,
        )
        layers = outputs.past_key_values.self_attention_cache.layers
        logits = self.output(outputs.last_hidden_state) + self.bias
        return (logits, *(tensor for layer in layers for tensor in (layer.keys, layer.values)))


def _names(kind: str, side: str, layers: int) -> list[str]:
    return [f"{kind}.{layer}.{side}.{part}" for layer in range(layers) for part in ("key", "value")]


def _write_translator(export: Export, model: Any, folder: Path) -> None:
    layers = model.config.decoder_layers
    past, cross = _names("past_key_values", "decoder", layers), _names("past_key_values", "encoder", layers)
    inputs = _batch(["input_ids", "attention_mask"], model.config.vocab_size, 3, 7)
    encoder, decoder = _Encoder(model), _Decoder(model)
    export.say("tracing the encoder")
    source = {0: "batch", 1: "source_length"}
    outputs = _names("present", "encoder", layers)
    _export(encoder, inputs, outputs, dict.fromkeys(inputs, source), folder / "encoder.onnx")
    export.say("tracing the decoder")
    encoded = encoder(*inputs.values())
    width = encoded[0].shape[1], encoded[0].shape[3]
    step = {"input_ids": torch.ones(3, 1, dtype=torch.long), "encoder_attention_mask": inputs["attention_mask"]}
    step |= {name: torch.zeros(3, width[0], 4, width[1]) for name in past} | dict(zip(cross, encoded, strict=True))
    axes = {"input_ids": {0: "batch"}, "encoder_attention_mask": source}
    axes |= {name: {0: "batch", 2: "target_length"} for name in past}
    axes |= {name: {0: "batch", 2: "source_length"} for name in cross}
    _export(decoder, step, ["logits", *_names("present", "decoder", layers)], axes, folder / "decoder.onnx")
    export.say("comparing with PyTorch")
    _compare_translator(model, folder)


def _compare_translator(model: Any, folder: Path) -> None:
    search = _Search(folder)
    for rows, length in ((1, 1), (4, 11)):
        inputs = _batch(["input_ids", "attention_mask"], model.config.vocab_size, rows, length)
        target = _batch(["input_ids"], model.config.decoder_vocab_size, rows, 5)["input_ids"]
        expected = model(**inputs, decoder_input_ids=target).logits
        search.start(*(value.numpy() for value in inputs.values()))
        for position in range(target.shape[1]):
            logits = search.logits(target[:, position : position + 1].numpy())
            _compare([logits], [expected[:, position]], f"{position + 1}. token")


class _Search:
    """Runs the two exported files; holds the cache of a batch between two tokens."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._encoder, self._decoder = (_session(folder / f"{part}.onnx", **options) for part in ("encoder", "decoder"))
        inputs = {value.name: value.shape for value in self._decoder.get_inputs()}
        self._past = [name for name in inputs if name.endswith((".decoder.key", ".decoder.value"))]
        self._cross = [name for name in inputs if name.endswith((".encoder.key", ".encoder.value"))]
        self._width = inputs[self._past[0]]  # (B, N, P, H)

    def start(self, ids: Any, mask: Any) -> None:
        """Encode a batch: ids, mask (B, T)."""
        _, heads, _, head_dim = self._width
        encoded = self._encoder.run(None, {"input_ids": ids, "attention_mask": mask})
        empty = np.zeros((len(ids), heads, 0, head_dim), np.float32)
        self._feed = dict(zip(self._cross, encoded, strict=True)) | dict.fromkeys(self._past, empty)
        self._feed["encoder_attention_mask"] = mask

    def logits(self, tokens: Any) -> Any:
        """tokens (B, 1) -> logits of the next token (B, V); appends the tokens to the cache."""
        logits, *present = self._decoder.run(None, {**self._feed, "input_ids": tokens})
        self._feed |= dict(zip(self._past, present, strict=True))
        return logits[:, -1]

    def keep(self, rows: Any) -> None:
        """Drop all rows of the batch except these."""
        self._feed = {name: value[rows] for name, value in self._feed.items()}


class OnnxTranslator(Translator):
    """Translates by greedy search with a folder written by `hf-freeze export --format onnx`. For beam search, export to
    CTranslate2. `options` are fields of `onnxruntime.SessionOptions`, such as `intra_op_num_threads`."""

    format = "onnx"
    settings = ("max_new_tokens", "max_length", "bad_words_ids")

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder)
        require("onnxruntime", self.format)
        self._search = _Search(Path(folder), **options)

    def _translate(self, encoded: list[list[int]], config: Any, batch_size: int) -> list[list[list[int]]]:
        banned = config.bad_words_ids or []
        if any(len(word) > 1 for word in banned):
            raise ValueError(f"bad_words_ids={banned}: this greedy search can ban single tokens only")
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))  # similar lengths need little padding
        translations: dict[int, list[int]] = {}
        for begin in range(0, len(order), batch_size):
            rows = order[begin : begin + batch_size]
            outputs = self._greedy([encoded[i] for i in rows], config, [word[0] for word in banned])
            translations |= zip(rows, outputs, strict=True)
        return [[translations[i]] for i in range(len(encoded))]

    def _greedy(self, encoded: list[list[int]], config: Any, banned: list[int]) -> list[list[int]]:
        length, ends = max(map(len, encoded)), token_ids(config.eos_token_id)
        mask = np.array([[1] * len(ids) + [0] * (length - len(ids)) for ids in encoded], np.int64)
        pad = set_or(config.pad_token_id, 0)
        self._search.start(np.array([ids + [pad] * (length - len(ids)) for ids in encoded], np.int64), mask)
        outputs: list[list[int]] = [[] for _ in encoded]
        running, tokens = np.arange(len(encoded)), np.full((len(encoded), 1), config.decoder_start_token_id, np.int64)
        for _ in range(self._new_tokens(config)):
            logits = self._search.logits(tokens)
            logits[:, banned] = -np.inf
            best = logits.argmax(-1)
            unfinished = ~np.isin(best, ends)
            running, tokens = running[unfinished], best[unfinished, None]
            if not len(running):
                break
            if not unfinished.all():
                self._search.keep(unfinished)
            for row, token in zip(running, tokens[:, 0], strict=True):
                outputs[row].append(int(token))
        return outputs
