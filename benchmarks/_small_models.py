"""Small models of six tasks for the benchmarks, each trained in minutes on data that is drawn here, or on MNIST."""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from hf_freeze.io import whole_folder
from hf_freeze.lab.data.idx import read_images

TEXTS = 2000  # without labels, that a model is compressed from; of sounds a quarter as many
_TESTED = 500
_BATCH = 32
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Taught:
    """A model before its training. `batches`: with labels, without end. `right`: for each answer to `tested`, what is right."""

    model: Any
    processors: Sequence[Any]
    batches: Iterator[Batch]
    steps: int
    rate: float
    inputs: list[Any]
    tested: list[Any]
    right: Callable[[list[dict[str, Any]]], list[float]]


# -- who has what ------------------------------------------------------------------------------------------------------------

NAMES = [
    "anna",
    "ben",
    "carla",
    "david",
    "ella",
    "fred",
    "greta",
    "hugo",
    "ida",
    "jon",
    "kim",
    "lea",
    "max",
    "nora",
    "otto",
]
COLOURS = ["red", "blue", "green", "black", "white", "yellow", "brown", "grey"]
THINGS = ["boxes", "cups", "hats", "lamps", "pens", "rings", "shoes", "stones"]
TAGS = ["O", "PERSON", "THING"]


def sentence(draw: random.Random) -> tuple[list[str], list[int], dict[str, str]]:
    """(words, the tag of each, thing -> who has it). Who is named and has nothing is no PERSON."""
    words: list[str] = []
    tags: list[int] = []
    owners: dict[str, str] = {}
    names = draw.sample(NAMES, 6)
    for thing in draw.sample(THINGS, 3):
        owner, other = names.pop(), names.pop()
        thing = f"{draw.choice(COLOURS)} {thing}"
        owners[thing] = owner
        if draw.random() < 0.5:
            words += [owner, "has", *thing.split(), "from", other, "."]
            tags += [1, 0, 0, 2, 0, 0, 0]
        else:
            words += [other, "gave", *thing.split(), "to", owner, "."]
            tags += [0, 0, 0, 2, 0, 1, 0]
    return words, tags, owners


def word_tokenizer(**more: str) -> PreTrainedTokenizerFast:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *NAMES,
        *COLOURS,
        *THINGS,
        "has",
        "from",
        "gave",
        "to",
        ".",
        "who",
        "?",
    ]
    new = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    new.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    new.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=new, model_max_length=64, **special, **more)


def bert(tokenizer: PreTrainedTokenizerFast, **more: Any) -> BertConfig:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    return BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, **more)


def tags() -> Taught:
    tokenizer, draw = word_tokenizer(), random.Random(0)
    names = dict(enumerate(TAGS))
    config = bert(tokenizer, id2label=names, label2id={name: number for number, name in names.items()})

    def batches() -> Iterator[Batch]:
        while True:
            some = [sentence(draw) for _ in range(_BATCH)]
            encoded = dict(tokenizer([" ".join(words) for words, _, _ in some], return_tensors="pt", padding=True))
            labels = torch.full_like(encoded["input_ids"], -100)
            for row, (_, right, _) in enumerate(some):
                labels[row, 1 : len(right) + 1] = torch.tensor(right)
            yield encoded | {"labels": labels}

    held = random.Random(1)
    tested = [sentence(held) for _ in range(_TESTED)]

    def right(found: list[dict[str, Any]]) -> list[float]:
        of_words = [each["log_probs"].argmax(-1) for each in found]
        return [float((got == np.array(labels)).mean()) for got, (_, labels, _) in zip(of_words, tested, strict=True)]

    inputs = [" ".join(sentence(held)[0]) for _ in range(TEXTS)]
    tried = [" ".join(words) for words, _, _ in tested]
    return Taught(BertForTokenClassification(config), [tokenizer], batches(), 600, 1e-3, inputs, tried, right)


