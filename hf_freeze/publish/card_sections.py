"""Sections of a model card that only some models have: what trimming a vocabulary or a compression has changed."""

from typing import Any

_CHARACTERS = {
    "all": "Special tokens and all single characters and bytes of the tokenizer are kept.",
    "occurring": "Special tokens, bytes, and the single characters of these texts are kept.",
}


def vocabulary_section(trimming: dict[str, Any]) -> dict[str, Any]:
    """The rows of a table, as (name, before, after, ratio), and sentences on the texts."""
    before, after, texts = trimming["before"], trimming["after"], trimming["texts"]
    labels = {
        "tokens": "tokens",
        "parameters": "parameters",
        "table_bytes": "bytes of matrices with a row per token",
        "stored_bytes": "bytes of tensors in the file",
    }
    rows = [
        (label, f"{before[key]:,}", f"{after[key]:,}", f"{after[key] / before[key]:.3f}")
        for key, label in labels.items()
    ]
    mean, small_mean = (texts[f"tokens_{when}"] / texts["texts"] for when in ("before", "after"))
    rows.append(("tokens per text, mean", f"{mean:.2f}", f"{small_mean:.2f}", f"{small_mean / mean:.3f}"))
    rows.append(("texts with an unknown token", f"{texts['unknown_before']:,}", f"{texts['unknown_after']:,}", ""))
    count, renumbered, total = texts["texts"], texts["renumbered"], texts["tokens_before"]
    difference = trimming["largest_difference"]
    values = "they are equal bit for bit" if difference == 0 else f"the largest difference is {difference:.2g}"
    return {
        "rows": rows,
        "facts": [
            f"Chosen for {count:,} texts ({', '.join(trimming['files']) or 'from memory'}), to cover at least "
            f"{trimming['coverage']:.4%} of their {total:,} tokens; it covers {texts['covered'] / total:.4%}. "
            f"{_CHARACTERS[trimming['characters']]}",
            f"{renumbered:,} of these texts ({renumbered / count:.2%}) are the same tokens as before, only with other numbers. "
            f"The model computes the same for them: hidden states of {trimming['compared']} of them were compared, and {values}. "
            "All other texts are split into more, smaller tokens, and the model computes something else.",
        ],
    }


def compression_section(compression: dict[str, Any], pipeline: str) -> dict[str, Any]:
    """Headings and rows of a table, facts, what is kept of each kind of part, and code. `compression`: the record that
    `hf-freeze compress` left beside the model."""
    engine, served = compression["engine"], compression["served"]
    if engine == "ctranslate2":
        lines = [
            "from hf_freeze.publish.export import CTranslate2Translator",
            f'pipe = CTranslate2Translator("{served}")',
        ]
    else:
        lines = ["import hf_freeze", "from transformers import pipeline"]
        lines.append(f'pipe = pipeline("{pipeline}", model="{served}")')
    export = "" if engine == "torch" else f"hf-freeze export MODEL --format {engine} --quantization int8 --out {served}"
    table = compression["table"]
    return {
        "headings": list(table[0]),
        "rows": [list(row.values()) for row in table],
        "facts": compression["facts"],
        "parts": compression["parts"],
        "export": export,
        "example": "\n".join([*lines, 'print(pipe("A sentence"))']),
    }
