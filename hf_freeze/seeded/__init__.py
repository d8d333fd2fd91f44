"""Tensors that are defined by a seed, so that checkpoints need not store them."""

from hf_freeze.seeded.tensor import Origin as Origin
from hf_freeze.seeded.tensor import SeededTensor as SeededTensor
from hf_freeze.seeded.tensor import digest as digest
from hf_freeze.seeded.tensor import draws as draws
from hf_freeze.seeded.tensor import fingerprint as fingerprint
from hf_freeze.seeded.tensor import take as take
from hf_freeze.seeded.tensor import uniform as uniform
