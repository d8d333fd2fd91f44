"""Exports a model to another format: merges the methods, converts, compares with PyTorch, and replaces the folder atomically."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from hf_freeze._version import __version__
from hf_freeze.analysis.accounting import stored_bytes
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.architectures.tasks import task_of
from hf_freeze.compat.pipelines import max_positions
from hf_freeze.io import holds_files, whole_folder
from hf_freeze.methods.checks import check_share
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.convert import bytes_of_shard
from hf_freeze.model.loading import load_model, load_tokenizer
from hf_freeze.publish.export import (
    aotinductor,
    compressed_tensors,
    ctranslate2,
    executorch,
    gguf,
    onnx,
    openvino,
    recording,
    static_table,
    torch_export,
    trained_grid,
    transformers_js,
)
from hf_freeze.publish.export.exported import ExportedConfig
from hf_freeze.publish.export.folders import MARK, Export, Format, digests, require
from hf_freeze.publish.export.page import check_page, write_page
from hf_freeze.publish.export.served import check_fidelity
from hf_freeze.publish.sentence_files import copy_processors, copy_sentence_files
from hf_freeze.runtime.shortlists import Shortlist

_COMPARED = 10  # one in so many texts is kept out, if a format learns from the others


def _write_dense(export: Export, folder: Path) -> None:
    """Write the native model that `merge()` returns, in the dtype `export.quantization` if it is set."""
    dtype = None if export.quantization is None else getattr(torch, export.quantization)
    export.model.to(dtype).save_pretrained(folder, max_shard_size=export.max_shard_size)


FORMATS = {
    "onnx": onnx.FORMAT,
    "openvino": openvino.FORMAT,
    "torch": torch_export.FORMAT,
    "aotinductor": aotinductor.FORMAT,
    "executorch": executorch.FORMAT,
    "ctranslate2": ctranslate2.FORMAT,
    "transformers-js": transformers_js.FORMAT,
    "gguf": gguf.FORMAT,
    "compressed-tensors": compressed_tensors.FORMAT,
    "static": static_table.FORMAT,
    "dense": Format(_write_dense, quantizations=("float16", "bfloat16", "float32"), keeps_structure=False),
}


def export_model(
    source: str | os.PathLike[str],
    format: str,
    *,
    out: str | os.PathLike[str] | None = None,
    quantization: str | None = None,
    force: bool = False,
    texts: Iterable[Any] | None = None,
    min_fidelity: float | None = None,
    page: bool = False,
    max_shard_size: str = "1GB",
    shortlist: Shortlist | str | os.PathLike[str] | None = None,
    say: Callable[[str], Any] = lambda text: None,
) -> Path:
    """Write the model of a directory or Hub id in another format; returns the folder, which needs no hf_freeze.

    `format`: one of `FORMATS`. `quantization`: the type of the weights, one of the format's `quantizations`; None means fp32, or
    for `dense` the dtype of the model. `out` defaults to SOURCE-FORMAT or SOURCE-FORMAT-QUANTIZATION. An earlier export in this
    folder is replaced, any other content only with `force`. `texts`: to calibrate int8-static with, by the first ones, and for
    `min_fidelity`, by the others: the smallest `Fidelity.score` of the exported model that is accepted, from 0 to 1. Models of
    images or sound are compared on those. The tokenizer and the generation settings are exported too. `say` is called with a
    message before each slow step.

    `onnx`, `openvino`, `torch`, `aotinductor` and `executorch` keep the methods of a variant: what is smaller stays smaller. For
    `ctranslate2` and `dense` they are merged, and `say` gets what that costs in bytes. `compressed-tensors` merges all but the
    integers of linears. The exported model is compared with PyTorch before it is quantized. `max_shard_size`: of each file of
    `dense` and `compressed-tensors`, which keeps about as much in memory. `page`: for `transformers-js`, also write a web
    page that runs the model, with the runtime, which npm gets. `shortlist`: for a translator in `onnx`, one of
    `analysis.shortlist` or its file, which `hf_freeze.runtime` then uses.

    Raises ValueError for an unknown format or quantization, a missing package, a source without a model, a model that the
    format cannot represent, a page that cannot be written, an `out` that must not be replaced, an engine whose results differ
    from PyTorch's, and a fidelity below `min_fidelity`.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; choose from {list(FORMATS)}")
    kind = FORMATS[format]
    if quantization is not None and quantization not in kind.quantizations:
        choices = f"choose from {list(kind.quantizations)}" if kind.quantizations else "it has none"
        raise ValueError(f"unknown quantization {quantization!r} for {format}; {choices}")
    _check_browsers(format, page, min_fidelity)
    is_calibrated = quantization in kind.calibrated
    if shortlist is not None and (is_calibrated or not kind.takes_shortlist):
        raise ValueError(f"{format} in {quantization or 'fp32'} takes no shortlist; choose onnx, in fp32 or int8")
    listed = shortlist if shortlist is None or isinstance(shortlist, Shortlist) else Shortlist.load(shortlist)
    compared: list[Any] = []
    if min_fidelity is not None:
        check_share(min_fidelity, "export_model", "min_fidelity")
        texts = [text for text in texts or () if not isinstance(text, str) or text.strip()]
        compared = _texts_to_compare(texts, is_calibrated)
        if kind.learns:
            compared, texts = compared[::_COMPARED], [text for i, text in enumerate(compared) if i % _COMPARED]
    if is_calibrated:
        recording.check(str(quantization), texts)
    bytes_of_shard(max_shard_size)
    for package in kind.packages:
        require(package, format)
    folder = _destination(source, "-".join(filter(None, (format, quantization))), out)
    if holds_files(folder, source) and not (folder / MARK).is_file() and not force:
        raise ValueError(f"{folder} is neither empty nor an earlier export; choose another --out, or use --force")
    say(f"reading {source}")
    model, task = _open(source)
    tokenizer = load_tokenizer(source)
    _check_model(model, task, tokenizer, source, format)
    if listed is not None and task != "seq2seq-lm":
        raise ValueError(f"a shortlist is for translators, and {source} is a {task} model")
    if page:
        check_page(task, source)
    if is_calibrated:
        recording.check_model(model, tokenizer, str(quantization))
    model, row_steps = _prepared(model, format, quantization, say)
    export = Export(model, task, tokenizer, quantization, say, texts, row_steps, source, max_shard_size, listed)
    with whole_folder(folder) as written:
        kind.write(export, written)
        _write_beside(export, source, format, written)
        if page:
            write_page(export, written)
        if min_fidelity is not None:
            say("comparing with the original on the texts")
            check_fidelity(source, written, compared, min_fidelity, say)
    return folder


