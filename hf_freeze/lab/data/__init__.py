"""Readers for text, tables, images and the Hub, the built-in corpus, blocks of tokens; and all that `hf_freeze.data` has."""

import hf_freeze.lab.installed  # noqa: F401  first, for its message
from hf_freeze.data.batching import TokenBatchSampler as TokenBatchSampler
from hf_freeze.data.entities import entities as entities
from hf_freeze.data.lines import read_documents as read_documents
from hf_freeze.data.lines import read_lines as read_lines
from hf_freeze.data.sampling import sample as sample
from hf_freeze.data.tokenization import train_tokenizer as train_tokenizer
from hf_freeze.data.trimming import trim_tokenizer as trim_tokenizer
from hf_freeze.lab.data.blocks import cached_blocks as cached_blocks
from hf_freeze.lab.data.blocks import masked_blocks as masked_blocks
from hf_freeze.lab.data.blocks import text_blocks as text_blocks
from hf_freeze.lab.data.builtin import builtin_corpus as builtin_corpus
from hf_freeze.lab.data.builtin import builtin_tenses as builtin_tenses
from hf_freeze.lab.data.conll import read_conll as read_conll
from hf_freeze.lab.data.hub import load_hub_labelled as load_hub_labelled
from hf_freeze.lab.data.hub import load_hub_parallel as load_hub_parallel
from hf_freeze.lab.data.hub import load_hub_text as load_hub_text
from hf_freeze.lab.data.idx import read_idx as read_idx
from hf_freeze.lab.data.idx import read_images as read_images
from hf_freeze.lab.data.masking import Masking as Masking
from hf_freeze.lab.data.questions import load_hub_questions as load_hub_questions
from hf_freeze.lab.data.questions import read_race as read_race
from hf_freeze.lab.data.questions import read_squad as read_squad
from hf_freeze.lab.data.tables import read_labelled as read_labelled
from hf_freeze.lab.data.tables import read_table as read_table
from hf_freeze.lab.data.text import read_pairs as read_pairs
from hf_freeze.lab.data.text import read_parallel as read_parallel
from hf_freeze.lab.data.text import read_text as read_text
from hf_freeze.lab.data.tokens import Progress as Progress
from hf_freeze.lab.data.tokens import Texts as Texts
from hf_freeze.lab.data.tokens import TokenDataset as TokenDataset
from hf_freeze.lab.data.tokens import tokenise as tokenise
from hf_freeze.lab.data.tokens import tokenizer_for as tokenizer_for
