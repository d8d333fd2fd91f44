"""One file per method; each registers itself."""

from hf_freeze.methods.freeze import Freeze as Freeze
