"""One file per backbone family; each registers itself."""

from hf_freeze.architectures.bert import BERT as BERT
from hf_freeze.architectures.gpt2 import GPT2 as GPT2
from hf_freeze.architectures.llama import LLAMA as LLAMA
from hf_freeze.architectures.marian import MARIAN as MARIAN
