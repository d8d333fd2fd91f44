"""How fast folders answer as users feel it: saved models and exported folders of any format, side by side.

Every folder has a process of its own, which opens it and answers texts with tokenizer and search as usual. The processes take
turns, so that other load on the machine hits all of them alike, and a ratio of two folders is one of neighbouring measurements.

    results = measure(["runs/theseus/row-0-seed-1/model", "model-onnx-int8"], texts)
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.io import write_whole
from hf_freeze.publish.export.engine_parts import GENERATING
from hf_freeze.publish.export.folders import MODEL_FILES, mark_of
from hf_freeze.publish.markdown import markdown_table

BATCHES = (1, 32)
_ALONE, _TOGETHER = 16, 128  # texts of a round in batches of one, and in the others
FILES = ("latency.json", "latency.md", "latency.png")


@dataclass
class Latency:
    """What was measured of a folder.

    `megabytes`: of the model's files. `cold_start`: seconds from the start of the process to its first answer. `memory`: the
    largest resident set of the process, in MB. `first`: ms to the first token of one text alone, one entry for each (empty for
    models that do not generate). `batches`: batch size -> ms of each batch; `sizes`: batch size -> (texts, new tokens) of each
    batch.
    """

    folder: str
    engine: str
    task: str
    megabytes: float
    cold_start: float
    memory: float = 0.0
    first: list[float] = field(default_factory=list)
    batches: dict[int, list[float]] = field(default_factory=dict)
    sizes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, batch: int, texts: Sequence[str], answer: dict[str, Any]) -> None:
        """What the process has measured of a batch."""
        self.batches.setdefault(batch, []).append(answer["ms"])
        self.sizes.setdefault(batch, []).append((len(texts), answer["tokens"]))
        if "first" in answer:
            self.first.append(answer["first"])

    def per_text(self, batch: int) -> float:
        """ms a text, in batches of this size."""
        return sum(self.batches[batch]) / sum(texts for texts, _ in self.sizes[batch])

    def tokens_per_second(self, batch: int) -> float:
        """New tokens a second; 0 for models that do not generate."""
        return 1000 * sum(tokens for _, tokens in self.sizes[batch]) / sum(self.batches[batch])

    def percentile(self, batch: int, percent: float) -> float:
        """ms of a batch of this size."""
        return float(np.percentile(self.batches[batch], percent))

    def ratio_to(self, other: "Latency", batch: int) -> tuple[float, float, float]:
        """(median, quartiles) of this folder's time divided by the other's, over batches of the same texts."""
        ratios = np.array(self.batches[batch]) / np.array(other.batches[batch])
        quartile, middle, upper = np.percentile(ratios, (25, 50, 75))
        return float(middle), float(quartile), float(upper)


def megabytes(folder: Path) -> float:
    """MB of the model's files, without tokenizer and config."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in MODEL_FILES) / 1e6


def measure(
    folders: Sequence[str | os.PathLike[str]],
    texts: Iterable[str],
    *,
    batches: Sequence[int] = BATCHES,
    new_tokens: int = 64,
    exactly: bool = False,
    rounds: int = 3,
    threads: int = 1,
    say: Callable[[str], Any] = lambda text: None,
    worker: "Worker | None" = None,
) -> list[Latency]:
    """Measure each folder on the same texts; greedy search of at most `new_tokens` tokens, or `exactly` so many.

    A round has 16 texts one by one, first for one token and then for all, and up to 128 texts in each other batch size. Each
    process has `threads` threads. `say` is called with a line before each slow step. `worker`: the process for all folders, of as
    many threads; cold starts and memory are then not those of each folder alone.

    Raises ValueError for no folder or no text, a number below 1, and a folder that cannot be opened or answers with an error.
    """
    lines = [text for text in texts if text.strip()][:_TOGETHER]
    if not folders:
        raise ValueError("no folder to measure; name at least one")
    if not lines:
        raise ValueError("the texts are empty; give a file with a text on each line")
    for name, value in [
        ("new_tokens", new_tokens),
        ("rounds", rounds),
        ("threads", threads),
        *(("batch", b) for b in batches),
    ]:
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    settings = {"new_tokens": new_tokens, "exactly": exactly, "threads": threads}
    if busy := _busy():
        say(f"this machine is busy ({busy}): times will be too long")
    results, asks = [], []
    with contextlib.ExitStack() as stack:
        for number, folder in enumerate(map(str, folders), start=1):
            say(f"opening {folder} ({number} of {len(folders)})")
            begin = time.time()
            process = worker or stack.enter_context(contextlib.closing(Worker(threads)))
            asks.append(functools.partial(process.ask, folder, settings))
            opened = asks[-1](lines[:1], 0)
            size, seconds = megabytes(Path(folder)), time.time() - begin
            results.append(Latency(folder, opened["engine"], opened["task"], size, seconds))
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            for batch in batches:
                chosen = lines[:_ALONE] if batch == 1 else lines
                for start in range(0, len(chosen), batch):
                    for ask, result in zip(asks, results, strict=True):
                        result.add(batch, chosen[start : start + batch], ask(chosen[start : start + batch], batch))
        for ask, result in zip(asks, results, strict=True):
            result.memory = ask([], 0, last=True)["memory"]
    return results


