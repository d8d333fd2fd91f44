"""Replace a saved model so that its folder holds the old model or the new one at any moment, even if the process is killed.

A model is several files, and no rename replaces several at once. So:

1. The new model is written to a subfolder, `.staged-<process id>`, and synced to disk.
2. config.json is replaced by the new config, with one more field, `transformers_weights`. It names the staged weights, and
   transformers reads them from there. This one rename is the switch.
3. The staged files also get their usual names, weights of the old model are removed, config.json loses that field, and the
   subfolder is removed. What is left is the usual layout.

A process that ends before step 2 leaves the old model, one that ends after it the new one. The next save clears up.

An adapter of PEFT has no config that could name its weights. Where both of its files change, adapter_config.json is absent for
the two renames between the old adapter and the new one; `finish_adapter` completes what was interrupted there.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_freeze.io import link_or_copy, sync

_STAGED = re.compile(r"\.staged-\d+")
_ADAPTER = ".staged-adapter"
_INDEX = "staged.safetensors.index.json"  # of the staged shards, by their places in the subfolder
_SWITCH = "switch.json"
_SHARD = re.compile(r"(-\d{5}-of-\d{5})?\.safetensors")
_WEIGHTS = re.compile(r"model(\.[^.]+)?(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index(\.[^.]+)?\.json")
_INDEPENDENT_OF_WEIGHTS = {
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "transformers_weights",
    "hf_freeze_version",
}


@contextlib.contextmanager
def replacing_model(folder: Path) -> Iterator[Path]:
    """Yields a subfolder to write a model into, which then replaces the model in `folder`.

    If writing fails, the old model stays. Raises ValueError if the folder also holds weights of another `variant=` that do not
    fit the new settings.
    """
    finish_model(folder)
    _clear(folder)
    with _staging(folder) as staged:
        yield staged
        _check_other_weights(folder, staged)
        _switch(folder, staged)
    finish_model(folder)


@contextlib.contextmanager
def replacing_adapter(folder: Path) -> Iterator[Path]:
    """The same for an adapter of PEFT."""
    finish_adapter(folder)
    _clear(folder)
    with _staging(folder) as staged:
        yield staged
        for path in staged.iterdir():
            sync(path)
        os.replace(staged, folder / _ADAPTER)
    finish_adapter(folder)


def finish_model(folder: Path) -> None:
    """Complete the replacement of a model that was interrupted after its switch."""
    staged = staged_subfolder(_read_json(folder / "config.json"))
    if staged is not None and (folder / staged).is_dir():
        _give_usual_names(folder, folder / staged)
        shutil.rmtree(folder / staged)


def finish_adapter(folder: Path) -> None:
    """Complete the replacement of an adapter that was interrupted after its files were staged."""
    staged = folder / _ADAPTER
    if not staged.is_dir():
        return
    settings = folder / "adapter_config.json"
    new_settings = staged / settings.name
    if settings.exists() and settings.read_bytes() != new_settings.read_bytes():
        settings.unlink()  # never the old settings with the new weights
    for path in sorted(staged.iterdir(), key=lambda path: path == new_settings):  # the settings come last
        if path.suffix != ".part":
            link_or_copy(path, folder / path.name)
    sync(folder)
    done = staged.with_name(f".staged-{os.getpid()}")  # one that is removed in part must not be completed again
    shutil.rmtree(done, ignore_errors=True)
    os.replace(staged, done)
    shutil.rmtree(done)


def staged_subfolder(config: Any) -> str | None:
    """The subfolder that the weights of this config.json are staged in; None after a whole save."""
    name = str(config.get("transformers_weights", "")).partition("/")[0]
    return name if _STAGED.fullmatch(name) else None


def _clear(folder: Path) -> None:
    """Remove the subfolders of interrupted saves, except one that config.json names."""
    named = staged_subfolder(_read_json(folder / "config.json"))
    for staged in folder.glob(".staged-*"):
        if _STAGED.fullmatch(staged.name) and staged.name != named:
            shutil.rmtree(staged)


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    staged = folder / f".staged-{os.getpid()}"
    staged.mkdir(parents=True)
    try:
        yield staged
    except BaseException:
        if staged_subfolder(_read_json(folder / "config.json")) != staged.name:
            shutil.rmtree(staged, ignore_errors=True)
        raise


def _switch(folder: Path, staged: Path) -> None:
    indices = list(staged.glob("*.index*.json"))
    for index in indices:
        content = _read_json(index)
        places = {name: f"{staged.name}/{shard}" for name, shard in content["weight_map"].items()}
        (staged / _INDEX).write_text(json.dumps(content | {"weight_map": places}), encoding="utf-8")
    weights = _INDEX if indices else next(path.name for path in staged.glob("*.safetensors"))
    config = _read_json(staged / "config.json") | {"transformers_weights": f"{staged.name}/{weights}"}
    (staged / _SWITCH).write_text(json.dumps(config, indent=2), encoding="utf-8")
    for path in staged.iterdir():
        sync(path)
    sync(staged)
    os.replace(staged / _SWITCH, folder / "config.json")
    sync(folder)


def _give_usual_names(folder: Path, staged: Path) -> None:
    config = staged / "config.json"
    for path in list(staged.iterdir()):
        if path.name not in (config.name, _INDEX) and path.suffix != ".part":
            link_or_copy(path, folder / path.name)
    for path in _weights_of(folder, _variant(staged)):
        if not (staged / path.name).exists():
            path.unlink()
    sync(folder)
    link_or_copy(config, folder / config.name)
    sync(folder)


def _variant(staged: Path) -> str:
    """ "" of model.safetensors, ".fp16" of model.fp16.safetensors."""
    weights = next(path.name for path in staged.glob("*.safetensors"))
    return _SHARD.sub("", weights).removeprefix("model")


def _weights_of(folder: Path, variant: str | None = None) -> list[Path]:
    """The files with weights of a model, and their index; of one `variant`."""
    matches = [(path, _WEIGHTS.fullmatch(path.name)) for path in folder.iterdir()]
    return [path for path, match in matches if match and variant in (None, match[1] or match[3] or "")]


def _check_other_weights(folder: Path, staged: Path) -> None:
    own = _weights_of(folder, _variant(staged))
    others = [path for path in _weights_of(folder) if path not in own]
    old, new = _read_json(folder / "config.json"), _read_json(staged / "config.json")
    fields = sorted(f for f in (old.keys() | new.keys()) - _INDEPENDENT_OF_WEIGHTS if old.get(f) != new.get(f))
    if others and fields:
        raise ValueError(
            f"{folder} holds {others[0].name!r} of a model with other settings ({', '.join(fields[:5])}), and one config.json is "
            "for both; save to another folder, or remove that file"
        )


def _read_json(path: Path) -> dict[str, Any]:
    """{} if the file is missing or not JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
