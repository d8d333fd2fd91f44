"""Shared by all export formats: what a format is, the model to export, and the marker file of an exported folder."""

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_freeze.install import how_to_install
from hf_freeze.runtime.folders import MARK as MARK
from hf_freeze.runtime.folders import MODEL_FILES as MODEL_FILES
from hf_freeze.runtime.folders import digests as digests
from hf_freeze.runtime.folders import mark_of as mark_of
from hf_freeze.runtime.folders import read_mark as read_mark
from hf_freeze.runtime.shortlists import Shortlist


@dataclass(frozen=True)
class Export:
    """A model to export, in eval mode, with its task and its tokenizer, if any."""

    model: Any
    task: str
    tokenizer: Any
    quantization: str | None
    say: Callable[[str], Any]
    texts: Iterable[str] | None = None  # for the scales of activations
    # Of what was quantised before: `trained_grid.steps_of_rows`.
    row_steps: dict[bytes, float] = field(default_factory=dict)
    source: str | os.PathLike[str] = ""  # the directory or Hub id
    max_shard_size: str = "1GB"  # of safetensors
    shortlist: Shortlist | None = None  # of a translator


@dataclass(frozen=True)
class Format:
    """A format of export. `write` writes a model to a folder, and raises ValueError for one that it cannot represent.

    `packages`: what it needs. `quantizations`: types of weights; those in `calibrated` need texts, those in `round_inputs` round
    the inputs of linears too. `tasks`: model type -> tasks; None: all of every family. `keeps_structure`: the methods of a
    variant stay; otherwise they are merged, and `after_merge` makes the native model smaller without changing its outputs; where
    `merges` is False, `write` merges them. `learns`: whether texts change what it writes. `is_complete`: whether it writes all
    but the tokenizer. `for_browsers`: the folder opens in a browser alone. `takes_shortlist`: of translators.
    """

    write: Callable[[Export, Path], None]
    packages: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ()
    calibrated: tuple[str, ...] = ()
    round_inputs: tuple[str, ...] = ()
    tasks: Mapping[str, tuple[str, ...]] | None = None
    needs_tokenizer: bool = False
    keeps_structure: bool = True
    merges: bool = True
    after_merge: Callable[[Any], Any] | None = None
    learns: bool = False
    is_complete: bool = False
    for_browsers: bool = False
    takes_shortlist: bool = False


def require(package: str, format: str) -> Any:
    """The imported package. Raises ValueError if it is not installed."""
    extra = format if format in ("executorch", "gguf", "llama-cpp", "openvino") else "export"
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{format} needs {package}, which is missing; {how_to_install(extra)}") from error