def _check_browsers(format: str, page: bool, min_fidelity: float | None) -> None:
    """Raises ValueError for a page of another format, and for a fidelity that is asked of one that opens in browsers alone."""
    if page and not FORMATS[format].for_browsers:
        raise ValueError(f"{format} has no page; choose transformers-js, or export without --page")
    if min_fidelity is not None and FORMATS[format].for_browsers:
        raise ValueError(
            f"min_fidelity={min_fidelity:g}: {format} opens in browsers alone; measure onnx, which has the same graphs"
        )


def _prepared(
    model: Any, format: str, quantization: str | None, say: Callable[[str], Any]
) -> tuple[Any, dict[bytes, float]]:
    """(the model as the format writes it, what `trained_grid.steps_of_rows` says of it)"""
    kind, row_steps = FORMATS[format], {}
    if not isinstance(model, VariantMixin):
        return (model if kind.after_merge is None else kind.after_merge(model)), row_steps
    if kind.keeps_structure or not kind.merges:
        return _finished(model), row_steps
    if any(method.facts.finalizable and method.facts.stores for method in model.methods):
        model.finalize()
    row_steps = trained_grid.steps_of_rows(model)
    if quantization in kind.round_inputs and trained_grid.rounds_inputs(model):
        trained_grid.check_static(model, format, say)
        trained_grid.leave_inputs(model)
    return _merged(model, format, say), row_steps


