"""Writes code into a repository so that `trust_remote_code=True` loads it without hf_freeze.

This works if the native class has the same tensors, which may be frozen, seeded or removed. The loaded model is native, and all
of it is trainable; saving it stores all tensors.
"""

import json
import shutil
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from hf_freeze.architectures.base import base_name
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.install import how_to_install
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.config import cache_fields
from hf_freeze.model.merging import native_config_of
from hf_freeze.model.weights import no_draws
from hf_freeze.seeded import tensor as rng

TEMPLATE = Path(__file__).parent / "templates" / "modeling_hf_freeze.txt"
_MODULE, _RNG = "modeling_hf_freeze", "hf_freeze_rng"


def write_loader(folder: Path, model: VariantMixin, task: str) -> None:
    """Add the code to `folder`, where `model` is saved, and register it in config.json there.

    Raises ValueError if the native class has other tensors than the model.
    """
    _check_native(model)
    seeded = [
        (name, model.config.digests[base_name(model, name)], *astuple(definition))
        for name, definition in model.seeded_tensors.items()
    ]
    native_config: Any = model.native_class.config_class
    text = TEMPLATE.read_text(encoding="utf-8")
    for placeholder, value in (
        ("NATIVE_CONFIG", native_config.__name__),
        ("NATIVE_MODEL", model.native_class.__name__),
        ("MODEL_TYPE", type(model.config).model_type),
        ("SEEDED_TENSORS", "[\n" + "".join(f"    {entry!r},\n" for entry in seeded) + "]"),
    ):
        text = text.replace(placeholder, value)
    (folder / f"{_MODULE}.py").write_text(text, encoding="utf-8")
    shutil.copy(str(rng.__file__), folder / f"{_RNG}.py")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = {
        "AutoConfig": f"{_MODULE}.NativeConfig",
        AUTO_CLASSES[task].__name__: f"{_MODULE}.NativeModel",
    }
    config |= cache_fields(model.config)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_native(model: VariantMixin) -> None:
    with torch.device("meta"), no_draws():
        native = model.native_class(native_config_of(model.native_class, model.config))
    if _shapes(model) != _shapes(native):
        names = ", ".join(method["method"] for method in model.config.methods)
        raise ValueError(
            f"no remote code for the methods {names}: their layers need hf_freeze ({how_to_install()}); push without remote "
            f"code, or push the {model.native_class.__name__} that merge() returns"
        )


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}
