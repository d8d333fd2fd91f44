"""Readers for text and images, the built-in corpus, tokenizer training and batching by tokens."""

from hf_freeze.data.batching import TokenBatchSampler as TokenBatchSampler
from hf_freeze.data.blocks import cached_blocks as cached_blocks
from hf_freeze.data.blocks import masked_blocks as masked_blocks
from hf_freeze.data.blocks import text_blocks as text_blocks
from hf_freeze.data.builtin import builtin_corpus as builtin_corpus
from hf_freeze.data.builtin import builtin_tenses as builtin_tenses
from hf_freeze.data.idx import read_idx as read_idx
from hf_freeze.data.idx import read_images as read_images
from hf_freeze.data.lines import read_documents as read_documents
from hf_freeze.data.lines import read_lines as read_lines
from hf_freeze.data.masking import Masking as Masking
from hf_freeze.data.text import load_hub_labelled as load_hub_labelled
from hf_freeze.data.text import load_hub_parallel as load_hub_parallel
from hf_freeze.data.text import load_hub_text as load_hub_text
from hf_freeze.data.text import read_jsonl as read_jsonl
from hf_freeze.data.text import read_pairs as read_pairs
from hf_freeze.data.text import read_parallel as read_parallel
from hf_freeze.data.text import read_text as read_text
from hf_freeze.data.tokenization import train_tokenizer as train_tokenizer
from hf_freeze.data.tokens import Progress as Progress
from hf_freeze.data.tokens import Texts as Texts
from hf_freeze.data.tokens import TokenDataset as TokenDataset
from hf_freeze.data.tokens import tokenise as tokenise
from hf_freeze.data.tokens import tokenizer_for as tokenizer_for
from hf_freeze.data.trimming import trim_tokenizer as trim_tokenizer
from hf_freeze.data.tsv import read_tsv as read_tsv
