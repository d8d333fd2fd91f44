"""Freeze, randomise, factorise, prune, share or replace parts of a Hugging Face transformer.

Importing it registers the variants with the Auto classes and gives back the translation pipelines.
"""

from hf_freeze import methods as methods
from hf_freeze._version import __version__ as __version__
from hf_freeze.accounting import ParameterCount as ParameterCount
from hf_freeze.accounting import count_parameters as count_parameters
from hf_freeze.accounting import multiply_adds as multiply_adds
from hf_freeze.accounting import stored_bytes as stored_bytes
from hf_freeze.pipelines import register_pipelines
from hf_freeze.variant import make_variant as make_variant

register_pipelines()
