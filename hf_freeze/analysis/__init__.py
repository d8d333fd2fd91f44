"""Decides from data what to compress and how far. Every function returns the config of a method, or plain numbers."""

from hf_freeze.analysis.ablation import head_ablation as head_ablation
from hf_freeze.analysis.ablation import head_ablation_tests as head_ablation_tests
from hf_freeze.analysis.cutoffs import choose_cutoffs as choose_cutoffs
from hf_freeze.analysis.depth import extract_depth as extract_depth
from hf_freeze.analysis.head_importance import head_gates as head_gates
from hf_freeze.analysis.head_importance import head_importance as head_importance
from hf_freeze.analysis.head_importance import select_heads as select_heads
from hf_freeze.analysis.latency import LinearLatency as LinearLatency
from hf_freeze.analysis.latency import linear_latencies as linear_latencies
from hf_freeze.analysis.layer_importance import layer_importance as layer_importance
from hf_freeze.analysis.layer_importance import select_layers as select_layers
from hf_freeze.analysis.layer_search import search_layers as search_layers
from hf_freeze.analysis.neurons import ffn_importance as ffn_importance
from hf_freeze.analysis.neurons import select_neurons as select_neurons
from hf_freeze.analysis.ranks import choose_ranks as choose_ranks
from hf_freeze.analysis.significance import Difference as Difference
from hf_freeze.analysis.significance import compare as compare
from hf_freeze.analysis.vocabulary import TrimmingEffect as TrimmingEffect
from hf_freeze.analysis.vocabulary import choose_vocabulary as choose_vocabulary
from hf_freeze.analysis.vocabulary import count_tokens as count_tokens
from hf_freeze.analysis.vocabulary import trimming_effect as trimming_effect
from hf_freeze.analysis.vocabulary import word_continuations as word_continuations
