"""What each compression is measured by: recall of captions, fidelity to a language model, BLEU; and its interval.

Shapes: Q queries, M documents, D length of a vector, S sequences, T positions, V vocabulary.
"""

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blocks
import numpy as np
import torch
from job import load_model
from transformers import AutoTokenizer

from hf_freeze.analysis.significance import compare

CALIBRATION_TEXTS = {"minilm": 500, "stories260k": 128, "translator": 1000}
TEST_IMAGES, TEST_STORIES, STORY_TOKENS = 5000, 128, 200
_BATCH, _MOST_TOKENS = 64, 128
_REPLICATES = 2000  # of a bootstrap


def lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


# -- scores of items ------------------------------------------------------------------------------------------------------------
def places(queries: torch.Tensor, documents: torch.Tensor, chunk: int = 500) -> torch.Tensor:
    """How many documents are closer to query i, by the product, than document i: (Q, D), (M, D) -> (Q,).

    Documents as close as document i count as closer by half, so that equal vectors gain nothing.
    """
    found = []
    for start in range(0, len(queries), chunk):
        scores = queries[start : start + chunk] @ documents.T
        own = scores.gather(1, torch.arange(start, start + len(scores))[:, None])
        found.append((scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2)
    return torch.cat(found)


def interval(
    whole: list[np.ndarray], changed: list[np.ndarray], score: Callable[[np.ndarray], np.ndarray]
) -> list[float]:
    """Difference of the scores, mean over seeds, and its 95 % interval by a paired bootstrap over items (and t over seeds).

    `whole`, `changed`: for each seed an array of items (N, k); `score` takes their sum, (..., k) -> (...).
    """
    (found,) = compare({"whole": whole, "changed": changed}, score, replicates=_REPLICATES)
    return [found.difference, found.low, found.high]


def mean_of_first(sums: np.ndarray) -> np.ndarray:
    """Items (value · count, count) -> mean value."""
    return sums[..., 0] / sums[..., 1]


def perplexity_of(sums: np.ndarray) -> np.ndarray:
    return np.exp(mean_of_first(sums))


def bleu_of(sums: np.ndarray) -> np.ndarray:
    """BLEU from the sums of a sentence's (matches of 1 to 4 words, their totals, length, length of the reference)."""
    matches, totals, length, reference = sums[..., :4], sums[..., 4:8], sums[..., 8], sums[..., 9]
    with np.errstate(divide="ignore"):
        precisions = np.log(matches) - np.log(np.maximum(totals, 1))
    shortness = np.minimum(0, 1 - reference / np.maximum(length, 1))
    return 100 * np.exp(precisions.mean(-1) + shortness)


@dataclass
class Measure:
    """Items of one measure: an array (N, k), and the score of their sums."""

    items: np.ndarray
    score: Callable[[np.ndarray], np.ndarray]


SCORES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"perplexity": perplexity_of, "BLEU": bleu_of}


def score_of(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """The score of a measure such as "recall@1" or "BLEU test_2016"."""
    return SCORES.get(name.split()[0], mean_of_first)


# -- models and their data ------------------------------------------------------------------------------------------------------
class Task:
    """A model, the texts to calibrate with, and the measures. Settings are chosen on "val", results are of "test"."""

    name: str
    main: str  # the measure of the interval and the tables

    def __init__(self, model_folder: Path, data: Path, split: str, cache: Path) -> None:
        """`cache`: a folder for what the whole model computes."""
        self.model_folder, self.data, self.split = model_folder, data, split
        self.whole = load_model(self.name, model_folder)

    def calibration(self, seed: int, texts: int) -> tuple[list[str] | None, list[blocks.Batch]]:
        """Texts (None: the batches are the data) and the batches that are made of them."""
        raise NotImplementedError

    def measure(self, model: Any) -> dict[str, np.ndarray]:
        """Measure -> its items."""
        raise NotImplementedError

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.model_folder)


