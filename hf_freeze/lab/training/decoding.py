"""Translates a data set: to test a model, or to train a student on its translations (Kim & Rush, 2016, "Sequence-level knowledge
distillation", https://arxiv.org/abs/1606.07947).
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch import distributed
from torch.distributed.tensor import DTensor

from hf_freeze.data.tokenization import check_ids
from hf_freeze.io import whole_lines, write_whole
from hf_freeze.seeded import fingerprint

_CHUNK = 1024  # sentences translated between two writes to the file


def translate(
    model: Any,
    tokenizer: Any,
    sentences: list[str],
    *,
    num_beams: int = 1,
    max_tokens: int = 4096,
    bf16: bool = False,
) -> list[str]:
    """The translations in the order of `sentences`. Batches have sentences of similar length and at most `max_tokens` padded
    source tokens.

    With torch.distributed, all processes call this: they share the batches, which are those of one process, and all of them get
    all translations. `model` may be in shards.
    """
    model.eval()
    ids = tokenizer(sentences, truncation=True)["input_ids"]
    check_ids(ids, model.config.vocab_size)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    batches = []
    while order:
        longest = len(ids[order[-1]])
        batches.append([order.pop() for _ in range(min(len(order), max(1, max_tokens // longest)))])
    rank, processes = _place()
    mine = batches[rank::processes]
    in_shards = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if (
        in_shards
    ):  # every forward puts the layers together, with all processes: each needs as many batches, and steps in each
        mine += batches[-1:] * (-(-len(batches) // processes) - len(mine))
    texts: dict[int, str] = {}
    # What is put together here is used again by later training, which refuses tensors of inference mode.
    with torch.no_grad() if in_shards else torch.inference_mode():
        for batch in mine:
            inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, return_tensors="pt").to(model.device)
            limit = min(most_new_tokens(len(ids[batch[0]])), model.config.max_position_embeddings - 1)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
                outputs = model.generate(
                    **inputs, num_beams=num_beams, do_sample=False, max_new_tokens=limit, synced_gpus=in_shards or None
                )
            texts |= zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True)
    for part in _of_all_processes(texts):
        texts |= part
    return [texts[i] for i in range(len(ids))]


def most_new_tokens(source_tokens: int) -> int:
    """How long the translation of a text may become; only one that repeats itself would be longer."""
    return 2 * source_tokens + 10


def _place() -> tuple[int, int]:
    """(the number of this process, the number of processes) of torch.distributed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _of_all_processes(value: Any) -> list[Any]:
    """The values of all processes of torch.distributed, in their order."""
    _, processes = _place()
    values = [value] * processes
    if processes > 1:
        distributed.all_gather_object(values, value)
    return values


def teacher_translations(
    teacher: Any, sentences: list[str], path: str | Path, *, tokenizer: Any = None, **decoding: Any
) -> list[str]:
    """The translations of `sentences` by `teacher`, as targets for a student.

    `teacher` is a model, or the folder of a model and its tokenizer. `decoding` goes to `translate` (`num_beams`, `max_tokens`,
    `bf16`). The translations are stored in `path` (JSON lines), so that they are computed once and an interrupted decoding
    resumes. With torch.distributed, all processes call this and share the work; the first one writes.

    Raises ValueError if `path` holds translations of other sentences, by another teacher or with other decoding settings, and
    for a model without `tokenizer`.
    """
    if isinstance(teacher, str | Path):
        tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(teacher)
        teacher = transformers.AutoModelForSeq2SeqLM.from_pretrained(teacher)
    if tokenizer is None:
        raise ValueError("teacher_translations: give the tokenizer of the teacher, tokenizer=...")
    of = {"teacher": fingerprint(teacher), "decoding": decoding}
    return stored_translations(sentences, path, of, lambda chunk: translate(teacher, tokenizer, chunk, **decoding))


def stored_translations(
    sentences: list[str],
    path: str | Path,
    of: dict[str, Any],
    translate: Callable[[list[str]], list[str]],
    *,
    console: Console | None = None,
) -> list[str]:
    """What `translate` makes of the sentences, stored in `path` as `teacher_translations` does. `of`: what else than the
    sentences must be the same for the file to be used.

    Raises ValueError if `path` holds translations of other sentences, or with another `of`.
    """
    path, (rank, _) = Path(path), _place()
    header = {"sentences": _hash(sentences)} | of
    translations: list[str] = []
    if path.exists():
        old_header, *chunks = [json.loads(line) for line in whole_lines(path)] or [{}]
        if old_header != header:
            raise ValueError(
                f"{path} is of another decoding: {old_header}, not {header}; use another path, or delete it"
            )
        translations = [text for chunk in chunks for text in chunk]
    translations = _of_all_processes(translations)[0]  # all have read the file before the first process writes to it
    if rank == 0 and not path.exists():
        write_whole(path, json.dumps(header) + "\n")
    starts = range(len(translations), len(sentences), _CHUNK)
    for start in track(starts, "Translating", disable=rank > 0, console=console) if len(starts) > 1 else starts:
        chunk = translate(sentences[start : start + _CHUNK])
        if rank == 0:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(chunk, ensure_ascii=False) + "\n")
        translations += chunk
    return translations


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
