"""The process that `hf_freeze.publish.latency` starts for each folder. It imports PyTorch only for folders that need it."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from hf_freeze import runtime
from hf_freeze.runtime.folders import mark_of
from hf_freeze.runtime.sessions import SESSIONS

GENERATING = ("causal-lm", "seq2seq-lm")


def serve() -> None:
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
    if mark.get("format") in SESSIONS:
        try:
            return _Runtime(folder, mark, settings)
        except ValueError:  # such as a setting of generation that it does not follow
            opened = _Transformers(folder, mark, settings)
            opened.engine += " by transformers"
            return opened
    kinds: dict[Any, Any] = {"ctranslate2": _CTranslate2, "gguf": _LlamaCpp, "static": _Runtime}
    return kinds.get(mark.get("format"), _Transformers)(folder, mark, settings)


class _Runtime:
    def __init__(self, folder: Path, mark: dict[str, Any], settings: dict[str, Any]) -> None:
        self.engine, self.task = "-".join(filter(None, (mark["format"], mark["quantization"]))), mark["task"]
        self.model = runtime.open(folder, threads=settings["threads"])

    def __call__(self, texts: list[str], new_tokens: int, exactly: bool) -> int:
        """The number of new tokens."""
        if isinstance(self.model, runtime.StaticEncoder):
            self.model(texts)
            return 0
        if self.task not in GENERATING:
            self.model.outputs(texts, batch_size=len(texts))
            return 0
        limits = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens if exactly else 1}
        ids = self.model.token_ids(texts)
        found = self.model.ids(
            ids, batch_size=len(texts), **limits, num_beams=1, num_return_sequences=1, do_sample=False
        )
        return sum(len(each[0]) for each in found)


class _Transformers:
    """A model of transformers: saved, or exported."""

    def __init__(self, folder: Path, mark: dict[str, Any], settings: dict[str, Any]) -> None:
        import torch
        from transformers import AutoTokenizer

        from hf_freeze.architectures.tasks import task_of
        from hf_freeze.model.loading import load_model
        from hf_freeze.publish.export.exported import CLASSES
        from hf_freeze.publish.export.runners import thread_options

        torch.set_num_threads(settings["threads"])
        if mark.get("format") in (None, "dense", "compressed-tensors"):
            self.engine = "PyTorch"
            self.model: Any = load_model(folder).eval()
            self.task = task_of(self.model)
        else:
            self.engine = "-".join(filter(None, (mark["format"], mark["quantization"])))
            self.task = mark["task"]
            options = thread_options(mark["format"], settings["threads"])
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
    serve()