def questions() -> Taught:
    tokenizer, draw = word_tokenizer(), random.Random(0)

    def asked(draw: random.Random) -> tuple[tuple[str, str], int]:
        """((question, text), number of the word of the text that answers it)"""
        words, _, owners = sentence(draw)
        thing, owner = draw.choice(sorted(owners.items()))
        return (f"who has {thing} ?", " ".join(words)), words.index(owner)

    def batches() -> Iterator[Batch]:
        while True:
            some = [asked(draw) for _ in range(_BATCH)]
            pairs = [pair for pair, _ in some]
            encoded = dict(tokenizer(*map(list, zip(*pairs, strict=True)), return_tensors="pt", padding=True))
            place = torch.tensor([len(question.split()) + 2 + number for (question, _), number in some])
            yield encoded | {"start_positions": place, "end_positions": place}

    held = random.Random(1)
    tested = [asked(held) for _ in range(_TESTED)]

    def right(found: list[dict[str, Any]]) -> list[float]:
        places = [each["log_probs"].argmax(-1) for each in found]
        return [float((got == word).all()) for got, (_, word) in zip(places, tested, strict=True)]

    inputs = [asked(held)[0] for _ in range(TEXTS)]
    tried = [pair for pair, _ in tested]
    return Taught(BertForQuestionAnswering(bert(tokenizer)), [tokenizer], batches(), 3000, 1e-3, inputs, tried, right)


def language() -> Taught:
    tokenizer, draw = word_tokenizer(bos_token="[CLS]", eos_token="[SEP]"), random.Random(0)
    sizes: dict[str, Any] = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**sizes, vocab_size=len(tokenizer), bos_token_id=2, eos_token_id=3, pad_token_id=0)

    def batches() -> Iterator[Batch]:
        while True:
            texts = [" ".join(sentence(draw)[0]) for _ in range(_BATCH)]
            encoded = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
            ids = encoded["input_ids"]
            yield dict(encoded) | {"labels": ids.masked_fill(ids == 0, -100)}

    def right(found: list[dict[str, Any]]) -> list[float]:
        return [float(np.exp(-each["nats"]).mean()) for each in found]  # the probability of the word that follows

    held = random.Random(1)
    tried, inputs = ([" ".join(sentence(held)[0]) for _ in range(count)] for count in (_TESTED, TEXTS))
    return Taught(GPT2LMHeadModel(config), [tokenizer], batches(), 600, 1e-3, inputs, tried, right)


def turned(words: Sequence[str]) -> list[str]:
    """The same in other words: "ben gave red boxes to anna ." is "anna has red boxes from ben .", and the other way."""
    found = []
    for start in range(0, len(words), 7):
        first, verb, *thing, _, last, _ = words[start : start + 7]
        found += [last, *(["has", *thing, "from"] if verb == "gave" else ["gave", *thing, "to"]), first, "."]
    return found


def translation() -> Taught:
    tokenizer, draw = word_tokenizer(eos_token="[SEP]"), random.Random(0)
    sizes: dict[str, Any] = {"d_model": 64, "max_position_embeddings": 64, "init_std": 0.1, "scale_embedding": True}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 256}
    tokens = {"pad_token_id": 0, "eos_token_id": 3, "forced_eos_token_id": None, "decoder_start_token_id": 0}
    model = MarianMTModel(MarianConfig(**sizes, **tokens, vocab_size=len(tokenizer)))
    model.generation_config = GenerationConfig(**tokens, max_length=64, num_beams=1)

    def batches() -> Iterator[Batch]:
        while True:
            some = [sentence(draw)[0] for _ in range(_BATCH)]
            texts = [" ".join(words) for words in some]
            encoded = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
            written = [" ".join(turned(words)) for words in some]
            labels = tokenizer(written, return_tensors="pt", padding=True)["input_ids"][:, 1:]  # without [CLS]
            yield dict(encoded) | {"labels": labels.masked_fill(labels == 0, -100)}

    held = random.Random(1)
    tested = [sentence(held)[0] for _ in range(_TESTED)]

    def right(found: list[dict[str, Any]]) -> list[float]:
        return [
            float(each["text"].replace(" ", "") == "".join(turned(words)))
            for each, words in zip(found, tested, strict=True)
        ]

    inputs = [" ".join(sentence(held)[0]) for _ in range(TEXTS)]
    return Taught(model, [tokenizer], batches(), 1000, 2e-3, inputs, [" ".join(words) for words in tested], right)


# -- digits that are heard and seen ------------------------------------------------------------------------------------------

RATE, DIGIT_SECONDS, DIGITS = 16000, 0.16, 6


def spoken(draw: np.random.Generator) -> tuple[np.ndarray, str]:
    """(a second of sound, its six digits): each is a chord of two tones of its own, in noise."""
    digits = draw.integers(10, size=DIGITS)
    time = np.arange(int(RATE * DIGIT_SECONDS)) / RATE
    tones = [
        sum(np.sin(2 * np.pi * tone * time) for tone in (300 + 150 * d, 2000 + 400 * ((7 * d) % 10))) for d in digits
    ]
    sound = np.concatenate([0.2 * tone * np.hanning(len(tone)) for tone in tones])
    sound = np.pad(sound, (0, RATE - len(sound))) + 0.02 * draw.standard_normal(RATE)
    return sound.astype(np.float32), "".join(map(str, digits))


