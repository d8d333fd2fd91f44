"""What `hf_freeze.compress` makes of models that read images, hear, tag words and answer questions, from inputs without labels.

    python benchmarks/compressed_tasks.py --tasks tags questions speech images --mnist MNIST
    python benchmarks/compressed_tasks.py --tasks tags --steps 30 --budget 60%

Claims: none; the table says what comes of it.

Each model is small and trained here, by its labels, for some minutes: a BERT that tags who has what in made-up sentences; one
that is asked who has it; a Whisper that writes down the digits that it hears, each a chord of its own among noise;
a ViT on MNIST. It is then compressed from inputs alone, and both are scored in ONNX Runtime on inputs that neither saw.
Columns:

- folder: MB of all files, tokenizer included;
- score: of the labels, % of words, questions, digits or images that are right, and its difference from the model's in points
  with a 95 % interval, by a paired bootstrap over inputs;
- fidelity: to the model's answers, on other inputs that took no part (`analysis.answers`);
- seconds: of the compression, the training of the model not included.
"""

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _shared
import numpy as np
import torch
from compressed_texts import interval
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import hf_freeze
from hf_freeze.compression.budget import Budget
from hf_freeze.data.idx import read_images
from hf_freeze.publish.export.served import answers, opened

_TEXTS, _TESTED = 2000, 500
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


def word_tokenizer() -> PreTrainedTokenizerFast:
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
    return PreTrainedTokenizerFast(tokenizer_object=new, model_max_length=64, **special)


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

    inputs = [" ".join(sentence(held)[0]) for _ in range(_TEXTS)]
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

    inputs = [asked(held)[0] for _ in range(_TEXTS)]
    tried = [pair for pair, _ in tested]
    return Taught(BertForQuestionAnswering(bert(tokenizer)), [tokenizer], batches(), 3000, 1e-3, inputs, tried, right)


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

    inputs = [spoken(held)[0] for _ in range(_TEXTS // 4)]
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

    inputs = [of_three(pixels) for pixels in seen[:_TEXTS]]
    tried = [of_three(pixels) for pixels in others[: 4 * _TESTED]]
    return Taught(ViTForImageClassification(config), [processor], batches(), 1500, 1e-3, inputs, tried, right)


# -- the runs ----------------------------------------------------------------------------------------------------------------


def train(taught: Taught, steps: int) -> Any:
    model: nn.Module = taught.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=taught.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, taught.rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        model(**next(taught.batches)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return taught.model.eval()


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    tasks: dict[str, Callable[[], Taught]] = {"tags": tags, "questions": questions, "speech": speech}
    parser.add_argument("--tasks", nargs="+", default=list(tasks), choices=[*tasks, "images"])
    parser.add_argument("--mnist", type=Path, help="folder with the four files of MNIST, for images")
    parser.add_argument("--budget", default="12%", help="of bytes, such as 12%% (of the model's) or 300kB")
    parser.add_argument("--heal", default="0", help="0, 10min or 1epoch")
    parser.add_argument("--steps", type=int, help="of training; by default 600 to 3,000, by task")
    options = parser.parse_args()
    if "images" in options.tasks and options.mnist is None:
        parser.error("images are those of MNIST: give --mnist FOLDER")
    table = []
    for task in options.tasks:
        torch.manual_seed(0)
        taught = images(options.mnist) if task == "images" else tasks[task]()
        train(taught, options.steps or taught.steps)
        with tempfile.TemporaryDirectory() as temporary:
            source = Path(temporary) / "model"
            for each in (taught.model, *taught.processors):
                each.save_pretrained(source)
            made = hf_freeze.compress(
                source,
                texts=taught.inputs,
                budget=Budget(max_bytes=options.budget),
                out=Path(temporary) / "small",
                heal=0 if options.heal == "0" else options.heal,
            )
            before = np.array(taught.right(answers(opened(source), taught.tested).items))
            table.append(
                [f"{task}, the model", f"{made.original_bytes / 1e6:.2f}", f"{100 * before.mean():.2f}", "", "", ""]
            )
            for label, folder, seconds in (
                ("whole, int8", made.whole, ""),
                (f"{options.budget}: {made.kept}", made.after, f"{made.seconds:.0f}"),
            ):
                after = np.array(taught.right(answers(opened(folder.folder), taught.tested).items))
                change = interval(100 * (after - before))
                fidelity = f"{folder.fidelity.score:.4f}"
                table.append(
                    [label, f"{folder.bytes / 1e6:.2f}", f"{100 * after.mean():.2f}", change, fidelity, seconds]
                )
        print(json.dumps(table[-3:]), flush=True)
    headings = ["", "folder, MB", "score, %", "difference", "fidelity", "seconds"]
    _shared.report(
        options, _shared.markdown(headings, table), f"{_TEXTS:,} inputs without labels, of speech a quarter as many"
    )


if __name__ == "__main__":
    main()
