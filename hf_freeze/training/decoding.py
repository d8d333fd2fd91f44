"""Translate a data set: to test a model, or to train another one on its translations (Kim & Rush, 2016, "Sequence-level knowledge
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

_AT_A_TIME = 1024  # sentences between two writings of the file


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
    """Translate, in the given order; batches of similar length hold at most `max_tokens` padded source tokens."""
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
    """What `teacher`, a model or the folder of one with its tokenizer, makes of `sentences`: targets for a student. Decoded once,
    as `translate` does with `decoding` (`num_beams`, `max_tokens`, `bf16`), and kept in `path` (JSON lines), from which a
    broken decoding goes on.

    Raises ValueError where `path` holds translations of other sentences, by another teacher or decoded otherwise; and for a
    model without `tokenizer`.
    """
    if isinstance(teacher, str | Path):
        tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(teacher)
        teacher = transformers.AutoModelForSeq2SeqLM.from_pretrained(teacher)
    if tokenizer is None:
        raise ValueError("teacher_translations: give the tokenizer of the teacher, tokenizer=...")
    path = Path(path)
    of = {"sentences": _hash(sentences), "teacher": fingerprint(teacher), "decoding": decoding}
    done: list[str] = []
    if path.exists():
        first, *lines = [json.loads(line) for line in whole_lines(path)] or [{}]
        if first != of:
            raise ValueError(f"{path} is of another decoding: of {first}, not {of}; give another path, or delete it")
        done = [text for line in lines for text in line]
    else:
        write_whole(path, json.dumps(of) + "\n")
    starts = range(len(done), len(sentences), _AT_A_TIME)
    for start in track(starts, "Translating") if len(starts) > 1 else starts:
        found = translate(teacher, tokenizer, sentences[start : start + _AT_A_TIME], **decoding)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found, ensure_ascii=False) + "\n")
        done += found
    return done


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
