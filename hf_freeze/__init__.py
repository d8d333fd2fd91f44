"""Freeze, randomise, factorise, prune, share or replace parts of a Hugging Face transformer.

Importing it registers variants and exported folders with the Auto classes, and gives back the translation pipelines. It imports
neither torch nor transformers: what is registered is made when transformers asks for it.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from hf_freeze._version import __version__ as __version__
from hf_freeze.compat.registration import register_when_imported
from hf_freeze.install import how_to_install
from hf_freeze.model import pushing as _pushing

if TYPE_CHECKING:
    from hf_freeze import analysis as analysis
    from hf_freeze import methods as methods
    from hf_freeze import runtime as runtime
    from hf_freeze.analysis.accounting import ParameterCount as ParameterCount
    from hf_freeze.analysis.accounting import count_parameters as count_parameters
    from hf_freeze.analysis.accounting import multiply_adds as multiply_adds
    from hf_freeze.analysis.accounting import stored_bytes as stored_bytes
    from hf_freeze.compression.run import compress as compress
    from hf_freeze.model.make import make_variant as make_variant
    from hf_freeze.training import VariantCallback as VariantCallback

# The Trainer imports bitsandbytes where it is installed, which then warns about a missing CPU package that is not needed here.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "Failed to load CPU gemm" not in record.msg)

_ROOMS = ("analysis", "methods", "runtime")
_MODULES = {  # public name -> the module that is imported when the name is first used
    "ParameterCount": "hf_freeze.analysis.accounting",
    "count_parameters": "hf_freeze.analysis.accounting",
    "multiply_adds": "hf_freeze.analysis.accounting",
    "stored_bytes": "hf_freeze.analysis.accounting",
    "compress": "hf_freeze.compression.run",
    "make_variant": "hf_freeze.model.make",
    "VariantCallback": "hf_freeze.training",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULES.get(name, f"hf_freeze.{name}"))
    except ModuleNotFoundError as error:  # where only what `runtime` needs is installed
        if (error.name or "").partition(".")[0] == __name__:
            raise
        raise ImportError(f"hf_freeze.{name} needs {error.name}, which is missing; {how_to_install()}") from error
    if name in _ROOMS:
        return module
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS, *_MODULES})


def _variant_config(model_type: str) -> Any:
    from hf_freeze.model.classes import config_class_of_type

    return config_class_of_type(model_type)


def _exported_config(_: str) -> Any:
    from hf_freeze.publish.export.exported import ExportedConfig

    return ExportedConfig


def _push(model: Any, repo_id: str, **options: Any) -> Any:
    from hf_freeze.publish.hub import push_model

    return push_model(model, repo_id, **options)


_pushing.push = _push
register_when_imported({"hf_freeze_": _variant_config, "exported_by_hf_freeze": _exported_config})