def _busy() -> str:
    """How many processes want the cores, where there are more of them than cores; "" where the system does not tell."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"{load:.1f} processes for {cores} cores" if load > cores else ""


class Worker:
    """A process that opens folders and answers texts. Starting one takes longer than a few measurements of small models: give
    one to several calls of `measure`, and `close` it. It ends with the process that started it."""

    def __init__(self, threads: int = 1) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, folder: str, settings: dict[str, Any], texts: list[str], batch: int, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"folder": folder, "settings": settings, "texts": texts, "batch": batch} | more
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: its process ended with code {self.process.wait()}") from error
        if "error" in answer:
            raise ValueError(f"{folder}: {answer['error']}")
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


# -- table and picture ---------------------------------------------------------------------------------------------------------


def table(results: Sequence[Latency]) -> list[dict[str, str]]:
    """A row for each folder: heading -> text. Times are medians, with the 95th percentile after them; "32: ms" is that of a batch
    of 32."""
    rows = []
    for one in results:
        row = {"folder": _name(one), "engine": one.engine, "files, MB": f"{one.megabytes:.2f}"}
        row["cold start, s"] = f"{one.cold_start:.1f}"
        if one.first:
            first, late = np.percentile(one.first, (50, 95))
            row["first token, ms"] = f"{first:.1f} ({late:.1f})"
        for batch in one.batches:
            middle, late = (one.percentile(batch, percent) for percent in (50, 95))
            row[f"{batch}: ms"] = f"{middle:.1f} ({late:.1f})"
            if one.task in GENERATING:
                row[f"{batch}: tokens/s"] = f"{one.tokens_per_second(batch):,.0f}"
            else:
                row[f"{batch}: texts/s"] = f"{1000 / one.per_text(batch):,.0f}"
        row["memory, MB"] = f"{one.memory:,.0f}"
        rows.append(row)
    return rows


def _name(one: Latency) -> str:
    """The name of the folder; of a run's `model`, that of the run."""
    path = Path(one.folder).resolve()
    return path.parent.name if path.name == "model" else path.name


def write(results: Sequence[Latency], out: Path) -> None:
    """Write `FILES` to the folder `out`: what was measured, the table and the picture."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / FILES[0], json.dumps([asdict(one) for one in results], indent=1) + "\n")
    rows = table(results)
    lines = markdown_table(list(rows[0]), [list(row.values()) for row in rows], left=2)
    write_whole(out / FILES[1], "\n".join(lines) + "\n")
    draw(results, out / FILES[2])


def draw(results: Sequence[Latency], path: Path) -> None:
    """Bars: time a text in each batch size, with 5th and 95th percentile, and MB. The names of the folders are the labels."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    batches = list(results[0].batches)
    names = [f"{_name(one)}\n{one.engine}" for one in results]
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}):
        figure = Figure(figsize=(4 + 3.2 * len(batches), 1.4 + 0.55 * len(results)), layout="constrained")
        axes = figure.subplots(1, len(batches) + 1, sharey=True, squeeze=False)[0]
        for axis, batch in zip(axes, batches, strict=False):
            texts = np.array([[max(1, size) for size, _ in one.sizes[batch]] for one in results])
            times = np.array([one.batches[batch] for one in results]) / texts
            low, middle, high = np.percentile(times, (5, 50, 95), axis=1)
            whiskers = {"xerr": [middle - low, high - middle], "error_kw": {"linewidth": 0.8, "capsize": 2}}
            axis.barh(names, middle, color="#4477aa", **whiskers)
            axis.set_xlabel(f"ms a text, in batches of {batch}" if batch > 1 else "ms a text, one by one")
        axes[-1].barh(names, [one.megabytes for one in results], color="#bbbbbb")
        axes[-1].set_xlabel("model files, MB")
        axes[0].invert_yaxis()
        for axis in axes:
            axis.set_xlim(left=0)
            axis.grid(axis="x", alpha=0.2)
        figure.savefig(path, dpi=130, facecolor="white")


# -- in the process of folders -------------------------------------------------------------------------------------------------


