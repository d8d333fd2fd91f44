"""The module in the folder of a variant with which `trust_remote_code=True` loads it, in a program that imports no hf_freeze.

It imports hf_freeze, which enters the variants in the Auto classes. `native_code.py` adds what works without hf_freeze.
"""

from pathlib import Path
from typing import Any

from hf_freeze.install import how_to_install

TEMPLATES = Path(__file__).parent / "templates"
MODULE = "modeling_hf_freeze.py"


def has_remote_code(config: Any) -> bool:
    """Whether the folder that `config` was read from, or saved to, has such code."""
    return bool(getattr(config, "auto_map", None))


def module_for(config: Any) -> str:
    """The source of the module for the config of a variant: where hf_freeze is not installed, it says so in one sentence."""
    methods = ", ".join(dict.fromkeys(method["method"] for method in config.methods))
    what_for = f"it computes the layers of this model ({methods})" if methods else "this model was saved by it"
    sentence = (
        f"this model needs the package hf_freeze, which is not installed: {what_for}; install it {how_to_install()}"
    )
    contents = "hf_freeze must be installed: it has the layers of this model."
    return module(config, contents, f"raise ImportError({sentence!r}) from None")


def module(config: Any, contents: str, without: str) -> str:
    """The source of the module, whose docstring says `contents`; it runs the line `without` where hf_freeze is not installed."""
    return filled("modeling_hf_freeze.txt", CONTENTS=contents, MODEL_TYPE=config.model_type, WITHOUT_HF_FREEZE=without)


def filled(template: str, **values: str) -> str:
    """The text of a template, with values for its placeholders."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text
