"""Freeze, randomise, factorise, prune, share or replace parts of a Hugging Face transformer.

Importing it registers the variants with the Auto classes and gives back the translation pipelines.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hf_freeze import methods as methods
from hf_freeze._version import __version__ as __version__
from hf_freeze.analysis.accounting import ParameterCount as ParameterCount
from hf_freeze.analysis.accounting import count_parameters as count_parameters
from hf_freeze.analysis.accounting import multiply_adds as multiply_adds
from hf_freeze.analysis.accounting import stored_bytes as stored_bytes
from hf_freeze.compat.pipelines import register_pipelines
from hf_freeze.model.make import make_variant as make_variant

if TYPE_CHECKING:
    from hf_freeze import analysis as analysis
    from hf_freeze.training import VariantCallback as VariantCallback

register_pipelines()


def __getattr__(name: str) -> Any:
    if name == "VariantCallback":  # importing the Trainer takes longer than all else here
        from hf_freeze.training import VariantCallback

        return VariantCallback
    if name == "analysis":
        return importlib.import_module("hf_freeze.analysis")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
