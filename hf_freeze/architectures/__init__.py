"""One file per backbone family; each registers itself."""

from hf_freeze.architectures.bert import BERT as BERT
from hf_freeze.architectures.marian import MARIAN as MARIAN
