"""One recipe laid over another, or over a preset."""

import copy
from typing import Any

from hf_freeze.lab.recipes.settings import data_form


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins. Mappings are merged, except where they exclude each other: `data` of another form, and a pretrained instead of
    a fresh `backbone` or the reverse, replace what was there. A pretrained backbone brings its tokenizer, so it removes the
    `tokenizer` of `base` too."""
    merged = dict(base)
    if is_pretrained(over.get("backbone")) and not is_pretrained(base.get("backbone")):
        merged.pop("tokenizer", None)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and not _replaces(key, old, value):
            merged[key] = merge(old, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _replaces(section: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    if section == "data":
        return _is_other_form(old, new)
    if section == "backbone":
        return is_pretrained(new) != is_pretrained(old) and bool({"pretrained", "model_type"} & set(new))
    return False


def is_pretrained(backbone: Any) -> bool:
    return isinstance(backbone, dict) and "pretrained" in backbone


def _is_other_form(old: dict[str, Any], new: dict[str, Any]) -> bool:
    before, after = data_form(old), data_form(new)
    only_splits = before == "hub" and after == "files" and "root" not in new  # another split of the same data set
    return None not in (before, after) and before != after and not only_splits