def _texts_to_compare(texts: list[Any], is_calibrated: bool) -> list[Any]:
    """Those that nothing is calibrated with."""
    compared = texts[recording.TEXTS if is_calibrated else 0 :]
    if not compared:
        more = f", beyond the {recording.TEXTS} to calibrate with" if is_calibrated else ""
        raise ValueError(f"min_fidelity needs texts to compare with the original on{more}: --texts FILE")
    return compared


def _check_model(model: Any, task: str, tokenizer: Any, source: str | os.PathLike[str], format: str) -> None:
    """Raises ValueError unless the format has models of this kind."""
    kind = FORMATS[format]
    if kind.tasks is not None and task not in kind.tasks.get(architecture_of(model.config).model_type, ()):
        choices = "; ".join(f"{name}: {', '.join(tasks)}" for name, tasks in kind.tasks.items())
        raise ValueError(f"{format} does not support {type(model).__name__} ({task}); choose from {choices}")
    if tokenizer is None and kind.needs_tokenizer:
        raise ValueError(f"{source} holds no tokenizer, but {format} needs one; save it beside the model")


def _write_beside(export: Export, source: str | os.PathLike[str], format: str, folder: Path) -> None:
    """Write what a folder holds besides the files of the engine: tokenizer, processors, configs and the marker."""
    model = export.model
    if export.tokenizer is not None:
        export.tokenizer.save_pretrained(folder)
    _compact(folder)
    if FORMATS[format].is_complete:
        _mark(export, format, folder)
        return
    if model.main_input_name != "input_ids":
        copy_processors(source, folder)
    if export.task == "feature-extraction":
        copy_sentence_files(
            source, folder, exported=FORMATS[format].keeps_structure and not FORMATS[format].for_browsers
        )
    if FORMATS[format].for_browsers:
        transformers_js.write_configs(export, folder)
    elif FORMATS[format].keeps_structure:
        ExportedConfig.of(model.config).save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    _mark(export, format, folder)


def _mark(export: Export, format: str, folder: Path) -> None:
    config = export.model.config
    mark = {
        "format": format,
        "quantization": export.quantization,
        "task": export.task,
        "hf_freeze_version": __version__,
        "max_positions": {side: max_positions(config, side) for side in ("encoder", "decoder")},
        "files": digests(folder),
    }
    (folder / MARK).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")


def _compact(folder: Path) -> None:
    """Rewrite the vocabularies without white space, which is more than half of the bytes of a tokenizer trained here."""
    for path in (*folder.glob("tokenizer.json"), *folder.glob("*vocabulary.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def _destination(source: str | os.PathLike[str], suffix: str, out: Any) -> Path:
    if out is not None:
        return Path(out)
    path = Path(source)
    if path.is_dir():
        path = path.resolve()
        return path.with_name(f"{path.name}-{suffix}")
    return Path(f"{path.name}-{suffix}")  # a Hub id is exported to the working directory


def _open(source: str | os.PathLike[str]) -> tuple[Any, str]:
    """(model in eval mode, its task) of a directory or Hub id."""
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ValueError(f"{source} holds no model: it has no config.json")
    model = load_model(source).eval()
    return model, task_of(model)


def _finished(model: Any) -> Any:
    """The variant without what only training needs, as the tracer of `torch.export` can read it."""
    if model.finalizable:
        model.finalize()
    for module in model.modules():
        if hasattr(module, "store_numbers"):
            module.store_numbers()
    return model.eval()


def _merged(model: Any, format: str, say: Callable[[str], Any]) -> Any:
    """The native model; says first which savings it loses. Raises ValueError for a method that cannot be merged."""
    small = stored_bytes(model)
    try:
        merged: Any = model.merge()
    except ValueError as error:
        raise ValueError(f"{format} cannot hold this model: {error}") from error
    if (shrink := FORMATS[format].after_merge) is not None:
        merged = shrink(merged)
    large = stored_bytes(merged)
    if large > 1.01 * small:
        names = ", ".join(method.name for method in model.methods)
        say(
            f"{format} holds native models alone, so {names} are merged: {large / 1e6:.2f} MB of weights in fp32 instead of "
            f"{small / 1e6:.2f}"
        )
    return merged.eval()