def speech() -> Taught:
    words = ["<end>", "<start>", *"0123456789"]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<end>", eos_token="<end>", bos_token="<start>")
    extractor = WhisperFeatureExtractor(feature_size=32, chunk_length=1)
    sizes: dict[str, Any] = {"d_model": 64, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "num_mel_bins": 32}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4}
    tokens = {"decoder_start_token_id": 1, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 1}
    none: dict[str, Any] = {"suppress_tokens": None, "begin_suppress_tokens": None}
    config = WhisperConfig(**sizes, **tokens, **none, vocab_size=12, max_source_positions=50, max_target_positions=16)
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**tokens, max_length=12)
    draw = np.random.default_rng(0)

    def batches() -> Iterator[Batch]:
        while True:
            sounds, texts = zip(*(spoken(draw) for _ in range(_BATCH)), strict=True)
            labels = torch.tensor([[2 + int(digit) for digit in text] + [0] for text in texts])
            yield dict(extractor(list(sounds), sampling_rate=RATE, return_tensors="pt")) | {"labels": labels}

    held = np.random.default_rng(1)
    tested = [spoken(held) for _ in range(_TESTED)]

    def right(found: list[dict[str, Any]]) -> list[float]:
        heard = [[*each["text"].replace(" ", "")] for each in found]
        return [
            sum(a == b for a, b in zip(got, text, strict=False)) / DIGITS
            for got, (_, text) in zip(heard, tested, strict=True)
        ]

    inputs = [spoken(held)[0] for _ in range(TEXTS // 4)]
    tried = [sound for sound, _ in tested]
    return Taught(model, [tokenizer, extractor], batches(), 1500, 1e-3, inputs, tried, right)


def images(mnist: Path) -> Taught:
    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        pixels, labels = read_images(mnist / f"{part}-images-idx3-ubyte.gz", mnist / f"{part}-labels-idx1-ubyte.gz")
        return pixels.reshape(-1, 28, 28), labels

    seen, labels = read("train")
    others, right_ones = read("t10k")
    processor = ViTImageProcessor(size={"height": 28, "width": 28}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    config = ViTConfig(**sizes, image_size=28, patch_size=7, num_labels=10)
    draw = np.random.default_rng(0)

    def of_three(pixels: np.ndarray) -> np.ndarray:
        return np.repeat(pixels[..., None], 3, axis=-1)  # (28, 28) or more, as an image of three colours

    def batches() -> Iterator[Batch]:
        while True:
            drawn = draw.integers(len(seen), size=_BATCH)
            encoded = dict(processor([of_three(seen[i]) for i in drawn], return_tensors="pt"))
            yield encoded | {"labels": torch.tensor(labels[drawn].astype(int))}

    def right(found: list[dict[str, Any]]) -> list[float]:
        return [float(each["log_probs"].argmax() == label) for each, label in zip(found, right_ones, strict=False)]

    inputs = [of_three(pixels) for pixels in seen[:TEXTS]]
    tried = [of_three(pixels) for pixels in others[: 4 * _TESTED]]
    return Taught(ViTForImageClassification(config), [processor], batches(), 1500, 1e-3, inputs, tried, right)


# -- the training ------------------------------------------------------------------------------------------------------------

TASKS: dict[str, Callable[[Path], Taught]] = {  # of the folder with the four files of MNIST, for images
    "tags": lambda mnist: tags(),
    "questions": lambda mnist: questions(),
    "language": lambda mnist: language(),
    "translation": lambda mnist: translation(),
    "speech": lambda mnist: speech(),
    "images": images,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument(
        "--mnist", type=Path, default=Path("mnist"), help="folder with the four files of MNIST, for images"
    )
    parser.add_argument("--steps", type=int, help="of training; by default 600 to 3,000")


def trained(task: str, options: argparse.Namespace, folder: Path) -> Taught:
    """The task, with its model trained and saved in `folder`, unless it is there."""
    torch.manual_seed(0)
    taught = TASKS[task](options.mnist)
    if not folder.exists():
        train(taught, options.steps or taught.steps)
        with whole_folder(folder) as written:
            for part in (taught.model, *taught.processors):
                part.save_pretrained(written)
    return taught


def train(taught: Taught, steps: int) -> None:
    model: nn.Module = taught.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=taught.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, taught.rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        model(**next(taught.batches)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
