"""Translates a data set: to test a model, or to train a student on its translations (Kim & Rush, 2016, "Sequence-level knowledge
distillation", https://arxiv.org/abs/1606.07947).
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track

from hf_freeze.data.tokenization import check_ids
from hf_freeze.io import whole_lines, write_whole
from hf_freeze.seeded import fingerprint

_CHUNK = 1024  # sentences translated between two writes to the file


@torch.inference_mode()
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
    source tokens."""
    model.eval()
    ids = tokenizer(sentences, truncation=True)["input_ids"]
    check_ids(ids, model.config.vocab_size)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    translations = [""] * len(ids)
    while order:
        longest = len(ids[order[-1]])
        batch = [order.pop() for _ in range(min(len(order), max(1, max_tokens // longest)))]
        inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, return_tensors="pt").to(model.device)
        limit = min(2 * longest + 10, model.config.max_position_embeddings - 1)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            outputs = model.generate(**inputs, num_beams=num_beams, do_sample=False, max_new_tokens=limit)
        for i, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
            translations[i] = text
    return translations


def teacher_translations(
    teacher: Any, sentences: list[str], path: str | Path, *, tokenizer: Any = None, **decoding: Any
) -> list[str]:
    """The translations of `sentences` by `teacher`, as targets for a student.

    `teacher` is a model, or the folder of a model and its tokenizer. `decoding` goes to `translate` (`num_beams`, `max_tokens`,
    `bf16`). The translations are stored in `path` (JSON lines), so that they are computed once and an interrupted decoding
    resumes.

    Raises ValueError if `path` holds translations of other sentences, by another teacher or with other decoding settings, and
    for a model without `tokenizer`.
    """
    if isinstance(teacher, str | Path):
        tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(teacher)
        teacher = transformers.AutoModelForSeq2SeqLM.from_pretrained(teacher)
    if tokenizer is None:
        raise ValueError("teacher_translations: give the tokenizer of the teacher, tokenizer=...")
    path = Path(path)
    header = {"sentences": _hash(sentences), "teacher": fingerprint(teacher), "decoding": decoding}
    translations: list[str] = []
    if path.exists():
        old_header, *chunks = [json.loads(line) for line in whole_lines(path)] or [{}]
        if old_header != header:
            raise ValueError(
                f"{path} is of another decoding: {old_header}, not {header}; use another path, or delete it"
            )
        translations = [text for chunk in chunks for text in chunk]
    else:
        write_whole(path, json.dumps(header) + "\n")
    starts = range(len(translations), len(sentences), _CHUNK)
    for start in track(starts, "Translating") if len(starts) > 1 else starts:
        chunk = translate(teacher, tokenizer, sentences[start : start + _CHUNK], **decoding)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(chunk, ensure_ascii=False) + "\n")
        translations += chunk
    return translations


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
