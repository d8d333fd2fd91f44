"""Exports to CTranslate2 (Klein et al., 2020, https://github.com/OpenNMT/CTranslate2): fast decoding on CPUs, also with int8
weights.

Marian models are converted by CTranslate2's converter for Bart. Its Marian converter assumes a Helsinki-NLP model, in which the
pad token has the last id and the decoder starts from zeros. In transformers, the decoder starts from the embedding of
`decoder_start_token_id`, which training changes if tables are tied. Otherwise a Marian decoder equals a Bart decoder, and the
Bart converter keeps this embedding and all ids.
"""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_freeze.publish.export.folders import Export, Format, mark_of, read_mark, require
from hf_freeze.publish.export.trained_grid import on_grid
from hf_freeze.publish.export.translator import Translator, set_or, token_ids

_QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32")
SUPPORTED_TASKS = {"marian": ("seq2seq-lm",), "gpt2": ("causal-lm",), "llama": ("causal-lm",)}
_ROUND_INPUTS = _QUANTIZATIONS[:4]  # which also round the inputs of linears to int8, by the largest of each token
_TOLERANCE = 1e-3  # absolute and relative, of log-probabilities


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError if CTranslate2 lacks the activation function or computes other
    probabilities than PyTorch."""
    model = export.model.float()
    export.say("converting to CTranslate2")
    with tempfile.TemporaryDirectory() as exact:
        _save(model, export.tokenizer, Path(exact), None, {})
        export.say("comparing with PyTorch")
        _compare(model, Path(exact))
    _save(model, export.tokenizer, folder, export.quantization, export.row_steps)


FORMAT = Format(
    write,
    packages=("ctranslate2",),
    quantizations=_QUANTIZATIONS,
    round_inputs=_ROUND_INPUTS,
    tasks=SUPPORTED_TASKS,
    needs_tokenizer=True,
    keeps_structure=False,
)


@torch.no_grad()
def _save(model: Any, tokenizer: Any, folder: Path, quantization: str | None, row_steps: dict[bytes, float]) -> None:
    from ctranslate2.converters import transformers as converters

    model = copy.deepcopy(model)  # the converters change it
    config, settings = model.config, model.generation_config
    loader = {
        "marian": converters.BartLoader,
        "gpt2": converters.GPT2Loader,
        "llama": converters.LlamaLoader,
    }[config.model_type]()
    if config.model_type == "marian":
        config.normalize_before = config.normalize_embedding = False
    try:
        spec = loader.get_model_spec(model)
    except KeyError as error:
        raise ValueError(
            f"ctranslate2 has no activation {error}; choose from {sorted(converters._SUPPORTED_ACTIVATIONS)}"
        ) from error
    source, target = tokens_of(tokenizer)
    if config.model_type == "marian":
        spec.decoder.num_heads = np.int16(config.decoder_attention_heads)  # the converter took the encoder's
        source = numbered(source, config.vocab_size)
        target = numbered(target, model.lm_head.out_features)
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(target)
        spec.config.decoder_start_token = target[settings.decoder_start_token_id]
    else:
        target = numbered(source, config.vocab_size)
        spec.register_vocabulary(target)
        spec.config.layer_norm_epsilon = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        if (size := getattr(config, "head_dim", None)) is not None:  # the converter takes hidden size / heads
            for layer in spec.decoder.layer:
                # setattr takes no optional field after construction
                vars(layer.self_attention)["head_dim"] = np.int32(size)
    # CTranslate2 requires all three tokens. If the tokenizer lacks one, no text contains it, so any token can stand in.
    eos = target[token_ids(settings.eos_token_id)[0]] if settings.eos_token_id is not None else target[0]
    spec.config.eos_token = eos
    spec.config.bos_token = tokenizer.bos_token or eos
    spec.config.unk_token = tokenizer.unk_token or eos
    spec.validate()
    trained = _trained_integers(spec, row_steps) if quantization in _ROUND_INPUTS and row_steps else {}
    spec.optimize(quantization)
    _set_integers(spec, trained)
    spec.save(str(folder))


def _trained_integers(spec: Any, row_steps: dict[bytes, float]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name of each weight that was quantised before -> its numbers and steps. By itself, CTranslate2 would take the largest value
    of a row for 127, which is another grid where ranges were learnt, or have 4 bits."""
    from ctranslate2.specs.model_spec import visit_spec

    trained = {}

    def look(owner: Any, name: str, value: Any) -> None:
        has_scale = hasattr(owner, f"{name.rpartition('/')[2]}_scale") and hasattr(value, "numpy")
        if has_scale and (grid := on_grid(value.to("float32").numpy(), row_steps)) is not None:
            trained[name] = grid

    visit_spec(spec, look)
    return trained


