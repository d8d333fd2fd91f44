"""Make a variant of a checkpoint that is larger than the memory: `hf-freeze convert`."""

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_freeze._version import __version__
from hf_freeze.io import write_whole
from hf_freeze.methods.base import Method
from hf_freeze.methods.registry import method_to_dict
from hf_freeze.model.loading import empty_model, load_model
from hf_freeze.model.make import make_variant
from hf_freeze.model.paging import paging

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_JOB = "job.json"
_OF_MODEL = re.compile(r"config\.json|.*\.(safetensors|bin|pt|index\.json|h5|msgpack|onnx|gguf)|README\.md|\..*")


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    methods: Sequence[Method],
    *,
    max_shard_size: str = "1GB",
    say: Callable[[str], Any] = lambda text: None,
) -> Path:
    """Write the variant that `make_variant(source, methods)` makes to the folder `out`, with the other files of `source`, such as
    its tokenizer; returns the folder.

    `source`: a folder with a native model or a variant in safetensors, in one file or in shards. No more than about
    `max_shard_size` of its tensors is in memory at a time, and of what is made, besides what a method needs to convert one layer
    (on Linux; elsewhere the system decides). The rest lies in a folder beside `out`, `.OUT.convert`, which takes as much room
    as `out`. Tensors that transformers itself makes of those in the files, such as one of all experts, are loaded as a whole.
    After a kill or an error, the same call goes on: linears that a factorisation has finished are read from there.
    `say` is called with a message before each step.

    Raises FileNotFoundError for a source or a shard that is missing; ValueError for a shard that is truncated or holds other
    tensors than the index or the config says, for an `out` that exists, for a folder beside `out` that another conversion has
    left, and for what `make_variant` refuses; OSError for a disk without room.
    """
    source, out = Path(source), Path(out)
    shard_bytes = _bytes_of(max_shard_size)
    if out.exists():
        raise ValueError(f"{out} exists already: choose another folder, or remove it")
    say(f"checking {source}")
    files = check_shards(source)
    structure = empty_model(source)
    check_shapes(structure, files, source)
    with torch.device("meta"):
        target = make_variant(structure, list(methods))  # what cannot be is refused here
    _check_room(out, 2 * sum(p.nbytes for name, p in target.named_parameters() if name not in target.seeded_tensors))
    folder = out.with_name(f".{out.name}.convert")
    _claim(folder, source, files, methods)
    with paging(folder, shard_bytes):
        say(f"converting {source}: {', '.join(method.name for method in methods) or 'no methods'}")
        model, info = load_model(source, output_loading_info=True)
        if info["missing_keys"]:  # a variant is refused by itself
            shutil.rmtree(folder)
            lacking = sorted(info["missing_keys"])
            raise ValueError(f"{source} lacks {len(lacking)} tensors of its config, such as {lacking[0]!r}")
        variant = make_variant(model, list(methods), copy=False)
        say(f"writing {out}")
        written = folder / "written"
        shutil.rmtree(written, ignore_errors=True)
        variant.save_pretrained(written, max_shard_size=max_shard_size)
    for path in source.iterdir():  # of the tokenizer, above all
        if path.is_file() and not _OF_MODEL.fullmatch(path.name) and not (written / path.name).exists():
            shutil.copyfile(path, written / path.name)
    os.replace(written, out)
    shutil.rmtree(folder)
    return out


def check_shards(source: Path) -> dict[str, tuple[str, list[int]]]:
    """{tensor: (dtype, shape)} of a folder, from the headers of its files alone.

    Raises FileNotFoundError for a missing folder or shard, ValueError for a file that is truncated or no safetensors, and for an
    index that names a shard that does not hold its tensors.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is no folder with a model")
    if (source / _INDEX).exists():
        try:
            places = json.loads((source / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{source / _INDEX} is no index of shards: {error}") from error
    elif (source / _SINGLE).exists():
        places = dict.fromkeys(_header(source / _SINGLE), _SINGLE)
    else:
        raise FileNotFoundError(f"{source} holds neither {_SINGLE} nor {_INDEX}")
    headers = {}
    for shard in sorted(set(places.values())):
        if not (source / shard).is_file():
            raise FileNotFoundError(f"{source}: the index names {shard!r}, which is missing")
        headers[shard] = _header(source / shard)
    for name, shard in places.items():
        if name not in headers[shard]:
            raise ValueError(f"{source}: the index says that {name!r} is in {shard!r}, but it is not")
    for shard, header in headers.items():
        for name in header:
            if places.get(name) != shard:
                raise ValueError(f"{source}: {shard!r} holds {name!r}, which is not what the index says")
    return {name: headers[shard][name] for name, shard in places.items()}


def check_shapes(structure: Any, files: dict[str, tuple[str, list[int]]], source: Path) -> None:
    """Raise ValueError if a tensor of the files has another shape than in the model of the config."""
    prefix = f"{structure.base_model_prefix}."
    shapes = {name.removeprefix(prefix): list(value.shape) for name, value in structure.state_dict().items()}
    for name, (_, shape) in files.items():
        expected = shapes.get(
            name.removeprefix(prefix), shape
        )  # transformers gives some tensors of older files other names
        if expected != shape:
            raise ValueError(
                f"{source}: {name!r} has the shape {shape}, but the config says {expected}: another model's shard"
            )


def _header(file: Path) -> dict[str, tuple[str, list[int]]]:
    """{tensor: (dtype, shape)} of a safetensors file. Raises ValueError if it is truncated or none."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        tensors = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error
    if end != size:
        raise ValueError(f"{file} has {size} bytes, but its header says {end}: it is truncated or damaged")
    return tensors


def _bytes_of(size: str) -> int:
    match = re.fullmatch(r"(\d+)(KB|MB|GB)", size)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"max_shard_size={size!r}: write a number and one of {list(_UNITS)}, such as '500MB'")
    return int(match[1]) * _UNITS[match[2]]


def _check_room(out: Path, needed: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise OSError(
            f"{out.parent} has {free / 1e9:.1f} GB left, and the conversion needs up to {needed / 1e9:.1f} GB"
        )


def _claim(folder: Path, source: Path, files: dict[str, Any], methods: Sequence[Method]) -> None:
    """Make the folder of a conversion, or take the one that an interrupted call of the same conversion has left."""
    changed = {
        path.name: path.stat().st_mtime_ns
        for path in sorted(source.iterdir())
        if path.suffix in (".safetensors", ".json")
    }
    digest = hashlib.sha256(json.dumps([files, changed], sort_keys=True).encode()).hexdigest()
    job = {"source": str(source.resolve()), "digest": digest, "methods": [method_to_dict(method) for method in methods]}
    job |= {"hf_freeze": __version__, "torch": torch.__version__}
    if (folder / _JOB).exists():
        found = json.loads((folder / _JOB).read_text(encoding="utf-8"))
        if found != job:
            other = next(name for name in job if found.get(name) != job[name])
            raise ValueError(
                f"{folder} was left by a conversion with another {other}: run that one again, or remove the folder"
            )
    else:
        folder.mkdir(exist_ok=True)
        write_whole(folder / _JOB, json.dumps(job, indent=2))
