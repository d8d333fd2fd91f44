"""CTranslate2 (Klein et al., 2020, https://github.com/OpenNMT/CTranslate2): fast decoding on CPUs, of the weights in int8 too.

Its own converter takes a Marian model for one of Helsinki-NLP: the pad token must have the last id, and the decoder starts
from zeros. transformers lets it start from the row of `decoder_start_token_id`, which training moves where tables are tied. But
for that a Marian decoder is Bart's, so the converter of Bart writes it, with the row and with all ids as they are.
"""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_freeze.publish.export.folders import Export, require
from hf_freeze.publish.export.translator import Translator, set_or, token_ids

PACKAGES = ("ctranslate2",)
QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32")
SUPPORTED_TASKS = {"marian": ("seq2seq-lm",), "gpt2": ("causal-lm",), "llama": ("causal-lm",)}
NEEDS_TOKENIZER = True
HOLDS_VARIANTS: tuple[str, ...] = ()
_TOLERANCE = 1e-3  # of log-probabilities, absolute and relative


def write(export: Export, folder: Path) -> None:
    """Raises ValueError where CTranslate2 lacks the activation, or finds other probabilities than PyTorch."""
    model = export.model.float()
    export.say("converting to CTranslate2")
    with tempfile.TemporaryDirectory() as exact:
        _save(model, export.tokenizer, Path(exact), None)
        export.say("comparing with PyTorch")
        _compare(model, Path(exact))
    _save(model, export.tokenizer, folder, export.quantization)


@torch.no_grad()
def _save(model: Any, tokenizer: Any, folder: Path, quantization: str | None) -> None:
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
    source, target = _tokens(tokenizer)
    if config.model_type == "marian":
        spec.decoder.num_heads = np.int16(config.decoder_attention_heads)  # the converter took the encoder's
        source = _numbered(source, config.vocab_size)
        target = _numbered(target, model.lm_head.out_features)
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(target)
        spec.config.decoder_start_token = target[settings.decoder_start_token_id]
    else:
        target = _numbered(source, config.vocab_size)
        spec.register_vocabulary(target)
        spec.config.layer_norm_epsilon = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
    # Each must be a token; of those that the tokenizer lacks, none is ever looked for.
    eos = target[token_ids(settings.eos_token_id)[0]] if settings.eos_token_id is not None else target[0]
    spec.config.eos_token = eos
    spec.config.bos_token = tokenizer.bos_token or eos
    spec.config.unk_token = tokenizer.unk_token or eos
    spec.validate()
    spec.optimize(quantization)
    spec.save(str(folder))


def _tokens(tokenizer: Any) -> tuple[dict[int, str], dict[int, str]]:
    """id -> token, of source and target."""
    source = target = tokenizer.get_vocab()
    if getattr(tokenizer, "separate_vocabs", False):  # a MarianTokenizer of two languages
        target = tokenizer.target_encoder
    return {i: token for token, i in source.items()}, {i: token for token, i in target.items()}


def _numbered(tokens: dict[int, str], size: int) -> list[str]:
    """The token of each id, with a name for those that the model has a row for and the tokenizer none."""
    return [tokens.get(i, f"<unused_{i}>") for i in range(size)]


def _vocabulary(folder: Path, side: str) -> list[str]:
    shared = folder / "shared_vocabulary.json"
    path = shared if shared.is_file() else folder / f"{side}_vocabulary.json"
    return json.loads((path if path.is_file() else folder / "vocabulary.json").read_text(encoding="utf-8"))


@torch.no_grad()
def _compare(model: Any, folder: Path) -> None:
    """Probabilities of random tokens. The converters do not look at every field of a config."""
    import ctranslate2

    source, target = _vocabulary(folder, "source"), _vocabulary(folder, "target")
    random, options = np.random.default_rng(0), {"device": "cpu", "intra_threads": torch.get_num_threads()}
    eos = token_ids(set_or(model.generation_config.eos_token_id, 0))[0]
    for length in (5, 9):
        encoded = random.integers(len(source), size=length).tolist()
        found = random.integers(len(target), size=length).tolist()
        tokens = [target[i] for i in found]
        if model.config.is_encoder_decoder:
            engine = ctranslate2.Translator(str(folder), **options)
            scored = engine.score_batch([[source[i] for i in encoded]], [tokens])[0].log_probs
            start, found = model.generation_config.decoder_start_token_id, [*found, eos]
            inputs = {"input_ids": [encoded], "decoder_input_ids": [[start, *found[:-1]]]}
        else:
            scored = ctranslate2.Generator(str(folder), **options).score_batch([tokens])[0].log_probs
            inputs, found = {"input_ids": [found[:-1]]}, found[1:]
        logits = model(**{name: torch.tensor(ids) for name, ids in inputs.items()}).logits[0]
        expected = logits.log_softmax(-1)[range(len(found)), found].numpy()
        if not np.allclose(scored, expected, _TOLERANCE, _TOLERANCE):
            worst = np.abs(np.array(scored) - expected).max()
            raise ValueError(
                f"ctranslate2 does not compute what {type(model).__name__} does: log-probabilities differ by {worst:.3g}; its "
                "converter may not know a field of the config"
            )


class CTranslate2Translator(Translator):
    """Translates with a folder of `hf-freeze export --format ctranslate2`. `options` go to `ctranslate2.Translator`: `device`,
    `compute_type`, `inter_threads`, `intra_threads` ...

    In fp32 it finds what `generate` finds, greedily and with beams under `early_stopping=True`; without, a few texts may
    get a longer translation of a better score.
    """

    format = "ctranslate2"
    settings = (
        *("max_new_tokens", "max_length", "num_beams", "num_return_sequences", "length_penalty"),
        *("early_stopping", "no_repeat_ngram_size", "bad_words_ids"),
    )

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder)
        self._engine = require("ctranslate2", self.format).Translator(str(folder), **options)
        self._source, self._target = (_vocabulary(Path(folder), side) for side in ("source", "target"))
        self._target_ids = {token: i for i, token in enumerate(self._target)}

    def _translate(self, encoded: list[list[int]], config: Any, batch_size: int) -> list[list[list[int]]]:
        beams, returned = set_or(config.num_beams, 1), set_or(config.num_return_sequences, 1)
        results = self._engine.translate_batch(
            [[self._source[i] for i in ids] for ids in encoded],
            max_batch_size=batch_size,
            max_input_length=0,
            max_decoding_length=self._new_tokens(config),
            beam_size=beams,
            num_hypotheses=returned,
            # A text is done when so many sequences for each beam are. With early stopping that is what generate does. Without,
            # generate goes on until the running ones score worse at their present length; twice as many is nearly the same.
            patience=1 if config.early_stopping is True else 2,
            length_penalty=set_or(config.length_penalty, 1.0),
            no_repeat_ngram_size=set_or(config.no_repeat_ngram_size, 0),
            suppress_sequences=[[self._target[i] for i in word] for word in config.bad_words_ids or []],
            end_token=[self._target[i] for i in token_ids(config.eos_token_id)],
        )
        return [[[self._target_ids[token] for token in sequence] for sequence in r.hypotheses] for r in results]