def _set_integers(spec: Any, trained: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    from ctranslate2.specs.model_spec import NumpyVariable, visit_spec

    def set_values(owner: Any, name: str, value: Any) -> None:
        if name in trained and hasattr(value, "numpy"):  # otherwise it has the values of another one
            numbers, steps = trained[name]
            key = name.rpartition("/")[2]
            setattr(owner, key, NumpyVariable(numbers))
            setattr(owner, f"{key}_scale", NumpyVariable(1 / steps))

    visit_spec(spec, set_values)


def tokens_of(tokenizer: Any) -> tuple[dict[int, str], dict[int, str]]:
    """{id: token} of source and target."""
    source = target = tokenizer.get_vocab()
    if getattr(tokenizer, "separate_vocabs", False):  # a MarianTokenizer with two vocabularies
        target = tokenizer.target_encoder
    return {i: token for token, i in source.items()}, {i: token for token, i in target.items()}


def numbered(tokens: dict[int, str], size: int) -> list[str]:
    """The tokens by id; ids of the model that the tokenizer lacks get placeholder names."""
    return [tokens.get(i, f"<unused_{i}>") for i in range(size)]


def _vocabulary(folder: Path, side: str) -> list[str]:
    shared = folder / "shared_vocabulary.json"
    path = shared if shared.is_file() else folder / f"{side}_vocabulary.json"
    return json.loads((path if path.is_file() else folder / "vocabulary.json").read_text(encoding="utf-8"))


@torch.no_grad()
def _compare(model: Any, folder: Path) -> None:
    """Compare the log-probabilities of random tokens with PyTorch's: the converters ignore some fields of a config.

    Raises ValueError if they differ.
    """
    import ctranslate2

    source, target = _vocabulary(folder, "source"), _vocabulary(folder, "target")
    rng, options = np.random.default_rng(0), {"device": "cpu", "intra_threads": torch.get_num_threads()}
    eos = token_ids(set_or(model.generation_config.eos_token_id, 0))[0]
    for length in (5, 9):
        source_ids = rng.integers(len(source), size=length).tolist()
        target_ids = rng.integers(len(target), size=length).tolist()
        tokens = [target[i] for i in target_ids]
        if model.config.is_encoder_decoder:
            engine = ctranslate2.Translator(str(folder), **options)
            log_probs = engine.score_batch([[source[i] for i in source_ids]], [tokens])[0].log_probs
            start, labels = model.generation_config.decoder_start_token_id, [*target_ids, eos]
            inputs = {"input_ids": [source_ids], "decoder_input_ids": [[start, *target_ids]]}
        else:
            log_probs = ctranslate2.Generator(str(folder), **options).score_batch([tokens])[0].log_probs
            inputs, labels = {"input_ids": [target_ids[:-1]]}, target_ids[1:]
        logits = model(**{name: torch.tensor(ids) for name, ids in inputs.items()}).logits[0]
        expected = logits.log_softmax(-1)[range(len(labels)), labels].numpy()
        if not np.allclose(log_probs, expected, _TOLERANCE, _TOLERANCE):
            worst = np.abs(np.array(log_probs) - expected).max()
            raise ValueError(
                f"ctranslate2 does not compute the same as {type(model).__name__}: log-probabilities differ by {worst:.3g}; its "
                "converter may ignore a field of the config"
            )


def _computed(folder: str | Path, options: dict[str, Any]) -> dict[str, Any]:
    """`options`. On CPUs, 16 bits only make the file smaller: CTranslate2 computes in 32, and warns unless that is asked for."""
    smaller = mark_of(Path(folder)).get("quantization") == "int8_float16" and options.get("device", "cpu") == "cpu"
    return {"compute_type": "int8_float32"} | options if smaller else options


class CTranslate2Translator(Translator):
    """Translates with a folder written by `hf-freeze export --format ctranslate2`. `options` go to `ctranslate2.Translator`:
    `device`, `compute_type`, `inter_threads`, `intra_threads` ...

    In fp32, its translations equal those of `generate` for greedy search, and for beam search with `early_stopping=True`.
    Without early stopping, a few texts may get a longer translation with a better score.
    """

    format = "ctranslate2"
    settings = (
        *("max_new_tokens", "max_length", "num_beams", "num_return_sequences", "length_penalty"),
        *("early_stopping", "no_repeat_ngram_size", "bad_words_ids"),
    )

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder)
        self._engine = require("ctranslate2", self.format).Translator(str(folder), **_computed(folder, options))
        self._source, self._target = (_vocabulary(Path(folder), side) for side in ("source", "target"))
        self._target_ids = {token: i for i, token in enumerate(self._target)}

    def translate_ids(self, encoded: list[list[int]], config: Any, batch_size: int) -> list[list[list[int]]]:
        beams, returned = set_or(config.num_beams, 1), set_or(config.num_return_sequences, 1)
        results = self._engine.translate_batch(
            [[self._source[i] for i in ids] for ids in encoded],
            max_batch_size=batch_size,
            max_input_length=0,
            max_decoding_length=self._new_tokens(config),
            beam_size=beams,
            num_hypotheses=returned,
            # A text is finished when `patience` · `beam_size` sequences are. With early stopping, `generate` does the same with a
            # patience of 1. Without, it continues until the running sequences score worse at their present length; a patience of
            # 2 comes close to that.
            patience=1 if config.early_stopping is True else 2,
            length_penalty=set_or(config.length_penalty, 1.0),
            no_repeat_ngram_size=set_or(config.no_repeat_ngram_size, 0),
            suppress_sequences=[[self._target[i] for i in word] for word in config.bad_words_ids or []],
            end_token=[self._target[i] for i in token_ids(config.eos_token_id)],
        )
        return [[[self._target_ids[token] for token in sequence] for sequence in r.hypotheses] for r in results]

    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """Of the tokens of each target, at most up to the first end."""
        texts, others = (
            [[names[i] for i in ids] for ids in each]
            for names, each in ((self._source, sources), (self._target, targets))
        )
        ends = {self._target[i] for i in token_ids(self.generation_config.eos_token_id)}
        others = [[token for token in each if token not in ends] for each in others]  # the engine adds one
        scores = self._engine.score_batch(texts, others)
        return [list(score.log_probs)[: len(ids)] for score, ids in zip(scores, targets, strict=True)]


class CTranslate2Generator(nn.Module):
    """The forward of a language model in a folder written by `hf-freeze export --format ctranslate2`. `options` go to
    `ctranslate2.Generator`."""

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__()
        read_mark(Path(folder), "ctranslate2", "causal-lm")
        self._engine: Any = require("ctranslate2", "ctranslate2").Generator(str(folder), **_computed(folder, options))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """(B, T) ids, padded on the right, -> logits (B, T, V)"""
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        return {"logits": torch.from_numpy(np.array(self._engine.forward_batch(rows)))}
