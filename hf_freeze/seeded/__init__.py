"""Tensors that a seed defines, so that no checkpoint needs to hold them."""

from hf_freeze.seeded.tensor import Origin as Origin
from hf_freeze.seeded.tensor import SeededTensor as SeededTensor
from hf_freeze.seeded.tensor import digest as digest
from hf_freeze.seeded.tensor import draws as draws
from hf_freeze.seeded.tensor import fingerprint as fingerprint
from hf_freeze.seeded.tensor import uniform as uniform