class Encoder(Task):
    """A sentence encoder. Task: find caption 1 of an image by caption 5, among those of all test images; calibration sees
    caption 3 of other images."""

    name, main = "minilm", "recall@1"

    def __init__(self, model_folder: Path, data: Path, split: str, cache: Path) -> None:
        super().__init__(model_folder, data, split, cache)
        self.tokens = self.tokenizer()
        captions = {number: lines(data / f"train.{number}.en.gz") for number in (1, 3, 5)}
        order = np.random.default_rng(0).permutation(len(captions[1]))
        self.rest = [captions[3][image] for image in order[TEST_IMAGES:]]
        if split == "val":
            documents, queries = lines(data / "val.1.en.gz"), lines(data / "val.5.en.gz")
        else:
            documents, queries = ([captions[number][image] for image in order[:TEST_IMAGES]] for number in (1, 5))
        self.documents, self.queries = self.batches(documents), self.batches(queries)
        path = cache / f"{self.name}-{split}-vectors.pt"
        if not path.exists():
            torch.save(self.encode(self.whole, self.documents), path)
        self.vectors = torch.load(path)

    def batches(self, texts: list[str]) -> list[tuple[list[int], blocks.Batch]]:
        """Batches of similar lengths: (numbers of the texts, batch)."""
        ids = self.tokens(texts, truncation=True, max_length=_MOST_TOKENS)["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        groups = [order[i : i + _BATCH] for i in range(0, len(order), _BATCH)]
        pad = self.tokens.pad
        return [(group, dict(pad({"input_ids": [ids[i] for i in group]}, return_tensors="pt"))) for group in groups]

    @torch.no_grad()
    def encode(self, model: Any, batches: list[tuple[list[int], blocks.Batch]]) -> torch.Tensor:
        vectors = torch.cat([blocks.sentence_vectors(model, batch) for _, batch in batches])
        order = torch.tensor([number for numbers, _ in batches for number in numbers])
        return vectors[order.argsort()]

    def calibration(self, seed: int, texts: int) -> tuple[list[str] | None, list[blocks.Batch]]:
        chosen = [self.rest[i] for i in np.random.default_rng(seed).permutation(len(self.rest))[:texts]]
        batches = []
        for start in range(0, len(chosen), _BATCH):
            part = chosen[start : start + _BATCH]
            batch = dict(self.tokens(part, padding=True, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt"))
            with torch.no_grad():
                batch["vectors"] = blocks.sentence_vectors(self.whole, batch)
            batches.append(batch)
        return chosen, batches

    def measure(self, model: Any) -> dict[str, np.ndarray]:
        documents = self.vectors if model is self.whole else self.encode(model, self.documents)
        place = places(self.encode(model, self.queries), documents).numpy()
        cosine = (documents * self.vectors).sum(-1).numpy()
        values = {"recall@1": place < 1, "recall@10": place < 10, "cosine": cosine}
        return {name: np.stack([value, np.ones(len(value))], 1).astype(np.float64) for name, value in values.items()}


class LanguageModel(Task):
    """A causal model on samples of its own, without end."""

    name, main = "stories260k", "perplexity"

    def __init__(self, model_folder: Path, data: Path, split: str, cache: Path) -> None:
        super().__init__(model_folder, data, split, cache)
        self.test = self.samples(0 if split == "test" else 999, TEST_STORIES)  # no seed of a calibration
        with torch.no_grad():
            self.base = self.whole(self.test).logits[:, :-1].log_softmax(-1)  # (S, T, V)

    @torch.no_grad()
    def samples(self, seed: int, count: int) -> torch.Tensor:
        torch.manual_seed(seed)
        start = torch.full((count, 1), self.whole.config.bos_token_id)
        length = {"max_new_tokens": STORY_TOKENS, "min_new_tokens": STORY_TOKENS, "eos_token_id": None}
        return self.whole.generate(start, do_sample=True, top_k=0, **length)

    def calibration(self, seed: int, texts: int) -> tuple[list[str] | None, list[blocks.Batch]]:
        return None, [{"input_ids": part} for part in self.samples(seed, texts).split(_BATCH)]

    @torch.no_grad()
    def measure(self, model: Any) -> dict[str, np.ndarray]:
        own = model(self.test).logits[:, :-1].log_softmax(-1)
        losses = -own.gather(-1, self.test[:, 1:, None])[..., 0]
        kl = (self.base.exp() * (self.base - own)).sum(-1)
        same = (self.base.argmax(-1) == own.argmax(-1)).double()
        values = {"perplexity": losses, "KL, nats": kl, "top-1 kept": same}
        count = np.full(len(self.test), self.test.shape[1] - 1)
        return {name: np.stack([value.double().sum(1).numpy(), count], 1) for name, value in values.items()}


class Translator(Task):
    """German to English, greedy. Calibration: sentences of train with the model's own translations."""

    name, main = "translator", "BLEU test_2016_flickr"

    def __init__(self, model_folder: Path, data: Path, split: str, cache: Path) -> None:
        super().__init__(model_folder, data, split, cache)
        self.tokens = self.tokenizer()
        names = ["val"] if split == "val" else sorted(file.name[: -len(".de.gz")] for file in data.glob("test*.de.gz"))
        if not names:
            raise FileNotFoundError(f"no test*.de.gz in {data}")
        self.sets = {name: (lines(data / f"{name}.de.gz"), lines(data / f"{name}.en.gz")) for name in names}
        self.main = f"BLEU {names[0]}"
        self.train = lines(data / "train.de.gz")

    @torch.no_grad()
    def translate(self, model: Any, texts: list[str]) -> list[list[int]]:
        """Token ids, without those before the first token of the translation and after its end."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        outputs: list[list[int]] = [[] for _ in texts]
        config, pad = model.config, self.tokens.pad_token_id
        for start in range(0, len(order), _BATCH):
            part = order[start : start + _BATCH]
            batch = self.tokens([texts[i] for i in part], padding=True, return_tensors="pt")
            batch = {key: batch[key] for key in ("input_ids", "attention_mask")}
            for i, ids in zip(
                part, model.generate(**batch, num_beams=1, do_sample=False, max_new_tokens=80), strict=True
            ):
                kept = ids.tolist()[1:]
                end = kept.index(config.eos_token_id) + 1 if config.eos_token_id in kept else len(kept)
                outputs[i] = [token for token in kept[:end] if token != pad]
        return outputs

    def calibration(self, seed: int, texts: int) -> tuple[list[str] | None, list[blocks.Batch]]:
        chosen = [self.train[i] for i in np.random.default_rng(seed).permutation(len(self.train))[:texts]]
        outputs = self.translate(self.whole, chosen)
        batches = []
        for start in range(0, len(chosen), _BATCH):
            part = self.tokens(chosen[start : start + _BATCH], padding=True, truncation=True, max_length=_MOST_TOKENS)
            batch = {key: torch.tensor(part[key]) for key in ("input_ids", "attention_mask")}
            labels = [torch.tensor(ids) for ids in outputs[start : start + _BATCH]]
            batch["labels"] = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
            batches.append(batch)
        return chosen, batches

    def measure(self, model: Any) -> dict[str, np.ndarray]:
        from sacrebleu.metrics.bleu import BLEU

        bleu, measures = BLEU(), {}
        for name, (sources, references) in self.sets.items():
            outputs = self.tokens.batch_decode(self.translate(model, sources), skip_special_tokens=True)
            items = [bleu.corpus_score([hyp], [[ref]]) for hyp, ref in zip(outputs, references, strict=True)]
            rows = [[*item.counts, *item.totals, item.sys_len, item.ref_len] for item in items]
            measures[f"BLEU {name}"] = np.array(rows, dtype=np.float64)
        return measures


TASKS: dict[str, type[Task]] = {task.name: task for task in (Encoder, LanguageModel, Translator)}


# -- the cuts -------------------------------------------------------------------------------------------------------------------
CUTS: dict[str, dict[str, dict[str, Any]]] = {  # model -> cut -> what stays (of zeros: what goes)
    "minilm": {
        "1/2 of the neurons": {"neurons": 0.5},
        "1/4 of the neurons": {"neurons": 0.25},
        "1/2 of the heads": {"heads": 0.5},
        "1/2 of heads and neurons": {"heads": 0.5, "neurons": 0.5},
        "FFN low rank, 1/2 of the weights": {"rank": 0.5},
        "FFN 50 % zero": {"zeros": 0.5},
        "FFN tensor train, 1/2 of the weights": {"train": 0.5},
    },
    "stories260k": {
        "3/4 of the neurons": {"neurons": 0.75},
        "1/2 of the neurons": {"neurons": 0.5},
        "4 of 5 layers": {"layers": 0.8},
        "FFN 50 % zero": {"zeros": 0.5},
        "int4 in groups": {"bits": 4},
    },
    "translator": {
        "1/2 of the neurons": {"neurons": 0.5},
        "1/4 of the neurons": {"neurons": 0.25},
        "1/2 of the heads": {"heads": 0.5},
        "FFN low rank, 1/2 of the weights": {"rank": 0.5},
        "FFN low rank, 1/4 of the weights": {"rank": 0.25},
        "FFN 50 % zero": {"zeros": 0.5},
        "FFN 70 % zero": {"zeros": 0.7},
        "int4 in groups": {"bits": 4},
    },
}


def share_kept(model: Any, cut: dict[str, Any]) -> float | None:
    """The share of what the cut counts that the model really has: units whose columns are not all zero, weights that are not
    zero, weights of factors. Of heads and neurons together: the share of their weights. None where weights do not show it."""
    if cut.keys() & {"heads", "neurons"}:
        kept = total = 0
        for block in blocks.blocks(model):
            if ("heads" if block.attention else "neurons") in cut:
                columns = blocks.weight(model, block.out).unflatten(1, (block.units, block.size))
                size = len(block.linears) * block.size  # weights of a unit for each hidden channel
                kept += int(columns.ne(0).any(0).any(-1).sum()) * size
                total += block.units * size
        return kept / total
    if "layers" in cut:
        outs = [blocks.weight(model, block.out).ne(0).any() for block in blocks.ffns(model)]
        return sum(map(int, outs)) / len(outs)
    weights = [blocks.weight(model, name) for block in blocks.ffns(model) for name in block.linears]
    total = sum(weight.numel() for weight in weights)
    if "zeros" in cut:
        return sum(int(weight.count_nonzero()) for weight in weights) / total
    if "rank" in cut:
        return sum(_rank(weight) * sum(weight.shape) for weight in weights) / total
    return None


def _rank(weight: torch.Tensor) -> int:
    values = torch.linalg.svdvals(weight.double())
    return int((values > 1e-5 * values[0]).sum())


def limit_of(cut: dict[str, Any]) -> float:
    """The largest `share_kept` that counts as this cut."""
    return 1 - cut["zeros"] if "zeros" in cut else next(iter(cut.values()))


def save_inputs(folder: Path, texts: list[str] | None, batches: list[blocks.Batch]) -> None:
    torch.save(batches, folder / "batches.pt")
    (folder / "texts.json").write_text(json.dumps(texts))


def rounded(value: float) -> str:
    """Three digits behind the point below 1, fewer above."""
    return f"{value:.{3 if abs(value) < 1 else 2 if abs(value) < 10 else 1}f}" if math.isfinite(value) else "–"
