"""`hf-freeze convert` and `merge`: variants of checkpoints that are larger than the memory, and back to native models."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hf_freeze._version import __version__
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.io import sync, write_whole
from hf_freeze.methods.base import Method
from hf_freeze.methods.budget import check_budget
from hf_freeze.methods.parts import Selection
from hf_freeze.methods.registry import method_to_dict
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.calibration import digest_of
from hf_freeze.model.loading import empty_model, load_model
from hf_freeze.model.make import Conversion, variant_of
from hf_freeze.model.paging import Paged
from hf_freeze.model.samples import check_items

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_JOB = "job.json"
_BLOCKS, _BLOCK_BYTES = 64, 4096  # of a file that are read to recognise it
_OF_MODEL = re.compile(
    r"config\.json|.*\.(safetensors|bin|pt|index\.json|h5|msgpack|onnx|gguf)|README\.md|\..*"
    r"|modeling_hf_freeze\.py|hf_freeze_native\.py|hf_freeze_(rng|philox|schemes)\.py"  # which load the source
)


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    methods: Sequence[Method],
    *,
    max_shard_size: str = "1GB",
    calibration: Any = None,
    tokenizer: Any = None,
    budget: float | None = None,
    say: Callable[[str], Any] = lambda text: None,
) -> Path:
    """Write the variant that `make_variant(source, methods, calibration=, tokenizer=, budget=)` makes to the folder `out`, with
    the other files of `source`, such as its tokenizer; returns the folder.

    `source`: a folder with a native model or a variant in safetensors, in one file or in shards. No more than about
    `max_shard_size` of its tensors is in memory at a time, and of what is made, besides what a method needs to convert one layer
    (on Linux; elsewhere the system decides). The rest lies in a folder beside `out`, `.OUT.part`, which takes as much room
    as `out`. Tensors that transformers itself makes of those in the files, such as one of all experts, are loaded as a whole.
    After a kill or an error, the same call goes on: linears that a factorisation has finished are read from there. A calibration
    needs the states of its texts in memory too, and has no curvature here: heads and neurons of different layers compete by the
    errors of their outputs alone.
    `say` is called with a message before each step.

    Raises FileNotFoundError for a source or a shard that is missing; ValueError for a shard that is truncated or holds other
    tensors than the index or the config says, for an `out` that exists, for a folder beside `out` that another job has
    left, and for what `make_variant` refuses; OSError for a disk without room.
    """
    settings: dict[str, Any] = {"command": "convert", "methods": [method_to_dict(method) for method in methods]}
    if calibration is not None:
        if isinstance(calibration, Iterable) and not isinstance(calibration, str | Mapping):
            calibration = list(calibration)  # it is read more than once
            check_items(calibration, tokenizer)  # before a folder is made
        settings["calibration"] = digest_of(calibration, tokenizer)
    check_budget(methods, budget, calibration)
    if budget is not None:
        settings["budget"] = budget
    what = f"converting {source}: {', '.join(method.name for method in methods) or 'no methods'}"

    def make(model: Any, paged: Paged | None) -> Any:
        if model.device.type == "meta" and calibration is not None and _are_open(methods, model):
            return model  # how much stays of which layer, the texts tell
        how = Conversion(copy=False, calibration=calibration, tokenizer=tokenizer, budget=budget, paged=paged)
        variant = variant_of(model, list(methods), how)
        if (report := getattr(variant, "calibration_report", None)) is not None:
            say(f"calibrated with {report.texts:,} texts, {report.tokens:,} tokens")
            for note in report.notes:
                say(note)
        return variant

    return _write(Path(source), Path(out), _Job(make, settings, what), max_shard_size, say)


def merge(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_size: str = "1GB",
    say: Callable[[str], Any] = lambda text: None,
) -> Path:
    """Write the native model that `merge()` of the variant in the folder `source` gives to the folder `out`.

    As `convert`, the way back; after a kill the same call starts again. Raises ValueError for a native source and for a method
    that cannot be undone, and otherwise what `convert` raises.
    """

    def make(model: Any, paged: Paged | None) -> Any:
        if not isinstance(model, VariantMixin):
            raise ValueError(f"{source} holds a native {type(model).__name__} already: there is nothing to merge")
        return model.merge(copy=False)

    job = _Job(make, {"command": "merge"}, f"merging {source}")
    return _write(Path(source), Path(out), job, max_shard_size, say)


@dataclass(frozen=True)
class _Job:
    """`make(model, paged)` gives the model that is written, and uses the other one up. `settings` say what it does, and the
    message `what` says it in words."""

    make: Callable[[Any, Paged | None], Any]
    settings: dict[str, Any]
    what: str


def _write(source: Path, out: Path, job: _Job, max_shard_size: str, say: Callable[[str], Any]) -> Path:
    """Write what `job` makes of the model of `source` to `out`. See `convert`."""
    shard_bytes = bytes_of_shard(max_shard_size)
    if out.exists():
        raise ValueError(f"{out} exists already: choose another folder, or remove it")
    say(f"checking {source}")
    files = check_shards(source)
    structure = empty_model(source)
    check_shapes(structure, files, source)
    with torch.device("meta"):
        target = job.make(structure, None)  # what cannot be is refused here
    _check_room(out, _stored_bytes(target) + _stored_bytes(target, with_ties=True))  # tied ones may be made one by one
    folder = out.with_name(f".{out.name}.part")
    _claim(folder, job.settings | _identity(source, files))
    with Paged(folder, shard_bytes, say) as paged:
        say(job.what)
        of_variant = {"paged": paged} if isinstance(structure, VariantMixin) else {}
        model, info = load_model(source, output_loading_info=True, **of_variant)
        if info["missing_keys"]:  # a variant is refused by itself
            shutil.rmtree(folder)
            lacking = sorted(info["missing_keys"])
            raise ValueError(f"{source} lacks {len(lacking)} tensors of its config, such as {lacking[0]!r}")
        model = job.make(model, paged)
        say(f"writing {out}")
        written = folder / "written"
        shutil.rmtree(written, ignore_errors=True)
        try:
            model.save_pretrained(written, max_shard_size=max_shard_size)
        except SafetensorError as error:  # such as of a full disk
            raise OSError(f"{written}: {error}") from error
    for path in source.iterdir():  # of the tokenizer, above all
        if path.is_file() and not _OF_MODEL.fullmatch(path.name) and not (written / path.name).exists():
            shutil.copyfile(path, written / path.name)
    for path in (*written.iterdir(), written):
        sync(path)
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
        places = dict.fromkeys(header_of(source / _SINGLE), _SINGLE)
    else:
        raise FileNotFoundError(f"{source} holds neither {_SINGLE} nor {_INDEX}")
    headers = {}
    for shard in sorted(set(places.values())):
        if not (source / shard).is_file():
            raise FileNotFoundError(f"{source}: the index names {shard!r}, which is missing")
        headers[shard] = header_of(source / shard)
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
        # transformers gives some tensors of older files other names
        expected = shapes.get(name.removeprefix(prefix), shape)
        if expected != shape:
            raise ValueError(
                f"{source}: {name!r} has the shape {shape}, but the config says {expected}: another model's shard"
            )


def _are_open(methods: Sequence[Method], model: Any) -> bool:
    """Whether the sizes of what `methods` make of `model` depend on a calibration."""
    selections = [method.part(Selection) for method in methods if method.facts.calibration]
    return any(part.must_decide(architecture_for(model), model.config) for part in selections if part is not None)


def header_of(file: Path) -> dict[str, tuple[str, list[int]]]:
    """{tensor: (dtype, shape)} of a safetensors file. Raises ValueError if it is truncated or none."""
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no dict)
            return {name: (tensor.get_dtype(), list(tensor.get_shape())) for name, tensor in tensors.items()}
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error


def bytes_of_shard(size: str) -> int:
    """Such as of "1GB". Raises ValueError for another notation."""
    match = re.fullmatch(r"(\d+)(KB|MB|GB)", size)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"max_shard_size={size!r}: write a number and one of {list(_UNITS)}, such as '500MB'")
    return int(match[1]) * _UNITS[match[2]]


def _stored_bytes(model: Any, *, with_ties: bool = False) -> int:
    """Of all parameters but seeded ones; `with_ties`: a tied one under each of its names."""
    seeded = getattr(model, "seeded_tensors", ())
    parameters = model.named_parameters(remove_duplicate=not with_ties)
    return sum(parameter.nbytes for name, parameter in parameters if name not in seeded)


def _check_room(out: Path, needed: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise OSError(f"{out.parent} has {free / 1e9:.1f} GB left, and up to {needed / 1e9:.1f} GB are needed")


def _identity(source: Path, files: dict[str, Any]) -> dict[str, str]:
    """What another call must find as it is to go on with the same work."""
    paths = sorted(path for path in source.iterdir() if path.suffix in (".safetensors", ".json"))
    contents = {path.name: _sampled_digest(path) for path in paths}
    digest = hashlib.sha256(json.dumps([files, contents], sort_keys=True).encode()).hexdigest()
    return {
        "source": str(source.resolve()),
        "digest": digest,
        "hf_freeze": __version__,
        "torch": torch.__version__,
    }


def _sampled_digest(path: Path) -> str:
    """Of the size of a file and of blocks spread over it: a whole checkpoint would take minutes to read."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(_BLOCKS):
            file.seek(max(size - _BLOCK_BYTES, 0) * number // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _claim(folder: Path, job: dict[str, Any]) -> None:
    """Make the folder of a job, or take the one that an interrupted call with the same job has left."""
    if (folder / _JOB).exists():
        found = json.loads((folder / _JOB).read_text(encoding="utf-8"))
        if found != job:
            other = next(name for name in (*job, *found) if found.get(name) != job.get(name))
            raise ValueError(
                f"{folder} was left by a job with another {other}: run that one again, or remove the folder"
            )
    else:
        folder.mkdir(exist_ok=True)
        write_whole(folder / _JOB, json.dumps(job, indent=2))
