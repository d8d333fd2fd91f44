"""Lines of text files, tokenizers and batches by tokens. Readers of tables and data sets are in `hf_freeze.lab.data`."""

from hf_freeze.data.batching import TokenBatchSampler as TokenBatchSampler
from hf_freeze.data.entities import entities as entities
from hf_freeze.data.lines import read_documents as read_documents
from hf_freeze.data.lines import read_lines as read_lines
from hf_freeze.data.sampling import sample as sample
from hf_freeze.data.tokenization import train_tokenizer as train_tokenizer
from hf_freeze.data.trimming import trim_tokenizer as trim_tokenizer
