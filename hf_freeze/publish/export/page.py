"""A web page beside an export for browsers: it answers sentences, on any static host and without a network.

index.html    the page
README.md     for a static Space of the Hub, whose headers allow threads
runtime/      transformers.js and ONNX Runtime, from npm
"""

import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import jinja2

from hf_freeze.compat.pipelines import NEW_TOKENS, max_positions
from hf_freeze.io import write_whole
from hf_freeze.publish.export.folders import Export
from hf_freeze.publish.export.transformers_js import DTYPES, FOLDER, SUFFIXES
from hf_freeze.publish.sentence_files import read_sentence_files

PACKAGES = (
    "HF_FREEZE_NODE_MODULES"  # environment variable: a folder node_modules with the packages, to use instead of npm
)
VERSIONS = {"@huggingface/transformers": "4.3.2", "onnxruntime-web": "1.31.0-dev.20260914-8d85527a0"}
_FILES = {
    "@huggingface/transformers": ("dist/transformers.web.min.js", "LICENSE"),
    "onnxruntime-web": ("dist/ort.wasm.min.mjs", "dist/ort-wasm-simd-threaded.mjs", "dist/ort-wasm-simd-threaded.wasm"),
}
# task -> the pipeline of transformers.js, and what the page says
PAGES = {
    "seq2seq-lm": ("translation", "A translator in your browser", "Sentence to translate", "Translate", "Translation"),
    "sequence-classification": ("text-classification", "A classifier in your browser", "Sentence", "Label", "Labels"),
    "feature-extraction": ("feature-extraction", "Nearest sentences", "Sentence", "Compare", "Nearest sentences"),
    "causal-lm": ("text-generation", "A language model in your browser", "Beginning of a text", "Continue", "Text"),
}
_POOLING = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
_CONTINUATION = 64  # tokens that a language model adds at most
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("hf_freeze.publish", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def check_page(task: str, source: str | os.PathLike[str]) -> None:
    """Raises ValueError without npm and without a folder to use instead, for a task that the page does not show, and for a
    sentence encoder whose pooling transformers.js does not have."""
    if task not in PAGES:
        raise ValueError(f"the page has no place for {task}; choose from {', '.join(PAGES)}, or export without --page")
    given = os.environ.get(PACKAGES)
    if given:
        for package in VERSIONS:
            _files(package, Path(given) / package)
    elif shutil.which("npm") is None:
        raise ValueError(
            f"--page needs npm, which is missing: install Node.js, or set {PACKAGES} to a folder node_modules that has "
            f"{_named(VERSIONS)}"
        )
    if task == "feature-extraction":
        _sentences(source)


def write_page(export: Export, folder: Path) -> None:
    """Write the page beside the exported files in `folder`. Raises ValueError if npm cannot get the packages."""
    settings = _settings(export, folder)
    export.say("copying transformers.js and ONNX Runtime")
    copy_runtime(folder / "runtime")
    words = dict(zip(("pipeline", "title", "label", "button", "heading"), PAGES[export.task], strict=True))
    context = words | {"settings": settings, "versions": _named(VERSIONS)}
    for template, name in (("browser.html", "index.html"), ("space.md", "README.md")):
        write_whole(folder / name, _ENVIRONMENT.get_template(template).render(context))


def _named(versions: dict[str, str]) -> str:
    return " and ".join(f"{name}@{version}" for name, version in versions.items())


def _settings(export: Export, folder: Path) -> dict[str, Any]:
    """What the page has to know of the model."""
    kind = export.quantization or "int8"
    files = [*folder.glob(f"{FOLDER}/*{SUFFIXES[kind]}.onnx")]
    if kind == "fp32":
        files = [path for path in files if not path.stem.endswith(tuple(filter(None, SUFFIXES.values())))]
    files += [folder / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json")]
    settings: dict[str, Any] = {
        "pipeline": PAGES[export.task][0],
        "kind": kind,
        "dtype": DTYPES[kind],
        "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
    }
    if export.model.can_generate():
        settings["options"] = {"max_new_tokens": _new_tokens(export), "do_sample": False}
    elif export.task == "feature-extraction":
        settings |= _sentences(folder)
    return settings


def _new_tokens(export: Export) -> int:
    """The largest number of new tokens, as `generate` takes it from the settings of the model. transformers.js has its own."""
    config, limit = export.model.generation_config, max_positions(export.model.config, "decoder")
    count = config.max_new_tokens or (config.max_length - 1 if config.max_length else NEW_TOKENS)
    if export.task == "causal-lm":
        return min(count, _CONTINUATION, *([limit // 2] if limit else []))
    return min(count, limit - 1) if limit else count


def _sentences(source: str | os.PathLike[str]) -> dict[str, Any]:
    """How a text becomes a vector. Raises ValueError for a way that transformers.js does not have."""
    found = read_sentence_files(source)
    mode = found.get("mode", "mean")
    if mode not in _POOLING or found.get("dense"):
        kind = "layers after its pooling" if found.get("dense") else f"the pooling {mode}"
        raise ValueError(
            f"this sentence encoder has {kind}, and transformers.js has {', '.join(_POOLING)} alone; export without --page"
        )
    return {
        "options": {"pooling": _POOLING[mode], "normalize": True},
        "prompt": found.get("prompt", ""),
        "lower": found.get("lower", False),
    }


def copy_runtime(folder: Path) -> None:
    """Copy the files of `VERSIONS` to a new folder. Raises ValueError if a package or a file of it is missing."""
    folder.mkdir()
    given = os.environ.get(PACKAGES)
    for package, version in VERSIONS.items():
        with tempfile.TemporaryDirectory() as temporary:
            source = Path(given) / package if given else _packed(package, version, Path(temporary))
            for path in _files(package, source):
                shutil.copyfile(path, folder / path.name)


def _files(package: str, source: Path) -> list[Path]:
    """Those that the page needs, of the package in the folder `source`. Raises ValueError if one is missing."""
    paths = [source / name for name in _FILES[package]]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{source} has no {path.name}; it should hold {package}@{VERSIONS[package]} of npm")
    return paths


def _packed(package: str, version: str, folder: Path) -> Path:
    """The files of a package of npm."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{package}@{version}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, shell=os.name == "nt")
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        reason = re.sub(r"\s+", " ", done.stderr).strip()[:200] or "no message"
        raise ValueError(
            f"npm cannot get {package}@{version}: {reason}; set {PACKAGES} to a folder node_modules instead"
        )
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"