def _serve() -> None:
    """Answer one request a line of stdin, on stdout, until there is no more. A folder is opened by the first one that names it,
    and forgotten after its `last`."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    models: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        folder, settings = request["folder"], request["settings"]
        try:
            if folder not in models:
                models[folder] = _open(Path(folder), settings)
            found = _answer(models[folder], request["texts"], request["batch"], settings)
            if "last" in request:
                del models[folder]
        except Exception as error:  # whatever it is, the process that asked reports it
            found = {"error": " ".join(str(error).split()) or type(error).__name__}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _answer(model: Any, texts: list[str], batch: int, settings: dict[str, Any]) -> dict[str, Any]:
    found = {"engine": model.engine, "task": model.task, "memory": _peak_memory()}
    if not texts:
        return found
    if batch == 1 and model.task in GENERATING:
        begin = time.perf_counter()
        model(texts, 1, True)
        found["first"] = 1e3 * (time.perf_counter() - begin)
    begin = time.perf_counter()
    tokens = model(texts, settings["new_tokens"], settings["exactly"])
    return found | {"ms": 1e3 * (time.perf_counter() - begin), "tokens": tokens}


def _peak_memory() -> float:
    """MB; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if status.exists():  # the peak that getrusage gives there includes that of the parent
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) * 1024 / 1e6
    try:
        import resource
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _open(folder: Path, settings: dict[str, Any]) -> Any:
    mark = mark_of(folder)
    kinds: dict[Any, Any] = {"ctranslate2": _CTranslate2, "gguf": _LlamaCpp}
    return kinds.get(mark.get("format"), _Transformers)(folder, mark, settings)


class _Transformers:
    """A model of transformers: saved, or exported."""

    def __init__(self, folder: Path, mark: dict[str, Any], settings: dict[str, Any]) -> None:
        import torch
        from transformers import AutoTokenizer

        from hf_freeze.architectures.tasks import task_of
        from hf_freeze.model.loading import load_model
        from hf_freeze.publish.export.exported import CLASSES

        torch.set_num_threads(settings["threads"])
        if mark.get("format") in (None, "dense"):
            self.engine = "PyTorch"
            self.model: Any = load_model(folder).eval()
            self.task = task_of(self.model)
        else:
            self.engine = "-".join(filter(None, (mark["format"], mark["quantization"])))
            self.task = mark["task"]
            options = {"intra_op_num_threads": settings["threads"]} if mark["format"] == "onnx" else {}
            self.model = CLASSES[self.task].from_pretrained(folder, engine=options)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.task == "causal-lm":
            self.tokenizer.padding_side = "left"

    def __call__(self, texts: list[str], new_tokens: int, exactly: bool) -> int:
        """The number of new tokens."""
        import torch

        encoded = self.tokenizer(texts, padding=True, return_tensors="pt")
        with torch.inference_mode():
            if self.task not in GENERATING:
                self.model(**encoded)
                return 0
            encoded.pop("token_type_ids", None)
            limits = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens if exactly else 1}
            found = self.model.generate(**encoded, **limits, num_beams=1, do_sample=False)
        begin = encoded["input_ids"].shape[1] if self.task == "causal-lm" else 1
        new = found[:, begin:]
        ends = self.model.generation_config.eos_token_id
        ended = torch.isin(new, torch.tensor(ends if isinstance(ends, list) else [ends or -1])).int()
        return int((ended.cumsum(1) - ended == 0).sum())  # up to the first end, with it


class _CTranslate2:
    engine = "ctranslate2"

    def __init__(self, folder: Path, mark: dict[str, Any], settings: dict[str, Any]) -> None:
        import ctranslate2
        from transformers import AutoTokenizer

        self.engine = "-".join(filter(None, (mark["format"], mark["quantization"])))
        self.task = mark["task"]
        kind = ctranslate2.Translator if self.task == "seq2seq-lm" else ctranslate2.Generator
        self.model: Any = kind(str(folder), intra_threads=settings["threads"], inter_threads=1)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def __call__(self, texts: list[str], new_tokens: int, exactly: bool) -> int:
        tokens = [self.tokenizer.convert_ids_to_tokens(ids) for ids in self.tokenizer(texts, truncation=True).input_ids]
        least = new_tokens if exactly else 1
        if self.task == "seq2seq-lm":
            found = self.model.translate_batch(
                tokens, beam_size=1, max_decoding_length=new_tokens, min_decoding_length=least, return_end_token=True
            )
            return sum(len(one.hypotheses[0]) for one in found)
        found = self.model.generate_batch(
            tokens, max_length=new_tokens, min_length=least, sampling_topk=1, include_prompt_in_result=False
        )
        return sum(len(one.sequences[0]) for one in found)


class _LlamaCpp:
    """One text after the other, tokenised by llama.cpp."""

    def __init__(self, folder: Path, mark: dict[str, Any], settings: dict[str, Any]) -> None:
        from hf_freeze.publish.export.llama_cpp import LlamaCpp

        self.engine = "-".join(filter(None, (mark["format"], mark["quantization"])))
        self.task = mark["task"]
        self.model = LlamaCpp(folder, self.task, threads=settings["threads"])

    def __call__(self, texts: list[str], new_tokens: int, exactly: bool) -> int:
        return sum(self._answered(self.model.tokens(text), new_tokens, [] if exactly else None) for text in texts)

    def _answered(self, ids: list[int], new_tokens: int, ends: list[int] | None) -> int:
        if self.task == "causal-lm":
            return len(self.model.continued(ids, new_tokens, ends))
        if self.task == "seq2seq-lm":
            self.model.encode(ids)
            return len(self.model.continued([self.model.start()], new_tokens, ends))
        self.model.outputs(ids)
        return 0


if __name__ == "__main__":
    _serve()
