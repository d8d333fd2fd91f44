"""One file per method; each registers itself."""

from hf_freeze.methods.adaptive_embedding import AdaptiveEmbedding as AdaptiveEmbedding
from hf_freeze.methods.define import DeFINE as DeFINE
from hf_freeze.methods.delight import DeLighT as DeLighT
from hf_freeze.methods.distillation import Distillation as Distillation
from hf_freeze.methods.factorized_embedding import FactorizedEmbedding as FactorizedEmbedding
from hf_freeze.methods.ffn_pruning import FFNPruning as FFNPruning
from hf_freeze.methods.fixed_attention import FixedAttention as FixedAttention
from hf_freeze.methods.freeze import Freeze as Freeze
from hf_freeze.methods.head_mask import HeadMask as HeadMask
from hf_freeze.methods.head_pruning import HeadPruning as HeadPruning
from hf_freeze.methods.hidden_pruning import HiddenPruning as HiddenPruning
from hf_freeze.methods.layer_drop import LayerDrop as LayerDrop
from hf_freeze.methods.layer_selection import LayerSelection as LayerSelection
from hf_freeze.methods.layer_sharing import LayerSharing as LayerSharing
from hf_freeze.methods.lite_transformer import LiteTransformer as LiteTransformer
from hf_freeze.methods.low_rank import LowRank as LowRank
from hf_freeze.methods.magnitude_pruning import MagnitudePruning as MagnitudePruning
from hf_freeze.methods.quantize import Quantize as Quantize
from hf_freeze.methods.recurrent_decoder import RecurrentDecoder as RecurrentDecoder
from hf_freeze.methods.tensor_train import TensorTrain as TensorTrain
from hf_freeze.methods.theseus import Theseus as Theseus
from hf_freeze.methods.tucker import Tucker as Tucker
from hf_freeze.methods.variational_dropout import VariationalDropout as VariationalDropout
from hf_freeze.methods.vocabulary_trimming import VocabularyTrimming as VocabularyTrimming
