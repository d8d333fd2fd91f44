"""Exported folders of small models, and the tokenizer of the encoders."""

from pathlib import Path

import pytest
import torch
from support.text import SOURCE, fast_tokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
)

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.publish.export import export_model

_CLASSES = [
    BertModel,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertForQuestionAnswering,
    BertForMaskedLM,
]
TASKS = dict(
    zip(
        ["feature-extraction", "sequence-classification", "token-classification", "question-answering", "masked-lm"],
        _CLASSES,
        strict=True,
    )
)


def bert_tokenizer() -> BertTokenizer:
    words = [*{word for text in SOURCE for word in text.split()}, *"abcdefghijklmnopqrstuvwxyzäöü"]
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *sorted(words),
        *(f"##{c}" for c in "abcdefghijklmnrstuvwz"),
    ]
    return BertTokenizer(
        vocab={piece: number for number, piece in enumerate(dict.fromkeys(pieces))}, model_max_length=40
    )


def noisy(kind, config, seed=5):
    """A model as if trained: every weight is moved, so that outputs depend on the inputs."""
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += 0.8 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="session")
def encoders(tmp_path_factory) -> dict[str, Path]:
    """task -> the folder in ONNX"""
    place, tokenizer, folders = tmp_path_factory.mktemp("encoders"), bert_tokenizer(), {}
    labels = {
        "id2label": {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"},
        "label2id": {"O": 0, "B-PER": 1, "I-PER": 2, "B-LOC": 3},
    }
    for task, kind in TASKS.items():
        sizes = {
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 1,
            "max_position_embeddings": 40,
            "type_vocab_size": 2,
        }
        config = BertConfig(**ARCHITECTURES["bert"].tiny | sizes | (labels if "classification" in task else {}))
        noisy(kind, config, seed=1).save_pretrained(place / task)
        tokenizer.save_pretrained(place / task)
        folders[task] = export_model(place / task, "onnx")
    return folders


@pytest.fixture(scope="session")
def translator(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("translator") / "model"
    tokenizer = fast_tokenizer(place.parent)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
    sizes = {"vocab_size": len(tokenizer), "decoder_vocab_size": len(tokenizer), "max_position_embeddings": 64}
    sizes |= {"encoder_layers": 1, "decoder_layers": 2}
    model = noisy(MarianMTModel, MarianConfig(**ARCHITECTURES["marian"].tiny | sizes | ids))
    model.final_logits_bias.normal_()
    model.generation_config.max_new_tokens = 12
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return export_model(place, "onnx")


@pytest.fixture(scope="session")
def generator(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("generator") / "model"
    tokenizer = fast_tokenizer(place.parent, end_of_text=False)
    sizes = {
        "vocab_size": len(tokenizer),
        "n_layer": 1,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    noisy(GPT2LMHeadModel, GPT2Config(**ARCHITECTURES["gpt2"].tiny | sizes)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return export_model(place, "onnx")
