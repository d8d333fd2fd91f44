"""All code that `trust_remote_code=True` runs from the folder of a variant, with what works where hf_freeze is not installed.

That is for variants whose native class has the same tensors, which may be frozen, seeded or removed. They are then loaded as a
native model, all of it trainable; saving it stores all tensors.
"""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from hf_freeze.architectures.base import base_name
from hf_freeze.architectures.tasks import AUTO_CLASSES, task_of
from hf_freeze.io import write_whole
from hf_freeze.model.config import VARIANT_FIELDS, cache_fields
from hf_freeze.model.merging import native_config_of
from hf_freeze.model.remote_code import MODULE, filled, module, module_for
from hf_freeze.model.weights import no_draws
from hf_freeze.seeded import philox, schemes
from hf_freeze.seeded import tensor as rng

_NATIVE, _RNG, _PHILOX, _SCHEMES = "hf_freeze_native", "hf_freeze_rng", "hf_freeze_philox", "hf_freeze_schemes"
FILES: tuple[str, ...] = (MODULE, f"{_NATIVE}.py", f"{_RNG}.py", f"{_PHILOX}.py", f"{_SCHEMES}.py")


def remote_code(model: Any) -> tuple[dict[str, str], dict[str, str]]:
    """(`auto_map` for the config of the variant `model`, file name -> source)."""
    name = MODULE.removesuffix(".py")
    # With hf_freeze imported, all Auto classes know this config, and transformers prefers what they know.
    auto_map = {"AutoConfig": f"{name}.Config"}
    if not is_native(model):
        return auto_map, {MODULE: module_for(model.config)}
    auto_map[AUTO_CLASSES[task_of(model)].__name__] = f"{name}.Model"
    native_class = model.native_class.__name__
    contents = f"Where hf_freeze is not installed, it is loaded as a {native_class}."
    importing = f"from .{_NATIVE} import Config, Model  # noqa: F401"
    seeded = [
        (name, model.config.digests[base_name(model, name)], *astuple(definition))
        for name, definition in model.seeded_tensors.items()
    ]
    native = filled(
        f"{_NATIVE}.txt",
        NATIVE_CONFIG=model.native_class.config_class.__name__,
        NATIVE_MODEL=native_class,
        MODEL_TYPE=model.config.model_type,
        SEEDED_TENSORS="[\n" + "".join(f"    {entry!r},\n" for entry in seeded) + "]",
        VARIANT_FIELDS=repr((*VARIANT_FIELDS, "auto_map")),
        NATIVE_FIELDS=repr(cache_fields(model.config)),
    )
    copied = [Path(str(source.__file__)).read_text(encoding="utf-8") for source in (rng, philox, schemes)]
    for source, name in ((philox, _PHILOX), (schemes, _SCHEMES)):
        copied[0] = copied[0].replace(f"from {source.__name__} import", f"from .{name} import")
    sources = module(model.config, contents, importing), native, *copied
    return auto_map, dict(zip(FILES, sources, strict=True))


def write_remote_code(folder: Path, model: Any) -> None:
    """Add the code to `folder`, where the variant `model` is saved, and enter it in config.json there."""
    auto_map, sources = remote_code(model)
    for name, source in sources.items():
        write_whole(folder / name, source)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"auto_map": auto_map}
    write_whole(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def is_native(model: Any) -> bool:
    """Whether the native class of the variant `model` has the same tensors, so that it needs no layer of hf_freeze."""
    with torch.device("meta"), no_draws():
        native = model.native_class(native_config_of(model.native_class, model.config))
    shapes, expected = ({name: value.shape for name, value in each.state_dict().items()} for each in (model, native))
    return shapes == expected
